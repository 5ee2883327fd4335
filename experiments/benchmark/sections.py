"""Measurements of the benchmark, one function for each section of the report; each returns plain data for JSON."""

import dataclasses
import functools
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.benchmark import measure, workload
from experiments.benchmark.jax_rounds import Rounds, local_training
from experiments.benchmark.optimizations import compare
from experiments.benchmark.workload import Scale
from experiments.config.options import MATMUL_PRECISION
from pfl_jax import models, simulate
from pfl_jax.engine import chunking

Record: TypeAlias = dict[str, Any]

COMPARED = ("fedavg", "fedpac", "fedas")


class Setup(NamedTuple):
    """Data shared by all sections.

    Attributes:
      scale: how large everything is.
      mesh: of all devices.
      chunk: the one of `--chunk auto` for clients of equal size, None for all at once.
      chunks: those that are compared.
      peak: floating-point operations per second of the machine's matrix products.
      notify: called with what is measured next.
    """

    scale: Scale
    mesh: Mesh
    chunk: int | None
    chunks: Sequence[int | None]
    peak: float
    notify: Callable[[str], None]


def has_torch() -> bool:
    """Whether PyTorch is installed."""
    return importlib.util.find_spec("torch") is not None


def _compare(setup: Setup, repetitions: int, ours: Callable[[], Any], theirs: Callable[[], Any] | None) -> Record:
    """Medians of interleaved repetitions, and the ratio of PyTorch's time to ours."""
    contestants = {"jax": ours} | ({} if theirs is None else {"torch": theirs})
    times = measure.interleaved(repetitions, contestants)
    medians = {f"{name}_seconds": measure.median(values) for name, values in times.items()}
    record: Record = medians | {"repetitions": times}
    if theirs is not None:
        record["ratio"] = medians["torch_seconds"] / medians["jax_seconds"]
    return record


def training(setup: Setup) -> Record:
    """Local training of all clients beside the plain PyTorch loop, one epoch of it at a time.

    Short repetitions, and many of them, say more on a disturbed machine than few long ones.
    """
    scale = setup.scale
    data = workload.federation(scale.clients, scale.examples)
    ours = local_training(data, scale, clients=scale.clients, epochs=1, chunk=setup.chunk, mesh=setup.mesh)
    ours()
    theirs: Callable[[], Any] | None = None
    if has_torch():
        from experiments.benchmark import torch_rounds

        network = torch_rounds.Network(workload.network().init(jax.random.key(0)))
        start = torch_rounds.weights(network)
        examples = [train for train, _ in torch_rounds.clients(data)]
        torch_rounds.train_clients(network, start, examples[:1], 1, scale)

        theirs = functools.partial(torch_rounds.train_clients, network, start, examples, 1, scale)

    record = _compare(setup, scale.repetitions[0], ours, theirs)
    visits = scale.clients * scale.examples
    for name in ("jax", "torch"):
        if f"{name}_seconds" in record:
            rate = visits / record[f"{name}_seconds"]
            record[f"{name}_examples_per_second"] = rate
            record[f"{name}_fraction_of_peak"] = rate * workload.operations()["training"] / setup.peak
    return {"clients": scale.clients, "examples": scale.examples, "epochs": 1, "chunk": setup.chunk} | record


def fedpac_round(setup: Setup) -> Record:
    """Whole FedPAC round with both evaluations beside the same round in PyTorch."""
    scale = setup.scale
    data = workload.federation(scale.clients, scale.examples)
    ours = Rounds(workload.method("fedpac", scale), data, participation=1.0, chunk=setup.chunk, mesh=setup.mesh)
    theirs = None
    if has_torch():
        from experiments.benchmark import torch_rounds

        params = workload.network().init(jax.random.key(0))
        classes = workload.dataset().num_classes
        federation = torch_rounds.FedPAC(params, torch_rounds.clients(data), classes, scale)
        # Not timed; from here on there are centroids to align to.
        federation.round(range(min(2, scale.clients)))
        theirs = federation.round
    record = _compare(setup, scale.repetitions[1], ours.both, theirs)
    return {"clients": scale.clients, "examples": scale.examples, "epochs": scale.epochs, "chunk": setup.chunk} | record


