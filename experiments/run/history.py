"""Completed rounds of a run, as its checkpoints store them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.folder.intact import cut_log, digest
from experiments.folder.run_folder import CONFIG, Counts, Evaluation, Newcomers
from pfl_jax.base import Scores, State
from pfl_jax.engine.checkpoint import Checkpoints
from pfl_jax.engine.communication import Traffic
from pfl_jax.errors import InvalidInput
from pfl_jax.tasks import Task


@dataclass
class History:
    """Completed rounds of a run.

    Attributes:
      evaluations: all of them.
      wasted: each round's share of wasted gradient steps.
      idle: each round's share of the time in which devices wait for another.
      bytes_up, bytes_down: sent by and to all clients so far.
      diverged: how often a client was left out because it had diverged.
      visits, seconds: examples visited, and time taken, in the rounds since the last evaluation.
      elapsed: since the run began, of all processes that had a part in it.
      starts: rounds completed when a process began its part; its first round includes compilation.
      state: to resume from; None at the start.
    """

    evaluations: list[Evaluation] = field(default_factory=list)
    wasted: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0
    diverged: int = 0
    visits: float = 0.0
    seconds: float = 0.0
    elapsed: float = 0.0
    starts: list[int] = field(default_factory=list)
    state: State | None = None

    @property
    def round(self) -> int:
        """Last completed round."""
        return len(self.wasted)

    @property
    def steady_speeds(self) -> list[float]:
        """Examples per second between evaluations, without intervals that have a process's first round; of all
        intervals if there are no others."""
        before, found = 0, []
        for one in self.evaluations:
            if not any(before <= start < one.round for start in self.starts):
                found.append(one.examples_per_second)
            before = one.round
        return found or [one.examples_per_second for one in self.evaluations]

    def add(self, visits: float, seconds: float, elapsed: float) -> None:
        """Count a round: examples visited, its wall time, and the time since the run began."""
        self.visits += visits
        self.seconds += seconds
        self.elapsed = elapsed

    def send(self, sent: Traffic, arrived: np.ndarray) -> None:
        """Count what a round's clients [M] were sent, and what those sent that arrived."""
        self.bytes_up += sent.up * int(arrived.sum())
        self.bytes_down += sent.down * len(arrived)

    def evaluate(
        self,
        number: int,
        received: Scores,
        trained: Scores,
        counts: Counts,
        *,
        newcomers: tuple[Scores, Scores] | None = None,
        before_aggregation: Scores | None = None,
    ) -> Evaluation:
        """Add the evaluation of a round, and start the next interval between evaluations.

        Args:
          number: of the round.
          received, trained, newcomers, before_aggregation: see `pfl_jax.simulate.RoundResult`.
          counts: of the clients' examples.
        """
        evaluation = Evaluation(
            round=number,
            received=received,
            trained=trained,
            test_counts=counts.test,
            seconds=self.elapsed,
            examples_per_second=self.visits / self.seconds,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            newcomers=_newcomers(newcomers, counts),
            before_aggregation=before_aggregation,
            validation_counts=counts.validation,
            attackers=counts.attackers,
            task=counts.task,
        )
        self.evaluations.append(evaluation)
        self.visits, self.seconds = 0.0, 0.0
        return evaluation

    def save(
        self,
        checkpoints: Checkpoints,
        state: State,
        log: Path,
        identity: dict[str, Any],
        clients: np.ndarray | None = None,
    ) -> None:
        """Write a checkpoint after a round; CannotWrite on failure.

        Args:
          checkpoints: of the run.
          state: after the round.
          log: the metrics written so far.
          identity: see `records.identity`.
          clients: see `Checkpoints.save`.
        """
        content = log.read_bytes()
        record = {"metrics_bytes": len(content), "metrics_digest": digest(content), "identity": identity}
        checkpoints.save(state, self.arrays(), record, clients)

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything except the state, for a checkpoint."""
        arrays: dict[str, np.ndarray] = {
            "wasted": np.array(self.wasted, np.float64),
            "idle": np.array(self.idle, np.float64),
            "since": np.array([self.visits, self.seconds, self.elapsed], np.float64),
            "sent": np.array([self.bytes_up, self.bytes_down, self.diverged], np.int64),
            "starts": np.array(self.starts, np.int64),
        }
        for name in _STORED:
            values = [_stored(getattr(evaluation, name), evaluation.task) for evaluation in self.evaluations]
            arrays[name] = np.array([np.zeros(0) if value is None else value for value in values])
        return arrays

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], counts: Counts, state: State | None = None) -> "History":
        """Restore the history from the result of `arrays`.

        Args:
          arrays: as `arrays` returns them.
          counts: of the clients' examples, which are not stored.
          state: that belongs to it.
        """
        columns = [arrays[name] for name in _STORED]
        rows = (dict(zip(_STORED, values, strict=True)) for values in zip(*columns, strict=True))
        evaluations = [_evaluation(row, counts) for row in rows]
        visits, seconds, elapsed = map(float, arrays["since"])
        up, down, diverged = map(int, arrays["sent"])
        wasted, idle, starts = (arrays[name].tolist() for name in ("wasted", "idle", "starts"))
        return cls(evaluations, wasted, idle, up, down, diverged, visits, seconds, elapsed, starts, state)

    @classmethod
    def restore(
        cls,
        checkpoints: Checkpoints,
        like: State,
        log: Path,
        identity: dict[str, Any],
        notify: Callable[[str], None],
        *,
        counts: Counts,
        clients: np.ndarray | None = None,
        cut: bool = True,
    ) -> "History":
        """Restore the run at its newest good checkpoint and cut off later lines of the log, which are written anew.

        A run that was killed before its first checkpoint begins anew.

        Args:
          checkpoints: of the run.
          like: shapes of its state.
          log: the metrics.
          identity: of the run, see `records.identity`.
          notify: receives a note if the run begins anew, or its last bits may differ from an uninterrupted run's.
          counts: see `from_arrays`.
          clients: see `Checkpoints.newest`.
          cut: False leaves the log to the process that writes it.

        Raises:
          InvalidInput: no checkpoint can be read, or it is that of another run, or the log is not the one it was.
        """

        def check(record: dict[str, Any]) -> None:
            check_identity(record["identity"], identity, checkpoints.folder, notify)

        found = checkpoints.newest(like, check, clients)
        if found is None:
            notify(f"No checkpoint was written to {checkpoints.folder}: the run begins anew.")
            cut_log(log, 0, cut=cut)
            return cls()
        cut_log(log, found.record["metrics_bytes"], found.record["metrics_digest"], cut=cut)
        return cls.from_arrays(found.arrays, counts, found.state)


_STORED = [name for name in Evaluation._fields if not name.endswith("_counts") and name not in ("attackers", "task")]
"""What a checkpoint has of an evaluation; numbers of the clients' examples, attackers and task come with the run."""


