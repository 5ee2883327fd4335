"""Vision transformers as models, with weights from the files of timm or big_vision."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Model
from pfl_jax.errors import InvalidInput, one_line
from pfl_jax.frozen import Frozen
from pfl_jax.networks.flax_modules import from_flax
from pfl_jax.networks.vit_modules import VitClassifier, VitConfig
from pfl_jax.networks.weights import WeightsFile


def vit(
    input_shape: tuple[int, ...], num_classes: int, *, path: str | Path | None = None, config: VitConfig | None = None
) -> Model:
    """Classifier on a vision transformer, pretrained or new; every seed has its own head.

    Args:
      input_shape: (H, W, C) of an image.
      num_classes: K.
      path: .safetensors or .npz file of weights under timm's names (blocks.0.attn.qkv.weight) or big_vision's
        (Transformer/encoderblock_0/...), with a class token; sizes follow from the arrays. Only an old head and the
        token of masked patches are left unread. None for new weights.
      config: sizes; with a path only `heads` is used, which timm's files do not have. By default it is the number of
        timm's models of this width, or "num_heads" of "model_args" in a config.json beside the file.

    Raises:
      InvalidInput: neither weights nor sizes are given; the file is missing or quantized, is not a vision transformer
        for these images, or has unsupported parts; or config.json belongs to another network.

    Reference:
      Dosovitskiy et al. An Image is Worth 16x16 Words. ICLR 2021, Section 3.1, without dropout.
    """
    if len(input_shape) != 3:
        raise InvalidInput(f"vit needs images (height, width, channels), not shape {tuple(input_shape)}")
    if path is None:
        if config is None:
            raise InvalidInput("vit needs a path of weights, or a config")
        return _model(config, input_shape, num_classes)
    file = WeightsFile(path, "a vision transformer of timm or big_vision with a class token")
    found, weights = (_big_vision if "embedding/kernel" in file else _timm)(file, input_shape, config)
    model = _model(found, input_shape, num_classes)
    frozen = Frozen({"encoder": jax.tree.map(jnp.asarray, weights)})

    def init(key):
        return {"backbone": frozen.read(), "head": model.init(key)["head"]}

    return model._replace(init=init, frozen=frozen)


def _model(config: VitConfig, input_shape: tuple[int, ...], num_classes: int) -> Model:
    _check_sizes(config, input_shape)
    return from_flax(VitClassifier(config, num_classes), input_shape, num_classes, head="classifier")


def _check_sizes(config: VitConfig, input_shape: tuple[int, ...]) -> None:
    if not isinstance(config.heads, int) or config.heads < 1 or config.width % config.heads:
        raise InvalidInput(f"{config.heads} heads do not divide a width of {config.width}")
    if any(side % config.patch for side in input_shape[:2]):
        raise InvalidInput(f"patches of {config.patch} do not divide images of {input_shape[0]}x{input_shape[1]}")


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


UNUSED = r"(head|pre_logits)[./].*|mask_token"
"""Arrays that are left unread on purpose."""

HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}
"""Width -> number of heads, for timm's vision transformers whose heads are not 64 wide."""


SHOWN = frozenset(
    ("img_size", "patch_size", "in_chans", "embed_dim", "depth", "mlp_ratio", "num_classes", "init_values", "qk_norm")
) | {"reg_tokens", "no_embed_class", "pre_norm", "drop_rate", "drop_path_rate", "dynamic_img_size"}
"""Arguments of timm's models that the arrays show, or that matter only in training."""

FIXED = {"global_pool": "token", "class_token": True, "qkv_bias": True, "act_layer": "gelu"}
"""Arguments of timm's models, and the only value that is supported here."""


