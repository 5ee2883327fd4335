"""Benchmark of this machine: prints tables, and stores them with --out; --only selects sections.

    python -m experiments.lab.benchmark --out results/benchmark.jsonl

training is local training beside PyTorch, and FedPAC's rounds; own_networks is local training by library.
"""

import importlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from experiments.cli.exit_codes import exit_code, leave
from experiments.cli.parser import Argument, choose, parse
from experiments.host.console import print_line
from pfl_jax.errors import InvalidInput

SECTIONS = {"training": "sections", "own_networks": "own_networks"}
"""Name of a section, and of the function that measures it -> its module."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line of the benchmark."""

    out: Annotated[Path | None, Argument(metavar="FILE")] = None
    """File of measurements, a line of JSON for each section; those that are measured take the place of older ones."""
    quick: bool = False
    """Tiny sizes, which only show that it runs."""
    only: Annotated[tuple[str, ...], Argument(metavar="SECTION", text=f"Some of {', '.join(SECTIONS)}.")] = ()
    pythons: Annotated[tuple[Path, ...], Argument(metavar="PYTHON")] = (Path(sys.executable),)
    """Interpreters, each with a version of JAX, that the section own_networks compares."""

    def check(self) -> None:
        """Raise InvalidInput for values that cannot be used."""
        choose("section", self.only, SECTIONS)
        if self.out is not None and not os.access(self.out.absolute().parent, os.W_OK):
            raise InvalidInput(f"the folder of {self.out} is not there or cannot be written")


def benchmark(options: Options, console: Console) -> None:
    """Measure the sections that are asked for, print them, and store them.

    Raises:
      InvalidInput: a section cannot be measured, or the file cannot be written.
    """
    began = time.perf_counter()
    # Imported now, so that errors and --help do not wait for it.
    from experiments.host import jax_config
    from experiments.lab.benchmark import measure, workload
    from experiments.lab.benchmark.records import store
    from pfl_jax import simulate

    jax_config.prepare_jax()
    machine = measure.machine()
    print_line(console, headline(machine))
    scale, mesh = workload.QUICK if options.quick else workload.FULL, simulate.client_mesh()

    def notify(what: str) -> None:
        print_line(console, f"[{time.perf_counter() - began:4.0f} s] {what}", "dim")

    notify("the peak of matrix products")
    peak = measure.matmul_peak(scale.matmul, mesh)
    setup = workload.Setup(scale, mesh, peak, notify, options.pythons)
    machine |= {"quick": options.quick, "peak": peak}
    for name, module in SECTIONS.items():
        if name in (options.only or SECTIONS):
            measured = getattr(importlib.import_module(f"experiments.lab.benchmark.{module}"), name)
            section = measured(setup)._replace(machine=machine)
            console.print(section.terminal())
            if options.out is not None:
                store(options.out, name, section)
    print_line(console, f"{time.perf_counter() - began:.0f} s in all")


def headline(machine: dict[str, Any]) -> str:
    """The machine in two lines."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    load = f"load {machine['load']:.1f} before" + (": BUSY, times are too long" if machine["load"] > 1 else "")
    torch = "" if "torch" in machine["versions"] else "; no PyTorch: pip install -r requirements-bench.txt to compare"
    gpu = machine["devices"] if machine["backend"] == "gpu" else "no GPU: GPU rows need one, same command"
    return f"{machine['cpu']}, {machine['cores']} cores, {load}; {versions}{torch}\n{gpu}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with command-line arguments, by default those of this process; return the exit code."""

    def work() -> None:
        options, _ = parse(Options, "experiments.lab.benchmark", __doc__, arguments)
        options.check()
        benchmark(options, Console())

    return exit_code(work)


if __name__ == "__main__":
    leave(main())
