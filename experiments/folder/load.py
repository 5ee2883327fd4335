"""Reading of a run's files, and inspection of a folder that may hold a run."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.folder.best_round import evaluations, final, phase_summary
from experiments.folder.run_folder import (
    CONFIG,
    DIGESTS,
    KEPT,
    METRICS,
    SUMMARY,
    RunFolder,
    digest,
    digest_of_content,
    lock_run,
)
from experiments.folder.version import ComparedCode, by_other_code
from experiments.spec.choices import FIELD, PROTOCOLS, WITH_FILES, Average, Protocol, ReportedRound
from experiments.spec.identity import difference, relevant_options
from experiments.spec.own_code import read as read_file
from experiments.spec.spec import Spec
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints
from pfl_jax.errors import InvalidInput
from pfl_jax.frames import read_json, read_metrics, task_of


def read_summary(folder: str | Path) -> dict[str, Any]:
    """Summary of a finished run; InvalidInput if it cannot be read, or a file of the run has been changed."""
    folder = Path(folder)
    summary = read_json(folder / SUMMARY)
    digests = summary.get(DIGESTS, {})
    # A summary that was written by hand has no digests, and nothing is checked.
    for name in (SUMMARY, CONFIG, METRICS) if digests else ():
        found = digest_of_content(summary) if name == SUMMARY else digest(read_file(folder / name))
        if not isinstance(digests, dict) or found != digests.get(name):
            raise InvalidInput(
                f"{folder / name} was changed after it was written: remove its folder, and do the run again"
            )
    return summary


def read_config(folder: str | Path) -> dict[str, Any]:
    return read_json(Path(folder) / CONFIG)


def protocols_of(line: dict[str, Any]) -> list[Protocol]:
    """Protocols of an evaluation."""
    return [protocol for protocol in PROTOCOLS if isinstance(line.get(protocol), dict)]


def coverage_text(summaries: Iterable[Mapping[str, Any]], everyone: int) -> str:
    """Number of clients behind the means of some evaluations, "5 of 8 clients"; "" if it is always `everyone`."""
    # Without any client there is no mean.
    counts = [summary["clients"] for summary in summaries if summary.get("clients")]
    if all(count == everyone for count in counts):
        return ""
    return f"{' to '.join(map(str, sorted({min(counts), max(counts)})))} of {everyone} clients"


@dataclass(frozen=True)
class StoredRun:
    """A stored run, whose results depend on the setting and the seed.

    Attributes:
      path: its folder.
      config: content of config.json.
      lines: its evaluations in order.
      summary: content of summary.json; None for an unfinished run.
      main_protocol: protocol that is reported first; None for the run's --eval-protocol.
    """

    path: Path
    config: dict[str, Any]
    lines: list[dict[str, Any]]
    summary: dict[str, Any] | None
    main_protocol: Protocol | None = None

    @functools.cached_property
    def spec(self) -> Spec:
        return Spec.stored(self.config)

    @functools.cached_property
    def setting(self) -> dict[str, Any]:
        """Options on which the results depend, except the seed."""
        return {"dataset": self.spec.dataset} | relevant_options(self.spec)

    @property
    def data(self) -> str:
        return self.config["data"]["description"]

    @property
    def data_name(self) -> str:
        """Name of the data: "cifar10", "cifar10, JPEG copy"; for a stand-in or a user's own data, their description."""
        if not self.is_real or self.spec.dataset in WITH_FILES:
            return self.data
        return ", ".join(filter(None, (self.spec.dataset, self.config["data"].get("note"))))

    @property
    def is_real(self) -> bool:
        return bool(self.config["data"]["is_real"])

    @property
    def everyone(self) -> int:
        """Number of clients that take part, without held-out clients."""
        return len(self.config.get("train_examples", ())) or self.spec.num_clients - self.spec.held_out_clients

    @property
    def task(self) -> dict[str, Any]:
        """Scores, see `pfl_jax.frames.task_of`."""
        return task_of(self.config)

    @property
    def axis(self) -> str:
        """Name of the primary score with its unit: "accuracy in %", "mse"."""
        name, *_ = self.task["scores"]
        return f"{name} in %" if name in self.task["in_percent"] else name

    @property
    def headline(self) -> Protocol:
        return self.main_protocol or self.spec.eval_protocol

    @property
    def seed(self) -> int:
        return self.spec.seed

    @property
    def round(self) -> int:
        """Round of the last evaluation; 0 before the first."""
        return self.lines[-1]["round"] if self.lines else 0

    @property
    def final(self) -> dict[str, Any]:
        """Evaluation whose scores are the results, see `best_round.final`."""
        higher = self.task["higher_is_better"]
        return final(self.lines, self.spec.eval_protocol, self.spec.patience, higher_is_better=higher)

    @property
    def phases(self) -> dict[str, float]:
        """Measures of a run whose data change, see `best_round.phase_summary`."""
        return phase_summary(self.lines, higher_is_better=self.task["higher_is_better"])

    @property
    def state(self) -> str:
        if self.summary is not None:
            return "finished"
        return f"unfinished: round {self.round} of {self.spec.rounds}"

    @property
    def seconds(self) -> float:
        """Run time of a finished run in seconds; runs that trained together share their time equally."""
        return (self.summary or {}).get("seconds", 0.0) / self.config.get("runs_together", 1)

    def accuracy(self, protocol: Protocol, score: ReportedRound = "last", average: Average = "clients") -> float | None:
        """Mean accuracy in percent, or other primary score, in the last or the best round; None if no client has one.

        With --patience, it is always the kept round.
        """
        means, line = self.curve(protocol, average), self.final
        if score == "last" or line is not self.lines[-1]:
            return means[self.lines.index(line)]
        known = [
            mean for one in evaluations(self.lines, protocol) if (mean := one[protocol][FIELD[average]]) is not None
        ]
        return self.best(known) if known else None

    def best(self, means: Iterable[float]) -> float:
        """Best of some means of the primary score."""
        return max(means) if self.task["higher_is_better"] else min(means)

    def curve(self, protocol: Protocol, average: Average = "clients") -> list[float | None]:
        """Mean accuracies [R] in percent, as in `accuracy`."""
        name = FIELD[average]
        if not all(name in line.get(protocol, {}) for line in self.lines):
            missing = f"{protocol}, {name}" if protocol in self.lines[-1] else protocol
            raise InvalidInput(f"{self.path} has no accuracies by {missing}: remove this folder, and do the run again")
        return [line[protocol][name] for line in self.lines]


