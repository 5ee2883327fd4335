"""What the benchmark's commands share: a new file for the figures, progress, and the way they end."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import tyro
from rich.console import Console

from experiments.cli.exit_codes import exit_code
from experiments.cli.parser import parse
from experiments.host.console import print_line
from experiments.host.signals import interruptible, leaving
from pfl_jax.atomic_write import write_text
from pfl_jax.errors import InvalidInput

if TYPE_CHECKING:
    from experiments.lab.benchmark.records import Section

Notify: TypeAlias = Callable[[str], None]
"""Prints what is measured now."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every command of the benchmark."""

    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """New file for all figures: .md is Markdown, else JSON."""

    def check(self) -> None:
        """Raise InvalidInput for values that cannot be used."""
        if self.out is None:
            return
        if self.out.exists():
            raise InvalidInput(f"{self.out} is there already: name a new file, or remove it")
        if not os.access(self.out.absolute().parent, os.W_OK):
            raise InvalidInput(f"the folder of {self.out} is not there or cannot be written")


_Options = TypeVar("_Options", bound=Options)
Measure: TypeAlias = Callable[[_Options, Notify], "tuple[dict[str, Section], dict[str, Any]]"]
"""Measures what the options ask for: returns the sections by name, and what the file says of the machine besides."""


def command(
    kind: type[_Options], module: str, description: str | None, words: Sequence[str] | None, measure: Measure[_Options]
) -> int:
    """Parse the command line, measure, print the tables, and write the file.

    Args:
      kind: dataclass of the options.
      module: module of the command, as after `python -m`.
      description: docstring of the command.
      words: command-line arguments; None for those of this process.
      measure: the work.

    Returns:
      The exit code, see `exit_codes.exit_code`.
    """

    def work() -> None:
        with interruptible(), leaving(lambda said: "interrupted: nothing was written"):
            options, _ = parse(kind, module, description, words)
            options.check()
            _measured(options, measure, Console())

    return exit_code(work)


def _measured(options: _Options, measure: Measure[_Options], console: Console) -> None:
    began = time.perf_counter()
    # Imported now, so that errors and --help do not wait for it.
    from experiments.host import jax_config
    from experiments.lab.benchmark import records
    from experiments.lab.benchmark.measure import machine

    jax_config.prepare_jax()
    this = machine()
    headline = _headline(this)
    print_line(console, headline)
    found, more = measure(
        options, lambda what: print_line(console, f"[{time.perf_counter() - began:4.0f} s] {what}", "dim")
    )
    for section in found.values():
        console.print(section.terminal())
    seconds = time.perf_counter() - began
    print_line(console, f"{seconds:.0f} s in all")
    if options.out is not None:
        is_markdown = options.out.suffix == ".md"
        text = f"{headline}\n\n{records.markdown(list(found.values()))}" if is_markdown else ""
        write_text(options.out, text or records.as_json(this | more | {"seconds": seconds}, found))


def _headline(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    load = f"load {machine['load']:.1f} before" + (": BUSY, times are too long" if machine["load"] > 1 else "")
    torch = "" if "torch" in machine["versions"] else "; no PyTorch: pip install -r requirements-bench.txt to compare"
    gpu = machine["devices"] if machine["backend"] == "gpu" else "no GPU: GPU rows need one, same command"
    return f"{machine['cpu']}, {machine['cores']} cores, {load}; {versions}{torch}\n{gpu}"
