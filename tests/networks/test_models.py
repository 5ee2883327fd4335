"""The networks: shapes, PyTorch's initialization, and their formula written out in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import convolve

from pfl_jax.networks.models import fedavg_cnn, fedpac_cnn, mlp

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


def test_smallest_picture_works():
    # 12 -> 8 -> 4 and, padded by one, 4 -> 2 -> 1.
    model = fedpac_cnn((12, 12, 1), 10)
    assert shapes(model)["backbone/fc1/kernel"] == (32, 128)
