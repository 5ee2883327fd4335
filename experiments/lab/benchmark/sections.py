"""Sections of the benchmark, one function for each name of --only."""

import dataclasses
import functools
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.host.jax_config import MATMUL_PRECISION
from experiments.lab.benchmark import measure, workload
from experiments.lab.benchmark.client_counts import client_counts as client_counts
from experiments.lab.benchmark.jax_rounds import Rounds, local_training
from experiments.lab.benchmark.large_cohorts import large_cohorts as large_cohorts
from experiments.lab.benchmark.records import Row, Section
from experiments.lab.benchmark.workload import Setup, child
from pfl_jax import models
from pfl_jax.engine import chunking

COMPARED = ("fedavg", "fedpac", "fedas")


def has_torch() -> bool:
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def _rate(setup: Setup, visits: int, seconds: float) -> Row:
    """Training examples visited per second, and the share of the machine's peak that their operations are."""
    rate = visits / seconds
    return {"examples/s": rate, "of peak %": 100 * rate * workload.operations()["training"] / setup.peak["peak"]}


def training(setup: Setup) -> Section:
    """Local training of all clients, and whole FedPAC rounds, beside the same work in PyTorch."""
    scale = setup.scale
    rows = _beside("local training, E = 1", scale.repetitions[0], *_training(setup))
    for row in rows:
        row |= _rate(setup, scale.clients * scale.examples, row["s"])
    rows += _beside(f"FedPAC round, E = {scale.epochs}, both evaluations", scale.repetitions[1], *_round(setup))
    note = (
        f"{scale.clients} clients of {scale.examples} examples, chunk {setup.chunk or 'all'}; medians of interleaved "
        f"repetitions; float32 matrix-product peak {setup.peak['peak'] / 1e9:.0f} GFLOP/s; a core copies "
        f"{setup.peak['memory'] / 1e9:.1f} GB/s"
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
    ours = local_training(data, scale, clients=scale.clients, epochs=1, chunk=setup.chunk, mesh=setup.mesh)
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
    ours = Rounds(workload.method("fedpac", scale), data, participation=1.0, chunk=setup.chunk, mesh=setup.mesh)
    if not has_torch():
        return ours.both, None
    from experiments.lab.benchmark import torch_rounds

    params = workload.network().init(jax.random.key(0))
    theirs = torch_rounds.FedPAC(params, torch_rounds.clients(data), workload.dataset().num_classes, scale)
    # Not timed; from here on there are centroids to align to.
    theirs.round(range(min(2, scale.clients)))
    return ours.both, theirs.round


def methods(setup: Setup) -> Section:
    """Rounds of the methods by number of clients and chunk."""
    rows = []
    for clients, participation in setup.scale.populations:
        for name in COMPARED:
            rows += _method(setup, name, clients, participation)
    note = "examples/s: training examples visited in local epochs; of peak: of these alone"
    return Section("Rounds", rows, note)


def _method(setup: Setup, name: str, clients: int, participation: float) -> list[Row]:
    scale, rows, state = setup.scale, [], None
    on_cpu = jax.default_backend() == "cpu"
    data = workload.federation(clients, scale.examples)
    first = (clients, participation) == scale.populations[0]
    # On a CPU other chunks only lose: one method is enough to show it, with one epoch.
    for chunk in setup.chunks if first and (name == COMPARED[0] or not on_cpu) else setup.chunks[:1]:
        epochs = scale.epochs if chunk == setup.chunks[0] or not on_cpu else 1
        setup.notify(f"{name}, {clients} clients, chunk {chunk or 'all'}")
        method, evaluated = workload.method(name, scale, epochs), first and state is None
        rounds = Rounds(
            method, data, participation=participation, chunk=chunk, mesh=setup.mesh, state=state, evaluation=evaluated
        )
        seconds = measure.seconds(rounds.round)
        evaluation = measure.seconds(rounds.evaluate) if evaluated else None
        state = rounds.state
        row = {"method": name, "clients": clients, "cohort": rounds.cohort_size, "chunk": chunk or "all", "E": epochs}
        row |= {"s/round": seconds, "s/evaluation": evaluation}
        rows.append(row | _rate(setup, rounds.cohort_size * scale.examples * epochs, seconds))
    return rows


def variants(setup: Setup) -> Section:
    """Local training by form of the convolutions, chunk, devices and, on a GPU, precision."""
    scale, rows = setup.scale, []
    on_cpu = jax.default_backend() == "cpu"
    clients = min(4, scale.clients) if on_cpu else scale.clients
    data = workload.federation(clients, scale.examples)
    together = -(-clients // setup.mesh.size)
    every = [("lax", 1, True), ("matmul", 1, True), ("matmul", together, True), ("direct", together, True)]
    every += [("direct", 1, False), ("direct", 1, True)] if on_cpu else [("lax", together, True)]
    for precision in ("float32",) if on_cpu else MATMUL_PRECISION:
        for form, chunk, all_devices in every:
            setup.notify(f"local training, {form} convolutions, chunk {chunk}")
            mesh = setup.mesh if all_devices else None
            with jax.default_matmul_precision(MATMUL_PRECISION[precision]):
                train = local_training(data, scale, clients=clients, epochs=1, chunk=chunk, mesh=mesh, form=form)
            seconds = statistics.median(measure.seconds(train) for _ in range(scale.repetitions[1]))
            row = {"form": form, "chunk": chunk, "devices": mesh.size if mesh else 1, "precision": precision}
            rows.append(row | {"examples/s": clients * scale.examples / seconds})
    return Section("Convolutions, chunks and devices", rows, f"{clients} clients, local training")


def chunks(setup: Setup) -> Section:
    """Local training of each of the papers' networks by clients under one vmap: the basis of `--chunk auto`."""
    scale, rows = setup.scale, []
    clients, examples = min(8, scale.clients), min(100, scale.examples)  # The digits are few.
    for name, network in workload.NETWORKS:
        setup.notify(f"{network} on pictures like {name}, by chunk")
        data, source = workload.federation(clients, examples, name), workload.dataset(name)
        model = models.MODELS[network](source.input_shape, source.num_classes)
        train = functools.partial(local_training, data, scale, clients=clients, epochs=1, mesh=setup.mesh, model=model)
        sizes = sorted({1, 2, -(-clients // setup.mesh.size)})
        contestants = {f"chunk {chunk}, examples/s": train(chunk=chunk) for chunk in sizes}
        for work in contestants.values():
            work()
        times = measure.medians(scale.repetitions[1], contestants)
        rates = {heading: clients * examples / seconds for heading, seconds in times.items()}
        rows.append({"model": network, "pictures like": name, **rates})
    note = f"local training of {clients} clients, {jax.default_backend()} x {setup.mesh.size}"
    return Section("Clients under one vmap on a device", rows, note)


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


def growth(setup: Setup) -> Section:
    """Time and peak memory from few to many clients, a process for each, and a line fitted to the cohorts' times."""
    rows = []
    for clients, participation in setup.scale.growth:
        setup.notify(f"{clients} clients, participation {participation:g}, in a process of its own")
        rows.append(child(setup, "growth", clients=clients, participation=participation))
    cohorts, times = (np.array([row[heading] for row in rows], np.float64) for heading in ("cohort", "s/round"))
    slope, intercept = np.polyfit(cohorts, times, 1)
    apart = np.max(np.abs(times / (slope * cohorts + intercept) - 1))
    note = (
        f"{setup.scale.growth_examples} examples each; a line through these rounds rises by {slope * 1e3:.1f} ms "
        f"for each client of the cohort and is within {apart:.0%} of all of them"
    )
    return Section("FedPAC from few to many clients", rows, note)


def memory_growth(setup: Setup) -> Section:
    """Memory over many rounds, programs compiled by two starts from an empty cache, and two runs in one process."""
    setup.notify(f"{setup.scale.memory_growth[0]} small rounds")
    held = child(setup, "memory_growth")
    rows: list[Row] = [{"what": f"memory after round {number}", "MiB": mib} for number, mib in held.items()]
    setup.notify("two starts of the same experiment, and two runs in one process")
    with tempfile.TemporaryDirectory() as folder:
        rows += [{"what": f"start {number}"} | start(folder, str(number)) for number in (1, 2)]
        runs = measure.in_process("runs", {"scale": dataclasses.asdict(setup.scale)}, PFL_JAX_CACHE=f"{folder}/none")
        rows += [{"what": f"{name} run in one process", "s": seconds} for name, seconds in runs.items()]
    return Section("Many rounds, second start", rows)


def start(folder: str, name: str, method: str = "fedpac") -> Row:
    """One start of a small experiment, in a folder that has the cache too: programs needed and compiled, seconds."""
    words = ["digits", "--method", method, "--rounds", "2", "--num-clients", "4", "--out", f"{folder}/{name}"]
    began = time.perf_counter()
    counted = measure.in_process("start", {"words": words}, PFL_JAX_CACHE=f"{folder}/cache")
    return counted | {"s": time.perf_counter() - began}


def many_clients(setup: Setup) -> Section:
    """Thousands of clients with states of their own, a process for each method."""
    clients, participation, rounds = setup.scale.many_clients
    rows = []
    for method in ("fedpac", "fedas"):
        setup.notify(f"{method}, {clients} clients, in a process of its own")
        rows.append(child(setup, "many_clients", method=method))
    note = f"trained: cohorts of the first three and the last three of {rounds} rounds; received: everyone at the end"
    return Section(f"{clients:,} clients, participation {participation:g}, states on the host", rows, note)


def sweep(setup: Setup) -> Section:
    """Time of a sweep and of its runs one after another in one process, compilation included in both."""
    rows: list[Row] = []
    for together, words in ((False, "one after another"), (True, "as a sweep")):
        setup.notify(f"{setup.scale.sweep[0]} runs {words}")
        rows.append({"runs": words} | child(setup, "sweep", together=together))
    alone, swept = rows
    ratios = {heading.replace("s,", "ratio,"): alone[heading] / swept[heading] for heading in list(alone)[1:]}
    return Section(f"{setup.scale.sweep[0]} runs of FedPAC", [alone, swept | ratios])
