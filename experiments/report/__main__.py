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

from rich.console import Console

from experiments.cli.exit_codes import exit_code, leave
from experiments.cli.options import Protocol
from experiments.cli.parser import Argument, parse
from experiments.folder.run_folder import write_text
from experiments.host.console import Terminal, print_line
from pfl_jax.errors import InvalidInput

PICTURES = (".png", ".svg", ".pdf")

OURS = "pfl_jax · report".encode()
"""Text contained in every page."""


@dataclass(frozen=True)
class Options:
    """Command line of the report."""

    runs: Annotated[tuple[Path, ...], Argument("positional", "RUN...")] = ()
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
        if not options.runs:
            raise InvalidInput("missing: RUN, the folder of a run or one above runs; see --help")
        if options.out is not None and options.plot is not None:
            raise InvalidInput("--out is for the page and --plot for a picture: give one of them")
        out = options.out or Path("report.html")
        _check(out, options.plot)
        _write(options.runs, out, options.plot, options.eval_protocol, Terminal())

    return exit_code(work)


def _check(out: Path, plot: Path | None) -> None:
    """Raise InvalidInput if the output file has an unsuitable name."""
    if plot is not None and plot.suffix not in PICTURES:
        raise InvalidInput(f"--plot {plot}: the name of a picture ends in {', '.join(PICTURES)}")
    target = (plot or out).expanduser()
    # A page may be overwritten while its runs continue; a picture does not show what made it.
    is_page = plot is None and target.is_file() and OURS in target.read_bytes()
    if target.exists() and not is_page:
        raise InvalidInput(f"{target} is there already and not a report's page: give another name, or remove it")


def _write(folders: Sequence[Path], out: Path, plot: Path | None, headline: Protocol | None, console: Console) -> None:
    # Imported now, so that errors and --help do not wait for it.
    from experiments.folder import stored_runs
    from experiments.report import page

    found = [stored_runs.read(folder, headline) for folder in stored_runs.find(folders)]
    if headline is not None and not any(headline in line for run in found for line in run.lines):
        raise InvalidInput(f"--eval-protocol {headline}: none of the runs has been evaluated by it")
    groups, repeated = stored_runs.group(found)
    if plot is None:
        write_text(out.expanduser(), page.page(groups, repeated))
    else:
        data = dict.fromkeys(group.data for group in groups)
        if len(data) > 1:
            raise InvalidInput(f"--plot draws one kind of data, and these are {'; '.join(data)}")
        if not any(group.rounds for group in groups):
            raise InvalidInput("no run has been evaluated yet: there is nothing to draw")
        from experiments.show.curves import picture
        from experiments.show.pictures import save

        save(picture(groups), plot.expanduser())
    runs, saved = sum(len(group.runs) for group in groups), out if plot is None else plot
    words = f"{runs} run{'s' if runs > 1 else ''}: saved {saved}"
    print_line(console, words)


if __name__ == "__main__":
    leave(main())
