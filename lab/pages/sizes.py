"""Tables of docs/performance.md and docs/distributed.md: bytes that methods store and send, from shapes alone."""

import functools
from pathlib import Path
from typing import Any

import jax

from experiments.show.tables import markdown
from experiments.spec.spec import Spec
from lab.pages.parts import filled
from pfl_jax.data.federated import FederatedData, NumClasses
from pfl_jax.data.specs import SPECS
from pfl_jax.engine import communication
from pfl_jax.engine.build import build
from pfl_jax.engine.cohort import RoundSettings
from pfl_jax.methods import METHODS, make_method
from pfl_jax.networks.models import MODELS
from pfl_jax.primitives.tree import byte_count

DATASET = "fashion_mnist"

MILLION, COHORT = 1_000_000, 10_000
"""Clients of the estimate, and of its rounds."""


def texts(root: Path) -> dict[Path, str]:
    """The page of a million clients of a checkout, with its table."""
    page = root / "docs/distributed.md"
    return {page: filled(page, {"sizes": of_a_million()})}


@functools.cache
def sizes(method: str, num_clients: int, train_size: int) -> tuple[int, int, int, int]:
    """Bytes that a client keeps between rounds, sends and receives in a round, and that the server keeps.

    Of a method with FedPAC's preset, for N clients of `train_size` examples.
    """
    run, spec = Spec.of(DATASET, method=method, preset="fedpac"), SPECS[DATASET]
    made = make_method(method, MODELS[run.model](spec.shape, spec.num_classes), **run.hyper_parameters)

    def of(*shape: int, dtype: str = "int32") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    data = FederatedData(
        x=of(1, *spec.shape, dtype="uint8"),
        y=of(1),
        train_index=of(num_clients, train_size),
        train_count=of(num_clients),
        test_index=of(num_clients, 1),
        test_count=of(num_clients),
        num_classes=NumClasses(spec.num_classes),
        mean=of(spec.shape[-1], dtype="float32"),
        std=of(spec.shape[-1], dtype="float32"),
    )
    state = jax.eval_shape(build(made, RoundSettings()).init, data, jax.random.key(0))
    sent = communication.traffic(made, data)
    return byte_count(state.clients) // num_clients, sent.up, sent.down, byte_count(state.server)


def each_method() -> str:
    """Sizes of every method, for 100 clients of 600 examples."""
    rows = [[f"`{method}`", *map(in_words, sizes(method, 100, 600))] for method in METHODS]
    return markdown(["method", "a client's state", "sent by a client", "sent to a client", "server"], rows)


def of_a_million() -> str:
    """Sizes for a million clients of 50 examples, ten thousand of them in a round."""
    rows = []
    for method in ("fedavg", "fedpac", "fedas", "fedfomo"):
        client, up, down, _ = sizes(method, MILLION, 50)
        rows.append([f"`{method}`", *map(in_words, (client, up, down, MILLION * client, COHORT * (up + down)))])
    heads = ["method", "a client's state", "sent by a client", "sent to a client", "all states", "a round"]
    return markdown(heads, rows)


def in_words(amount: int) -> str:
    """Bytes in the largest unit that leaves a number of at least 1: "1.5 MiB"."""
    value, units = float(amount), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if value == int(value) else f"{value:.1f} {units[0]}"