def methods(setup: Setup) -> list[Record]:
    """Rounds of the methods by number of clients and chunk."""
    scale, rows = setup.scale, []
    on_cpu = jax.default_backend() == "cpu"
    for clients, participation in scale.populations:
        data = workload.federation(clients, scale.examples)
        first = (clients, participation) == scale.populations[0]
        for name in COMPARED:
            state = None
            # On a CPU other chunks only lose: one method is enough to show it, with one epoch.
            by_chunk = first and (name == COMPARED[0] or not on_cpu)
            for chunk in setup.chunks if by_chunk else setup.chunks[:1]:
                epochs = scale.epochs if chunk == setup.chunks[0] or not on_cpu else 1
                setup.notify(f"{name}, {clients} clients, chunk {chunk or 'all'}")
                method = workload.method(name, scale, epochs)
                rounds = Rounds(
                    method,
                    data,
                    participation=participation,
                    chunk=chunk,
                    mesh=setup.mesh,
                    state=state,
                    evaluation=first and state is None,
                )
                seconds = measure.seconds(rounds.round)
                evaluation = measure.seconds(rounds.evaluate) if first and state is None else None
                state = rounds.state
                visits = rounds.cohort_size * scale.examples * epochs
                rows.append(
                    {
                        "method": name,
                        "clients": clients,
                        "cohort": rounds.cohort_size,
                        "chunk": chunk,
                        "epochs": epochs,
                        "round_seconds": seconds,
                        "evaluation_seconds": evaluation,
                        "examples_per_second": visits / seconds,
                        "fraction_of_peak": visits / seconds * workload.operations()["training"] / setup.peak,
                    }
                )
    return rows


