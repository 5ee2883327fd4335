"""Benchmark of this machine: local training beside PyTorch, also of networks by from_torch, FedPAC's rounds, and its
head weights beside those of its replication; --out stores the tables that it prints.

    python -m lab.benchmark --out results/benchmark.jsonl
    python -m lab.benchmark --only head-weights
"""

import functools
import importlib.util
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import jax
from jax.sharding import Mesh
from rich.console import Console

from experiments.cli.parser import parse
from experiments.host import jax_config
from experiments.host.console import print_line
from experiments.host.exit_codes import exit_code, exit_process
from experiments.show.tables import Table
from experiments.spec.option_notes import Argument
from experiments.spec.spec import Spec
from lab.benchmark import head_weights, measure, networks, workload
from lab.benchmark.jax_rounds import Rounds, local_training, operations
from lab.benchmark.records import Row, Section, store
from lab.benchmark.workload import FULL, QUICK, Scale
from pfl_jax import simulate
from pfl_jax.errors import InvalidInput

SectionName: TypeAlias = Literal["training", "networks", "head-weights"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line of the benchmark."""

    out: Annotated[Path | None, Argument(metavar="FILE")] = None
    """File of measurements, a line of JSON for each section; what is measured is replaced."""
    only: SectionName | None = None
    """The only section that is measured."""
    quick: bool = False
    """Tiny sizes, which only show that it runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with command-line arguments, by default those of this process; return the exit code."""

    def work() -> None:
        options, _ = parse(Options, "lab.benchmark", __doc__, arguments)
        if options.out is not None and not os.access(options.out.absolute().parent, os.W_OK):
            raise InvalidInput(f"the folder of {options.out} is not there or cannot be written")
        jax_config.prepare(Spec.of("digits"))
        machine, console, mesh = measure.machine(), Console(), simulate.client_mesh()
        print_line(console, headline(machine))
        scale = QUICK if options.quick else FULL
        peak = measure.matmul_peak(scale.matmul, mesh)
        sections: dict[SectionName, Callable[[], Section]] = {
            "training": lambda: training(scale, mesh, peak["peak"]),
            "networks": lambda: networks.section(scale, mesh, peak["peak"]),
            "head-weights": lambda: head_weights.section(scale),
        }
        if importlib.util.find_spec("torch") is None and options.only is None:
            sections.pop("networks")
        for name in sections if options.only is None else (options.only,):
            section = sections[name]()._replace(machine=machine | {"quick": options.quick, "peak": peak})
            console.print(Table(section.title, section.headings, section.cells).terminal(caption=section.note))
            if options.out is not None:
                store(options.out, name, section)

    return exit_code(work)


def headline(machine: dict[str, Any]) -> str:
    """The machine in two lines."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    load = f"load {machine['load']:.1f} before" + (": BUSY, times are too long" if machine["load"] > 1 else "")
    torch = "" if "torch" in machine["versions"] else "; no PyTorch: pip install -r requirements-bench.txt to compare"
    gpu = machine["devices"] if machine["backend"] == "gpu" else "no GPU: GPU rows need one, lab.gpu"
    return f"{machine['cpu']}, {machine['cores']} cores, {load}; {versions}{torch}\n{gpu}"


def training(scale: Scale, mesh: Mesh, peak: float) -> Section:
    """Local training of all clients beside the same work in PyTorch, and whole FedPAC rounds."""
    data = workload.federation(scale.clients, scale.examples)
    times = measure.interleaved(scale.repetitions[0], _contestants(scale, mesh))
    medians = {by: statistics.median(seconds) for by, seconds in times.items()}
    rows: list[Row] = []
    for by, seconds in medians.items():
        rate = scale.clients * scale.examples / seconds
        row = {"work": "local training, E = 1", "by": by, "s": seconds, "repetitions": times[by], "examples/s": rate}
        rows.append(row | {"of peak %": 100 * rate * operations() / peak})
    if "PyTorch" in medians:
        rows[0]["speed-up"] = medians["PyTorch"] / medians["pfl_jax"]
    rounds = Rounds(workload.method("fedpac", scale), data)
    (seconds,) = measure.interleaved(scale.repetitions[1], {"": rounds.both}).values()
    work = f"FedPAC round, E = {scale.epochs}, both evaluations"
    rows.append({"work": work, "by": "pfl_jax", "s": statistics.median(seconds), "repetitions": seconds})
    note = (
        f"{scale.clients} clients of {scale.examples} examples, chunk {workload.usual_chunk() or 'all'}; medians of "
        "interleaved repetitions"
    )
    return Section("Beside plain PyTorch", rows, note)


def _contestants(scale: Scale, mesh: Mesh) -> dict[str, Callable[[], Any]]:
    """One epoch at a time: short repetitions, and many of them, say more on a disturbed machine than few long ones."""
    data = workload.federation(scale.clients, scale.examples)
    ours = local_training(data, scale, clients=scale.clients, epochs=1, chunk=workload.usual_chunk(), mesh=mesh)
    ours()
    if importlib.util.find_spec("torch") is None:
        return {"pfl_jax": ours}
    from lab.benchmark import torch_rounds

    network = torch_rounds.Network(workload.network().init(jax.random.key(0)))
    start = torch_rounds.weights(network)
    examples = torch_rounds.clients(data)
    torch_rounds.train_clients(network, start, examples[:1], 1, scale)
    return {
        "pfl_jax": ours,
        "PyTorch": functools.partial(torch_rounds.train_clients, network, start, examples, 1, scale),
    }


if __name__ == "__main__":
    exit_process(main())
