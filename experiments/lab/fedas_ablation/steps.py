"""Steps between FedPer and FedAS as released, the runs that measure them, and a record with the curves of each."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from experiments.cli.request import RunCommand
from experiments.folder import load
from experiments.folder.run_folder import rounded
from experiments.folder.version import method_version
from experiments.run import committed
from pfl_jax.errors import InvalidInput

PARTICIPATION, SEEDS = (0.2, 1.0), (0, 1, 2)

COMMON = (
    *("--preset", "fedas", "--num-clients", "20", "--partition", "dirichlet", "--beta", "0.1", "--rounds", "15"),
    *("--train-size", "200", "--test-size", "150", "--lr", "0.05", "--batch-size", "16", "--eval-every", "1"),
)
"""The setting of all runs: shorter than the paper's, with a larger learning rate in return."""

SOURCES = {"cifar100": "embedded", "fashion_mnist": "files"}
"""dataset -> source of its examples."""

EVERY_BATCH = ("--no-drop-last", "--shuffle")
RELEASED_BATCHES = ("--drop-last", "--no-shuffle")


@dataclass(frozen=True)
class Step:
    """Step of the ablation.

    Attributes:
      letter: its name in figures.
      name: its name in file names.
      title: its name in tables; for FedAS, its difference from the step before.
      words: options of the run.
      in_place: whether clients align one shared backbone, see `experiments.run.in_place`.
    """

    letter: str
    name: str
    title: str
    words: tuple[str, ...]
    in_place: bool = False


def _fedas(count: int) -> tuple[str, ...]:
    """FedAS with the first `count` choices of the release."""
    choices = (
        RELEASED_BATCHES,
        ("--target", "class_mean", "--align-loss", "class_sum"),
        ("--reduction", "batch_means"),
        ("--first-alignment",),
    )
    words = choices[:count] if count else (EVERY_BATCH,)
    return ("--method", "fedas", *itertools.chain.from_iterable(words))


STEPS = (
    Step("a", "fedper", "FedPer", ("--method", "fedper", *EVERY_BATCH)),
    Step("b", "fedper-batches", "FedPer, batches as released", ("--method", "fedper", *RELEASED_BATCHES)),
    Step("c", "fedas", "FedAS as printed", _fedas(0)),
    Step("d", "fedas-batches", "+ incomplete batches dropped, fixed order", _fedas(1)),
    Step("e", "fedas-class-sum", "+ alignment with class means, summed over classes", _fedas(2)),
    Step("f", "fedas-batch-traces", "+ traces of batch means", _fedas(3)),
    Step("g", "fedas-first-alignment", "+ first alignment with the initial backbone", _fedas(4)),
    Step("h", "fedas-in-place", "+ alignment in place, client after client (released)", _fedas(4), in_place=True),
)


class AblationRun(NamedTuple):
    """One run of the ablation.

    Attributes:
      dataset, participation, seed: of the run.
      step: of STEPS.
    """

    dataset: str
    participation: float
    step: Step
    seed: int

    @property
    def name(self) -> str:
        """Name of the folder and of the record."""
        return f"{self.dataset}-participation{self.participation:g}-{self.step.name}-seed{self.seed}"

    @property
    def cell(self) -> RunCommand:
        """The run's command line."""
        arguments = (
            *self.step.words,
            *COMMON,
            *("--participation", f"{self.participation:g}", "--source", SOURCES[self.dataset]),
            *("--procedure", "release" if self.step.in_place else "print"),
        )
        return RunCommand(self.dataset, arguments, self.seed)

    @property
    def command(self) -> str:
        """Shell command of the run, the same on every machine."""
        return self.cell.command(Path("runs") / self.name)


RUNS = {
    run.name: run
    for run in (
        AblationRun(dataset, share, step, seed)
        for seed, share, dataset, step in itertools.product(SEEDS, PARTICIPATION, SOURCES, STEPS)
    )
}
"""Name -> run, all steps before the next participation, dataset and seed."""

