"""Tiny federation and model: a method trains on them within a second, and all arrays can be inspected."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Model, PyTree
from pfl_jax.data.federated import PER_CLIENT, FederatedData, NumClasses
from pfl_jax.errors import InvalidInput
from pfl_jax.tasks import CLASSIFICATION, Task

CLASSES, FEATURES, SHAPE = 3, 4, (2, 3, 1)
"""Sizes of the federation and the model: K, d and the shape of one input."""

HYPER_PARAMETERS = {"lr": 0.1, "batch_size": 8, "epochs": 2}
"""Hyper-parameters that every method has, for fast tests."""

UNEVEN = (9, 18, 14, 5)
"""Training examples of clients around mini-batches of 8: last batches of 1, 2 and 6, and one that is not full.
The last batch of the largest client has a separate size, see `pfl_jax.primitives.mini_batches`."""


def tiny_model(task: Task = CLASSIFICATION) -> Model:
    """Six inputs, one tanh layer of four features, three classes: small enough for float64 checks by hand.

    Args:
      task: task of the outputs, one of TASKS; in a sequence each of the two rows of an input is one place.
    """
    outputs = 1 if task.name == "binary" else CLASSES
    places = SHAPE[:1] if task.kind == "sequences" else ()
    inputs_of_place = 6 // max(places, default=1)

    def init(key):
        keys = jax.random.split(key, 2)
        return {
            "backbone": {
                "kernel": 0.5 * jax.random.normal(keys[0], (inputs_of_place, FEATURES)),
                "bias": jnp.zeros(FEATURES),
            },
            "head": {"kernel": 0.5 * jax.random.normal(keys[1], (FEATURES, outputs)), "bias": jnp.zeros(outputs)},
        }

    def features(backbone, inputs):
        check_part("backbone", backbone)
        rows = inputs.reshape(inputs.shape[0], *places, -1)
        return jnp.tanh(rows @ backbone["kernel"] + backbone["bias"])

    def classify(head, features):
        check_part("head", head)
        return features @ head["kernel"] + head["bias"]

    return Model(init, features, classify, FEATURES, outputs, task=task)


def check_part(name: str, part: PyTree) -> None:
    """Raise InvalidInput unless a part of the tiny model, its backbone or head, has the leaves of one.

    Args:
      name: name of the part.
      part: the tree that a method gives the model in its place.
    """
    leaves = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(part)]
    if sorted(leaves) != ["bias", "kernel"]:
        there = ", ".join(leaves) or "nothing"
        raise InvalidInput(f"the model's {name} has the leaves bias and kernel, and got {there} in its place")


LABELS: dict[str, list[Any]] = {
    "regression": [[0.5, -1.0, 0.0], [-1.5, 0.0, 1.0], [1.0, 2.0, -0.5]],
    "multi_label": [[1, 0, 1], [0, 1, 1], [0, 0, 0]],
    "binary": [1, 0, 0],
    "next_symbol": [[0, 1], [1, 2], [2, -1]],
}
"""Task -> y of the examples of each of the three patterns."""


def tiny_federation(
    train_sizes: Sequence[int] = (9, 20, 14, 5),
    test_size: int = 12,
    *,
    pad: int = 0,
    seed: int = 0,
    task: Task = CLASSIFICATION,
    stray: bool = False,
) -> FederatedData:
    """Clients that learn the same three noisy patterns, in different class proportions.

    Args:
      train_sizes: examples of each client.
      test_size: test examples of each client.
      pad: extra padding of every index table.
      seed: seed of everything.
      task: one of TASKS; y of an example depends on its pattern, see LABELS.
      stray: whether the pool begins with a white image of the last class that belongs to no client. Padding of the
        tables points to it, so that code that counts padding is noticed.
    """
    generator = np.random.default_rng(seed)
    patterns = generator.integers(40, 216, (CLASSES, *SHAPE))
    number = 1 if stray else 0
    pool_x, pool_y = [np.full((number, *SHAPE), 255, np.uint8)], [np.full(number, CLASSES - 1, np.int32)]
    tables = {"train": [], "test": []}
    for client, train_size in enumerate(train_sizes):
        proportions = np.roll([0.7, 0.25, 0.05], client)
        for name, size in (("train", train_size), ("test", test_size)):
            labels = generator.choice(CLASSES, size, p=proportions)
            noise = generator.integers(-40, 40, (size, *SHAPE))
            start = sum(map(len, pool_y))
            pool_x.append((patterns[labels] + noise).astype(np.uint8))
            pool_y.append(labels.astype(np.int32))
            tables[name].append(np.arange(start, start + size))

    def table(rows):
        width = max(map(len, rows)) + pad
        return jnp.asarray(np.stack([np.pad(row, (0, width - len(row))) for row in rows]), jnp.int32)

    y = np.concatenate(pool_y)
    return FederatedData(
        x=jnp.asarray(np.concatenate(pool_x)),
        y=jnp.asarray(np.array(LABELS[task.name])[y] if task.name in LABELS else y),
        train_index=table(tables["train"]),
        train_count=jnp.asarray([len(row) for row in tables["train"]], jnp.int32),
        test_index=table(tables["test"]),
        test_count=jnp.asarray([len(row) for row in tables["test"]], jnp.int32),
        # Numbers and flags are not classes.
        num_classes=NumClasses(0 if task.kind == "vectors" and task.name in LABELS else CLASSES),
        mean=jnp.asarray(np.full(1, 0.5, np.float32)),
        std=jnp.asarray(np.full(1, 0.25, np.float32)),
    )


def uneven_federation(*, pad: int = 0, task: Task = CLASSIFICATION) -> FederatedData:
    """The clients of the conformance checks, with the sizes UNEVEN, beside an example that belongs to no client.

    Args:
      pad, task: see `tiny_federation`.
    """
    return tiny_federation(UNEVEN, pad=pad, task=task, stray=True)


def permute_clients(data: FederatedData, order: Sequence[int] | np.ndarray) -> FederatedData:
    """The same federation with its clients in another order.

    Args:
      data: a federation.
      order: the clients' old numbers.
    """
    order = np.asarray(order)
    given = [name for name in PER_CLIENT if getattr(data, name) is not None]
    return data._replace(**{name: jnp.asarray(np.asarray(getattr(data, name))[order]) for name in given})
