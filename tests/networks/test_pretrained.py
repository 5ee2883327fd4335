"""Pretrained BERTs and vision transformers: their weights, their equations, and what does not fit."""

import json
import math

import jax
import numpy as np
import pytest
import reference
from tiny_bert import SIZES, write_bert

from pfl_jax import InvalidInput
from pfl_jax.networks.adapters import lora
from pfl_jax.networks.pretrained import NAMES, bert, bert_states, minilm_folder, read_weights
from pfl_jax.networks.vit import VitConfig, vit

SENTENCE = [101, 7349, 16848, 4083, 2003, 4569, 1012, 102]
"""Tokens of "Federated learning is fun." in all-MiniLM-L6-v2."""

EMBEDDING = [0.02854592, -0.09212107, 0.04244002, 0.01547849]
"""First entries of its embedding by transformers 5.24 and torch 2.14, mean-pooled and normalized."""

TOKENS = np.array([[3, 7, 29, 1, 0, 0], [5, 0, 0, 0, 0, 0], [2, 4, 6, 8, 10, 12], [0] * 6], np.int32)


@pytest.fixture
def weights(tmp_path):
    return write_bert(tmp_path)


def embedding(weights, tokens):
    """Sentence embedding of one example by the equations, in float64, without its padding."""
    weights = {name: array.astype(np.float64) for name, array in weights.items()}
    tokens = tokens[tokens > 0]

    def normalized(x, name):
        return reference.layer_norm(x, weights[f"{name}.weight"], weights[f"{name}.bias"], SIZES.epsilon)

    x = weights["embeddings.word_embeddings.weight"][tokens]
    x = x + weights["embeddings.position_embeddings.weight"][: len(tokens)]
    x = normalized(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for layer in range(SIZES.layers):

        def dense(x, part, prefix=f"encoder.layer.{layer}."):
            name = prefix + NAMES[part]
            return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

        mixed = reference.attention(dense(x, "query"), dense(x, "key"), dense(x, "value"), SIZES.heads)
        name = f"encoder.layer.{layer}."
        x = normalized(x + dense(mixed, "attention_output"), name + NAMES["attention_norm"])
        x = normalized(x + dense(reference.gelu(dense(x, "intermediate")), "output"), name + NAMES["output_norm"])
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)


def test_the_encoder_computes_the_equations(weights):
    path, stored = weights
    model = bert(path, 6, num_classes=3)
    params = model.init(jax.random.key(0))
    features = jax.jit(model.features)(params["backbone"], TOKENS)
    for row, tokens in zip(features[:3], TOKENS[:3], strict=True):
        np.testing.assert_allclose(row, embedding(stored, tokens), atol=2e-5)
    assert model.classify(params["head"], features).shape == (4, 3)


def test_an_example_of_padding_has_finite_gradients(weights):
    model = bert(weights[0], 6, num_classes=3)
    params = model.init(jax.random.key(0))
    gradient = jax.jit(jax.grad(lambda params: model.apply(params, TOKENS[3:]).sum()))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_states_of_the_first_layers_are_inputs_of_the_others(weights):
    path, _ = weights
    whole, upper = bert(path, 6, num_classes=3), bert(path, 6, num_classes=3, first=2)
    states = bert_states(path, TOKENS, 2, batch_size=3)
    params, rest = (model.init(jax.random.key(0)) for model in (whole, upper))
    assert set(rest["backbone"]["encoder"]) == {"layer_2"}
    np.testing.assert_allclose(
        upper.features(rest["backbone"], states)[:3], whole.features(params["backbone"], TOKENS)[:3], atol=1e-5
    )


def test_each_key_has_a_head_of_its_own_and_the_weights_of_the_file(weights):
    path, stored = weights
    model = bert(path, 6, num_classes=3)
    one, other = (model.init(jax.random.key(seed)) for seed in (0, 1))
    assert not np.array_equal(one["head"]["kernel"], other["head"]["kernel"])
    words = stored["embeddings.word_embeddings.weight"]
    np.testing.assert_array_equal(other["backbone"]["encoder"]["embeddings"]["words"]["embedding"], words)


