"""Estimates of the work and time of runs from their command lines and the speed of finished runs."""

import statistics

import numpy as np

from experiments.choices import CUSTOM
from experiments.fields import is_partition_file
from experiments.identity import visits
from experiments.spec import Spec
from pfl_jax.data.partition_files import rows_of
from pfl_jax.data.specs import SPECS

EXAMPLES_PER_SECOND = {"fedpac_cnn": 12_000.0, "fedavg_cnn": 8_000.0}
"""Network -> training examples per second on two quiet cores, assumed until a run with it has finished."""

OTHER_EXAMPLES_PER_SECOND = 11_000.0
"""The same for all other networks."""


def examples_visited(spec: Spec) -> int:
    """Training examples that a run visits, counted once in each epoch of each round."""
    if spec.source == "embedded":
        spec, _ = spec.on_embedded_data()
    size, clients = spec.train_size, spec.num_clients
    natural = spec.partition == "natural"
    if is_partition_file(spec.partition):
        size = round(sum(map(len, rows_of(spec.partition).train)) / clients)
    if spec.dataset == CUSTOM and (natural or size is None):
        from experiments import own_data

        examples, natural_clients = own_data.sizes(spec)
        clients = natural_clients or clients
        size = round(examples / clients) if size is None else size
    elif size is None:
        # The whole dataset, training and test examples together, three quarters of it for training.
        known = SPECS.get(spec.dataset)
        size = round(0.75 * sum((known and known.published) or (0, 0)) / clients)
    cohort = spec.buffer or max(1, round(spec.participation * clients))
    return spec.rounds * cohort * int(visits(spec, np.array(size)))


class Speeds:
    """Speed of finished runs, by method and network, or by network alone if no run had this method."""

    def __init__(self):
        self._seen: dict[tuple[str, ...], list[float]] = {}

    def add(self, spec: Spec, seconds: float) -> None:
        """Count a finished run."""
        for kind in _kinds(spec) if seconds > 0 and examples_visited(spec) else ():
            self._seen.setdefault(kind, []).append(examples_visited(spec) / seconds)

    def seconds(self, spec: Spec) -> float:
        """Estimated seconds of a run."""
        seen = next((self._seen[kind] for kind in _kinds(spec) if kind in self._seen), None)
        usual = EXAMPLES_PER_SECOND.get(spec.model, OTHER_EXAMPLES_PER_SECOND)
        return examples_visited(spec) / (usual if seen is None else statistics.median(seen))


def _kinds(spec: Spec) -> list[tuple[str, ...]]:
    """Groups of runs of similar speed, the most similar first."""
    return [(spec.model, spec.method), (spec.model,)]
