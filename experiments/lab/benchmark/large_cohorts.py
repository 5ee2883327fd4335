"""Large models and large cohorts: time and memory of a round, a process for each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from experiments.lab.benchmark import measure, workload
from experiments.lab.benchmark.child import in_process
from experiments.lab.benchmark.jax_rounds import Rounds
from experiments.lab.benchmark.records import Row, Section
from experiments.lab.benchmark.workload import Scale, Setup
from pfl_jax import models, simulate
from pfl_jax.methods import make_method
from pfl_jax.primitives.tree import byte_count


class Large(NamedTuple):
    """A round of one local epoch on CIFAR-10's shape, with one batch for each client.

    Attributes:
      method, model: their names.
      clients: of the federation.
      cohort: of the round.
      examples: of each client, and of a batch.
    """

    method: str
    model: str
    clients: int
    cohort: int
    examples: int


ROUNDS = (
    Large("fedavg", "resnet18", 100, 20, 10),
    Large("fedavg", "resnet18", 100, 100, 10),
    Large("fedper", "resnet18", 100, 100, 10),
    Large("fedavg", "fedavg_cnn", 1000, 1000, 12),
    Large("fedpac", "fedavg_cnn", 1000, 1000, 12),
)
QUICK = (Large("fedavg", "fedavg_cnn", 4, 2, 10), Large("fedpac", "fedavg_cnn", 3, 3, 10))


def large_cohorts(setup: Setup) -> Section:
    """Seconds and memory of ROUNDS."""
    rows = []
    for one in QUICK if setup.scale == workload.QUICK else ROUNDS:
        setup.notify(f"{one.method}, {one.model}, {one.cohort} of {one.clients} clients, in a process of its own")
        rows.append(in_process(large_cohort, setup.scale, of=one))
    note = "CIFAR-10's shape; a client trains one step on one batch: of 10 examples (ResNet-18), of 12 (CNN)"
    return Section("Large models and cohorts", rows, note)


def large_cohort(scale: Scale, of: Sequence[Any]) -> Row:
    """Seconds and memory of one of ROUNDS, the second round of a new federation; in a process of its own.

    On paper each device holds a client's parameters, gradient and momentum, the sum of the means of its clients, the
    server's model before and after the round, all clients' states twice, and the examples. The activations of a batch
    and the programs are not in it.
    """
    method, name, clients, cohort, examples = Large(*of)
    data = workload.federation(clients, examples, "cifar10")
    model = models.MODELS[name]((32, 32, 3), 10)
    before = measure.peak_memory()
    rates = {"lr": 0.01, "momentum": 0.5, "batch_size": examples, "epochs": 1}
    rounds = Rounds(make_method(method, model, **rates), data, cohort / clients, evaluation=False)
    rounds.round()
    seconds, size = measure.seconds(rounds.round), byte_count(jax.eval_shape(model.init, jax.random.key(0)))
    states = byte_count(rounds.state.clients)
    held = simulate.client_mesh().size * (6 * size + 2 * states + byte_count(data))
    return {
        "method": method,
        "model": name,
        "parameters, million": size / 4e6,
        "cohort": cohort,
        "s/round": seconds,
        "on paper MiB": held / measure.MIB,
        "peak MiB": measure.peak_memory() / measure.MIB,
        "before the round MiB": before / measure.MIB,
    }