def _stored(value: Any, task: Task) -> Any:
    """The S scores of a task as an array: [S, N], [2 S, N] with validation examples, or [2, S, N'] for new clients."""
    if isinstance(value, Newcomers):
        return np.array([_stored(value.received, task), _stored(value.trained, task)])
    if not isinstance(value, Scores):
        return value
    return np.array([part[one.name] for part in (value, value.validation) if part for one in task.scores])


def _scores(stored: np.ndarray, task: Task) -> Scores:
    """Scores from an array of `_stored`."""
    names = [one.name for one in task.scores]
    test, validation = stored[: len(names)], stored[len(names) :]
    return Scores(
        dict(zip(names, test, strict=True)),
        Scores(dict(zip(names, validation, strict=True))) if len(validation) else None,
    )


def _newcomers(scores: tuple[Scores, Scores] | None, counts: Counts) -> Newcomers | None:
    return None if scores is None or counts.newcomers is None else Newcomers(*scores, counts.newcomers)


def _evaluation(row: dict[str, np.ndarray], counts: Counts) -> Evaluation:
    """Evaluation from stored arrays."""
    newcomers, middle, scores = row["newcomers"], row["before_aggregation"], partial(_scores, task=counts.task)
    return Evaluation(
        round=int(row["round"]),
        received=scores(row["received"]),
        trained=scores(row["trained"]),
        test_counts=counts.test,
        seconds=float(row["seconds"]),
        examples_per_second=float(row["examples_per_second"]),
        bytes_up=int(row["bytes_up"]),
        bytes_down=int(row["bytes_down"]),
        newcomers=_newcomers((scores(newcomers[0]), scores(newcomers[1])), counts) if newcomers.size else None,
        before_aggregation=scores(middle) if middle.size else None,
        validation_counts=counts.validation,
        attackers=counts.attackers,
        task=counts.task,
    )


def check_identity(stored: dict[str, Any], own: dict[str, Any], folder: Path, notify: Callable[[str], None]) -> None:
    """Refuse the checkpoints of another run; notify where only the last bits may differ."""
    for name, value in json.loads(json.dumps(own["run"])).items():
        found = stored["run"].get(name, value)
        if found != value:
            raise InvalidInput(
                f"the checkpoints in {folder} are of another run: they were written with {name} {found}, {CONFIG} has "
                f"{value}"
            )
    began, now = stored["made_with"], own["made_with"]
    changed = [
        f"{name} {began[name]} then and {now[name]} now" for name in now if began.get(name, now[name]) != now[name]
    ]
    if changed:
        notify(f"Note: {', '.join(changed)}: results may differ in their last bits from an uninterrupted run's.")