def variants(setup: Setup) -> list[Record]:
    """Local training by form of the convolutions, chunk, devices and, on a GPU, precision."""
    scale = setup.scale
    on_cpu = jax.default_backend() == "cpu"
    clients = min(4, scale.clients) if on_cpu else scale.clients
    data = workload.federation(clients, scale.examples)
    together = -(-clients // setup.mesh.size)
    every = [("lax", 1, True), ("matmul", 1, True), ("matmul", together, True), ("direct", together, True)]
    if on_cpu:
        every += [("direct", 1, False), ("direct", 1, True)]
    else:
        every.append(("lax", together, True))
    rows = []
    for precision in ("float32",) if on_cpu else MATMUL_PRECISION:
        for form, chunk, all_devices in every:
            setup.notify(f"local training, {form} convolutions, chunk {chunk}")
            with jax.default_matmul_precision(MATMUL_PRECISION[precision]):
                mesh = setup.mesh if all_devices else None
                train = local_training(data, scale, clients=clients, epochs=1, chunk=chunk, mesh=mesh, form=form)
            times = [measure.seconds(train) for _ in range(scale.repetitions[1])]
            rate = clients * scale.examples / measure.median(times)
            devices = setup.mesh.size if all_devices else 1
            rows.append(
                {"form": form, "chunk": chunk, "devices": devices, "precision": precision, "clients": clients}
                | {"examples_per_second": rate}
            )
    return rows


def chunks(setup: Setup) -> list[Record]:
    """Local training of each of the papers' networks by clients under one vmap: the basis of `--chunk auto`."""
    scale, rows = setup.scale, []
    clients = min(8, scale.clients)
    for name, network in workload.NETWORKS:
        # The digits are few.
        data = workload.federation(clients, min(100, scale.examples), name)
        source = workload.dataset(name)
        model = models.MODELS[network](source.input_shape, source.num_classes)
        sizes = sorted({1, 2, -(-clients // setup.mesh.size)})
        setup.notify(f"{network} on pictures like {name}, by chunk")
        contestants = {
            str(chunk): local_training(
                data, scale, clients=clients, epochs=1, chunk=chunk, mesh=setup.mesh, model=model
            )
            for chunk in sizes
        }
        for train in contestants.values():
            train()
        times = measure.interleaved(scale.repetitions[1], contestants)
        visits = clients * min(100, scale.examples)
        rates = {chunk: visits / measure.median(values) for chunk, values in times.items()}
        rows.append({"dataset": name, "model": network, "clients": clients, "examples_per_second": rates})
    return rows


def optimizations(setup: Setup) -> list[Record]:
    """Time before and after each optimization inside a client's round."""
    return compare(setup.scale, setup.notify)


def waste(setup: Setup) -> list[Record]:
    """Share of gradient steps wasted on clients of unequal size, Dirichlet 0.1, by chunk."""
    devices, batch = setup.mesh.size, setup.scale.batch_size
    rows = []
    for clients in (20, 100):
        counts = workload.dirichlet_sizes(clients)
        record: Record = {
            "clients": clients,
            "smallest": int(counts.min()),
            "largest": int(counts.max()),
            "devices": devices,
        }
        record["by_chunk"] = {
            str(chunk or "all"): chunking.wasted_step_share(counts, batch_size=batch, chunk=chunk, devices=devices)
            for chunk in (1, 2, 3, 5, 10, None)
        }
        record["auto"] = {
            kind: chunking.choose_chunk(counts, batch_size=batch, devices=number, backend=kind)
            for kind, number in (("cpu", devices), ("gpu", 1))
        }
        rows.append(record)
    return rows


def growth(setup: Setup) -> Record:
    """Time and peak memory from few to many clients, a process for each, and a line fitted to the cohorts' times."""
    scale = setup.scale
    rows = []
    for clients, participation in scale.growth:
        setup.notify(f"{clients} clients, participation {participation:g}, in a process of its own")
        request = {"scale": dataclasses.asdict(scale), "clients": clients, "participation": participation}
        request["repetitions"] = scale.repetitions[1]
        rows.append(measure.in_process("experiments.benchmark.children", "growth", json.dumps(request)))
    cohorts = np.array([row["cohort"] for row in rows], np.float64)
    times = np.array([row["round_seconds"] for row in rows])
    slope, intercept = np.polyfit(cohorts, times, 1)
    return {
        "rows": rows,
        "examples": scale.growth_examples,
        "seconds_per_client": float(slope),
        "seconds_at_no_client": float(intercept),
        "largest_deviation": float(np.max(np.abs(times / (slope * cohorts + intercept) - 1))),
    }


def memory_growth(setup: Setup) -> Record:
    """Memory over many rounds."""
    setup.notify(f"{setup.scale.memory_growth[0]} small rounds")
    request = json.dumps({"scale": dataclasses.asdict(setup.scale)})
    return measure.in_process("experiments.benchmark.children", "memory_growth", request)


def many_clients(setup: Setup) -> list[Record]:
    """Thousands of clients with states of their own, a process for each method."""
    rows = []
    for method in ("fedpac", "fedas"):
        setup.notify(f"{method}, {setup.scale.many_clients[0]} clients, in a process of its own")
        request = json.dumps({"scale": dataclasses.asdict(setup.scale), "method": method})
        rows.append(measure.in_process("experiments.benchmark.children", "many_clients", request))
    return rows


def sweep(setup: Setup) -> Record:
    """Time of a sweep and of its runs one after another in one process, compilation included in both."""
    rows = {}
    for together in (False, True):
        setup.notify(f"{setup.scale.sweep[0]} runs {'together' if together else 'one after another'}")
        request = json.dumps({"scale": dataclasses.asdict(setup.scale), "together": together})
        rows["together" if together else "alone"] = measure.in_process(
            "experiments.benchmark.children", "sweep", request
        )
    ratios = {name: rows["alone"][name] / rows["together"][name] for name in ("seconds", "round_seconds")}
    return rows | {"ratio": ratios["seconds"], "round_ratio": ratios["round_seconds"]}


def second_start(setup: Setup) -> list[Record]:
    """Programs compiled by two starts of the same small experiment, with an initially empty cache."""
    setup.notify("two starts of the same experiment")
    with tempfile.TemporaryDirectory() as folder:
        return [start(folder, str(number)) for number in (1, 2)]


def start(folder: str, name: str, method: str = "fedpac") -> Record:
    """One start of a small experiment: programs needed, programs compiled, and seconds.

    Args:
      folder: of the cache, and for the results.
      name: of the results' folder.
      method: that is run.
    """
    words = ["digits", "--method", method, "--rounds", "2", "--num-clients", "4", "--out", f"{folder}/{name}"]
    request = json.dumps({"words": words})
    began = time.perf_counter()
    record = measure.in_process("experiments.benchmark.children", "start", request, PFL_JAX_CACHE=f"{folder}/cache")
    return record | {"seconds": time.perf_counter() - began}


def setup(scale: Scale, chunks: Sequence[int] | None, notify: Callable[[str], None]) -> tuple[Setup, Record]:
    """Measure the machine and build the data shared by the sections.

    Args:
      scale: how large everything is.
      chunks: to compare, the first one everywhere; None is the default of the backend.
      notify: called with what is measured next.

    Returns:
      The setup, and its peak as a record.
    """
    mesh = simulate.client_mesh()
    notify("the peak of matrix products")
    peak = measure.matmul_peak(scale.matmul, mesh)
    if chunks is None:
        compared: Sequence[int | None] = (1, 5) if jax.default_backend() == "cpu" else (None, 1, 5)
    else:
        compared = chunks
    return Setup(scale, mesh, compared[0], compared, peak["peak"], notify), peak
