"""Bytes that each method stores and sends, computed from shapes without training.

    python -m experiments.sizes --dataset fashion_mnist --num-clients 1000000 --cohort 10000

For one client: its state between rounds, and what it sends and receives in a round. For all: the states of all clients
and of the server, and what a round sends. Model and options are those of the dataset's preset.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
from rich.console import Console

from experiments import DATASETS
from experiments.cli import parser
from experiments.fields import Argument
from experiments.host.console import Terminal, print_line
from experiments.host.exit_codes import exit_code, leave
from experiments.show.tables import markdown
from experiments.spec import Spec
from pfl_jax.data.federated import FederatedData, NumClasses
from pfl_jax.data.specs import SPECS, DatasetSpec
from pfl_jax.engine import communication
from pfl_jax.engine.build import build
from pfl_jax.engine.cohort import RoundSettings
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import METHODS, make_method
from pfl_jax.networks.models import MODELS
from pfl_jax.primitives.tree import byte_count
from pfl_jax.validation import Count


@dataclass(frozen=True)
class Words:
    """Command line."""

    dataset: Annotated[str, Argument(text=", ".join(SPECS))] = "fashion_mnist"
    method: parser.Names = ()
    """By default all."""
    num_clients: Count = 1000
    """N."""
    cohort: Count | None = None
    """Clients of a round; by default a hundredth of all."""
    train_size: Count = 50
    """Examples of a client."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the sizes with command-line arguments, by default those of this process; return the exit code."""
    return exit_code(lambda: _print(arguments, Terminal()))


def sizes(dataset: str, method: str, num_clients: int, train_size: int) -> tuple[int, int, int, int]:
    """Bytes that a client keeps between rounds, sends and receives in a round, and that the server keeps.

    Of a method with its dataset's preset, for N clients of `train_size` examples.
    """
    run, spec = Spec.of(dataset, method=method), SPECS[dataset]
    made = make_method(method, MODELS[run.model](spec.shape, spec.num_classes), **run.hyper_parameters)
    data = _shapes(spec, num_clients, train_size)
    state = jax.eval_shape(build(made, RoundSettings()).init, data, jax.random.key(0))
    sent = communication.traffic(made, data)
    return byte_count(state.clients) // num_clients, sent.up, sent.down, byte_count(state.server)


def _shapes(spec: DatasetSpec, num_clients: int, train_size: int) -> FederatedData:
    """Federation of shapes without data."""

    def of(*shape: int, dtype: str = "int32") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    channels = spec.shape[-1]
    return FederatedData(
        x=of(1, *spec.shape, dtype="uint8"),
        y=of(1),
        train_index=of(num_clients, train_size),
        train_count=of(num_clients),
        test_index=of(num_clients, 1),
        test_count=of(num_clients),
        num_classes=NumClasses(spec.num_classes),
        mean=of(channels, dtype="float32"),
        std=of(channels, dtype="float32"),
    )


def _print(words: Sequence[str] | None, console: Console) -> None:
    own, _ = parser.parse(Words, "experiments.sizes", __doc__, words)
    if own.dataset in DATASETS and own.dataset not in SPECS:
        raise InvalidInput(f"the sizes on {own.dataset} are in a run's config.json: bytes_per_client_and_round")
    methods = own.method or tuple(METHODS)
    parser.choose("dataset", [own.dataset], SPECS)
    parser.choose("method", methods, METHODS)
    cohort = max(1, own.num_clients // 100) if own.cohort is None else own.cohort
    if cohort > own.num_clients:
        raise InvalidInput(f"--cohort {cohort} is more than the {own.num_clients} clients")

    states = f"{own.num_clients:,} states"
    heads = ["method", "a client's state", "sent by it", "sent to it", "server", states, "a round"]
    rows = []
    for method in methods:
        client, up, down, server = sizes(own.dataset, method, own.num_clients, own.train_size)
        amounts = (client, up, down, server, own.num_clients * client, cohort * (up + down))
        rows.append([f"`{method}`", *map(in_words, amounts)])
    print_line(console, markdown(heads, rows, None).rstrip())


def in_words(amount: int) -> str:
    """Bytes in the largest unit that leaves a number of at least 1: "1.5 MiB"."""
    value, units = float(amount), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if value == int(value) else f"{value:.1f} {units[0]}"


if __name__ == "__main__":
    leave(main())
