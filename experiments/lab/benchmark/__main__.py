"""Benchmark of this machine: prints tables, and writes them to a file with --out; --only selects sections."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from experiments.cli.exit_codes import leave
from experiments.cli.parser import Switch, choose
from experiments.lab.benchmark import command
from pfl_jax.errors import InvalidInput

if TYPE_CHECKING:
    from experiments.lab.benchmark.records import Section

SECTIONS = (
    *("training", "methods", "waste", "growth", "memory_growth"),
    *("variants", "chunks", "many_clients", "client_counts", "large_cohorts", "sweep"),
)
USUAL = SECTIONS[:5]
"""Sections without --only."""

HELP_ONLY = f"Some of {', '.join(SECTIONS)}; those after {USUAL[-1]} are run only if they are named."


@dataclass(frozen=True, kw_only=True)
class Options(command.Options):
    """Command line of the benchmark."""

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
        super().check()


def benchmark(request: Options, notify: command.Notify) -> "tuple[dict[str, Section], dict[str, Any]]":
    """Measure the sections that are asked for.

    Args:
      request: the parsed command line.
      notify: for progress.

    Returns:
      The sections by name, and what was asked and what the machine's peak is.
    """
    # Imported now, so that errors and --help do not wait for it.
    from experiments.lab.benchmark import sections, workload

    setup = workload.setup(workload.QUICK if request.quick else workload.FULL, request.chunks, notify)
    found = {name: getattr(sections, name)(setup) for name in SECTIONS if name in (request.only or USUAL)}
    return found, {"quick": request.quick, "peak": setup.peak, "operations": workload.operations()}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
      words: after the module's name; by default those of this process.

    Returns:
      The exit code, see `exit_codes.exit_code`.
    """
    return command.command(Options, "experiments.lab.benchmark", __doc__, words, benchmark)


if __name__ == "__main__":
    leave(main())
