"""Estimates of the work and time of runs from their command lines and the speed of finished runs."""

import statistics

import numpy as np

from experiments.choices import CUSTOM
from experiments.cli.effects import visits
from experiments.cli.own_code import is_partition_file
from experiments.cli.request import Request
from pfl_jax.data.partition_files import rows_of
from pfl_jax.data.specs import SPECS

EXAMPLES_PER_SECOND = {"fedpac_cnn": 12_000.0, "fedavg_cnn": 8_000.0}
"""Network -> training examples per second on two quiet cores, assumed until a run with it has finished."""

OTHER_EXAMPLES_PER_SECOND = 11_000.0
"""The same for all other networks."""


def examples_visited(request: Request) -> int:
    """Training examples that a run visits, counted once in each epoch of each round."""
    if request.options.source == "embedded":
        request, _ = request.on_embedded_data()
    options = request.options
    size, clients = options.train_size, options.num_clients
    natural = options.partition == "natural"
    if is_partition_file(options.partition):
        size = round(sum(map(len, rows_of(options.partition).train)) / clients)
    if request.dataset == CUSTOM and (natural or size is None):
        from experiments.cli import own_data

        examples, natural_clients = own_data.sizes(options)
        clients = natural_clients or clients
        size = round(examples / clients) if size is None else size
    elif size is None:
        # The whole dataset, training and test examples together, three quarters of it for training.
        spec = SPECS.get(request.dataset)
        size = round(0.75 * sum((spec and spec.published) or (0, 0)) / clients)
    cohort = options.buffer or max(1, round(options.participation * clients))
    return options.rounds * cohort * int(visits(request, np.array(size)))


class Speeds:
    """Speed of finished runs, by method and network, or by network alone if no run had this method."""

    def __init__(self):
        self._seen: dict[tuple[str, ...], list[float]] = {}

    def add(self, request: Request, seconds: float) -> None:
        """Count a finished run."""
        for kind in _kinds(request) if seconds > 0 and examples_visited(request) else ():
            self._seen.setdefault(kind, []).append(examples_visited(request) / seconds)

    def seconds(self, request: Request) -> float:
        """Estimated seconds of a run."""
        seen = next((self._seen[kind] for kind in _kinds(request) if kind in self._seen), None)
        usual = EXAMPLES_PER_SECOND.get(request.options.model, OTHER_EXAMPLES_PER_SECOND)
        return examples_visited(request) / (usual if seen is None else statistics.median(seen))


def _kinds(request: Request) -> list[tuple[str, ...]]:
    """Groups of runs of similar speed, the most similar first."""
    return [(request.options.model, request.options.method), (request.options.model,)]