MEASURES = ("received", "received_of_trained", "trained", "before_aggregation")
"""`received` and `trained` as everywhere; received_of_trained is `received` of the clients that `trained` is of, those
with a training behind them; before_aggregation is how the released FedPer is tested: members of the round's cohort with
the model that they have trained, all others with what they received at the start of the round."""

Record: TypeAlias = dict[str, Any]


def from_run(run: AblationRun, folder: Path) -> Record:
    """Record of a finished run that was evaluated in every round, from its folder.

    Raises:
      InvalidInput: the folder cannot be read, or lacks rounds.
    """
    config, lines = load.read_config(folder), load.read_metrics(folder)
    rounds = [line["round"] for line in lines]
    if rounds != list(range(1, config["options"]["rounds"] + 1)):
        raise InvalidInput(f"{folder} has not every round: remove it, and it is made again")
    sizes = np.array(config["test_examples"], np.float64)
    curves = _curves(lines)
    return {
        "study": "fedas",
        "dataset": run.dataset,
        "step": run.step.name,
        "participation": run.participation,
        "seed": run.seed,
        "command": run.command,
        "data": config["data"]["description"],
        "versions": {name: config["versions"][name] for name in ("pfl_jax", "jax", "jaxlib", "python")},
        "version": config["method_version"],
        "test_examples": int(sizes.sum()),
        "rounds": rounds,
        **{name: {"mean": _means(rows), "pooled": _means(rows, sizes)} for name, rows in curves.items()},
        "clients_trained": (~np.isnan(curves["trained"])).sum(1).tolist(),
        "seconds": lines[-1]["seconds"],
    }


def _curves(lines: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Accuracies [rounds, N] in percent by each measure; NaN where a client has none."""
    received, trained = (
        np.array([line[f"{name}_per_client"] for line in lines], np.float64) for name in ("received", "trained")
    )
    # The model that a client receives in a round is the one that it would deploy after the round before.
    before = np.concatenate([np.full((1, received.shape[1]), np.nan), received[:-1]])
    for row, line in zip(range(len(lines)), lines, strict=True):
        before[row, line["cohort"]] = trained[row, line["cohort"]]
    if np.isnan(before[0]).any():
        # What the others had before the first round was not measured.
        before[0] = np.nan
    of_trained = np.where(np.isnan(trained), np.nan, received)
    return dict(zip(MEASURES, (received, of_trained, trained, before), strict=True))


def _means(rows: np.ndarray, sizes: np.ndarray | None = None) -> list[float | None]:
    """Mean of each row over the clients that have a value, weighted by sizes [N]; None if no client has one."""
    weights = np.where(np.isnan(rows), 0.0, 1.0 if sizes is None else sizes)
    totals = weights.sum(1)
    means = (np.nan_to_num(rows) * weights).sum(1) / np.where(totals > 0, totals, 1.0)
    return [rounded(float(mean)) if total > 0 else None for mean, total in zip(means, totals, strict=True)]


def read(run: AblationRun, file: Path) -> Record | None:
    """Stored record of a run; None if there is none with its options and today's version of its method.

    Raises:
      InvalidInput: the file cannot be read.
    """
    record = committed.read(file).get(run.name)
    if record is None or _arguments(record["command"]) != _arguments(run.command):
        return None
    return record if record["version"] == method_version(run.cell.request().options.method) else None


def _arguments(command: str) -> list[str]:
    """Options of a command; of the procedure only what it stands for, since earlier commands have no name for it."""
    words = command.replace(" --procedure print", "").replace(" --procedure release", "").split()[3:]
    # The data set was once an argument of the released procedure.
    return [word for word in words if word not in SOURCES]


def value(record: Record, measure: str, average: str, score: str) -> float | None:
    """One of MEASURES in percent: "mean" over clients or "pooled" over test examples, in the "last" or "best" round."""
    curve = record[measure][average]
    if score == "last":
        return curve[-1]
    return max((number for number in curve if number is not None), default=None)
