"""Sections of the benchmark, one function for each name of --only."""

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


def has_torch() -> bool:
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def training(setup: Setup) -> Section:
    """Local training of all clients beside the same work in PyTorch, and whole FedPAC rounds."""
    scale = setup.scale
    data = workload.federation(scale.clients, scale.examples)
    setup.notify("local training")
    times = measure.interleaved(scale.repetitions[0], _contestants(setup))
    medians = {by: statistics.median(seconds) for by, seconds in times.items()}
    rows: list[Row] = []
    for by, seconds in medians.items():
        rate = scale.clients * scale.examples / seconds
        row = {"work": "local training, E = 1", "by": by, "s": seconds, "repetitions": times[by], "examples/s": rate}
        rows.append(row | {"of peak %": 100 * rate * operations() / setup.peak["peak"]})
    if "PyTorch" in medians:
        rows[0]["speed-up"] = medians["PyTorch"] / medians["pfl_jax"]
    setup.notify("FedPAC rounds")
    rounds = Rounds(workload.method("fedpac", scale), data)
    (seconds,) = measure.interleaved(scale.repetitions[1], {"": rounds.both}).values()
    work = f"FedPAC round, E = {scale.epochs}, both evaluations"
    rows.append({"work": work, "by": "pfl_jax", "s": statistics.median(seconds), "repetitions": seconds})
    note = (
        f"{scale.clients} clients of {scale.examples} examples, chunk {workload.usual_chunk() or 'all'}; medians of "
        "interleaved repetitions"
    )
    return Section("Beside plain PyTorch", rows, note)


def _contestants(setup: Setup) -> dict[str, Callable[[], Any]]:
    """One epoch at a time: short repetitions, and many of them, say more on a disturbed machine than few long ones."""
    scale = setup.scale
    data = workload.federation(scale.clients, scale.examples)
    ours = local_training(data, scale, clients=scale.clients, epochs=1, chunk=workload.usual_chunk(), mesh=setup.mesh)
    ours()
    if not has_torch():
        return {"pfl_jax": ours}
    from experiments.lab.benchmark import torch_rounds

    network = torch_rounds.Network(workload.network().init(jax.random.key(0)))
    start = torch_rounds.weights(network)
    examples = torch_rounds.clients(data)
    torch_rounds.train_clients(network, start, examples[:1], 1, scale)
    return {
        "pfl_jax": ours,
        "PyTorch": functools.partial(torch_rounds.train_clients, network, start, examples, 1, scale),
    }
