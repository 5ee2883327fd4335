"""Federations that differ in their number of clients alone, with states on the host and on disk: time and memory."""

import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from experiments.folder.run_folder import Counts, RunFolder, evaluation
from experiments.lab.benchmark import measure
from experiments.lab.benchmark.child import in_process
from experiments.lab.benchmark.records import Row, Section
from experiments.lab.benchmark.workload import Scale, Setup
from pfl_jax import models, simulate
from pfl_jax.data import federated
from pfl_jax.data.allocation import Partition
from pfl_jax.data.federated import FederatedData
from pfl_jax.data.sources import Dataset
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints
from pfl_jax.methods import make_method
from pfl_jax.primitives.tree import byte_count

PLACES = {"fedavg": ("host",), "fedpac": ("host", "disk"), "fedas": ("host", "disk")}
"""Method -> places of its clients' states; FedAvg's have none."""

TRAIN, TEST, POOL, CLASSES, SHAPE = 50, 10, (50_000, 10_000), 10, (8, 8, 1)
"""Training and test examples of a client and of the pool that they are drawn from, and what they are like."""


def federation(clients: int) -> FederatedData:
    """Clients with synthetic examples of two neighboring classes each, which others may have too."""
    draw = np.random.default_rng(0)
    centers = draw.integers(0, 128, (CLASSES, *SHAPE), np.uint8)
    pools, tables, each = [], [], np.arange(clients)[:, None]
    for size, own in zip(POOL, (TRAIN, TEST), strict=True):
        # Sorted, so that neighboring classes are neighboring rows.
        y = np.sort(np.arange(size) % CLASSES).astype(np.int32)
        pools.append((centers[y] + draw.integers(0, 128, (size, *SHAPE), np.uint8), y))
        starts = each % CLASSES * (size // CLASSES) + draw.integers(0, size // CLASSES, (clients, 1))
        tables.append(list((starts + np.arange(own) * (size // CLASSES // own)) % size))
    (x, y), (test_x, test_y) = pools
    dataset = Dataset("synthetic", "arrays", "", False, x, y, test_x, test_y, CLASSES, (0.5,), (0.2,), keep_split=True)
    return federated.federate(dataset, Partition(*tables))


def client_counts(setup: Setup) -> Section:
    """Start, rounds, evaluation, records and memory by method, place of the states and number of clients."""
    counts, cohort, evaluated, rounds = setup.scale.client_counts
    rows = []
    for method, places in PLACES.items():
        for place in places:
            for clients in counts:
                setup.notify(f"{method}, {clients} clients, states on {place}, in a process of its own")
                rows.append(in_process(many_states, setup.scale, method=method, clients=clients, place=place))
    note = (
        f"{TRAIN} training examples each, cohort {cohort}, {rounds} rounds of one epoch, mlp; start: initial states "
        f"and first round, whose programs are compiled unless the cache on disk has them; round: median of the others; "
        f"evaluation of {evaluated} clients"
    )
    return Section("From few to very many clients", rows, note)


def many_states(scale: Scale, method: str, clients: int, place: simulate.StateOn) -> Row:
    """A run over so many clients with their states in one place, in this process."""
    _, cohort, evaluated, rounds = scale.client_counts
    began = time.perf_counter()
    data = federation(clients)
    made = time.perf_counter() - began
    model = models.mlp(SHAPE, CLASSES)
    every, sample = max(2, rounds // 10), min(evaluated, clients)
    settings = simulate.Settings(rounds, cohort / clients, chunk=None, eval_every=every, eval_clients=sample)
    with tempfile.TemporaryDirectory() as name:
        folder, times, last = Path(name), [], None
        for result in simulate.run(
            make_method(method, model, batch_size=10, epochs=1, lr=0.05),
            *(data, settings, jax.random.key(0)),
            mesh=simulate.client_mesh(),
            state_on=place,
            state_folder=folder if place == "disk" else None,
            donate=True,
        ):
            times.append(result.seconds)
            last = result
        assert last is not None
        # The first round and the first evaluation compile.
        usual = statistics.median(s for number, s in enumerate(times[1:], 2) if number % every)
        evaluation = statistics.median(times[2 * every - 1 :: every]) - usual
        peak, size = measure.peak_memory(), byte_count(last.state.clients)
        row: Row = {"method": method, "states on": place if size else "", "clients": clients}
        row |= {"s, data": made, "s, start": times[0], "ms/round": 1e3 * usual}
        row |= {"s/evaluation": evaluation, **_written(last, np.asarray(data.test_count), folder)}
    return row | {"states MiB": size / measure.MIB, "peak MiB": peak / measure.MIB}


def _written(last: simulate.RoundResult, counts: np.ndarray, folder: Path) -> dict[str, float]:
    """Seconds of writing a line of the log, and a checkpoint."""
    assert last.received is not None
    scores = {"received": last.received, "trained": last.trained}
    log, checkpoints = RunFolder(folder), Checkpoints(folder / FOLDER)
    line = measure.seconds(lambda: log.log(evaluation(last.round, scores, Counts(counts))))
    return {"s/line of the log": line, "s/checkpoint": measure.seconds(lambda: checkpoints.save(last.state, {}, {}))}
