"""Report of runs as an HTML page, or a picture of their curves.

    python -m experiments.report runs/digits-fedpac-seed0-001
    python -m experiments.report runs/sweeps/digits --out sweep.html
    python -m experiments.report runs/digits-fedpac-seed0-001 --plot curves.svg

Folders of sweeps, tables and figures are searched for runs. Runs that differ only in their seed are one line with a
band. The page is one file that needs no network.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from experiments.choices import Protocol
from experiments.cli.exit_codes import exit_code, leave
from experiments.cli.parser import Argument, check_new, parse
from experiments.folder import stored_runs
from experiments.folder.run_folder import write_text
from experiments.host.console import Terminal, print_line
from experiments.report import page
from experiments.show.curves import picture
from experiments.show.pictures import ENDINGS, save
from pfl_jax.errors import InvalidInput

OURS = "pfl_jax · report".encode()
"""Text contained in every page."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line of the report."""

    runs: Annotated[tuple[Path, ...], Argument("positional", "RUN...")]
    """Folders of runs, or folders above runs."""
    out: Annotated[Path | None, Argument(metavar="FILE")] = None
    """The page; None writes report.html."""
    plot: Annotated[Path | None, Argument(metavar="FILE")] = None
    """Write only a picture of the curves: .png, .svg or .pdf."""
    eval_protocol: Protocol | None = None
    """Accuracy that comes first; None is that of most of the runs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a report with command-line arguments, by default those of this process; return the exit code."""

    def work() -> None:
        options, _ = parse(Options, "experiments.report", __doc__, arguments)
        if options.out is not None and options.plot is not None:
            raise InvalidInput("--out is for the page and --plot for a picture: give one of them")
        out, headline = (options.out or Path("report.html")).expanduser(), options.eval_protocol
        check_new("--plot", options.plot, *ENDINGS)
        # A page may be overwritten while its runs continue; a picture does not show what made it.
        if options.plot is None and out.exists() and not (out.is_file() and OURS in out.read_bytes()):
            raise InvalidInput(f"{out} is there already and not a report's page: give another name, or remove it")
        found = [stored_runs.read(folder, headline) for folder in stored_runs.find(options.runs)]
        if headline is not None and not any(headline in line for run in found for line in run.lines):
            raise InvalidInput(f"--eval-protocol {headline}: none of the runs has been evaluated by it")
        groups, repeated = stored_runs.group(found)
        if options.plot is None:
            write_text(out, page.page(groups, repeated))
        else:
            _draw(groups, options.plot.expanduser())
        runs = sum(len(group.runs) for group in groups)
        print_line(Terminal(), f"{runs} run{'s' if runs > 1 else ''}: saved {options.plot or out}")

    return exit_code(work)


def _draw(groups: Sequence[stored_runs.Group], path: Path) -> None:
    for what, kinds in (("kind of data", {one.data: 0 for one in groups}), ("score", {one.axis: 0 for one in groups})):
        if len(kinds) > 1:
            raise InvalidInput(f"--plot draws one {what}, and these are {'; '.join(kinds)}")
    if not any(group.rounds for group in groups):
        raise InvalidInput("no run has been evaluated yet: there is nothing to draw")
    save(picture(groups), path)


if __name__ == "__main__":
    leave(main())
