"""Small vision transformer, pretrained on one half of Fashion-MNIST's training images.

    python -m experiments.lab.vit

writes its weights under timm's names, in float16, to results/vit.npz, and the other half and the test images to
vit-train.npz and vit-test.npz in the present folder: `experiments.lab.queue --only field-images` compares methods with
adapters on them. Ten passes take two minutes on two cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.cli.exit_codes import exit_code, leave
from experiments.cli.parser import parse
from experiments.host.jax_config import prepare_jax
from experiments.run import committed
from pfl_jax import data
from pfl_jax.atomic_write import write_binary
from pfl_jax.base import Model, PyTree
from pfl_jax.networks.vit import TIMM, VitConfig, vit

CONFIG = VitConfig(patch=7, width=64, layers=4, heads=1, hidden=128)
"""Sizes: 17 tokens of a 28 x 28 image. timm's files do not have the number of heads; ours are 64 wide."""

WEIGHTS = committed.ROOT / "vit.npz"
EPOCHS, BATCH, RATE = 10, 128, 1e-3


@dataclass(frozen=True)
class Options:
    """Command line."""

    data_dir: str | None = None
    """Folder of Fashion-MNIST's files; by default where Debian has it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Pretrain with command-line arguments, by default those of this process; return the exit code."""

    def work() -> None:
        options, _ = parse(Options, "experiments.lab.vit", __doc__, arguments)
        prepare_jax(devices=1)
        dataset = data.load("fashion_mnist", "files", options.data_dir)
        x, test_x = (pixels(dataset, rows) for rows in (dataset.train_x, dataset.test_x))
        order = np.random.default_rng(0).permutation(len(x))
        first, second = np.split(order, 2)
        model = vit(x.shape[1:], dataset.num_classes, config=CONFIG)
        params = pretrain(model, x[first], dataset.train_y[first])
        right = jnp.argmax(jax.jit(model.apply)(params, test_x), axis=1) == dataset.test_y
        weights: dict[str, Any] = timm(params["backbone"]["encoder"])
        write_binary(WEIGHTS, lambda file: np.savez(file, **weights))
        for name, inputs, labels in (
            ("vit-train.npz", x[second], dataset.train_y[second]),
            ("vit-test.npz", test_x, dataset.test_y),
        ):
            write_binary(Path(name), lambda file, x=inputs, y=labels: np.savez(file, x=x, y=y))
        print(f"{100 * right.mean():.2f} % of the test images after {EPOCHS} passes; {WEIGHTS}")

    return exit_code(work)


def pixels(dataset: data.Dataset, images: np.ndarray) -> np.ndarray:
    """Normalized images [P, H, W, C], float32."""
    mean, std = np.asarray(dataset.mean), np.asarray(dataset.std)
    return ((images / np.float32(255) - mean) / std).astype(np.float32)


def pretrain(model: Model, x: np.ndarray, y: np.ndarray) -> PyTree:
    """Parameters after EPOCHS passes over the images, by Adam with a cosine schedule."""
    steps = len(x) // BATCH
    optimizer = optax.adam(optax.cosine_decay_schedule(RATE, EPOCHS * steps))

    def loss(params, rows):
        outputs = model.apply(params, jnp.asarray(x)[rows])
        return optax.softmax_cross_entropy_with_integer_labels(outputs, jnp.asarray(y)[rows]).mean()

    @jax.jit
    def epoch(state, key):
        def step(state, rows):
            params, moments = state
            updates, moments = optimizer.update(jax.grad(loss)(params, rows), moments)
            return (optax.apply_updates(params, updates), moments), None

        order = jax.random.permutation(key, len(x))[: steps * BATCH]
        return jax.lax.scan(step, state, order.reshape(steps, BATCH))[0]

    params = model.init(jax.random.key(0))
    state = params, optimizer.init(params)
    for key in jax.random.split(jax.random.key(1), EPOCHS):
        state = epoch(state, key)
    return state[0]


def timm(encoder: dict[str, Any]) -> dict[str, np.ndarray]:
    """Parameters of a `pfl_jax.networks.vit.VitEncoder` under timm's names, float16: what `vit` reads."""
    embeddings = encoder["embeddings"]
    found = {
        "patch_embed.proj.weight": embeddings["patches"]["kernel"].transpose(3, 2, 0, 1),
        "patch_embed.proj.bias": embeddings["patches"]["bias"],
        "cls_token": embeddings["class"],
        "pos_embed": embeddings["positions"],
    }
    parts = {"norm": encoder["norm"]}
    for i in range(CONFIG.layers):
        layer = encoder[f"layer_{i}"]
        parts |= {f"blocks.{i}.{name}": layer[own] for own, name in TIMM.items()}
        parts[f"blocks.{i}.attn.qkv"] = {
            kind: jnp.concatenate([layer[own][kind] for own in ("query", "key", "value")], axis=-1)
            for kind in ("kernel", "bias")
        }
    for name, part in parts.items():
        found[f"{name}.weight"] = part["scale"] if "scale" in part else part["kernel"].T
        found[f"{name}.bias"] = part["bias"]
    return {name: np.asarray(array, np.float16) for name, array in found.items()}


if __name__ == "__main__":
    leave(main())