def test_other_files_and_sizes_are_refused(weights, tmp_path):
    path, _ = weights
    with pytest.raises(InvalidInput, match="safetensors"):
        read_weights(tmp_path / "model.bin")
    with pytest.raises(InvalidInput, match="first must be from 0 to 3"):
        bert(path, 6, num_classes=3, first=4)
    with pytest.raises(InvalidInput, match="length must be from 1 to 9"):
        bert(path, 10, num_classes=3)


def changed(folder, **fields):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | fields))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"hidden_act": "quick_gelu"}, "the activation 'quick_gelu' is none of gelu, "),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key': here it can only be"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": 2}, "has 3 layers, and its config says 2"),
        ({"num_attention_heads": 3}, "3 heads do not divide a width of 8"),
        ({"vocab_size": 31}, r"word_embeddings.weight of .* is \[30, 8\], and .* has \[31, 8\]"),
    ],
)
def test_a_config_of_another_bert_is_refused(weights, fields, text):
    changed(weights[0].parent, **fields)
    with pytest.raises(InvalidInput, match=text):
        bert(weights[0], 6, num_classes=3)


def test_weights_of_another_bert_are_refused(weights):
    path, arrays = weights
    query = "encoder.layer.1.attention.self.query.bias"
    distances = "encoder.layer.0.attention.self.distance_embedding.weight"
    for change, text in (
        ({distances: np.ones((17, 4))}, f"does not read, so it is another network: {distances}"),
        ({query: np.full(8, np.inf, np.float32)}, f"{query} of .* has NaN or infinite"),
        ({query: np.ones(8, np.int8)}, f"{query} of .* is int8"),
        ({"encoder.layer.7.output.dense.bias": np.ones(8)}, "has no layer 3, and 4 others"),
    ):
        np.savez(path, **arrays | change)
        with pytest.raises(InvalidInput, match=text):
            bert(path, 6, num_classes=3)
        with pytest.raises(InvalidInput, match=text):
            bert_states(path, TOKENS, 2)
    # A pooler, heads and numbers of positions are left alone.
    unused = {"pooler.dense.bias": np.ones(8), "cls.predictions.bias": np.ones(30), "classifier.bias": np.ones(2)}
    np.savez(path, **arrays | unused | {"embeddings.position_ids": np.arange(9)})
    assert bert(path, 6, num_classes=3)


@pytest.mark.real_data
def test_minilm_gives_what_the_original_gives():
    try:
        path = minilm_folder() / "model.safetensors"
    except InvalidInput as error:
        pytest.skip(str(error))
    tokens = np.zeros((1, 32), np.int32)
    tokens[0, : len(SENTENCE)] = SENTENCE
    model = bert(path, 32, num_classes=2)
    features = model.features(model.init(jax.random.key(0))["backbone"], tokens)
    np.testing.assert_allclose(features[0, :4], EMBEDDING, atol=1e-5)


SHAPE, PATCH, WIDTH, HEADS, HIDDEN, LAYERS, REGISTERS = (8, 6, 2), 2, 6, 3, 10, 2, 5
IMAGES = np.random.default_rng(1).normal(size=(4, *SHAPE))


PARTS = {"scale": ".gamma", "query_norm": "_norm.", "registers": "reg_token"}
"""Parts that only some vision transformers have -> what timm's names of their arrays have, and no other name."""

NEAR = 2e-3
"""Distance from the equations: float32 leaves that much of the difference of two numbers, the size of these heads."""


