"""Ablation of FedAS: its lead over FedPer, with one choice of the released code after another.

    python -m experiments.lab.fedas_ablation

Two data sets, participation 0.2 and 1, three seeds, eight steps from FedPer to FedAS as released: 96 runs, two hours on
two quiet cores. Repeating the command resumes where it stopped. Each run leaves a line in results/fedas_ablation.jsonl.
`python -m experiments.lab.pages` makes the page docs/fedas.md and its figure from them.
--dry-run lists the missing runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import tyro
from rich.console import Console

from experiments.cli import parser
from experiments.cli.exit_codes import leave
from experiments.cli.parser import Folder, Names, choose, flat
from experiments.folder.version import Trust
from experiments.host.console import print_line
from experiments.lab.fedas_ablation import steps
from experiments.lab.fedas_ablation.steps import SOURCES, STEPS, Place
from experiments.run import batch, cached_runs, committed

SHARES = {f"{share:g}": share for share in steps.PARTICIPATION}
BY_NAME = {step.name: step for step in STEPS}

TRUST: Trust = "version"
"""Code whose runs count: as for their records."""


@dataclass(frozen=True, kw_only=True)
class Study(batch.Batch):
    """Command line of the study."""

    dataset: Annotated[Names, tyro.conf.arg(help=f"Only these of {', '.join(SOURCES)}.")] = ()
    participation: Annotated[Names, tyro.conf.arg(help=f"Only these of {', '.join(SHARES)}.")] = ()
    step: Annotated[Names, tyro.conf.arg(help=f"Only these of {', '.join(BY_NAME)}.")] = ()
    seeds: int = 3
    """Number of seeds, from 0."""
    results: Folder = None
    """File of the records; by default results/fedas_ablation.jsonl."""
    accept_other_code: tyro.conf.Suppress[bool] = False

    name: ClassVar = "lab.fedas_ablation"
    accepts_run_options: ClassVar = False

    def check(self) -> None:
        choose("dataset", flat(self.dataset), SOURCES)
        choose("participation", flat(self.participation), SHARES)
        choose("step", flat(self.step), BY_NAME)
        parser.at_least_one(seeds=self.seeds)

    def default_folder(self) -> Path:
        return Path("runs/fedas_study")

    @property
    def trust(self) -> Trust:
        return TRUST

    @property
    def file(self) -> Path:
        """File of the records."""
        return self.results or committed.ROOT / "fedas_ablation.jsonl"

    @property
    def places(self) -> list[Place]:
        """The wanted runs in their order."""
        shares = [SHARES[word] for word in flat(self.participation) or SHARES]
        wanted = [step for step in STEPS if not self.step or step.name in flat(self.step)]
        return steps.places(flat(self.dataset) or list(SOURCES), shares, self.seeds, wanted)

    def jobs(self, console: Console) -> list[batch.Job]:
        return [batch.Job(place.cell, self.folder / place.name, place.name) for place in self.places]

    def _place(self, job: batch.Job) -> Place:
        return next(place for place in self.places if place.name == job.title)

    def seconds(self, job: batch.Job) -> float | None:
        record = steps.read(self._place(job), self.file)
        return None if record is None else record.get("seconds", 0.0)

    def state(self, job: batch.Job) -> tuple[str, float]:
        return ("missing", 1.0) if self.seconds(job) is None else ("there", 0.0)

    def command(self, job: batch.Job) -> str:
        return self._place(job).command(job.folder)

    def run(self, jobs: Sequence[batch.Job], console: Console) -> None:
        for job in jobs:
            place = self._place(job)
            committed.write(self.file, place.name, measure(place, job.folder, console))

    def finish(self, console: Console) -> None:
        print_line(console, f"all runs are there, in {self.file}")


def measure(place: Place, folder: Path, console: Console) -> steps.Record:
    """Run one place of the ablation in its folder and return its record.

    Raises:
      InvalidInput: the folder holds something else, or the run is refused.
      KeyboardInterrupt: after SIGINT.
    """
    cached_runs.run_cell(place.cell, folder, console, trust=TRUST)
    return steps.from_run(place, folder)


def main(words: Sequence[str] | None = None) -> int:
    """Run the study; return the exit code, see `exit_codes.exit_code`."""
    return batch.command(Study, words)


if __name__ == "__main__":
    leave(main())
