"""The models by name: layers, equations, initialization."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import convolve

from pfl_jax.errors import InvalidInput
from pfl_jax.networks import resnet, series, text
from pfl_jax.networks.models import MODELS, fedavg_cnn, fedpac_cnn, is_convolutional, mlp
from pfl_jax.tasks import NEXT_SYMBOL

GREY, COLOUR, DIGITS = (28, 28, 1), (32, 32, 3), (8, 8, 1)


def shapes(model):
    """Path -> shape of every parameter, without computing any."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize(
    ("factory", "input_shape", "kernels"),
    [
        (fedpac_cnn, GREY, {"conv1": (5, 5, 1, 16), "conv2": (5, 5, 16, 32), "fc1": (32 * 5 * 5, 128)}),
        (
            fedpac_cnn,
            COLOUR,
            {"conv1": (5, 5, 3, 16), "conv2": (5, 5, 16, 32), "conv3": (3, 3, 32, 64), "fc1": (64 * 3 * 3, 128)},
        ),
        (fedavg_cnn, COLOUR, {"conv1": (5, 5, 3, 32), "conv2": (5, 5, 32, 64), "fc1": (64 * 5 * 5, 512)}),
        (fedavg_cnn, GREY, {"conv1": (5, 5, 1, 32), "conv2": (5, 5, 32, 64), "fc1": (64 * 4 * 4, 512)}),
        (mlp, DIGITS, {"fc1": (64, 64), "fc2": (64, 32)}),
        (mlp, COLOUR, {"fc1": (3072, 64), "fc2": (64, 32)}),
    ],
)
def test_layers_of_the_papers(factory, input_shape, kernels):
    model = factory(input_shape, 10)
    width = kernels[max(kernels)][-1]
    expected = {f"backbone/{name}/kernel": shape for name, shape in kernels.items()}
    expected |= {f"backbone/{name}/bias": shape[-1:] for name, shape in kernels.items()}
    expected |= {"head/kernel": (width, 10), "head/bias": (10,)}
    assert shapes(model) == expected
    assert model.num_features == width
    params = jax.eval_shape(model.init, jax.random.key(0))
    inputs = jax.ShapeDtypeStruct((7, *input_shape), jnp.float32)
    assert jax.eval_shape(model.features, params["backbone"], inputs).shape == (7, width)
    assert jax.eval_shape(model.apply, params, inputs).shape == (7, 10)


def leaky(x):
    return np.where(x > 0, x, 0.01 * x)


def relu(x):
    return np.maximum(x, 0)