def weights_of_timm():
    """Random weights with all of PARTS, by timm's names."""
    rng = np.random.default_rng(0)
    tokens = (SHAPE[0] // PATCH) * (SHAPE[1] // PATCH)
    found = {
        "cls_token": rng.normal(size=(1, 1, WIDTH)),
        "reg_token": rng.normal(size=(1, REGISTERS, WIDTH)),
        "pos_embed": rng.normal(size=(1, 1 + tokens, WIDTH)),
    }
    # big_vision's class has no position.
    found["pos_embed"][0, 0] = 0

    def dense(name, outputs, *inputs):
        found[f"{name}.weight"] = rng.normal(size=(outputs, *inputs)) / math.sqrt(math.prod(inputs))
        found[f"{name}.bias"] = 0.1 * rng.normal(size=outputs)

    def norm(name, size=WIDTH):
        found[f"{name}.weight"], found[f"{name}.bias"] = 1 + 0.1 * rng.normal(size=size), 0.1 * rng.normal(size=size)

    dense("patch_embed.proj", WIDTH, SHAPE[2], PATCH, PATCH)
    norm("norm")
    for block in (f"blocks.{index}" for index in range(LAYERS)):
        dense(f"{block}.attn.qkv", 3 * WIDTH, WIDTH)
        dense(f"{block}.attn.proj", WIDTH, WIDTH)
        dense(f"{block}.mlp.fc1", HIDDEN, WIDTH)
        dense(f"{block}.mlp.fc2", WIDTH, HIDDEN)
        for name in ("norm1", "norm2"):
            norm(f"{block}.{name}")
            found[f"{block}.ls{name[-1]}.gamma"] = 1 + 0.1 * rng.normal(size=WIDTH)
        for name in ("q_norm", "k_norm"):
            norm(f"{block}.attn.{name}", WIDTH // HEADS)
    return found


WEIGHTS = weights_of_timm()


def timm(parts=()):
    """The weights without those of other parts than these."""
    absent = [word for part, word in PARTS.items() if part not in parts]
    return {name: array for name, array in WEIGHTS.items() if not any(word in name for word in absent)}


def features(image, parts=()):
    """State of the class of one image by the equations, with some of PARTS."""

    def normalized(x, name):
        return reference.layer_norm(x, WEIGHTS[f"{name}.weight"], WEIGHTS[f"{name}.bias"], 1e-6)

    def dense(x, name):
        return x @ WEIGHTS[f"{name}.weight"].reshape(-1, x.shape[1]).T + WEIGHTS[f"{name}.bias"]

    rows = [
        image[i : i + PATCH, j : j + PATCH].transpose(2, 0, 1).reshape(-1)
        for i in range(0, SHAPE[0], PATCH)
        for j in range(0, SHAPE[1], PATCH)
    ]
    x = np.vstack([WEIGHTS["cls_token"][0], dense(np.array(rows), "patch_embed.proj")]) + WEIGHTS["pos_embed"][0]
    # Attention does not ask in what order tokens are.
    x = np.vstack([x, WEIGHTS["reg_token"][0]]) if "registers" in parts else x
    for block in (f"blocks.{index}" for index in range(LAYERS)):
        queries_keys_values = np.split(dense(normalized(x, f"{block}.norm1"), f"{block}.attn.qkv"), 3, axis=1)
        norms = [
            [WEIGHTS[f"{block}.attn.{name}.{kind}"] for kind in ("weight", "bias")] for name in ("q_norm", "k_norm")
        ]
        mixed = reference.attention(*queries_keys_values, HEADS, norms if "query_norm" in parts else None)
        scales = [WEIGHTS[f"{block}.ls{half}.gamma"] if "scale" in parts else 1 for half in (1, 2)]
        x = x + scales[0] * dense(mixed, f"{block}.attn.proj")
        hidden = reference.gelu(dense(normalized(x, f"{block}.norm2"), f"{block}.mlp.fc1"))
        x = x + scales[1] * dense(hidden, f"{block}.mlp.fc2")
    return normalized(x[0], "norm")


def big_vision():
    """The same by big_vision's names: kernels [inputs, outputs], attention by heads."""
    heads = HEADS, WIDTH // HEADS
    found = {"embedding/kernel": WEIGHTS["patch_embed.proj.weight"].transpose(2, 3, 1, 0)}
    found |= {"embedding/bias": WEIGHTS["patch_embed.proj.bias"], "cls": WEIGHTS["cls_token"]}
    found |= {"pos_embedding": WEIGHTS["pos_embed"][:, 1:]}
    names = {"norm": "Transformer/encoder_norm"}
    for index in range(LAYERS):
        old, block = f"blocks.{index}", f"Transformer/encoderblock_{index}"
        attention = f"{block}/MultiHeadDotProductAttention_0"
        for part, name in enumerate(("query", "key", "value")):
            rows = slice(part * WIDTH, (part + 1) * WIDTH)
            found[f"{attention}/{name}/kernel"] = WEIGHTS[f"{old}.attn.qkv.weight"][rows].T.reshape(WIDTH, *heads)
            found[f"{attention}/{name}/bias"] = WEIGHTS[f"{old}.attn.qkv.bias"][rows].reshape(heads)
        found[f"{attention}/out/kernel"] = WEIGHTS[f"{old}.attn.proj.weight"].T.reshape(*heads, WIDTH)
        found[f"{attention}/out/bias"] = WEIGHTS[f"{old}.attn.proj.bias"]
        names |= {f"{old}.norm1": f"{block}/LayerNorm_0", f"{old}.norm2": f"{block}/LayerNorm_1"}
        names |= {f"{old}.mlp.fc1": f"{block}/MlpBlock_0/Dense_0", f"{old}.mlp.fc2": f"{block}/MlpBlock_0/Dense_1"}
    for old, name in names.items():
        kind = "scale" if "norm" in name.lower() else "kernel"
        found |= {f"{name}/{kind}": WEIGHTS[f"{old}.weight"].T, f"{name}/bias": WEIGHTS[f"{old}.bias"]}
    return found


def stored(path, arrays):
    np.savez(path, **{name: array.astype(np.float32) for name, array in arrays.items()})
    return path


VIT_SIZES = VitConfig(PATCH, WIDTH, LAYERS, HEADS, HIDDEN)


@pytest.mark.parametrize(("names", "config"), [(timm, VIT_SIZES), (big_vision, None)])
def test_both_names_give_the_equations(names, config, tmp_path):
    model = vit(SHAPE, 3, path=stored(tmp_path / "vit.npz", names()), config=config)
    params = model.init(jax.random.key(0))
    wanted = np.array([features(image) for image in IMAGES])
    np.testing.assert_allclose(jax.jit(model.features)(params["backbone"], IMAGES), wanted, atol=2e-5)
    other = model.init(jax.random.key(1))
    assert not np.array_equal(params["head"]["kernel"], other["head"]["kernel"])
    adapted = lora(model, SHAPE, rank=1, targets="layer_1/(query|value)")
    backbone = adapted.init(jax.random.key(0))["backbone"]
    np.testing.assert_allclose(adapted.features(backbone, IMAGES), wanted, atol=2e-5)


@pytest.mark.parametrize("parts", [("scale",), ("query_norm",), ("registers",), tuple(PARTS)])
def test_parts_that_some_have(parts, tmp_path):
    arrays = timm(parts)
    # An old head and the token of masked patches are left alone.
    arrays |= {"head.weight": np.ones((5, WIDTH)), "head.bias": np.ones(5), "mask_token": np.ones((1, WIDTH))}
    config = None if "query_norm" in parts else VIT_SIZES
    model = vit(SHAPE, 3, path=stored(tmp_path / "vit.npz", arrays), config=config)
    backbone = model.init(jax.random.key(0))["backbone"]
    wanted = np.array([features(image, parts) for image in IMAGES])
    np.testing.assert_allclose(jax.jit(model.features)(backbone, IMAGES), wanted, atol=NEAR)
    fresh = vit(SHAPE, 3, config=VIT_SIZES._replace(registers=5, layer_scale=True, normalized_queries=True))
    shapes = jax.tree.map(np.shape, fresh.init(jax.random.key(0))["backbone"])
    assert len(parts) < 3 or shapes == jax.tree.map(np.shape, backbone)


def test_positions_of_the_class_and_of_registers(tmp_path):
    """A file has positions of the patches alone, with that of the class, or with those of class and registers."""
    whole, registers = WEIGHTS["pos_embed"], WEIGHTS["reg_token"]
    several = {
        "class": {},
        "none": {"pos_embed": whole[:, 1:], "cls_token": WEIGHTS["cls_token"] + whole[:, :1]},
        "all": {
            "pos_embed": np.concatenate([whole[:, :1], np.ones_like(registers), whole[:, 1:]], axis=1),
            "reg_token": registers - 1,
        },
    }
    wanted = np.array([features(image, PARTS) for image in IMAGES])
    for change in several.values():
        model = vit(SHAPE, 3, path=stored(tmp_path / "vit.npz", WEIGHTS | change))
        np.testing.assert_allclose(model.features(model.init(jax.random.key(0))["backbone"], IMAGES), wanted, atol=NEAR)


REFUSED = {
    "scales of one half": ({"blocks.0.ls1.gamma": np.ones(WIDTH)}, "has no blocks.0.ls2.gamma"),
    "norms of queries": (
        {f"blocks.{i}.attn.q_norm.{kind}": np.ones(2) for i in (0, 1) for kind in ("weight", "bias")},
        "has no blocks.0.attn.k_norm.weight",
    ),
    "beyond float32": ({"norm.bias": np.full(WIDTH, 1e300)}, "norm.bias of .* has NaN or infinite"),
    "integers": ({"norm.bias": np.ones(WIDTH, np.int8)}, "norm.bias of .* is int8: give the weights as floats"),
    "no rank": ({"blocks.0.mlp.fc1.bias": np.ones(())}, r"fc1.bias of .* is \[\], and .* has \[any\]"),
    "other images": ({"pos_embed": np.ones((1, 17, WIDTH))}, "has 17 positions, and images .* have 12 patches"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_vision_transformers_are_refused(what, tmp_path):
    arrays, text = REFUSED[what]
    np.savez(tmp_path / "vit.npz", **timm() | arrays)
    with pytest.raises(InvalidInput, match=text):
        vit(SHAPE, 3, path=tmp_path / "vit.npz", config=VIT_SIZES)


def test_the_number_of_heads_is_known_or_asked_for(tmp_path):
    path = stored(tmp_path / "vit.npz", timm())
    with pytest.raises(InvalidInput, match="does not say how many heads its width of 6 is divided into: give config"):
        vit(SHAPE, 3, path=path)
    wanted = np.array([features(image) for image in IMAGES])
    for content in ({"model_args": {"num_heads": HEADS, "img_size": [8, 6]}}, {"model_args": {"num_heads": HEADS}}):
        (tmp_path / "config.json").write_text(json.dumps(content | {"global_pool": "token", "num_classes": 7}))
        model = vit(SHAPE, 3, path=path)
        np.testing.assert_allclose(model.features(model.init(jax.random.key(0))["backbone"], IMAGES), wanted, atol=2e-5)
    for content, text in (
        ({"global_pool": "avg"}, "has global_pool 'avg'"),
        ({"model_args": {"num_heads": HEADS, "act_layer": "relu"}}, "has act_layer 'relu'"),
        ({"model_args": {"num_heads": 4}}, "4 heads do not divide a width of 6"),
        ([], "cannot be read"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(InvalidInput, match=text):
            vit(SHAPE, 3, path=path)


def test_new_weights_are_those_of_a_seed():
    model = vit(SHAPE, 3, config=VIT_SIZES)
    one, other = (model.init(jax.random.key(seed))["backbone"] for seed in (0, 1))
    assert not np.array_equal(*(leaf["encoder"]["embeddings"]["class"] for leaf in (one, other)))


def test_sizes_that_are_not_given_or_do_not_fit_are_one_line():
    with pytest.raises(InvalidInput, match="a path of weights, or a config"):
        vit(SHAPE, 3)
    with pytest.raises(InvalidInput, match="patches of 2 do not divide"):
        vit((7, 6, 2), 3, config=VIT_SIZES)
    with pytest.raises(InvalidInput, match="do not divide a width"):
        vit(SHAPE, 3, config=VIT_SIZES._replace(heads=4))
