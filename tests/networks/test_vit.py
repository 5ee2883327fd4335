"""`pfl_jax.networks.vit` against NumPy in float64, from the same weights under timm's and big_vision's names."""

import math

import jax
import numpy as np
import pytest

from pfl_jax.errors import InvalidInput
from pfl_jax.networks.adapters import lora
from pfl_jax.networks.vit import VitConfig, vit

SHAPE, PATCH, WIDTH, HEADS, HIDDEN, LAYERS = (8, 6, 2), 2, 6, 3, 10, 2
IMAGES = np.random.default_rng(1).normal(size=(4, *SHAPE))


def parameters():
    """Weights by plain names, kernels [inputs, outputs], attention by heads."""
    rng = np.random.default_rng(0)

    def dense(inputs, outputs):
        return rng.normal(size=(inputs, outputs)) / math.sqrt(inputs), 0.1 * rng.normal(size=outputs)

    def norm():
        return 1 + 0.1 * rng.normal(size=WIDTH), 0.1 * rng.normal(size=WIDTH)

    layers = [
        {name: dense(WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
        | {"norm1": norm(), "norm2": norm(), "fc1": dense(WIDTH, HIDDEN), "fc2": dense(HIDDEN, WIDTH)}
        for _ in range(LAYERS)
    ]
    patches = dense(PATCH * PATCH * SHAPE[2], WIDTH)
    tokens = (SHAPE[0] // PATCH) * (SHAPE[1] // PATCH)
    positions = rng.normal(size=(1 + tokens, WIDTH))
    # big_vision's class has no position.
    positions[0] = 0
    return {
        "patches": patches,
        "class": rng.normal(size=WIDTH),
        "positions": positions,
        "norm": norm(),
        "layers": layers,
    }


PARAMETERS = parameters()


def features(image):
    """State of the class of one image by the equations."""

    def normalized(x, parameters):
        deviation = x - x.mean(-1, keepdims=True)
        return deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + 1e-6) * parameters[0] + parameters[1]

    def dense(x, parameters):
        return x @ parameters[0] + parameters[1]

    rows = [
        image[i : i + PATCH, j : j + PATCH].reshape(-1)
        for i in range(0, SHAPE[0], PATCH)
        for j in range(0, SHAPE[1], PATCH)
    ]
    x = np.vstack([PARAMETERS["class"], dense(np.array(rows), PARAMETERS["patches"])]) + PARAMETERS["positions"]
    for layer in PARAMETERS["layers"]:
        y, mixed, size = normalized(x, layer["norm1"]), [], WIDTH // HEADS
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            query, key, value = (dense(y, layer[name])[:, part] for name in ("query", "key", "value"))
            scores = np.exp(query @ key.T / math.sqrt(size))
            mixed.append(scores / scores.sum(-1, keepdims=True) @ value)
        x = x + dense(np.concatenate(mixed, -1), layer["out"])
        hidden = dense(normalized(x, layer["norm2"]), layer["fc1"])
        x = x + dense(hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2, layer["fc2"])
    return normalized(x[0], PARAMETERS["norm"])


def timm():
    kernel = PARAMETERS["patches"][0].reshape(PATCH, PATCH, SHAPE[2], WIDTH)
    found = {"patch_embed.proj.weight": kernel.transpose(3, 2, 0, 1), "patch_embed.proj.bias": PARAMETERS["patches"][1]}
    found |= {"cls_token": PARAMETERS["class"][None, None], "pos_embed": PARAMETERS["positions"][None]}
    found |= {"norm.weight": PARAMETERS["norm"][0], "norm.bias": PARAMETERS["norm"][1]}
    for index, layer in enumerate(PARAMETERS["layers"]):
        whole = [np.concatenate([layer[name][i].T for name in ("query", "key", "value")]) for i in (0, 1)]
        parts = {"attn.qkv": (whole[0].T, whole[1]), "attn.proj": layer["out"], "mlp.fc1": layer["fc1"]}
        parts |= {"mlp.fc2": layer["fc2"], "norm1": layer["norm1"], "norm2": layer["norm2"]}
        for name, (weight, bias) in parts.items():
            found |= {f"blocks.{index}.{name}.weight": weight.T, f"blocks.{index}.{name}.bias": bias}
    return found


def big_vision():
    heads, size = (HEADS, WIDTH // HEADS), WIDTH // HEADS
    found = {"embedding/kernel": PARAMETERS["patches"][0].reshape(PATCH, PATCH, SHAPE[2], WIDTH)}
    found |= {"embedding/bias": PARAMETERS["patches"][1], "cls": PARAMETERS["class"][None, None]}
    found |= {"pos_embedding": PARAMETERS["positions"][None, 1:]}
    found |= dict(
        zip(("Transformer/encoder_norm/scale", "Transformer/encoder_norm/bias"), PARAMETERS["norm"], strict=True)
    )
    for index, layer in enumerate(PARAMETERS["layers"]):
        block = f"Transformer/encoderblock_{index}"
        for name in ("query", "key", "value"):
            where = f"{block}/MultiHeadDotProductAttention_0/{name}"
            found |= {
                f"{where}/kernel": layer[name][0].reshape(WIDTH, *heads),
                f"{where}/bias": layer[name][1].reshape(heads),
            }
        where = f"{block}/MultiHeadDotProductAttention_0/out"
        found |= {f"{where}/kernel": layer["out"][0].reshape(HEADS, size, WIDTH), f"{where}/bias": layer["out"][1]}
        for name, own in (("MlpBlock_0/Dense_0", "fc1"), ("MlpBlock_0/Dense_1", "fc2")):
            found |= {f"{block}/{name}/kernel": layer[own][0], f"{block}/{name}/bias": layer[own][1]}
        for name, own in (("LayerNorm_0", "norm1"), ("LayerNorm_1", "norm2")):
            found |= {f"{block}/{name}/scale": layer[own][0], f"{block}/{name}/bias": layer[own][1]}
    return found


def stored(path, arrays):
    np.savez(path, **{name: array.astype(np.float32) for name, array in arrays.items()})
    return path


SIZES = VitConfig(PATCH, WIDTH, LAYERS, HEADS, HIDDEN)


@pytest.mark.parametrize(("names", "config"), [(timm, SIZES), (big_vision, None)])
def test_both_names_give_the_equations(names, config, tmp_path):
    model = vit(SHAPE, 3, path=stored(tmp_path / "vit.npz", names()), config=config)
    params = model.init(jax.random.key(0))
    wanted = np.array([features(image) for image in IMAGES])
    np.testing.assert_allclose(model.features(params["backbone"], IMAGES), wanted, atol=2e-5)
    other = model.init(jax.random.key(1))
    assert not np.array_equal(params["head"]["kernel"], other["head"]["kernel"])
    adapted = lora(model, SHAPE, rank=1, targets="layer_1/(query|value)")
    backbone = adapted.init(jax.random.key(0))["backbone"]
    np.testing.assert_allclose(adapted.features(backbone, IMAGES), wanted, atol=2e-5)


def test_new_weights_are_those_of_a_seed():
    model = vit(SHAPE, 3, config=SIZES)
    one, other = (model.init(jax.random.key(seed))["backbone"] for seed in (0, 1))
    assert not np.array_equal(*(leaf["encoder"]["embeddings"]["class"] for leaf in (one, other)))


@pytest.mark.parametrize(
    ("change", "shape", "words"),
    [
        (lambda found: found.pop("blocks.1.norm2.bias"), SHAPE, "has no blocks.1.norm2.bias"),
        (lambda found: found.pop("cls_token"), SHAPE, "has no cls_token"),
        (lambda found: None, (8, 8, 2), "positions is [1, 13, 6], not [1, 17, 6]"),
        (lambda found: None, (7, 6, 2), "patches of 2 do not divide"),
        (lambda found: None, (12,), "needs images"),
    ],
)
def test_weights_that_do_not_fit_are_one_line(change, shape, words, tmp_path):
    found = timm()
    change(found)
    with pytest.raises(InvalidInput) as error:
        vit(shape, 3, path=stored(tmp_path / "vit.npz", found), config=SIZES)
    assert words in str(error.value)


def test_sizes_that_are_not_given_or_do_not_fit_are_one_line():
    with pytest.raises(InvalidInput, match="a path of weights, or a config"):
        vit(SHAPE, 3)
    with pytest.raises(InvalidInput, match="do not divide a width"):
        vit(SHAPE, 3, config=SIZES._replace(heads=4))
