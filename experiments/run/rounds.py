"""A run in progress: counts and records of its rounds."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from experiments.folder import load
from experiments.folder.best_round import PHASE, PHASES, UNTRAINED, final
from experiments.folder.run_folder import (
    METRICS,
    TRAINED_BETWEEN,
    VALIDATION,
    Line,
    RunFolder,
    digest,
    evaluation,
    rounded,
    strict,
)
from experiments.host.console import print_notice
from experiments.run.build import Experiment
from experiments.run.records import identity, info_record
from experiments.spec.choices import FIELD
from experiments.spec.spec import Spec
from pfl_jax.base import Scores
from pfl_jax.engine.communication import bytes_of_round
from pfl_jax.engine.simulate import RoundResult
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.metrics import summarize


@dataclass
class Totals:
    """Counts over the completed rounds of a run, which checkpoints store.

    Attributes:
      diverged: how often a client was left out because it had diverged.
      ended: whether the run diverged while other runs of its program go on; it then has no more scores.
      visits, seconds: examples visited, and time taken, in the rounds since the last evaluation.
      elapsed: run time in seconds, over all processes that continued the run.
      between: means by `trained` of the rounds since the last evaluation, see `run_folder.TRAINED_BETWEEN`.
      starts: numbers of completed rounds when a process began, whose first round includes compilation.
    """

    round: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    diverged: int = 0
    ended: bool = False
    visits: float = 0.0
    seconds: float = 0.0
    elapsed: float = 0.0
    between: list[Line] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Totals":
        """Totals of a checkpoint; further entries, from earlier code, are left out."""
        return cls(**{name: value for name, value in record.items() if name in cls.__dataclass_fields__})


@dataclass
class ActiveRun:
    """A run in progress.

    Attributes:
      lines: its evaluations so far, with the scores of single clients in the last one and in `final` only.
      track: receives each evaluation, see `trackers.open_trackers`; None in processes that write nothing.
    """

    experiment: Experiment
    folder: RunFolder
    counts: Totals = field(default_factory=Totals)
    lines: list[Line] = field(default_factory=list)
    track: Callable[[Line], object] | None = None
    has_warned: bool = False

    @property
    def accuracy(self) -> float | None:
        """Mean of the latest evaluation in percent, by --eval-protocol; None before the first."""
        return self.lines[-1][self.experiment.spec.eval_protocol]["mean"] if self.lines else None

    @property
    def final(self) -> Line:
        """Evaluation whose scores are the results of the run so far, see `best_round.final`."""
        spec = self.experiment.spec
        if spec.patience is None:
            return self.lines[-1]
        primary = self.experiment.counts.task.primary
        return final(self.lines, spec.eval_protocol, spec.patience, higher_is_better=primary.higher_is_better)

    @property
    def over(self) -> str:
        """Number of clients behind `accuracy`, "5 of 8 clients"; "" for all clients."""
        latest = [line[self.experiment.spec.eval_protocol] for line in self.lines[-1:]]
        return load.coverage_text(latest, self.experiment.data.num_clients)

    @property
    def steady_speeds(self) -> list[float]:
        """Examples per second between evaluations. Intervals with a process's first round are left out, unless there
        are no others."""
        before, found = 0, []
        for line in self.lines:
            if not any(before <= start < line["round"] for start in self.counts.starts):
                found.append(line["examples_per_second"])
            before = line["round"]
        return found or [line["examples_per_second"] for line in self.lines]

    def record(self) -> dict[str, Any]:
        """Entries of a checkpoint about the run, for JSON."""
        log = (self.folder.path / METRICS).read_bytes()
        counts = dataclasses.asdict(self.counts)
        return {"counts": counts, "log": [len(log), digest(log)], "identity": identity(self.experiment)}

    def restore(self, record: dict[str, Any] | None, *, cut: bool = True) -> None:
        """Go back to a checkpoint's record, None for the beginning; later lines of the log are cut off."""
        log = self.folder.path / METRICS
        size, expected = record["log"] if record else (0, digest(b""))
        content = log.read_bytes()[:size] if log.is_file() else b""
        if digest(content) != expected:
            raise InvalidInput(f"{log} has changed since the last checkpoint: start the run anew, in another folder")
        if cut:
            with log.open("r+b") as file:
                file.truncate(size)
        self.counts = Totals.of(record["counts"]) if record else Totals()
        self.lines = []
        for line in content.splitlines():
            self._add(json.loads(line))

    def restore_from_log(self) -> bool:
        """Go to the end of a run that lacks only its summary, as after a full disk; return False for other runs."""
        # A run with a damaged log is not complete.
        with contextlib.suppress(InvalidInput):
            self.lines = load.read_metrics(self.folder.path)
        if not self.is_complete:
            self.lines = []
            return False
        last = self.lines[-1]
        self.counts = Totals(last["round"], diverged=last.get("diverged", 0), elapsed=last["seconds"])
        return True

    def add(self, result: RoundResult, elapsed: float) -> None:
        """Count a round, which ended `elapsed` seconds after the run began."""
        counts, sent = self.counts, self.experiment.traffic
        counts.round, counts.elapsed = result.round, elapsed
        up, down = bytes_of_round(sent, result.arrived[self._active(result)], result.info)
        counts.bytes_up, counts.bytes_down = counts.bytes_up + up, counts.bytes_down + down
        counts.diverged += len(result.diverged)
        counts.visits += self.visits(result)
        counts.seconds += result.seconds
        if result.received is None:
            summary = evaluation(result.round, {"trained": result.trained}, self.experiment.counts)["trained"]
            means = {name: summary[name] for name in (*FIELD.values(), "clients")}
            counts.between.append({"round": result.round} | means)

    def _active(self, result: RoundResult) -> np.ndarray:
        """Clients of a round's cohort that do not pause in its phase, bool [M]."""
        active = self.experiment.data_in(result.round).active
        return np.ones(len(result.cohort), bool) if active is None else np.asarray(active)[result.cohort]

    def visits(self, result: RoundResult) -> int:
        """Training examples that the cohort of a round visited."""
        counts = np.asarray(self.experiment.data_in(result.round).train_count)
        return int(visits(self.experiment.spec, counts[result.cohort]).sum())

    def evaluate(self, result: RoundResult) -> None:
        """Record a round's evaluation, also in the log and the trackers."""
        counts, newcomers = self.counts, result.newcomers
        apart = None if newcomers is None else {"received": newcomers[0], "trained": newcomers[1]}
        line = evaluation(result.round, _scores(result), self.experiment.counts_in(result.round), apart)
        line |= self._phases(result)
        line |= {"bytes_up": counts.bytes_up, "bytes_down": counts.bytes_down, "seconds": round(counts.elapsed, 3)}
        line |= {"examples_per_second": rounded(counts.visits / counts.seconds)}
        line["cohort"] = result.cohort.tolist()
        if missing := result.cohort[~result.arrived & self._active(result)].tolist():
            line["missing"] = missing
        if counts.diverged:
            line["diverged"] = counts.diverged
        if info := info_record(result.info):
            line["info"] = info
        if counts.between:
            line[TRAINED_BETWEEN] = {name: [means[name] for means in counts.between] for name in counts.between[0]}
            counts.between = []
        if self.experiment.privacy:
            line["epsilon"] = {budget.unit: budget.epsilon(result.round) for budget in self.experiment.privacy}
        counts.visits, counts.seconds = 0.0, 0.0
        # Epsilon is infinite without noise, and Info may have any numbers, but JSON is strict.
        line = strict(line)
        self._add(line)
        if self.track is not None:
            is_result = self.experiment.spec.patience is not None and self.final is line
            self.folder.log(line, is_last=is_result or self.is_complete)
            self.track(line)

    def _phases(self, result: RoundResult) -> Line:
        """Entries of an evaluation about the phases; empty if the data do not change."""
        data, task = self.experiment.phases, self.experiment.counts.task
        if data is None or result.phases is None or result.untrained is None:
            return {}
        tests = [np.asarray(part.test_count) for part in data.parts]
        means = [
            [rounded(summarize(one, test, task).mean) for one, test in zip(scores, tests, strict=True)]
            for scores in (result.phases, result.untrained)
        ]
        return {PHASE: data.phase_of(result.round - 1), PHASES: means[0], UNTRAINED: means[1]}

    def _add(self, line: Line) -> None:
        whole = [self.final, self.lines[-1]] if self.lines else []
        self.lines.append(line)
        for before in whole:
            if before is not self.final:
                large = {name for name, value in before.items() if name == "info" or isinstance(value, list)}
                for name in large - {PHASES, UNTRAINED}:
                    del before[name]

    def warn(self, result: RoundResult, console: Console) -> None:
        """Name a client whose test loss is not finite, once in a run."""
        losses = [one.name for one in self.experiment.counts.task.scores if not one.higher_is_better]
        for protocol, scores in _scores(result).items() if losses and not self.has_warned else ():
            is_scored = np.any([~np.isnan(values) for values in scores.by_name.values()], axis=0)
            clients = np.flatnonzero(is_scored & ~np.isfinite(scores[losses[0]]))
            if clients.size:
                self.has_warned = True
                more = f" (and {len(clients) - 1} more)" if len(clients) > 1 else ""
                print_notice(
                    console,
                    f"round {result.round}: the test loss of client {clients[0]}{more} is NaN or infinite "
                    f"({protocol}); a prediction of NaN counts as wrong, and training goes on",
                )
                return

    @property
    def is_complete(self) -> bool:
        """Whether no round is left."""
        done = self.lines[-1]["round"] if self.lines else 0
        return done == self.experiment.spec.rounds or self.has_ended()

    def has_reached_target(self) -> bool:
        """Whether the latest evaluation reaches --target-accuracy, on validation examples if there are any."""
        spec, target = self.experiment.spec, self.experiment.spec.target_accuracy
        if target is None or not self.lines:
            return False
        mean = self.lines[-1].get(VALIDATION, self.lines[-1])[spec.eval_protocol]["mean"]
        is_high = self.experiment.counts.task.primary.higher_is_better
        return mean is not None and (mean >= target if is_high else mean <= target)

    def has_ended(self) -> bool:
        """Whether the run stops before its last round: it has reached its target, or its patience has run out."""
        patience = self.experiment.spec.patience if self.lines and VALIDATION in self.lines[-1] else None
        is_over = patience is not None and self.lines[-1]["round"] - self.final["round"] >= patience
        return is_over or self.has_reached_target()


def visits(spec: Spec, counts: np.ndarray) -> np.ndarray:
    """Visits [N] of training examples by clients with `counts` [N] examples in a round; each epoch counts anew."""
    if spec.local_steps is None and not spec.drop_last:
        return counts * spec.hyper_parameters.get("epochs", 1)
    size = spec.hyper_parameters["batch_size"]
    whole = counts - counts % size
    epoch = np.where(spec.drop_last & (whole > 0), whole, counts)
    if spec.local_steps is None:
        return epoch * spec.hyper_parameters["epochs"]
    epochs, steps = np.divmod(spec.local_steps, -(-epoch // size))
    return epochs * epoch + np.minimum(steps * size, epoch)


def _scores(result: RoundResult) -> dict[str, Scores]:
    """Scores of an evaluated round by protocol."""
    assert result.received is not None
    found = {"received": result.received, "trained": result.trained}
    if result.before_aggregation is not None:
        found["before_aggregation"] = result.before_aggregation
    return found
