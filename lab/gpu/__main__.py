"""The hour with a GPU: its figures, then the runs of the queue that are missing.

    python -m lab.gpu --minutes 9 --out FOLDER    # on the machine with the GPU; ends by itself
    python -m lab.gpu.carried --cifar10 FILE.npz  # before: what that machine lacks, what to type
    python -m lab.gpu --out FOLDER --keep         # afterwards: into results/, to be committed

Parts: machine (versions, peaks, rounds equal to the CPU's), training (local training by network, form of the
convolutions, chunk and precision), pytorch (the same in PyTorch), rounds (FedPAC, FedAS, a sweep, very many clients,
adapters), runs (of the queue, in its order). Each has a share of the time. Every measurement is a line of
FOLDER/measurements.jsonl as soon as it is there, every finished run one of FOLDER/queue/BLOCK.jsonl; the same command
goes on where it stopped. To measure something again, remove its line.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console

from experiments.cli.parser import Folder, parse
from experiments.folder import version
from experiments.folder.run_folder import slug
from experiments.host.console import print_line
from experiments.host.exit_codes import exit_code, exit_process
from experiments.spec.option_notes import Argument
from lab import committed
from lab.benchmark.records import Section, store
from lab.gpu import carried
from lab.gpu.queued import missing
from pfl_jax.atomic_write import make_folder
from pfl_jax.errors import InvalidInput
from pfl_jax.validation import Count, Positive

SHARES = {"machine": 0.12, "training": 0.45, "pytorch": 0.6, "rounds": 0.75, "runs": 1.0}
"""Part -> share of the time after which it ends, in the order in which they run."""

TITLES = {
    "machine": "What is there",
    "training": "Local training of one epoch",
    "pytorch": "The same in PyTorch on the same card",
    "rounds": "Rounds",
    "runs": "Runs of the papers' tables",
}

ROOT = committed.ROOT.parent

RESERVE, GRACE = 15.0, 8.0
"""Seconds before the end in which nothing begins, and those of them in which a measurement or a round may end."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line."""

    out: Path
    """Folder of the measurements, and of the lines of finished runs."""
    minutes: Positive = 9.0
    """Time after which the command has ended."""
    quick: bool = False
    """Tiny sizes and runs of one round, which only show that it works."""
    parts: Annotated[tuple[str, ...], Argument("repeated", text=f"Some of {', '.join(SHARES)}; by default all.")] = ()
    only: Annotated[tuple[str, ...], Argument("repeated", text="Runs, as of lab.queue.")] = ()
    at_once: Count = 4
    """Runs at once."""
    runs: Folder = None
    """Folder of the runs' own folders and the datasets; by default OUT/runs."""
    keep: bool = False
    """Measure nothing, and store what --out has in results/."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Spend the time with command-line arguments, by default those of this process; return the exit code."""

    def work() -> None:
        options, _ = parse(Options, "lab.gpu", __doc__, arguments)
        if unknown := set(options.parts) - SHARES.keys():
            raise InvalidInput(f"unknown part {unknown.pop()}: choose from {', '.join(SHARES)}")
        if options.keep:
            keep(options.out)
        else:
            Hour(options).spend()

    return exit_code(work)