def forward_by_hand(params, x, paddings, activation):
    """Convolution, bias, activation, then pooling, in float64: the order in which the papers' code computes."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    backbone, head = params["backbone"], params["head"]
    x = np.asarray(x, np.float64)
    for layer, padding in enumerate(paddings, start=1):
        kernel, bias = backbone[f"conv{layer}"]["kernel"], backbone[f"conv{layer}"]["bias"]
        x = activation(convolve(x, kernel, padding) + bias)
        rows, columns = x.shape[1] // 2, x.shape[2] // 2
        x = x[:, : 2 * rows, : 2 * columns].reshape(len(x), rows, 2, columns, 2, -1).max(axis=(2, 4))
    x = x.reshape(len(x), -1)
    for layer in range(1, sum(name.startswith("fc") for name in backbone) + 1):
        x = activation(x @ backbone[f"fc{layer}"]["kernel"] + backbone[f"fc{layer}"]["bias"])
    return x, x @ head["kernel"] + head["bias"]


@pytest.mark.parametrize(
    ("factory", "input_shape", "paddings", "activation"),
    [
        (fedpac_cnn, (14, 15, 1), (0, 1), leaky),
        (fedpac_cnn, (20, 20, 3), (0, 1, 1), leaky),
        (fedavg_cnn, (16, 17, 2), (0, 0), relu),
        (mlp, (5,), (), relu),
    ],
)
def test_formula(factory, input_shape, paddings, activation):
    model = factory(input_shape, 6)
    params = jax.jit(model.init)(jax.random.key(3))
    x = np.random.default_rng(0).normal(size=(3, *input_shape)).astype(np.float32)
    features, logits = forward_by_hand(params, x, paddings, activation)
    np.testing.assert_allclose(jax.jit(model.features)(params["backbone"], x), features, atol=1e-5)
    np.testing.assert_allclose(jax.jit(model.apply)(params, x), logits, atol=1e-5)


def test_initialization_is_pytorchs():
    """Weights and biases uniform in (-1/sqrt(fan_in), 1/sqrt(fan_in)); fan_in of a convolution is kh kw Cin."""
    params = jax.jit(fedavg_cnn(COLOUR, 50).init)(jax.random.key(0))
    layers = {**params["backbone"], "head": params["head"]}
    for name, fan_in in {"conv1": 75, "conv2": 800, "fc1": 1600, "head": 512}.items():
        bound = fan_in**-0.5
        for values in layers[name].values():
            assert np.abs(values).max() <= bound
            assert np.abs(values).max() > 0.85 * bound
            # A uniform variable on (-bound, bound) has the variance bound^2 / 3; four standard errors.
            spread = 4 * (4 / 45 / values.size) ** 0.5
            assert np.mean(np.square(values)) / bound**2 == pytest.approx(1 / 3, abs=spread)
            assert np.mean(values) / bound == pytest.approx(0, abs=4 * (3 * values.size) ** -0.5)


def test_layers_and_keys_draw_different_numbers():
    model = mlp((64,), 64, hidden=(64,))
    first, second = model.init(jax.random.key(0)), model.init(jax.random.key(1))
    assert not np.allclose(first["backbone"]["fc1"]["kernel"], first["head"]["kernel"])
    assert not np.allclose(first["head"]["kernel"], second["head"]["kernel"])


KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "position"),
    [
        ("lenet5", (28, 28, 1), 10, 0),
        ("lenet5", (32, 32, 3), 10, 1),
        ("resnet8", (32, 32, 3), 10, 0),
        ("resnet18", (32, 32, 3), 10, 0),
        ("resnet8_bn", (32, 32, 3), 10, 0),
        ("resnet18_bn", (32, 32, 3), 10, 0),
        ("text_mean", (20,), 2, 0),
        ("text_gru", (20,), 2, 0),
        ("leaf_cnn", (28, 28, 1), 62, 0),
        ("bag_of_words", (20,), 500, 0),
        ("series_cnn", (128, 9), 6, 0),
        ("series_gru", (128, 9), 6, 0),
        ("series_transformer", (128, 9), 6, 0),
    ],
)
def test_the_docstring_has_the_number_of_parameters(name, shape, classes, position):
    model = MODELS[name](shape, classes)
    params = jax.eval_shape(model.init, KEY)
    told = re.findall(r"\b(\d{1,3}(?:,\d{3})+)\b", MODELS[name].__doc__ or "")[position]
    assert f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,}" == told
    assert is_convolutional(model) == (len(shape) == 3)
    kind = jnp.int32 if len(shape) == 1 else jnp.float32
    inputs = jax.ShapeDtypeStruct((5, *shape), kind)
    assert jax.eval_shape(model.features, params["backbone"], inputs).shape == (5, model.num_features)
    assert jax.eval_shape(model.apply, params, inputs).shape == (5, classes)


def test_a_block_by_hand():
    """Convolution, normalization, ReLU, convolution, normalization, shortcut, ReLU, in NumPy."""
    block = resnet.Block(4, groups=2, halve=True)
    x = jax.random.normal(KEY, (2, 6, 6, 2))
    params = jax.tree.map(
        lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape),
        jax.jit(block.init)(jax.random.key(1), x)["params"],
    )

    def conv(x, kernel, stride):
        return convolve(x, kernel, kernel.shape[0] // 2, stride)

    def norm(x, scale, bias):
        groups = x.reshape(len(x), -1, 2, x.shape[-1] // 2)
        mean, variance = groups.mean((1, 3), keepdims=True), groups.var((1, 3), keepdims=True)
        return ((groups - mean) / np.sqrt(variance + 1e-6)).reshape(x.shape) * scale + bias

    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    inputs = np.asarray(x, np.float64)
    y = norm(conv(inputs, p["conv1"]["kernel"], 2), **p["norm1"])
    y = norm(conv(np.maximum(y, 0), p["conv2"]["kernel"], 1), **p["norm2"])
    shortcut = norm(conv(inputs, p["shortcut"]["kernel"], 2), **p["shortcut_norm"])
    np.testing.assert_allclose(jax.jit(block.apply)({"params": params}, x), np.maximum(y + shortcut, 0), atol=1e-4)


@pytest.mark.parametrize("name", ["series_gru", "series_transformer"])
def test_steps_of_zeros_after_a_series_change_nothing(name):
    model = MODELS[name]((6, 2), 3)
    params = jax.jit(model.init)(KEY)
    series = jax.random.normal(jax.random.key(1), (4, 6, 2)).at[:, 4:].set(0)
    found = jax.jit(model.apply)(params, series)
    changed = jax.jit(model.apply)(params, series.at[0, 3].set(0).at[1, 4].set(1.0))
    np.testing.assert_allclose(changed[2:], found[2:], atol=1e-6)
    assert np.abs(changed[:2] - found[:2]).max(axis=1).min() > 1e-4
    if name == "series_gru":
        np.testing.assert_allclose(jax.jit(model.apply)(params, series[:, :4]), found, atol=1e-6)
    # A series of zeros alone has finite outputs and gradients.
    gradient = jax.jit(jax.grad(lambda params, x: jnp.sum(model.apply(params, x) ** 2)))(params, jnp.zeros((1, 6, 2)))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_networks_over_series_need_series():
    for name, shape, said in (
        ("series_gru", (8, 8, 1), "needs series"),
        ("series_cnn", (27, 3), "which needs 28"),
        ("series_transformer", (9,), "needs series"),
    ):
        with pytest.raises(InvalidInput, match=said):
            MODELS[name](shape, 2)
    with pytest.raises(InvalidInput, match="heads must divide"):
        series.series_transformer((9, 2), 2, width=10)


@pytest.mark.parametrize("name", ["text_mean", "text_gru"])
def test_padding_changes_nothing_and_order_only_the_gru(name):
    model = MODELS[name]((5,), 2)
    params = jax.jit(model.init)(KEY)
    apply = jax.jit(model.apply)
    plain = apply(params, jnp.array([[3, 7, 9, 0, 0]]))
    longer = apply(params, jnp.array([[3, 7, 9, 0, 0, 0, 0]]))
    within = apply(params, jnp.array([[0, 3, 0, 7, 9]]))
    turned = apply(params, jnp.array([[9, 7, 3, 0, 0]]))
    np.testing.assert_allclose(longer, plain, rtol=1e-5)
    np.testing.assert_allclose(within, plain, rtol=1e-5)
    assert np.allclose(turned, plain, rtol=1e-5) == (name == "text_mean")
    # Empty texts, unknown words and tokens as floats.
    assert np.isfinite(apply(params, jnp.array([[0, 0, 0, 0, 0], [10_000, 123_456, -1, 1, 1]]))).all()
    np.testing.assert_array_equal(apply(params, jnp.array([[3.0, 7, 9, 0, 0]])), plain)


def test_a_bag_of_words_is_linear_in_the_frequencies():
    """Padding does not count, and a word beyond the vocabulary shares the feature of another one."""
    model = text.bag_of_words((6,), 3, vocabulary=5)
    params = jax.tree.map(lambda leaf: leaf + 1.0, model.init(jax.random.key(0)))
    found = model.apply(params, jnp.array([[1, 2, 2, 8, 0, 0], [0, 0, 0, 0, 0, 0]]))
    kernel, bias = (np.asarray(params["head"][name]) for name in ("kernel", "bias"))
    np.testing.assert_allclose(found[0], (kernel[1] + 2 * kernel[2] + kernel[4]) / 4 + bias, rtol=1e-5)
    np.testing.assert_allclose(found[1], bias, rtol=1e-6)


def test_a_character_is_predicted_from_those_before_it():
    model = text.char_lstm((6,), 9, vocabulary=9, width=4)
    params = model.init(jax.random.key(0))
    assert model.task is NEXT_SYMBOL
    first, other = (model.apply(params, jnp.array([symbols])) for symbols in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 8, 5, 6]))
    assert first.shape == (1, 6, 9)
    np.testing.assert_array_equal(first[0, :3], other[0, :3])
    assert (np.abs(first - other)[0, 3:].max(axis=1) > 1e-6).all()
    leaves = jax.tree.leaves(jax.eval_shape(text.char_lstm((80,), 100, vocabulary=100).init, jax.random.key(0)))
    assert f"{sum(leaf.size for leaf in leaves):,} parameters" in text.char_lstm.__doc__


def test_a_vocabulary_has_a_row_for_each_token_and_bounds():
    assert text.vocabulary_of(np.array([[0, 9], [3, 4]])) == 10
    assert text.vocabulary_of(np.zeros((3, 2), np.int32)) == 2
    assert text.vocabulary_of(np.array([[2**31 - 1]])) == text.MOST_WORDS
    assert set(text.TEXT_MODELS) <= set(MODELS)
