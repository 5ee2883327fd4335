"""Ablation of FedAS: its lead over FedPer, one choice of the released code after another.

    python -m experiments.fedas_study

Two data sets, participation 0.2 and 1, three seeds, eight rungs from FedPer to FedAS as released: 96 runs, two hours on
two quiet cores. Repeating the command resumes where it stopped. Of each run a small file stays in
results/fedas_study; from these files the page docs/fedas.md and its figure are made, at the end and whenever the
command is stopped. --page only makes them; --dry-run says which runs are missing.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from experiments.commands import batch
from experiments.execution import cached_runs
from experiments.fedas_study import ladder, page, records
from experiments.fedas_study.ladder import Place
from pfl_jax.errors import InvalidInput

ROOT = Path(__file__).parents[2]


class StudyRequest(NamedTuple):
    """Checked command line.

    Attributes:
      places: the runs that are wanted, in their order.
      out: folder of the runs.
      results: folder of the records.
      page: the page that is made from them.
      dry_run: only say what is missing.
      only_page: run nothing.
    """

    places: list[Place]
    out: Path
    results: Path
    page: Path
    dry_run: bool
    only_page: bool


def parse(words: Sequence[str]) -> StudyRequest:
    """Check a command line.

    Raises:
      InvalidInput: an unknown option, data set, step or number.
    """
    parser = batch.Parser("experiments.fedas_study", __doc__)
    steps = [step.name for step in ladder.LADDER]
    parser.add_argument("--dataset", nargs="+", default=list(ladder.SOURCES), help=", ".join(ladder.SOURCES))
    parser.add_argument("--participation", nargs="+", default=[f"{share:g}" for share in ladder.PARTICIPATION])
    parser.add_argument("--step", nargs="+", default=steps, help=", ".join(steps))
    parser.add_argument("--seeds", type=int, default=3, metavar="K", help="seeds 0 to K - 1 (default 3)")
    parser.add_argument("--out", type=Path, default=Path("runs/fedas_study"), metavar="DIR", help="folder of the runs")
    parser.add_argument("--results", type=Path, default=ROOT / "results/fedas_study", metavar="DIR", help="the records")
    parser.add_argument("--write", type=Path, default=ROOT / "docs/fedas.md", metavar="FILE", help="the page")
    parser.add_argument("--page", action="store_true", help="only make the page and its figure")
    parser.add_argument("--dry-run", action="store_true", help="only say which runs are missing")
    own: argparse.Namespace = parser.parse_args(list(words))
    shares = {f"{share:g}": share for share in ladder.PARTICIPATION}
    batch.choose("dataset", own.dataset, ladder.SOURCES)
    batch.choose("participation", own.participation, shares)
    batch.choose("step", own.step, steps)
    if own.seeds < 1:
        raise InvalidInput(f"--seeds must be at least 1, not {own.seeds}")
    chosen = [step for step in ladder.LADDER if step.name in own.step]
    places = ladder.places(own.dataset, [shares[word] for word in own.participation], own.seeds, chosen)
    return StudyRequest(places, own.out.expanduser(), own.results, own.write, own.dry_run, own.page)


def _say(request: StudyRequest, console: Console) -> None:
    for place in request.places:
        state = "missing" if records.read(place, request.results) is None else "there"
        console.print(f"{place.command(request.out / place.name)}  # {state}", soft_wrap=True, highlight=False)


def _make(request: StudyRequest, console: Console) -> None:
    """Run what is missing, and write the page."""
    missing = [place for place in request.places if records.read(place, request.results) is None]
    if not request.only_page:
        there = len(request.places) - len(missing)
        console.print(f"{there} of {len(request.places)} runs are there, in {request.results}", highlight=False)
        try:
            for number, place in enumerate(missing, start=1):
                console.print(f"run {number} of {len(missing)}: {place.name}", style="bold", highlight=False)
                records.write(place, measure(place, request.out / place.name, console), request.results)
        except KeyboardInterrupt:
            page.write(request.results, request.page)
            raise KeyboardInterrupt("interrupted; finished runs stay, the same command goes on") from None
    page.write(request.results, request.page)
    console.print(f"saved in {request.page}", soft_wrap=True, highlight=False)


def measure(place: Place, folder: Path, console: Console) -> records.Record:
    """Run one place of the ladder in its folder and return its record.

    Raises:
      InvalidInput: the folder holds something else, or the run is refused.
      KeyboardInterrupt: after SIGINT.
    """
    if not place.step.in_place:
        cached_runs.run_cell(place.cell, folder, console)
    elif cached_runs.inspect(place.cell, folder) != "finished":
        import jax

        from experiments import fedas_released

        cached_runs.remove_unfinished(folder)
        words = [*place.cell.arguments, "--seed", str(place.seed), "--out", str(folder)]
        try:
            fedas_released.run(fedas_released.released_request(place.dataset, words), console)
        finally:
            jax.clear_caches()
    return records.from_run(place, folder)


def main(words: Sequence[str] | None = None) -> int:
    """Run the study; return the exit code, see `exit_codes.exit_code`."""
    return batch.command(words, parse, _say, _make)


if __name__ == "__main__":
    sys.exit(main())
