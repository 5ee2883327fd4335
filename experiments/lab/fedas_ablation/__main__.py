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
from typing import ClassVar

from rich.console import Console

from experiments.cli.exit_codes import leave
from experiments.cli.parser import Folder, Hidden
from experiments.folder.version import Trust
from experiments.lab.fedas_ablation import steps
from experiments.lab.fedas_ablation.steps import RUNS, AblationRun
from experiments.run import batch, cached_runs, committed

TRUST: Trust = "version"
"""Code whose runs count: as for their records."""


@dataclass(frozen=True, kw_only=True)
class Study(batch.Batch):
    """Command line of the study."""

    results: Folder = None
    """File of the records; by default results/fedas_ablation.jsonl."""
    accept_other_code: Hidden[bool] = False

    name: ClassVar = "lab.fedas_ablation"
    accepts_run_options: ClassVar = False

    def default_folder(self) -> Path:
        return Path("runs/fedas_study")

    @property
    def trust(self) -> Trust:
        return TRUST

    @property
    def file(self) -> Path:
        """File of the records."""
        return self.results or committed.ROOT / "fedas_ablation.jsonl"

    def jobs(self, console: Console) -> list[batch.Job]:
        return [batch.Job(run.cell, self.folder / name, name) for name, run in RUNS.items()]

    def seconds(self, job: batch.Job) -> float | None:
        record = steps.read(RUNS[job.title], self.file)
        return None if record is None else record.get("seconds", 0.0)

    def state(self, job: batch.Job) -> tuple[str, float]:
        return ("missing", 1.0) if self.seconds(job) is None else ("there", 0.0)

    def run(self, jobs: Sequence[batch.Job], console: Console) -> None:
        for job in jobs:
            committed.write(self.file, job.title, measure(RUNS[job.title], job.folder, console))


def measure(run: AblationRun, folder: Path, console: Console) -> steps.Record:
    """Make a run of the ablation in its folder and return its record.

    Raises:
      InvalidInput: the folder holds something else, or the run is refused.
      KeyboardInterrupt: after SIGINT.
    """
    cached_runs.run_cell(run.cell, folder, console, trust=TRUST)
    return steps.from_run(run, folder)


def main(words: Sequence[str] | None = None) -> int:
    """Run the study; return the exit code, see `exit_codes.exit_code`."""
    return batch.command(Study, words)


if __name__ == "__main__":
    leave(main())
