"""Benchmark of this machine: prints tables, and writes them to a file with --out; --only selects sections."""

import datetime
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from experiments.commands.parser import Switch, choose, parse
from experiments.config.exit_codes import exit_code
from experiments.runtime.console import print_line
from experiments.runtime.signals import interruptible
from pfl_jax.atomic_write import write_text
from pfl_jax.errors import InvalidInput

SECTIONS = (
    *("training", "methods", "waste", "growth", "memory_growth"),
    *("optimizations", "variants", "chunks", "many_clients", "client_counts", "sweep", "overhead", "head_weights"),
)
USUAL = SECTIONS[:5]
"""Sections without --only."""

HELP_ONLY = f"Some of {', '.join(SECTIONS)}; those after {USUAL[-1]} are run only if they are named."


@dataclass(frozen=True)
class Options:
    """Command line of the benchmark."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """New file for all figures: .md is Markdown, else JSON."""
    quick: Switch = False
    """Tiny sizes, which only show that it runs."""
    chunks: Annotated[tuple[int, ...], tyro.conf.arg(metavar="M...")] = ()
    """Clients under one vmap to compare, the first one everywhere."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="SECTION...", help=HELP_ONLY)] = ()

    def check(self) -> None:
        """Raise InvalidInput for values that cannot be used."""
        choose("section", self.only, SECTIONS)
        if self.chunks and min(self.chunks) < 1:
            raise InvalidInput(f"--chunks must be at least 1, not {min(self.chunks)}")
        if self.out is None:
            return
        if self.out.exists():
            raise InvalidInput(f"{self.out} is there already: name a new file, or remove it")
        if not os.access(self.out.absolute().parent, os.W_OK):
            raise InvalidInput(f"the folder of {self.out} is not there or cannot be written")


def _parse(words: Sequence[str] | None) -> Options:
    options, _ = parse(Options, "experiments.benchmark", __doc__, words)
    options.check()
    return options


def _machine() -> dict[str, Any]:
    import jax

    packages = ("jax", "jaxlib", "torch", "numpy")
    there = {found.metadata["Name"]: found.version for found in metadata.distributions()}
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    devices = jax.local_devices()
    return {
        "devices": f"{devices[0].device_kind} x {len(devices)}",
        "backend": jax.default_backend(),
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version()} | {name: there[name] for name in packages if name in there},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _headline(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    load = f"load {machine['load']:.1f} before" + (": BUSY, figures are too low" if machine["load"] > 1 else "")
    torch = "" if "torch" in machine["versions"] else "; no PyTorch: pip install -r requirements-bench.txt to compare"
    gpu = machine["devices"] if machine["backend"] == "gpu" else "no GPU: GPU rows need one, same command"
    return f"{machine['cpu']}, {machine['cores']} cores, {load}; {versions}{torch}\n{gpu}"


def benchmark(request: Options, console: Console) -> None:
    """Run the benchmark, print its progress and its tables, and write the file.

    Args:
      request: the parsed command line.
      console: for progress and tables.
    """
    began = time.perf_counter()
    # Imported now, so that errors and --help do not wait for it.
    from experiments.benchmark import records, sections, workload
    from experiments.runtime import jax_config

    def notify(what: str) -> None:
        print_line(console, f"[{time.perf_counter() - began:4.0f} s] {what}", "dim")

    jax_config.prepare_jax()
    machine = _machine()
    print_line(console, _headline(machine))
    setup = workload.setup(workload.QUICK if request.quick else workload.FULL, request.chunks, notify)
    found = {name: getattr(sections, name)(setup) for name in SECTIONS if name in (request.only or USUAL)}
    for section in found.values():
        console.print(section.terminal())
    seconds = time.perf_counter() - began
    print_line(console, f"{seconds:.0f} s in all")
    if request.out is not None:
        machine |= {"quick": request.quick, "peak": setup.peak, "operations": workload.operations(), "seconds": seconds}
        is_markdown = request.out.suffix == ".md"
        text = records.markdown(list(found.values())) if is_markdown else records.as_json(machine, found)
        write_text(request.out, text if not is_markdown else f"{_headline(machine)}\n\n{text}")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
      words: after the module's name; by default those of this process.

    Returns:
      The exit code, see `exit_codes.exit_code`.
    """

    def work() -> None:
        try:
            with interruptible():
                benchmark(_parse(words), Console())
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted: nothing was written") from None

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
