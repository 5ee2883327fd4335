"""Figures of the papers: run all runs of a figure, each in its folder, and write it as PNG, SVG and JSON.

    python -m experiments.figures --paper fedpac --figure 2

Repeating the command resumes where it stopped: finished runs are kept, an interrupted one resumes or starts again.
--dry-run only lists the runs and estimates their time. All other options (--train-size 100, --chunk 4, ...) are those
of `python -m experiments.DATASET` and apply to every run.

On embedded data the runs are small, and a figure takes some minutes on two cores. On real data they have the paper's
size and take hours.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

from rich.console import Console

from experiments.cli import parser
from experiments.cli.effects import relevant_options
from experiments.cli.exit_codes import leave
from experiments.cli.options import flag
from experiments.cli.parser import Argument, Names, choose
from experiments.cli.run_command import RunCommand
from experiments.figures.figure import Figure, Key, Results, Runs, arrays_path
from experiments.figures.index import FIGURES
from experiments.figures.runs import is_real, run_with_arrays
from experiments.folder.run_folder import RunFolder
from experiments.host.console import print_line, print_notice
from experiments.run import batch, measured
from experiments.run.measured import MeasuredBatch
from pfl_jax.data.specs import SPECS
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import METHODS

NUMBERS = "; ".join(f"{paper}: {', '.join(figures)}" for paper, figures in FIGURES.items())


@dataclass(frozen=True, kw_only=True)
class Figures(MeasuredBatch):
    """Command line of a figure."""

    paper: Annotated[str, Argument(text=", ".join(FIGURES))]
    figure: Annotated[str, Argument(metavar="NUMBER", text=NUMBERS)]
    dataset: Names = ()
    """Datasets in place of the figure's."""
    method: Names = ()
    """Methods in place of the figure's."""
    rounds: int | None = None
    """Rounds of each run, in place of the figure's."""
    source: str = "auto"
    """Origin of the data: auto, tfds, files or embedded."""
    data_dir: str | None = None
    """Folder of the data."""

    name: ClassVar = "figures"

    def check(self) -> None:
        choose("paper", [self.paper], FIGURES)
        choose("figure", [self.figure], FIGURES[self.paper], f" in {self.paper}")
        choose("source", [self.source], ("auto", "tfds", "files", "embedded"))
        choose("dataset", self.dataset, SPECS)
        choose("method", self.method, METHODS)
        if self.method and not self.content.methods:
            raise InvalidInput(f"--method has no effect: {self.content.title} compares no methods")
        super().check()
        for option, name in (("eval_protocol", "protocol"), ("score", "score"), ("average", "average")):
            if getattr(self, option) is not None and name not in self.content.measured:
                raise InvalidInput(f"{flag(option)} has no effect on {self.content.title}")
        parser.at_least_one(rounds=self.rounds)
        for dataset in self.datasets:
            runs = self.runs_on(dataset, real=True)
            own = runs.varied | {"seed", "out", "resume", "method", "preset", "target_accuracy"}
            if fixed := sorted(parser.given(self.words) & own):
                why = "whose runs have all their rounds" if fixed[0] == "target_accuracy" else "which sets it itself"
                raise InvalidInput(f"{flag(fixed[0])} cannot be given for {self.content.title}, {why}")
            # What a word means depends on the dataset and the method, not on what else the runs differ in.
            cells = runs.cells()
            for key in {own["method"]: key for key, own in runs.variants.items()}.values():
                self._check_fixed(cells[key][0], replace(runs, words=()).cells()[key][0])

    def _check_fixed(self, cell: RunCommand, usual: RunCommand) -> None:
        """Raise InvalidInput if a run has another value of a fixed option than the figure without further words."""
        asked, own = vars(cell.request().options), vars(usual.request().options)
        for name in self.content.fixed:
            if asked[name] != own[name]:
                raise InvalidInput(f"{flag(name)} must be {own[name]} for {self.content.title}, not {asked[name]}")

    def default_folder(self) -> Path:
        rounds = () if self.rounds is None else ("--rounds", str(self.rounds))
        source = () if self.source == "auto" else ("--source", self.source)
        return Path("runs/figures") / measured.folder_name(self.paper, self.figure, (*rounds, *source, *self.all_words))

    @property
    def content(self) -> Figure:
        """Content of the figure."""
        return FIGURES[self.paper][self.figure]

    @property
    def datasets(self) -> tuple[str, ...]:
        """Datasets of the figure."""
        return self.dataset or self.content.datasets

    def runs_on(self, dataset: str, *, real: bool) -> Runs:
        """Runs on a dataset, given whether the real dataset is available."""
        source = self.source if real else "embedded"
        words = () if source == "auto" else ("--source", source)
        words += () if self.data_dir is None else ("--data-dir", self.data_dir)
        return self.content.runs(
            dataset,
            short=not real,
            seeds=self.seeds,
            methods=self.method,
            rounds=self.rounds,
            words=(*words, *self.all_words),
        )

    def places(self, runs: Runs) -> dict[Key, list[tuple[RunCommand, Path]]]:
        """Cells of runs with their folders; runs that several panels show share one."""
        folders: dict[str, Path] = {}
        found = {}
        for key, cells in runs.cells().items():
            relevant = json.dumps(relevant_options(cells[0].request()), sort_keys=True)
            folder = folders.setdefault(relevant, self.folder / parser.slug(" ".join([runs.dataset, *key])))
            found[key] = [(cell, folder / f"seed-{cell.seed}") for cell in cells]
        return found

    @functools.cache  # noqa: B019 - one for a process, and asked for twice.
    def all_runs(self, console: Console) -> list[Runs]:
        """Runs on each dataset, the smaller ones where the real data is not available."""
        notify = functools.partial(print_notice, console)
        real = {
            dataset: is_real(dataset, self.source, self.data_dir, notify, download=not self.dry_run)
            for dataset in self.datasets
        }
        return [self.runs_on(dataset, real=real[dataset]) for dataset in self.datasets]

    def jobs(self, console: Console) -> list[batch.Job]:
        places = [self.places(runs) for runs in self.all_runs(console)]
        folders = {folder: cell for by_key in places for of_key in by_key.values() for cell, folder in of_key}
        return [batch.Job(cell, folder, f"{folder.parent.name}, seed {cell.seed}") for folder, cell in folders.items()]

    def seconds(self, job: batch.Job) -> float | None:
        seconds, path = super().seconds(job), arrays_path(job.folder)
        if seconds is None or self.content.observe is None or path.exists():
            return seconds
        raise InvalidInput(
            f"{job.folder} holds the run but {path} is gone: remove {job.folder}, and the run is made again"
        )

    def files(self, job: batch.Job) -> list[Path]:
        return [job.folder, arrays_path(job.folder)]

    def run(self, jobs: Sequence[batch.Job], console: Console) -> None:
        for job in jobs:
            run_with_arrays(job.cell, job.folder, console, self.content.observe, self.trust)

    def finish(self, console: Console) -> None:
        # Imported now, so that errors and --help do not wait for matplotlib.
        from experiments.figures.compose import compose
        from experiments.show import drawing

        results = [
            Results(
                runs, {key: [folder for _, folder in of_key] for key, of_key in self.places(runs).items()}, self.measure
            )
            for runs in self.all_runs(console)
        ]
        picture, name = compose(results), f"{self.paper}-figure-{self.figure}"
        paths = drawing.save(picture, self.folder, name)
        data = [one.config(one.keys[0])["data"] for one in results]
        RunFolder(self.folder, []).write(f"{name}.json", picture.record() | {"data": data})
        for path in (*paths, self.folder / f"{name}.json"):
            print_line(console, f"saved {path}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a figure with command-line arguments, by default those of this process; return the exit code."""
    return batch.command(Figures, arguments)


if __name__ == "__main__":
    leave(main())
