"""The premise of FedAS's synchronization: that stragglers have smaller Fisher traces, and therefore weigh less.

    python -m experiments.lab.fedas_ablation.premise --data-dir DIR

DIR has CIFAR-10's binary files; Fashion-MNIST's are where Debian has them. Half of the 20 clients are stragglers, drawn
at a tenth of the others' weight; everyone is in the last round. Learning rate, batch size, network, partition and
rounds are the paper's, the clients are smaller: 8 runs, an hour on two quiet cores. The command resumes where it
stopped; each run leaves a line in results/premise.jsonl, of which `python -m experiments.lab.pages` makes a part of
docs/fedas.md.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import numpy as np
from rich.console import Console

from experiments.cli import batch
from experiments.cli.parser import Folder
from experiments.cli.request import RunCommand
from experiments.folder import load
from experiments.host.exit_codes import leave
from experiments.lab.fedas_ablation import measured
from experiments.run import cached_runs, committed
from pfl_jax.engine.cohort import stragglers

CLIENTS, ROUNDS, STRAGGLERS, SEED = 20, 40, 0.5, 0
DATASETS = ("fashion_mnist", "cifar10")
TRACES = ("example", "batch_means", "model")
"""Definitions of a client's trace, see `measured`."""
WEIGHED_BY = ("example", "size", "batch_means", "model")

WORDS = (
    *("--preset", "fedas", "--method", f"{measured.__file__}:fedas_measured", "--num-clients", str(CLIENTS)),
    *("--partition", "dirichlet", "--beta", "0.1", "--train-size", "200", "--test-size", "150"),
    *("--participation", "0.4", "--straggler-fraction", str(STRAGGLERS), "--straggler-rate", "0.1"),
    *("--full-last-round", "--rounds", str(ROUNDS), "--eval-every", "2", "--source", "files"),
)

Record: TypeAlias = dict[str, Any]


class Run(NamedTuple):
    """A run: dataset, and what clients are weighed by."""

    dataset: str
    weighed_by: str

    @property
    def name(self) -> str:
        """Name of the folder and of the record."""
        return f"{self.dataset}-{self.weighed_by}"

    def cell(self, data_dir: str | None = None) -> RunCommand:
        """The run's command line."""
        files = () if data_dir is None or self.dataset != "cifar10" else ("--data-dir", data_dir)
        return RunCommand(self.dataset, (*WORDS, "--weighed-by", self.weighed_by, *files), SEED)


RUNS = {run.name: run for run in (Run(dataset, one) for one, dataset in itertools.product(WEIGHED_BY, DATASETS))}


@dataclass(frozen=True, kw_only=True)
class Premise(batch.Batch):
    """Command line."""

    data_dir: str | None = None
    """Folder of CIFAR-10's files."""
    results: Folder = None
    """File of the records; by default results/premise.jsonl."""

    name: ClassVar = "lab.fedas_ablation.premise"
    accepts_run_options: ClassVar = False

    def default_folder(self) -> Path:
        return Path("runs/premise")

    @property
    def file(self) -> Path:
        """File of the records."""
        return self.results or committed.ROOT / "premise.jsonl"

    def jobs(self, console: Console) -> list[batch.Job]:
        every = [(run.cell(self.data_dir), name) for name, run in RUNS.items()]
        return [batch.Job(cell, self.folder / name, name) for cell, name in every]

    def seconds(self, job: batch.Job) -> float | None:
        record = committed.read(self.file).get(job.title)
        return None if record is None else record["seconds"]

    def state(self, job: batch.Job) -> tuple[str, float]:
        return super().state(job) if self.seconds(job) is None else ("there", 0.0)

    def run(self, jobs: Sequence[batch.Job], console: Console) -> None:
        for job in jobs:
            checkpoints = (*job.cell.arguments, "--checkpoint-every", "5", "--devices", "1")
            cached_runs.run_cell(replace(job.cell, arguments=checkpoints).spec(), job.folder, console, trust=self.trust)
            committed.write(self.file, job.title, record(job.folder))


def record(folder: Path) -> Record:
    """Record of a finished run, from its folder."""
    config, lines = load.read_config(folder), load.read_metrics(folder)
    return {
        "options": {name: config["hyper_parameters"][name] for name in ("lr", "batch_size", "epochs", "weighed_by")},
        "data": config["data"]["description"],
        "versions": {name: config["versions"][name] for name in ("pfl_jax", "jax", "jaxlib", "python")},
        "train_examples": config["train_examples"],
        "is_straggler": np.asarray(stragglers(jax.random.key(SEED), CLIENTS, STRAGGLERS)).tolist(),
        **{name: [line[name] for line in lines] for name in ("round", "cohort")},
        **{name: [line["info"][name] for line in lines] for name in ("weights", *TRACES)},
        **{name: lines[-1][f"{name}_per_client"] for name in ("received", "trained")},
        "seconds": lines[-1]["seconds"],
    }


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code, see `exit_codes.exit_code`."""
    return batch.command(Premise, words)


if __name__ == "__main__":
    leave(main())
