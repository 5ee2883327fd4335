"""Figures of the papers: every run of a figure, each in its folder, and the figure as PNG, SVG and JSON.

    python -m experiments.figures --paper fedpac --figure 2

Repeating the command resumes where it stopped: finished runs are kept, an interrupted one resumes or starts again.
--dry-run only lists the runs and estimates their time. All options of `python -m experiments.DATASET` (--train-size
100, --chunk 4, ...) can be given and apply to every run.

On real data the runs have the paper's size and take hours. For a small figure in minutes, give --source embedded
--rounds 5 --num-clients 10.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from rich.console import Console

from experiments.cli.parser import Names, choose
from experiments.commands import batch
from experiments.commands.batch import MeasuredBatch
from experiments.commands.figure import Figure, Runs, compose
from experiments.commands.paper_figures import FIGURES
from experiments.folder.run_folder import RunFolder
from experiments.host.console import print_line
from experiments.host.exit_codes import exit_process
from experiments.show.pictures import save
from experiments.spec.option_notes import Argument, flag, texts_of
from pfl_jax.data.specs import SPECS
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import METHODS
from pfl_jax.validation import Count

NUMBERS = "; ".join(f"{paper}: {', '.join(figures)}" for paper, figures in FIGURES.items())


@dataclass(frozen=True, kw_only=True)
class Figures(MeasuredBatch):
    """Command line of a figure."""

    paper: Annotated[str, Argument(text=", ".join(FIGURES))]
    figure: Annotated[str, Argument(metavar="NUMBER", text=NUMBERS)]
    dataset: Names = ()
    """Datasets that replace the figure's."""
    method: Names = ()
    """Methods that replace the figure's."""
    rounds: Count | None = None
    """Rounds of each run, instead of the figure's."""

    name: ClassVar = "figures"

    def check(self) -> None:
        choose("paper", [self.paper], FIGURES)
        choose("figure", [self.figure], FIGURES[self.paper])
        choose("dataset", self.dataset, SPECS)
        choose("method", self.method, METHODS)
        super().check()
        if self.procedure not in (None, *self.content.procedures):
            raise InvalidInput(
                f"{self.content.title} compares ways to align, but the released code has only one: --procedure print"
            )
        if self.method and not self.content.methods:
            raise InvalidInput(f"--method has no effect: {self.content.title} compares no methods")
        for option, name in (("eval_protocol", "protocol"), ("score", "score"), ("average", "average")):
            if getattr(self, option) is not None and name not in self.content.measured:
                raise InvalidInput(f"{flag(option)} has no effect on {self.content.title}")
        for runs in self.every:
            own = runs.varied | {*self.content.fixed, "seed", "out", "resume", "method", "preset", "target_accuracy"}
            if fixed := sorted(texts_of(self.words).keys() & own):
                why = "whose runs do all their rounds" if fixed[0] == "target_accuracy" else "which sets it itself"
                raise InvalidInput(f"{flag(fixed[0])} cannot be given for {self.content.title}, {why}")
            # Refuse unknown options now, before a folder is made.
            assert runs.jobs

    def default_folder(self) -> Path:
        rounds = () if self.rounds is None else ("--rounds", str(self.rounds))
        return self.folder_of(self.figure, self.content.procedures, *rounds)

    @property
    def content(self) -> Figure:
        return FIGURES[self.paper][self.figure]

    @property
    def every(self) -> list[Runs]:
        given = {name: value for name in ("procedure", "rounds") if (value := getattr(self, name)) is not None}
        datasets = self.dataset or self.content.datasets
        return [Runs(self.content, dataset, self, self.method, given) for dataset in datasets]

    def jobs(self, console: Console) -> list[batch.Job]:
        every = [job for runs in self.every for jobs in runs.jobs.values() for job in jobs]
        return list({job.folder: job for job in every}.values())

    def finish(self, console: Console) -> None:
        name, picture = f"{self.paper}-figure-{self.figure}", compose(self.every)
        paths = [self.folder / f"{name}.{kind}" for kind in ("png", "svg")]
        save(picture, *paths)
        data = [runs.config(next(iter(runs.jobs)))["data"] for runs in self.every]
        RunFolder(self.folder).write(f"{name}.json", picture.record() | {"data": data})
        for path in (*paths, self.folder / f"{name}.json"):
            print_line(console, f"saved {path}")


def main(arguments: Sequence[str] | None = None) -> int:
    return batch.command(Figures, arguments)


if __name__ == "__main__":
    exit_process(main())
