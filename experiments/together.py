"""Runs of one program, side by side: each leaves the folder that `run.run` would have left for it alone."""

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments import assembly
from experiments.memory import free_bytes
from experiments.parsing import Request
from experiments.progress import RoundProgress
from experiments.records import Experiment, configuration, devices, headline, summary, wasted_step_share
from experiments.run import prepare
from experiments.study import Cell, remove_unfinished
from experiments.sweep import real_numbers
from pfl_jax import simulate, sweep
from pfl_jax.data import federated
from pfl_jax.models import CONVOLUTIONAL
from pfl_jax.reporting import CONFIG, SUMMARY, Evaluation, RunFolder

MEMORY_SHARE = 0.5
"""Of the memory that is free before a sweep, what its runs may take; the rest is for what a client's training needs."""


def run(cells: Sequence[tuple[Cell, Path]], console: Console) -> None:
    """Runs cells that differ in seeds and in real numbers among the method's hyper-parameters only.

    Args:
      cells: with a folder for each, which holds nothing or a run that was cut off.
      console: for what a run says.

    Raises:
      InvalidInput: the data cannot serve the request, or a folder cannot be written.
      KeyboardInterrupt: after SIGINT; none of the runs that were going on is left.
    """
    options = cells[0][0].request().options
    prepare(options)
    used = devices(options)
    request, dataset = assembly.load(cells[0][0].request(), console)
    requests = [_on_one_device(cell.request(folder)) for cell, folder in cells]
    if not dataset.is_real:
        requests = [one.on_embedded_data()[0] for one in requests]
    partitions = [assembly.divide(one.options, dataset) for one in requests]
    data = federated.federate_runs(
        dataset,
        partitions,
        **assembly.shift_of(request.options, dataset),
        seeds=[one.options.seed for one in requests],
        augment=request.options.augment,
    )
    experiments = [
        assembly.assemble(one, dataset, federated.select_run(data, index)) for index, one in enumerate(requests)
    ]
    at_once = _at_once(experiments[0], used)
    for start in range(0, len(cells), at_once):
        part = slice(start, start + at_once)
        rows = np.arange(len(cells))[part]
        _run(experiments[part], federated.select_run(data, rows), [folder for _, folder in cells[part]], used, console)


def _on_one_device(request: Request) -> Request:
    """Devices divide the runs here: each run stays on one, with all its clients."""
    return dataclasses.replace(request, options=dataclasses.replace(request.options, devices=1))


def _at_once(experiment: Experiment, used: Sequence[Any]) -> int:
    """How many runs fit into the memory, at least one."""
    values = real_numbers(experiment.request)
    needed = sweep.bytes_of_runs(_factory(experiment), experiment.data, experiment.settings, values)
    # On CPUs all devices share one memory.
    free = free_bytes(used[0]) * (1 if jax.default_backend() == "cpu" else len(used))
    return max(1, math.floor(MEMORY_SHARE * free / needed))


def _factory(experiment: Experiment) -> sweep.MakeMethod:
    request, dataset = experiment.request, experiment.dataset
    return lambda **values: assembly.make_method(request, dataset, **values)


def _run(
    experiments: Sequence[Experiment],
    data: federated.FederatedData,
    paths: Sequence[Path],
    used: Sequence[Any],
    console: Console,
) -> None:
    began, first = time.perf_counter(), experiments[0]
    folders = []
    try:
        for experiment, path in zip(experiments, paths, strict=True):
            remove_unfinished(path)
            folders.append(RunFolder.claim(path, ""))
            folders[-1].write(CONFIG, configuration(experiment) | {"runs_together": len(experiments)})
        words = f"{len(experiments)} runs together, the first: " if len(experiments) > 1 else ""
        console.print(f"{words}{headline(first)}", soft_wrap=True, highlight=False)
        evaluations, wasted = _rounds(experiments, data, folders, used, console, began)
    except BaseException:
        for folder in folders:
            folder.discard()
        raise
    for experiment, folder, of_run, share in zip(experiments, folders, evaluations, wasted, strict=True):
        folder.write(SUMMARY, summary(experiment, of_run, share))


def _rounds(
    experiments: Sequence[Experiment],
    data: federated.FederatedData,
    folders: Sequence[RunFolder],
    used: Sequence[Any],
    console: Console,
    began: float,
) -> tuple[list[list[Evaluation]], list[float]]:
    """All rounds of all runs; returns each one's evaluations and its share of wasted steps."""
    first = experiments[0]
    options, settings = first.request.options, first.settings
    numbers = [real_numbers(experiment.request) for experiment in experiments]
    # What does not vary stays a constant of the program, which compilers like better.
    varied = [name for name in numbers[0] if len({values[name] for values in numbers}) > 1]
    epochs = first.request.hyper_parameters.get("epochs", 1)
    results = sweep.run(
        _factory(first),
        data,
        settings,
        jnp.stack([jax.random.key(one.request.options.seed) for one in experiments]),
        {name: jnp.asarray([values[name] for values in numbers], jnp.float32) for name in varied},
        chunk=_run_chunk(options.model),
        mesh=simulate.client_mesh(list(used[: len(experiments)])),
    )
    evaluations: list[list[Evaluation]] = [[] for _ in experiments]
    wasted: list[list[float]] = [[] for _ in experiments]
    visits, seconds, accuracy = np.zeros(len(experiments)), 0.0, None
    with RoundProgress(console, options.rounds, options.eval_protocol) as progress:
        for result in results:
            visits, seconds = visits + result.examples * epochs, seconds + result.seconds
            for index, experiment in enumerate(experiments):
                wasted[index].append(wasted_step_share(experiment, result.cohorts[index]))
            if result.received is not None:
                elapsed = time.perf_counter() - began
                for index, folder in enumerate(folders):
                    received, trained = result.received[index], result.trained[index]
                    evaluation = Evaluation(result.round, received, trained, elapsed, visits[index] / seconds)
                    folder.log(evaluation)
                    evaluations[index].append(evaluation)
                means = [of_run[-1].summary(options.eval_protocol).mean for of_run in evaluations]
                accuracy = float(np.mean(means))
                visits, seconds = np.zeros(len(experiments)), 0.0
            speed = float(result.examples.sum()) * epochs / result.seconds
            progress.update(result.round, result.seconds, accuracy, speed)
    return evaluations, [math.fsum(shares) / len(shares) for shares in wasted]


def _run_chunk(model: str) -> int | None:
    """Runs under one vmap on a device: as clients, one after another for convolutions on a CPU."""
    return 1 if jax.default_backend() == "cpu" and model in CONVOLUTIONAL else None
