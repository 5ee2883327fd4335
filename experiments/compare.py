"""Comparison of finished runs: intervals of differences, clients worse off, methods that cannot be told apart.

    python -m experiments.compare runs/first
    python -m experiments.compare runs/first --reference fedpac --out comparison.md --plot ranks.svg

Runs of one setting differ only in their seed. Runs of two settings with the same seed have the same clients, which are
compared one by one after the last common round. Intervals are over seeds or, with a single seed, over its clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from experiments.cli.parser import check_new, parse
from experiments.commands.comparison import for_paper, ranks, read, rounds_to, table
from experiments.folder import stored_runs
from experiments.host.console import Terminal, print_text
from experiments.host.exit_codes import exit_code, exit_process
from experiments.show.pictures import ENDINGS, save
from experiments.spec.choices import Protocol
from experiments.spec.option_notes import Argument


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line of the comparison."""

    runs: Annotated[tuple[Path, ...], Argument("positional", "RUN...")]
    """Folders of runs, or folders above runs, such as a sweep's."""
    reference: str | None = None
    """Method, by its name in the table, that all others are compared with; None is the best method on validation
    examples or, without these, on test examples."""
    select: Literal["validation"] | None = None
    """Compare only the best setting of each method on validation examples."""
    name: Annotated[tuple[str, ...], Argument("repeated", "SHORT=NAME")] = ()
    """Short names for methods or settings in the table; may be repeated."""
    eval_protocol: Protocol = "received"
    """Evaluation protocol of the scores."""
    out: Annotated[Path | None, Argument(metavar="FILE")] = None
    """Also write the table to a file: .md, .csv, or .tex for a column of a paper, with everything else as comments."""
    target: float | None = None
    """Also show after how many rounds the mean first reaches this score."""
    plot: Annotated[Path | None, Argument(metavar="FILE")] = None
    """Also draw the mean ranks with the critical difference to a file: .png, .svg or .pdf."""
    overwrite: bool = False
    """Replace existing files of --out and --plot."""


def main(arguments: Sequence[str] | None = None) -> int:

    def work() -> None:
        options, _ = parse(Options, "experiments.compare", __doc__, arguments)
        check_new("--out", options.out, ".md", ".csv", ".tex", overwrite=options.overwrite)
        check_new("--plot", options.plot, *ENDINGS, overwrite=options.overwrite)
        groups, _ = stored_runs.grouped(*options.runs)
        chosen_by = ""
        if options.select is not None:
            groups, chosen_by = stored_runs.best_setting_per_method(groups, options.eval_protocol)
        groups = stored_runs.renamed(groups, options.name)
        compared = read(groups, options.eval_protocol)
        reached = {} if options.target is None else rounds_to(options.target, groups, compared)
        made = table(compared, options.reference, reached)
        made = made._replace(notes=[*filter(None, [chosen_by]), *made.notes])
        console = Terminal()
        console.print(made.terminal())
        for note in made.notes:
            print_text(console, note)
        if options.out is not None:
            made = for_paper(made, compared) if options.out.suffix == ".tex" else made
            made.save(options.out.expanduser())
        if options.plot is not None:
            save(ranks(compared), options.plot.expanduser())
        for path in filter(None, (options.out, options.plot)):
            print_text(console, f"saved {path}")

    return exit_code(work)


if __name__ == "__main__":
    exit_process(main())
