"""Vision transformers as models, with weights from the files of timm or big_vision."""

import re
from collections.abc import Mapping
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
from pfl_jax.networks.pretrained import read_weights

EPSILON = 1e-6
"""Of the layer normalizations."""


class VitConfig(NamedTuple):
    """Sizes of a vision transformer.

    Attributes:
      patch: side length of the square patches.
      width: of the hidden states, d.
      layers: number of transformer layers.
      heads: attention heads of a layer.
      hidden: width of the layers' perceptrons.
    """

    patch: int
    width: int
    layers: int
    heads: int
    hidden: int


class VitEmbeddings(nn.Module):
    """Embeddings of patches after that of the class, with positions: [B, H, W, C] -> [B, 1 + patches, d]."""

    config: VitConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        side, width = self.config.patch, self.config.width
        patches = nn.Conv(width, (side, side), strides=side, padding="VALID", name="patches")(images)
        patches = patches.reshape(len(images), -1, width)
        small = nn.initializers.normal(0.02)
        first = jnp.broadcast_to(self.param("class", small, (1, 1, width)), (len(images), 1, width))
        positions = self.param("positions", small, (1, 1 + patches.shape[1], width))
        return jnp.concatenate([first, patches], axis=1) + positions


class VitLayer(nn.Module):
    """Self-attention and perceptron, each after a layer normalization and under a residual: [B, T, d] -> [B, T, d]."""

    config: VitConfig

    @nn.compact
    def __call__(self, states: jax.Array) -> jax.Array:
        config, (*rows, width) = self.config, states.shape
        heads = (*rows, config.heads, width // config.heads)
        x = nn.LayerNorm(EPSILON, name="attention_norm")(states)
        query, key, value = (nn.Dense(width, name=name)(x).reshape(heads) for name in ("query", "key", "value"))
        mixed = jax.nn.dot_product_attention(query, key, value).reshape(states.shape)
        states = states + nn.Dense(width, name="attention_output")(mixed)
        x = nn.Dense(config.hidden, name="intermediate")(nn.LayerNorm(EPSILON, name="output_norm")(states))
        return states + nn.Dense(width, name="output")(nn.gelu(x, approximate=False))


class VitEncoder(nn.Module):
    """Vision transformer: images [B, H, W, C] -> normalized state of the class [B, d]."""

    config: VitConfig

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        states = VitEmbeddings(self.config, name="embeddings")(images.astype(jnp.float32))
        for index in range(self.config.layers):
            states = VitLayer(self.config, name=f"layer_{index}")(states)
        return nn.LayerNorm(EPSILON, name="norm")(states[:, 0])


class VitClassifier(nn.Module):
    """A dense classifier of K outputs on a `VitEncoder`."""

    config: VitConfig
    num_classes: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        return nn.Dense(self.num_classes, name="classifier")(VitEncoder(self.config, name="encoder")(images))


def vit(
    input_shape: tuple[int, ...], num_classes: int, *, path: str | Path | None = None, config: VitConfig | None = None
) -> Model:
    """Classifier on a vision transformer, pretrained or new; every seed has a head of its own.

    Args:
      input_shape: (H, W, C) of an image.
      num_classes: K.
      path: .safetensors or .npz file of weights under timm's names (blocks.0.attn.qkv.weight) or big_vision's
        (Transformer/encoderblock_0/...), with a class token; the sizes are read off them. None for new weights.
      config: sizes; with a path only `heads` counts, which timm's files do not have (by default 64 units each).

    Raises:
      InvalidInput: neither weights nor sizes are given; no such file, or one that is no vision transformer for these
        images.

    Reference:
      Dosovitskiy et al. An Image is Worth 16x16 Words. ICLR 2021, Section 3.1, without dropout.
    """
    if len(input_shape) != 3:
        raise InvalidInput(f"vit needs images (height, width, channels), not shape {tuple(input_shape)}")
    if path is None:
        if config is None:
            raise InvalidInput("vit needs a path of weights, or a config")
        return _model(config, input_shape, num_classes)
    stored = read_weights(path)
    weights = _from_big_vision(stored, path) if "embedding/kernel" in stored else _from_timm(stored, path)
    side, *_, width = weights["embeddings"]["patches"]["kernel"].shape
    heads = weights.pop("heads", None) or (max(1, width // 64) if config is None else config.heads)
    layers = sum(name.startswith("layer_") for name in weights)
    hidden = weights["layer_0"]["intermediate"]["bias"].shape[0]
    model = _model(VitConfig(side, width, layers, heads, hidden), input_shape, num_classes)
    wanted = jax.eval_shape(model.init, jax.random.key(0))["backbone"]["encoder"]
    for keys, leaf in jax.tree.leaves_with_path(wanted):
        found, name = weights, jax.tree_util.keystr(keys, simple=True, separator="/")
        for key in keys:
            found = found.get(key.key, {}) if isinstance(found, Mapping) else {}
        if getattr(found, "shape", None) != leaf.shape:
            shape = list(found.shape) if isinstance(found, np.ndarray) else "not there"
            raise InvalidInput(
                f"{path} does not fit images {list(input_shape)}: {name} is {shape}, not {list(leaf.shape)}"
            )
    frozen = Frozen({"encoder": jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), weights)})

    def init(key):
        return {"backbone": frozen.read(), "head": model.init(key)["head"]}

    return model._replace(init=init, frozen=frozen)


def _model(config: VitConfig, input_shape: tuple[int, ...], num_classes: int) -> Model:
    if config.width % config.heads:
        raise InvalidInput(f"{config.heads} heads do not divide a width of {config.width}")
    if any(side % config.patch for side in input_shape[:2]):
        raise InvalidInput(f"patches of {config.patch} do not divide images of {input_shape[0]}x{input_shape[1]}")
    return from_flax(VitClassifier(config, num_classes), input_shape, num_classes, head="classifier")


TIMM = {
    "attention_norm": "norm1",
    "attention_output": "attn.proj",
    "output_norm": "norm2",
    "intermediate": "mlp.fc1",
    "output": "mlp.fc2",
}
"""Part of `VitLayer` -> its name in timm, after blocks.I."""

BIG_VISION = {
    "attention_norm": "LayerNorm_0",
    "query": "MultiHeadDotProductAttention_0/query",
    "key": "MultiHeadDotProductAttention_0/key",
    "value": "MultiHeadDotProductAttention_0/value",
    "attention_output": "MultiHeadDotProductAttention_0/out",
    "output_norm": "LayerNorm_1",
    "intermediate": "MlpBlock_0/Dense_0",
    "output": "MlpBlock_0/Dense_1",
}
"""The same in big_vision, after Transformer/encoderblock_I."""


def _array(stored: Mapping[str, np.ndarray], name: str, path: Any) -> np.ndarray:
    if name not in stored:
        raise InvalidInput(f"{path} has no {name}: it is no vision transformer by timm's or big_vision's names")
    return np.asarray(stored[name])


def _count(stored: Mapping[str, np.ndarray], pattern: str) -> int:
    """Number of layers by the names of their parameters."""
    return 1 + max((int(found[1]) for name in stored if (found := re.match(pattern, name))), default=0)


def _from_timm(stored: Mapping[str, np.ndarray], path: Any) -> dict[str, Any]:
    """Parameters of a `VitEncoder` from a file of timm's: kernels [outputs, inputs], one product for the attention."""

    def norm(name):
        return {"scale": _array(stored, f"{name}.weight", path), "bias": _array(stored, f"{name}.bias", path)}

    def dense(name):
        return {"kernel": _array(stored, f"{name}.weight", path).T, "bias": _array(stored, f"{name}.bias", path)}

    def layer(prefix):
        parts = {part: (norm if "norm" in part else dense)(prefix + name) for part, name in TIMM.items()}
        attention = dense(f"{prefix}attn.qkv")
        thirds = {name: np.split(leaf, 3, axis=-1) for name, leaf in attention.items()}
        own = {
            part: {name: leaf[i] for name, leaf in thirds.items()} for i, part in enumerate(("query", "key", "value"))
        }
        return parts | own

    embeddings = {
        "patches": {
            "kernel": _array(stored, "patch_embed.proj.weight", path).transpose(2, 3, 1, 0),
            "bias": _array(stored, "patch_embed.proj.bias", path),
        },
        "class": _array(stored, "cls_token", path),
        "positions": _array(stored, "pos_embed", path),
    }
    layers = {f"layer_{i}": layer(f"blocks.{i}.") for i in range(_count(stored, r"blocks\.(\d+)\."))}
    return {"embeddings": embeddings, "norm": norm("norm")} | layers


def _from_big_vision(stored: Mapping[str, np.ndarray], path: Any) -> dict[str, Any]:
    """Parameters of a `VitEncoder`, and `heads`, from a file of big_vision's: attention by heads, no class position."""
    prefix = "Transformer/encoderblock_"

    def part(name, block):
        found = {
            kind: _array(stored, f"{block}/{name}/{kind}", path)
            for kind in ("scale" if "norm" in name.lower() else "kernel", "bias")
        }
        if "kernel" in found:
            outputs = found["bias"].size
            found = {"kernel": found["kernel"].reshape(-1, outputs), "bias": found["bias"].reshape(outputs)}
        return found

    layers = {
        f"layer_{i}": {own: part(name, f"{prefix}{i}") for own, name in BIG_VISION.items()}
        for i in range(_count(stored, rf"{prefix}(\d+)/"))
    }
    token, positions = _array(stored, "cls", path), _array(stored, "pos_embedding", path)
    embeddings = {
        "patches": {kind: _array(stored, f"embedding/{kind}", path) for kind in ("kernel", "bias")},
        "class": token,
        "positions": np.concatenate([np.zeros_like(token), positions], axis=1),
    }
    heads = _array(stored, f"{prefix}0/{BIG_VISION['query']}/bias", path).shape[0]
    return {"embeddings": embeddings, "norm": part("encoder_norm", "Transformer"), "heads": heads} | layers
