"""Tables of the papers: every run of a table, each in its folder, and the table with our results beside the paper's.

    python -m experiments.tables --paper fedpac --table 1 --dataset fashion_mnist --clients 20 --seeds 3

Repeating the command resumes where it stopped: finished runs are kept, an interrupted one resumes. --method and
--setting select a part of the table, --dry-run only lists the runs. All options of `python -m experiments.DATASET`
(--rounds 50, --source embedded, ...) can be given, apply to every run, and are noted in the table.

Table 1 of FedPAC on Fashion-MNIST with 20 clients: 15 methods of 200 rounds for each seed.
"""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from rich.console import Console

from experiments.cli.parser import Names, choose
from experiments.commands import batch, paper_table
from experiments.commands.batch import MeasuredBatch
from experiments.commands.paper_table import Comparison, Entry
from experiments.folder import load
from experiments.folder.load import StoredRun
from experiments.host.console import print_line
from experiments.host.exit_codes import exit_process
from experiments.papers import published, settings
from experiments.papers.published import Published
from experiments.spec.option_notes import Argument, flag, texts_of
from experiments.spec.presets import PROCEDURES
from experiments.spec.spec import Spec
from pfl_jax.errors import InvalidInput

NUMBERS = {paper: [str(number) for number in content.tables] for paper, content in settings.PAPERS.items()}
"""Paper -> its tables."""

HINTS = {
    "seed": "use --seeds",
    "resume": "the same command goes on where it was stopped",
    "target_accuracy": "its runs do all their rounds",
}


@dataclass(frozen=True, kw_only=True)
class Tables(MeasuredBatch):
    """Command line of a table."""

    paper: Annotated[str, Argument(text=", ".join(NUMBERS))]
    table: Annotated[int, Argument(text="; ".join(f"{name}: {', '.join(of)}" for name, of in NUMBERS.items()))]
    dataset: Names = ()
    """Datasets; by default all datasets of the table."""
    clients: Names = ()
    """Numbers of clients; by default all numbers of the table."""
    setting: Names = ()
    """Settings with these words, such as beta=0.1."""
    method: Names = ()
    """Methods by their names in the table; by default all methods."""

    name: ClassVar = "tables"

    def check(self) -> None:
        choose("paper", [self.paper], NUMBERS)
        choose("table", [str(self.table)], NUMBERS[self.paper])
        super().check()
        fixed = sorted(texts_of(self.words).keys() & settings.FIXED)
        if fixed:
            hint = HINTS.get(fixed[0], "it is what the table compares, or a part of its setting")
            raise InvalidInput(f"{flag(fixed[0])} cannot be given for a table: {hint}")
        # The meaning of options depends on the dataset and the method, not on the setting.
        different = {(row.dataset, row.method): row for row in self.shown}
        for row in different.values():
            self._spec(row)

    def default_folder(self) -> Path:
        return self.folder_of(self.table, PROCEDURES)

    @functools.cached_property
    def rows(self) -> list[Published]:
        rows = [row for row in published.load() if (row.paper, row.table) == (self.paper, self.table)]
        return [row._replace(procedure=self.procedure or row.procedure) for row in rows]

    @functools.cached_property
    def shown(self) -> list[Published]:
        """Selected part of the table."""
        chosen = self.rows
        for name, words in (("dataset", "dataset"), ("clients", "number of clients"), ("method", "method")):
            if asked := getattr(self, name):
                choose(words, asked, dict.fromkeys(str(getattr(row, name)) for row in chosen))
                chosen = [row for row in chosen if str(getattr(row, name)) in asked]
        asked = " ".join(self.setting).split()
        matching = [row for row in chosen if set(asked) <= set(row.setting.split())]
        if not matching:
            choose("setting", [" ".join(asked)], dict.fromkeys(row.setting for row in chosen))
        return matching

    def jobs_of(self, row: Published) -> list[batch.Job]:
        title = f"{row.method} on {row.dataset}, {row.clients} clients, {row.setting}"
        folder = self.folder / paper_table.folder_of(row)
        return batch.jobs_of_seeds(self._spec(row), self.seeds, folder, title)

    def _spec(self, row: Published) -> Spec:
        """Run of a cell of the table with seed 0."""
        return batch.spec_in_batch(row.dataset, row.options | self.options(row.dataset, **row.options))

    def jobs(self, console: Console) -> list[batch.Job]:
        if (path := self.folder / paper_table.JSON).exists():
            stored = load.read_json(path)
            if (stored.get("paper"), stored.get("table")) != (self.paper, self.table):
                raise InvalidInput(
                    f"{self.folder} holds another table, which is never overwritten: give --out another folder"
                )
        # Seed by seed: all cells get their first run before any cell gets its second.
        return sorted([job for row in self.shown for job in self.jobs_of(row)], key=lambda job: job.spec.seed)

    def _results(self, row: Published) -> list[StoredRun]:
        """Finished runs of a cell; a folder with other content counts as empty."""
        found = []
        for job in self.jobs_of(row):
            with contextlib.suppress(InvalidInput):
                if self.inspect(job) == "finished":
                    found.append(load.read(job.folder))
        return found

    def compare(self) -> tuple[Comparison, Comparison]:
        """Two comparisons: the requested part of the table, and this part with all other stored results."""
        entries = [Entry(row, self._results(row), self.requested(row.measure)) for row in self.rows]
        shown = [entry for entry in entries if entry.row in self.shown]
        needed = [entry for entry in entries if entry.runs or entry.row in self.shown]
        columns, methods = {entry.column for entry in needed}, {entry.row.method for entry in needed}
        saved = [entry for entry in entries if entry.column in columns and entry.row.method in methods]
        both = (paper_table.compare(self.paper, self.table, some, self.seeds) for some in (shown, saved))
        return next(both), next(both)

    def update(self) -> None:
        paper_table.save(self.compare()[1], self.folder)

    def finish(self, console: Console) -> None:
        shown, saved = self.compare()
        paper_table.save(saved, self.folder)
        paper_table.show(shown, console)
        print_line(console, f"saved in {self.folder / paper_table.MARKDOWN}")


def main(arguments: Sequence[str] | None = None) -> int:
    return batch.command(Tables, arguments)


if __name__ == "__main__":
    exit_process(main())
