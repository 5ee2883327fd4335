"""Benchmark of this machine in some minutes: tables on the terminal, JSON with --out; --only selects sections."""

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from experiments.config.exit_codes import INTERRUPTED, INVALID
from experiments.runtime.signals import interruptible
from pfl_jax.atomic_write import write_whole
from pfl_jax.errors import InvalidInput

SECTIONS = (
    "training",
    "methods",
    "waste",
    "growth",
    "memory_growth",
    "optimizations",
    "variants",
    "chunks",
    "many_clients",
    "sweep",
    "overhead",
)
USUAL = SECTIONS[:5]
"""Without --only."""

NO_GPU = "no GPU: GPU rows need one, same command"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidInput(f"{message}; see --help")


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="python -m experiments.benchmark", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="new file for all figures")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, its figures mean nothing")
    parser.add_argument(
        "--chunks", type=int, nargs="+", metavar="M", help="clients under one vmap to compare, the first one everywhere"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SECTIONS,
        metavar="SECTION",
        help=f"some of {', '.join(SECTIONS)}; those after growth are measured only if they are named",
    )
    request = parser.parse_args(words)
    if request.chunks and min(request.chunks) < 1:
        raise InvalidInput(f"--chunks must be at least 1, not {min(request.chunks)}")
    if request.out is not None:
        if request.out.exists():
            raise InvalidInput(f"{request.out} is there already: name a new file, or remove it")
        if not os.access(request.out.absolute().parent, os.W_OK):
            raise InvalidInput(f"the folder of {request.out} is not there or cannot be written")
    return request


def _machine() -> dict[str, Any]:
    import jax

    devices = jax.local_devices()
    found = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "torch", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), cpu)
    return {
        "devices": f"{devices[0].device_kind} x {len(devices)}",
        "backend": jax.default_backend(),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "gpu": devices[0].device_kind if jax.default_backend() == "gpu" else None,
        "versions": found,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _headline(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    load = f"load {machine['load']:.1f} before" + (": BUSY, figures are too low" if machine["load"] > 1 else "")
    torch = "" if "torch" in machine["versions"] else "; no PyTorch: pip install -r requirements-bench.txt to compare"
    return f"{machine['cpu']}, {machine['cores']} cores, {load}; {versions}{torch}\n{machine['gpu'] or NO_GPU}"


def benchmark(request: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the benchmark and print its progress.

    Args:
      request: the parsed command line.
      console: for progress and tables.

    Returns:
      All figures, for JSON.
    """
    began = time.perf_counter()
    # Imported now, so that errors and --help do not wait for it.
    from experiments.benchmark import report, sections, workload
    from experiments.benchmark.overhead import overhead
    from experiments.runtime import jax_config

    jax_config.prepare_jax()
    machine = _machine()
    console.print(_headline(machine), soft_wrap=True, highlight=False, markup=False)

    def notify(what: str) -> None:
        elapsed = time.perf_counter() - began
        console.print(f"[{elapsed:4.0f} s] {what}", style="dim", soft_wrap=True, highlight=False, markup=False)

    scale = workload.QUICK if request.quick else workload.FULL
    setup, peak = sections.setup(scale, request.chunks, notify)
    results: dict[str, Any] = {"machine": machine, "quick": request.quick, "peak": peak}
    results["operations"] = workload.operations()
    wanted = request.only or USUAL
    if "training" in wanted:
        notify("local training" + (" beside PyTorch" if sections.has_torch() else ""))
        results["training"] = sections.training(setup)
        notify("FedPAC rounds" + (" beside PyTorch" if sections.has_torch() else ""))
        results["round"] = sections.fedpac_round(setup)
    for name in SECTIONS[1:]:
        if name in wanted:
            results[name] = overhead(setup) if name == "overhead" else getattr(sections, name)(setup)
    if "memory_growth" in wanted:
        results["second_start"] = sections.second_start(setup)
    results["seconds"] = time.perf_counter() - began
    report.show(console, results)
    console.print(f"{results['seconds']:.0f} s in all", highlight=False)
    return results


def main(words: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
      words: after the module's name; by default those of this process.

    Returns:
      The exit code: 0, 2 for input that cannot be used, 130 after SIGINT.
    """
    try:
        request = _parse(words)
        with interruptible():
            results = benchmark(request, Console())
        if request.out is not None:
            write_whole(request.out, json.dumps(results, indent=2) + "\n")
    except InvalidInput as error:
        print(f"error: {error}", file=sys.stderr)
        return INVALID
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
