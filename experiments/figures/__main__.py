"""Figures of the papers: every run of a figure, each in its folder, and the figure as PNG and SVG with its numbers.

    python -m experiments.figures --paper fedpac --figure 2

Repeating the command resumes where it stopped: finished runs stay, an interrupted one resumes or starts again.
--dry-run only shows the runs, and how much work they are. Words that are not named here (--train-size 100, --chunk 4,
...) are options of `python -m experiments.DATASET`, and go to every run.

On embedded data the runs are small and a figure takes some minutes on two cores. On real data they are the paper's:
hours where methods are compared over 200 rounds; --dry-run estimates how many.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from experiments import DATASETS
from experiments.commands import batch
from experiments.config.cell import Cell
from experiments.config.options import flag
from experiments.config.request import relevant_options
from experiments.execution import cached_runs
from experiments.figures.catalogue import PLANS, numbers
from experiments.figures.plan import Key, Plan, Results, Scope, arrays_path
from experiments.figures.runs import examples_visited, is_real, run_with_arrays
from experiments.results.run_folder import RunFolder
from experiments.runtime.progress import duration
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import METHODS

ROOT = Path("runs/figures")
SPEED = 11_000
"""Training examples a second, see docs/performance.md."""


class FigureRequest(NamedTuple):
    """Checked command line.

    Attributes:
      plan: the figure.
      datasets: that it shows.
      methods: compared instead of the figure's own; empty for its own.
      seeds: how many, from 0.
      rounds: of each run; None as the figure has it.
      source, data_dir: origin of the data, as `python -m experiments.DATASET` has them.
      words: for every run.
      out: folder of runs and pictures.
      dry_run: only print the commands.
    """

    plan: Plan
    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: int
    rounds: int | None
    source: str
    data_dir: str | None
    words: tuple[str, ...]
    out: Path
    dry_run: bool

    def scope(self, dataset: str, *, real: bool) -> Scope:
        """Runs on a dataset, given whether the real dataset is available."""
        source = self.source if real else "embedded"
        words = ["--source", source] if source != "auto" else []
        words += [] if self.data_dir is None else ["--data-dir", self.data_dir]
        return self.plan.scope(
            dataset,
            short=not real,
            seeds=self.seeds,
            methods=self.methods,
            rounds=self.rounds,
            words=[*words, *self.words],
        )

    def runs(self, scope: Scope) -> dict[Key, list[tuple[Cell, Path]]]:
        """Cells of a scope with their folders; a run that several places show appears once."""
        folders: dict[str, Path] = {}
        found = {}
        for key, cells in self.plan.cells(scope).items():
            relevant = json.dumps(relevant_options(cells[0].request()), sort_keys=True)
            folder = folders.setdefault(relevant, self.out / batch.slug(" ".join([scope.dataset, *key])))
            found[key] = [(cell, folder / f"seed-{cell.seed}") for cell in cells]
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a figure.

    Args:
      arguments: command-line arguments; by default those of this process.

    Returns:
      The exit code, see `exit_codes.exit_code`.
    """
    return batch.command(arguments, parse, _dry_run, _make)


def _parser() -> batch.Parser:
    parser = batch.Parser("experiments.figures", __doc__)
    figures = "; ".join(f"{paper}: {', '.join(numbers(paper))}" for paper in PLANS)
    parser.add_argument("--paper", required=True, help=", ".join(PLANS))
    parser.add_argument("--figure", required=True, metavar="NUMBER", help=figures)
    parser.add_argument("--dataset", nargs="+", action="extend", help="instead of the figure's datasets")
    parser.add_argument("--method", nargs="+", action="extend", help="instead of the methods that the figure compares")
    parser.add_argument("--rounds", type=int, help="of each run, instead of the figure's")
    parser.add_argument("--seeds", type=int, default=1, metavar="K", help="seeds 0 to K - 1 (default 1)")
    parser.add_argument("--source", default="auto", help="auto (default), tfds, files or embedded")
    parser.add_argument("--data-dir", metavar="DIR", help="folder of the data")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of runs and pictures; by default in runs/figures"
    )
    parser.add_argument("--dry-run", action="store_true", help="say each command and what is there, and run nothing")
    return parser


def parse(words: Sequence[str]) -> FigureRequest:
    """Check a command line.

    Raises:
      InvalidInput: an unknown paper, figure, dataset, method or option, or one that the figure cannot take.
    """
    own, rest = _parser().parse_known_args(words)
    batch.choose("paper", [own.paper], PLANS)
    batch.choose("figure", [own.figure], numbers(own.paper), f" in {own.paper}")
    batch.choose("source", [own.source], ("auto", "tfds", "files", "embedded"))
    batch.choose("dataset", own.dataset or [], DATASETS)
    batch.choose("method", own.method or [], METHODS)
    plan = PLANS[own.paper][own.figure]
    if own.method and not plan.methods:
        raise InvalidInput(f"--method has no effect: {plan.title} compares no methods")
    for name in ("seeds", "rounds"):
        if getattr(own, name) is not None and getattr(own, name) < 1:
            raise InvalidInput(f"{flag(name)} must be at least 1, not {getattr(own, name)}")
    rounds = [] if own.rounds is None else ["--rounds", str(own.rounds)]
    source = [] if own.source == "auto" else ["--source", own.source]
    request = FigureRequest(
        plan=plan,
        datasets=tuple(dict.fromkeys(own.dataset or plan.datasets)),
        methods=tuple(dict.fromkeys(own.method or ())),
        seeds=own.seeds,
        rounds=own.rounds,
        source=own.source,
        data_dir=own.data_dir,
        words=tuple(rest),
        out=(own.out or ROOT / batch.folder_name(own.paper, int(own.figure), [*rounds, *source, *rest])).expanduser(),
        dry_run=own.dry_run,
    )
    _check_words(request)
    return request