def read(folder: Path, main_protocol: Protocol | None = None) -> StoredRun:
    """Run in a folder; `main_protocol` is reported first, by default the run's --eval-protocol."""
    config = read_config(folder)
    # Read before the lines: a run that finishes in between counts as unfinished.
    summary = read_summary(folder) if (folder / SUMMARY).exists() else None
    run = StoredRun(folder, config, read_metrics(folder), summary, main_protocol)
    try:
        # These raise an error if an edited configuration lacks an entry.
        _ = run.setting, run.data, run.is_real
    except (KeyError, TypeError, AttributeError):
        raise InvalidInput(f"{folder / CONFIG} is not the configuration of a run") from None
    if not all("round" in line and "received" in line for line in run.lines):
        raise InvalidInput(f"{folder / METRICS} is not the log of a run")
    return run


State = Literal["absent", "unfinished", "finished", "of other code"]


def inspect(spec: Spec, folder: str | Path, compared: ComparedCode = "sources") -> State:
    """State of a run in a folder; InvalidInput if the folder holds another run, or cannot be read."""
    folder = Path(folder)
    is_finished = (folder / SUMMARY).exists()
    if not (folder / CONFIG).exists() and not is_finished:
        return "unfinished" if (folder / METRICS).exists() else "absent"
    config = read_config(folder)
    try:
        differs = difference(spec, config, finished=is_finished)
    except KeyError as error:
        raise InvalidInput(f"{folder / CONFIG} has no {error}: give --out another folder") from None
    if differs:
        raise InvalidInput(f"{folder} holds another run ({differs}), which is never overwritten: give --out another")
    if by_other_code(config, compared):
        return "of other code"
    is_kept = any(Checkpoints(folder / name).rounds() for name in (FOLDER, KEPT))
    if is_finished and spec.keep_state == "always" and not is_kept:
        raise InvalidInput(f"{folder} holds the run, which kept no state: --keep-state always needs another --out")
    return "finished" if is_finished else "unfinished"


def continued(spec: Spec) -> Spec:
    """Prepare a run that is absent or unfinished in its folder `out`: it resumes from checkpoints, or begins anew."""
    folder = Path(str(spec.out))
    if Checkpoints(folder / FOLDER).rounds():
        return dataclasses.replace(spec, resume=str(folder))
    if (folder / METRICS).exists():
        try:
            with lock_run(folder):
                RunFolder(folder).clear()
        except OSError as error:
            raise InvalidInput(f"cannot clear {folder}: {error.strerror or error}") from None
    return spec
