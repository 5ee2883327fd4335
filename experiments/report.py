"""Report of runs as an HTML page, or a picture of their curves.

    python -m experiments.report runs/digits-fedpac-seed0-001
    python -m experiments.report runs/sweeps/digits --out sweep.html
    python -m experiments.report runs/digits-fedpac-seed0-001 --plot curves.svg
    python -m experiments.report runs/sweeps/digits --plot curves.pdf --width 3.3 --band interval

Folders of sweeps, tables and figures are searched for runs. Runs that differ only in their seed are one line with a
band. The page is one file that needs no network.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from experiments.cli.parser import check_new, parse
from experiments.commands import report_charts as charts
from experiments.commands import report_page as page
from experiments.folder import stored_runs
from experiments.folder.run_folder import write_text
from experiments.host.console import Terminal, print_line
from experiments.host.exit_codes import exit_code, exit_process
from experiments.show import curves
from experiments.show.draw import Band
from experiments.show.pictures import ENDINGS
from experiments.spec.choices import Protocol
from experiments.spec.option_notes import Argument
from pfl_jax.errors import InvalidInput
from pfl_jax.validation import Positive, Range

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
    width: Positive | None = None
    """Width of the --plot in inches, for a column of a paper (3.3, for example): one protocol, a band over seeds, a
    serif font."""
    band: Band | None = None
    """Band over the seeds (with --width): the standard deviation, the 95 % interval of the mean, or the range; None is
    deviation."""
    eval_protocol: Protocol | None = None
    """Accuracy that comes first; None for the one that most of the runs report."""
    select: Literal["validation"] | None = None
    """Show one setting of each method, the best one on validation examples."""
    name: Annotated[tuple[str, ...], Argument("repeated", "SHORT=NAME")] = ()
    """Short names for methods or settings; may be repeated."""
    client: Annotated[int, Range(0)] | None = None
    """Add a section on this client: its labels, its scores, and whom it learns from."""
    features: bool = False
    """Add the features of the clients' models by PCA; of runs that kept their state (--keep-state always)."""


def main(arguments: Sequence[str] | None = None) -> int:

    def work() -> None:
        options, _ = parse(Options, "experiments.report", __doc__, arguments)
        if options.out is not None and options.plot is not None:
            raise InvalidInput("--out is for the page and --plot for a picture: give one of them")
        for name, needed in (("width", "plot"), ("band", "width")):
            if getattr(options, name) and not getattr(options, needed):
                raise InvalidInput(f"--{name} needs --{needed}")
        out, headline = (options.plot or options.out or Path("report.html")).expanduser(), options.eval_protocol
        check_new("--plot", options.plot, *ENDINGS)
        # A page may be overwritten while its runs continue; nothing in a picture says that a report made it.
        if options.plot is None and out.exists() and not (out.is_file() and OURS in out.read_bytes()):
            raise InvalidInput(f"{out} is there already and not a report's page: give another name, or remove it")
        groups, repeated = stored_runs.grouped(*options.runs, asked=headline)
        evaluated = [line for group in groups for run in group.runs for line in run.lines]
        if headline is not None and not any(headline in line for line in evaluated):
            raise InvalidInput(f"--eval-protocol {headline}: none of the runs has been evaluated by it")
        notes, of_kinds = [], page.kinds(groups)
        if options.select is not None:
            for heading, some in of_kinds.items():
                of_kinds[heading], which = stored_runs.best_setting_per_method(some, stored_runs.headline(some))
                notes.append(f"{heading}: {which}" if len(of_kinds) > 1 else which)
        elif options.plot is None:
            of_kinds = {heading: stored_runs.labelled(some) for heading, some in of_kinds.items()}
        groups = stored_runs.renamed([one for some in of_kinds.values() for one in some], options.name)
        if options.plot is None:
            more = {"Features": charts.features} if options.features else {}
            if options.client is not None:
                more = {f"Client {options.client}": functools.partial(charts.client, number=options.client)} | more
            write_text(out, page.page(groups, repeated, notes, more=more))
        else:
            curves.save_picture(groups, out, width=options.width, band=options.band or "deviation")
        runs = sum(len(group.runs) for group in groups)
        print_line(Terminal(), f"{runs} run{'s' if runs > 1 else ''}: saved {out}")

    return exit_code(work)


if __name__ == "__main__":
    exit_process(main())