def _check_words(request: FigureRequest) -> None:
    """Refuse options that would change the runs of the figure, or that a method does not accept."""
    if {"-h", "--help"} & set(request.words):
        raise InvalidInput("--help stands alone")
    for dataset in request.datasets:
        scope = request.scope(dataset, real=True)
        own = request.plan.varied(scope) | {"seed", "out", "resume", "method", "preset"}
        fixed = sorted(batch.given(request.words) & own)
        if fixed:
            raise InvalidInput(f"{flag(fixed[0])} cannot be given for {request.plan.title}, which sets it itself")
        # What a word means depends on the dataset and the method, not on what else the runs differ in.
        variants = request.plan.variants(scope)
        for key in {own["method"]: key for key, own in variants.items()}.values():
            request.plan.cells(scope)[key][0].request()


def _scopes(request: FigureRequest, console: Console) -> list[Scope]:
    """Runs on each dataset, the smaller ones where the real data is not available."""

    def notify(message: str) -> None:
        console.print(message, style="bold yellow", soft_wrap=True, highlight=False, markup=False)

    real = {
        dataset: is_real(dataset, request.source, request.data_dir, notify, download=not request.dry_run)
        for dataset in request.datasets
    }
    return [request.scope(dataset, real=real[dataset]) for dataset in request.datasets]


def _dry_run(request: FigureRequest, console: Console) -> None:
    examples, count = 0, 0
    for cell, folder in _distinct(request.runs(scope) for scope in _scopes(request, console)):
        cached_runs.print_state(cell, folder, console)
        examples, count = examples + examples_visited(cell.request()), count + 1
    console.print(
        f"{count} runs, {examples / 1e6:,.1f} million training examples: {duration(examples / SPEED)} at {SPEED:,} a "
        "second, which two cores reach with FedPAC's smaller network",
        soft_wrap=True,
        highlight=False,
    )


def _make(request: FigureRequest, console: Console) -> None:
    """Run what is missing, draw the figure and save it."""
    # All folders first: what is refused is refused before hours of work.
    scopes = _scopes(request, console)
    everything = [(scope, request.runs(scope)) for scope in scopes]
    cells = _distinct(runs for _, runs in everything)
    missing = [run for run in cells if not _is_there(request.plan, *run)]
    finished = len(cells) - len(missing)
    console.print(f"{finished} of {len(cells)} runs are there, in {request.out}", soft_wrap=True, highlight=False)
    try:
        for cell, folder in missing:
            console.print(
                f"run {finished + 1} of {len(cells)}: {folder.parent.name}, seed {cell.seed}",
                style="bold",
                soft_wrap=True,
                highlight=False,
            )
            run_with_arrays(cell, folder, console, request.plan.observe)
            finished += 1
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"{stop or 'interrupted'}; {finished} of {len(cells)} runs are finished and stay in {request.out}: the "
            "same command goes on"
        ) from None
    # Imported now, so that errors and --help do not wait for matplotlib.
    from experiments.figures.compose import compose
    from experiments.plots import drawing

    results = [
        Results(scope, {key: [folder for _, folder in of_key] for key, of_key in runs.items()})
        for scope, runs in everything
    ]
    picture = compose(request.plan, results)
    name = f"{request.plan.paper}-figure-{request.plan.number}"
    paths = drawing.save(picture, request.out, name)
    RunFolder(request.out, []).write(f"{name}.json", picture.record() | {"data": _data(results)})
    for path in (*paths, request.out / f"{name}.json"):
        console.print(f"saved {path}", soft_wrap=True, highlight=False)


def _distinct(scopes: Iterable[dict[Key, list[tuple[Cell, Path]]]]) -> list[tuple[Cell, Path]]:
    """All cells, each folder once."""
    folders = {folder: cell for runs in scopes for of_key in runs.values() for cell, folder in of_key}
    return [(cell, folder) for folder, cell in folders.items()]


def _is_there(plan: Plan, cell: Cell, folder: Path) -> bool:
    """Whether a run is finished and its arrays are stored."""
    if cached_runs.inspect(cell, folder) != "finished":
        return False
    path = arrays_path(folder)
    if plan.observe is None or path.exists():
        return True
    raise InvalidInput(f"{folder} holds the run but {path} is gone: remove {folder}, and the run is made again")


def _data(results: Sequence[Results]) -> list[dict[str, Any]]:
    """Full description of each dataset as it was used."""
    return [one.config(one.keys[0])["data"] for one in results]


if __name__ == "__main__":
    sys.exit(main())
