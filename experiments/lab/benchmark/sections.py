"""Sections of the benchmark that are measured in its own process, one function for each name of --only."""

import functools
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import jax

from experiments.lab.benchmark import measure, workload
from experiments.lab.benchmark.jax_rounds import Rounds, local_training, operations
from experiments.lab.benchmark.records import Row, Section
from experiments.lab.benchmark.workload import Setup
from pfl_jax.engine import chunking

COMPARED = ("fedavg", "fedpac", "fedas")


def has_torch() -> bool:
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def _rate(setup: Setup, visits: int, seconds: float) -> Row:
    """Training examples visited per second, and the share of the machine's peak that their operations are."""
    rate = visits / seconds
    return {"examples/s": rate, "of peak %": 100 * rate * operations() / setup.peak["peak"]}


def training(setup: Setup) -> Section:
    """Local training of all clients, and whole FedPAC rounds, beside the same work in PyTorch."""
    scale = setup.scale
    rows = _beside("local training, E = 1", scale.repetitions[0], *_training(setup))
    for row in rows:
        row |= _rate(setup, scale.clients * scale.examples, row["s"])
    rows += _beside(f"FedPAC round, E = {scale.epochs}, both evaluations", scale.repetitions[1], *_round(setup))
    note = (
        f"{scale.clients} clients of {scale.examples} examples, chunk {workload.usual_chunk() or 'all'}; medians of "
        "interleaved repetitions"
    )
    return Section("Beside plain PyTorch", rows, note)


def _beside(work: str, repetitions: int, ours: Callable[[], Any], theirs: Callable[[], Any] | None) -> list[Row]:
    times = measure.interleaved(repetitions, {"pfl_jax": ours} | ({} if theirs is None else {"PyTorch": theirs}))
    medians = {by: statistics.median(seconds) for by, seconds in times.items()}
    rows: list[Row] = [{"work": work, "by": by, "s": medians[by], "repetitions": times[by]} for by in times]
    if theirs is not None:
        rows[0]["speed-up"] = medians["PyTorch"] / medians["pfl_jax"]
    return rows


def _training(setup: Setup) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    """One epoch at a time: short repetitions, and many of them, say more on a disturbed machine than few long ones."""
    scale = setup.scale
    setup.notify("local training")
    data = workload.federation(scale.clients, scale.examples)
    ours = local_training(data, scale, clients=scale.clients, epochs=1, chunk=workload.usual_chunk(), mesh=setup.mesh)
    ours()
    if not has_torch():
        return ours, None
    from experiments.lab.benchmark import torch_rounds

    network = torch_rounds.Network(workload.network().init(jax.random.key(0)))
    start = torch_rounds.weights(network)
    examples = [train for train, _ in torch_rounds.clients(data)]
    torch_rounds.train_clients(network, start, examples[:1], 1, scale)
    return ours, functools.partial(torch_rounds.train_clients, network, start, examples, 1, scale)


def _round(setup: Setup) -> tuple[Callable[[], Any], Callable[[], Any] | None]:
    scale = setup.scale
    setup.notify("FedPAC rounds")
    data = workload.federation(scale.clients, scale.examples)
    ours = Rounds(workload.method("fedpac", scale), data)
    if not has_torch():
        return ours.both, None
    from experiments.lab.benchmark import torch_rounds

    params = workload.network().init(jax.random.key(0))
    theirs = torch_rounds.FedPAC(params, torch_rounds.clients(data), workload.dataset().num_classes, scale)
    # Not timed; from here on there are centroids to align to.
    theirs.round(range(min(2, scale.clients)))
    return ours.both, theirs.round


def methods(setup: Setup) -> Section:
    """Rounds of the methods by number of clients."""
    scale, rows = setup.scale, []
    for clients, participation in scale.populations:
        data = workload.federation(clients, scale.examples)
        for name in COMPARED:
            setup.notify(f"{name}, {clients} clients")
            rounds = Rounds(workload.method(name, scale), data, participation)
            seconds, evaluation = measure.seconds(rounds.round), measure.seconds(rounds.evaluate)
            row = {"method": name, "clients": clients, "cohort": rounds.cohort_size, "E": scale.epochs}
            row |= {"s/round": seconds, "s/evaluation": evaluation}
            rows.append(row | _rate(setup, rounds.cohort_size * scale.examples * scale.epochs, seconds))
    note = "examples/s: training examples visited in local epochs; of peak: of these alone"
    return Section("Rounds", rows, note)


def waste(setup: Setup) -> Section:
    """Share of gradient steps wasted on clients of unequal size, Dirichlet 0.1, by chunk."""
    devices, batch, rows = setup.mesh.size, setup.scale.batch_size, []
    for clients in (20, 100):
        counts = workload.dirichlet_sizes(clients)
        row: Row = {"clients": clients, "fewest examples": int(counts.min()), "most": int(counts.max())}
        for chunk in (1, 2, 3, 5, 10, None):
            unused = chunking.unused_shares(counts, batch_size=batch, chunk=chunk, devices=devices)
            row[f"chunk {chunk or 'all'}, %"] = 100 * unused.steps
        for kind, number in (("cpu", devices), ("gpu", 1)):
            # Convolutions on a CPU, see `chunking.one_by_one`.
            row[f"auto: {number} {kind}"] = 1 if kind == "cpu" else chunking.choose_chunk(counts, batch, number)
        rows.append(row)
    return Section(f"Wasted gradient steps by chunk, Dirichlet 0.1, {devices} devices", rows)