class Hour:
    """One call of the command.

    Args:
      options: its command line.
    """

    def __init__(self, options: Options):
        self.options, self.console, self.began = options, Console(), time.time()
        self.folder, self.file = options.runs or options.out / "runs", options.out / "measurements.jsonl"

    def spend(self) -> None:
        """All parts, each until its share of the time is over."""
        make_folder(self.options.out)
        make_folder(self.folder)
        seconds, unpacking = 60 * self.options.minutes - RESERVE, None
        if (ROOT / carried.FOLDER).exists() and "runs" in (self.options.parts or SHARES):
            # Beside the first measurements, which are few.
            words = [sys.executable, "-m", "lab.gpu.carried", "--unpack", str(self.folder / "data")]
            unpacking = subprocess.Popen(words)
        for part, share in SHARES.items():
            if part in (self.options.parts or SHARES):
                until = self.began + share * seconds
                self._say(f"{part}, until {until - self.began:.0f} s")
                if part == "runs":
                    self._runs(until, unpacking)
                else:
                    words = ["lab.gpu.parts", part, str(self.file), str(until), self._quick]
                    self._process(words, until)
        self._say("the end")

    @property
    def _quick(self) -> str:
        return json.dumps(self.options.quick)

    def _say(self, text: str) -> None:
        print_line(self.console, f"[{time.time() - self.began:4.0f} s] {text}")

    def _process(self, words: Sequence[str], until: float, output: Path | None = None) -> None:
        """Run a module in a process of its own, which is stopped soon after that time."""
        # Several processes share the card.
        variables = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
        if self.options.quick:
            variables |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        with open(output or os.devnull, "a") as file:
            streams = (file, file) if output else (None, None)
            process = subprocess.Popen(
                [sys.executable, "-m", *words], env=variables, stdout=streams[0], stderr=streams[1]
            )
            for stop in (process.terminate, process.kill):
                try:
                    process.wait(max(2.0, until + GRACE - time.time()))
                    break
                except subprocess.TimeoutExpired:
                    stop()
            process.wait()

    def _runs(self, until: float, unpacking: subprocess.Popen | None) -> None:
        """Missing runs, some at once, as long as one more may be finished in time."""
        if unpacking is not None:
            unpacking.wait()
        if time.time() >= until:
            return
        waiting, seconds = iter(missing(self.options.out, self.folder, self.options.only)), list[float]()

        def work() -> None:
            for block, name in waiting:
                usual = statistics.median(seconds) if seconds else 0.0
                if time.time() + usual >= until:
                    return
                began = time.time()
                request = {"out": str(self.options.out), "folder": str(self.folder), "name": name}
                data = str(self.folder / "data") if unpacking else None
                request |= {"data": data, "quick": self.options.quick, "only": self.options.only}
                words = ["lab.gpu.queued", json.dumps(request)]
                output = self.folder / f"{slug(name)}.txt"
                self._process(words, until, output)
                took = time.time() - began
                if name in committed.read(self.options.out / "queue" / f"{block}.jsonl"):
                    seconds.append(took)
                    committed.write(self.file, f"runs/{name}", {"what": name, "s": took})
                    self._say(f"{name}: finished in {took:.0f} s")
                else:
                    self._say(f"{name}: not finished; {(output.read_text().splitlines() or ['it said nothing'])[-1]}")

        with ThreadPoolExecutor(self.options.at_once) as threads:
            for one in [threads.submit(work) for _ in range(self.options.at_once)]:
                one.result()


def keep(out: Path, root: Path = committed.ROOT) -> None:
    """Store measurements as sections of results/benchmark.jsonl, and the lines of runs in results/queue.

    Raises:
      InvalidInput: there are none, or they are of --quick.
    """
    lines = committed.read(out / "measurements.jsonl")
    machine = lines.pop("machine/machine", None)
    if machine is None or machine["quick"]:
        raise InvalidInput(f"{out} has no measurements to keep: none of the machine, or those of --quick")
    for part, title in TITLES.items():
        own = {name.removeprefix(f"{part}/"): line for name, line in lines.items() if name.startswith(f"{part}/")}
        rows = [
            ({"what": name} if part == "machine" else {}) | {key: one for key, one in line.items() if key != "took, s"}
            for name, line in own.items()
        ]
        if rows:
            store(root / "benchmark.jsonl", f"gpu-{part}", Section(title, rows, "", machine))
    for file in sorted(out.glob("queue/*.jsonl")):
        for name, record in committed.read(file).items():
            if "config" in record:
                record["commit"] = version.commit_of(record["config"]["versions"]["pfl_jax"])
            committed.write(root / "queue" / file.name, name, record)


if __name__ == "__main__":
    exit_process(main())