def _timm_heads(file: WeightsFile, width: int, config: VitConfig | None) -> int:
    """Number of heads of one of timm's models, which comes with a config.json if it is from the hub."""
    place = file.path.parent / "config.json"
    try:
        stored = json.loads(place.read_text()) if place.is_file() else {}
        known = {"global_pool": stored.get("global_pool")} | stored.get("model_args", {})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{place} cannot be read: {one_line(error, 100)}") from None
    heads = known.pop("num_heads", None)
    for name, value in known.items():
        if name not in SHOWN and value not in (None, FIXED.get(name)):
            raise InvalidInput(f"{place} has {name} {value!r}, which this network does not support")
    if "blocks.0.attn.q_norm.weight" in file:
        heads = width // max(1, file.arrays["blocks.0.attn.q_norm.weight"].size)
    if config is not None:
        heads = config.heads
    if heads is None and width not in HEADS and width % 64:
        raise InvalidInput(
            f"{file.path} does not say how many heads its width of {width} is divided into: give config, or write "
            f'{{"model_args": {{"num_heads": ...}}}} to {place}'
        )
    return heads or HEADS.get(width, width // 64)


def _timm(
    file: WeightsFile, input_shape: tuple[int, ...], config: VitConfig | None
) -> tuple[VitConfig, dict[str, Any]]:
    """Sizes and parameters from timm's file: kernels are [outputs, inputs], with one product for the attention."""

    def norm(name, size):
        return {"scale": file.read(f"{name}.weight", size), "bias": file.read(f"{name}.bias", size)}

    def dense(name, outputs, inputs):
        return {"kernel": file.read(f"{name}.weight", outputs, inputs).T, "bias": file.read(f"{name}.bias", outputs)}

    first = "patch_embed.proj.weight"
    side = file.read(first, None, input_shape[2], None, None).shape[3]
    kernel = file.read(first, None, input_shape[2], side, side)
    width, layers = len(kernel), file.layers(r"blocks\.(\d+)\.")
    heads = _timm_heads(file, width, config)
    registers = file.read("reg_token", 1, None, width) if "reg_token" in file else np.zeros((1, 0, width), np.float32)
    found = VitConfig(
        *(side, width, layers, heads, len(file.read("blocks.0.mlp.fc1.bias", None)), registers.shape[1]),
        layer_scale="blocks.0.ls1.gamma" in file,
        normalized_queries="blocks.0.attn.q_norm.weight" in file,
    )
    _check_sizes(found, input_shape)

    def layer(prefix):
        sizes = {
            "attention_output": (width, width),
            "intermediate": (found.hidden, width),
            "output": (width, found.hidden),
        }
        parts = {
            part: dense(prefix + name, *sizes[part]) if part in sizes else norm(prefix + name, width)
            for part, name in TIMM.items()
        }
        thirds = {
            kind: np.split(leaf, 3, axis=-1) for kind, leaf in dense(f"{prefix}attn.qkv", 3 * width, width).items()
        }
        for i, part in enumerate(("query", "key", "value")):
            parts[part] = {kind: leaf[i] for kind, leaf in thirds.items()}
        if found.layer_scale:
            parts |= {"attention_scale": file.read(f"{prefix}ls1.gamma", width)}
            parts |= {"output_scale": file.read(f"{prefix}ls2.gamma", width)}
        if found.normalized_queries:
            parts |= {"query_norm": norm(f"{prefix}attn.q_norm", width // heads)}
            parts |= {"key_norm": norm(f"{prefix}attn.k_norm", width // heads)}
        return parts

    patches = (input_shape[0] // side) * (input_shape[1] // side)
    positions = file.read("pos_embed", 1, None, width)
    if positions.shape[1] == patches:
        # Here the class has no position.
        positions = np.concatenate([np.zeros_like(positions[:, :1]), positions], axis=1)
    if positions.shape[1] == 1 + found.registers + patches:
        registers = registers + positions[:, 1 : 1 + found.registers]
        positions = np.delete(positions, np.s_[1 : 1 + found.registers], axis=1)
    if positions.shape[1] != 1 + patches:
        raise InvalidInput(
            f"{file.path} has {positions.shape[1]} positions, and images {list(input_shape)} have {patches} patches: "
            "give images of the size that it was trained with"
        )
    embeddings = {
        "patches": {"kernel": kernel.transpose(2, 3, 1, 0), "bias": file.read("patch_embed.proj.bias", width)},
        "class": file.read("cls_token", 1, 1, width),
        "positions": positions,
    }
    embeddings |= {"registers": registers} if found.registers else {}
    weights = {f"layer_{i}": layer(f"blocks.{i}.") for i in range(layers)}
    weights |= {"embeddings": embeddings, "norm": norm("norm", width)}
    file.finish(UNUSED)
    return found, weights


def _big_vision(
    file: WeightsFile, input_shape: tuple[int, ...], config: VitConfig | None
) -> tuple[VitConfig, dict[str, Any]]:
    """Sizes and parameters from big_vision's file: attention by heads, and a class token with position 0."""
    side = file.read("embedding/kernel", None, None, input_shape[2], None).shape[0]
    kernel = file.read("embedding/kernel", side, side, input_shape[2], None)
    width, block = kernel.shape[3], "Transformer/encoderblock_"
    heads = len(file.read(f"{block}0/{BIG_VISION['query']}/bias", None, None))
    hidden = len(file.read(f"{block}0/{BIG_VISION['intermediate']}/bias", None))
    found = VitConfig(side, width, file.layers(rf"{block}(\d+)/"), heads, hidden)
    _check_sizes(found, input_shape)
    per_head = (heads, width // heads)
    sizes = dict.fromkeys(("query", "key", "value"), ((width,), per_head))
    sizes |= {
        "attention_output": (per_head, (width,)),
        "intermediate": ((width,), (hidden,)),
        "output": ((hidden,), (width,)),
    }

    def norm(name):
        return {kind: file.read(f"{name}/{kind}", width) for kind in ("scale", "bias")}

    def dense(name, inputs, outputs):
        array = file.read(f"{name}/kernel", *inputs, *outputs)
        return {
            "kernel": array.reshape(math.prod(inputs), math.prod(outputs)),
            "bias": file.read(f"{name}/bias", *outputs).reshape(-1),
        }

    weights = {
        f"layer_{i}": {
            part: dense(f"{block}{i}/{name}", *sizes[part]) if part in sizes else norm(f"{block}{i}/{name}")
            for part, name in BIG_VISION.items()
        }
        for i in range(found.layers)
    }
    patches = (input_shape[0] // side) * (input_shape[1] // side)
    token, positions = file.read("cls", 1, 1, width), file.read("pos_embedding", 1, patches, width)
    weights["embeddings"] = {
        "patches": {"kernel": kernel, "bias": file.read("embedding/bias", width)},
        "class": token,
        "positions": np.concatenate([np.zeros_like(token), positions], axis=1),
    }
    weights["norm"] = norm("Transformer/encoder_norm")
    file.finish(UNUSED)
    return found, weights
