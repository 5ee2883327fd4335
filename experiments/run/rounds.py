"""Rounds of one run, or of several runs that share a program, and their records."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Console

from experiments.folder import load
from experiments.folder.best_round import PHASES, UNTRAINED, final
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
from experiments.host.console import RoundProgress, print_line, print_notice
from experiments.host.distributed import Processes
from experiments.host.exit_codes import Stop
from experiments.run.build import Experiment
from experiments.run.changing import phase_record
from experiments.run.records import configuration, identity, info_record
from experiments.spec.choices import FIELD
from experiments.spec.spec import Spec
from pfl_jax.base import Scores, State
from pfl_jax.engine.communication import bytes_of_round
from pfl_jax.engine.simulate import RoundResult
from pfl_jax.errors import InvalidInput


@dataclass
class Totals:
    """Counts over the completed rounds of a run, which a checkpoint has.

    Attributes:
      diverged: how often a client was left out because it had diverged.
      ended: whether the run diverged among others, which go on: it has no scores any more.
      visits, seconds: examples visited, and time taken, in the rounds since the last evaluation.
      elapsed: seconds since the run began, of all processes that had a part in it.
      between: means by `trained` of the rounds since the last evaluation, see `run_folder.TRAINED_BETWEEN`.
      starts: rounds completed when a process began its part; its first round includes compilation.
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
        """Totals of a checkpoint; earlier code may have written further ones, which are left out."""
        return cls(**{name: value for name, value in record.items() if name in cls.__dataclass_fields__})


@dataclass
class ActiveRun:
    """A run in progress.

    Attributes:
      lines: its evaluations so far, with the scores of single clients in the last one and in `final` only.
      track: receives each evaluation, see `trackers.open_trackers`; None in processes that write nothing.
      is_finished: whether its folder has all results already; then nothing is written there.
    """

    experiment: Experiment
    folder: RunFolder
    counts: Totals = field(default_factory=Totals)
    lines: list[Line] = field(default_factory=list)
    track: Callable[[Line], object] | None = None
    is_finished: bool = False
    has_warned: bool = False

    @property
    def accuracy(self) -> float | None:
        """Mean of the latest evaluation in percent, by --eval-protocol; None before the first."""
        return self.lines[-1][self.experiment.spec.eval_protocol]["mean"] if self.lines else None

    @property
    def final(self) -> Line:
        """Evaluation whose scores are the results of the run as it is now, see `best_round.final`."""
        spec = self.experiment.spec
        if spec.patience is None:
            return self.lines[-1]
        primary = self.experiment.counts.task.primary
        return final(self.lines, spec.eval_protocol, spec.patience, higher_is_better=primary.higher_is_better)

    @property
    def over(self) -> str:
        """Over how many clients `accuracy` is, "5 of 8 clients"; "" where over all."""
        latest = [line[self.experiment.spec.eval_protocol] for line in self.lines[-1:]]
        return load.coverage_text(latest, self.experiment.data.num_clients)

    @property
    def steady_speeds(self) -> list[float]:
        """Examples per second between evaluations, without intervals that have a process's first round; of all
        intervals if there are no others."""
        before, found = 0, []
        for line in self.lines:
            if not any(before <= start < line["round"] for start in self.counts.starts):
                found.append(line["examples_per_second"])
            before = line["round"]
        return found or [line["examples_per_second"] for line in self.lines]

    def tracked(self, stack: contextlib.ExitStack) -> Callable[[Line], object]:
        """Receiver of the run's evaluations beside its log, until the stack's end."""
        spec = self.experiment.spec
        if not (spec.tensorboard or spec.wandb or spec.tracker):
            return lambda line: None
        # Imported now: most runs have none.
        from experiments.run.trackers import open_trackers

        return stack.enter_context(open_trackers(self.folder, spec, configuration(self.experiment)))

    def record(self) -> dict[str, Any]:
        """Entries of a checkpoint about the run, for JSON."""
        log = (self.folder.path / METRICS).read_bytes()
        counts = dataclasses.asdict(self.counts)
        return {"counts": counts, "log": [len(log), digest(log)], "identity": identity(self.experiment)}

    def restore(self, record: dict[str, Any] | None, *, cut: bool = True) -> None:
        """Go back to a checkpoint's record, None for the beginning: later lines of the log are cut off, and are written
        anew."""
        log = self.folder.path / METRICS
        size, expected = record["log"] if record else (0, digest(b""))
        content = log.read_bytes()[:size] if log.is_file() else b""
        if digest(content) != expected:
            raise InvalidInput(f"{log} is not as it was at the last checkpoint: start the run anew, in another folder")
        if cut:
            with log.open("r+b") as file:
                file.truncate(size)
        self.counts = Totals.of(record["counts"]) if record else Totals()
        self.lines = []
        for line in content.splitlines():
            self._add(json.loads(line))

    def restore_from_log(self) -> bool:
        """Go to the end of a run that lacks its summary alone, as after a full disk; whether it is such a run."""
        # A damaged log is of no run that could end.
        with contextlib.suppress(InvalidInput):
            self.lines = load.read_metrics(self.folder.path)
        if not self.is_complete:
            self.lines = []
            return False
        last = self.lines[-1]
        self.counts = Totals(last["round"], diverged=last.get("diverged", 0), elapsed=last["seconds"])
        return True

    def add(self, result: RoundResult, seconds: float, elapsed: float) -> None:
        """Count a round of so many seconds, that ended so long after the run began."""
        counts, sent = self.counts, self.experiment.traffic
        counts.round, counts.elapsed = result.round, elapsed
        up, down = bytes_of_round(sent, result.arrived, result.info)
        counts.bytes_up, counts.bytes_down = counts.bytes_up + up, counts.bytes_down + down
        counts.diverged += len(result.diverged)
        counts.visits += self.visits(result)
        counts.seconds += seconds
        if result.received is None:
            summary = evaluation(result.round, {"trained": result.trained}, self.experiment.counts)["trained"]
            means = {name: summary[name] for name in (*FIELD.values(), "clients")}
            counts.between.append({"round": result.round} | means)

    def visits(self, result: RoundResult) -> int:
        """Training examples that the cohort of a round visited."""
        counts = np.asarray(self.experiment.data_in(result.round).train_count)
        return int(visits(self.experiment.spec, counts[result.cohort]).sum())

    def evaluate(self, result: RoundResult) -> None:
        """Record a round's evaluation, in the log and the trackers too."""
        counts, newcomers = self.counts, result.newcomers
        apart = None if newcomers is None else {"received": newcomers[0], "trained": newcomers[1]}
        counts_now = self.experiment.counts_in(result.round)
        line = evaluation(result.round, _scores(result), counts_now, apart)
        line |= phase_record(result, self.experiment.phases, counts_now.task)
        line |= {"bytes_up": counts.bytes_up, "bytes_down": counts.bytes_down, "seconds": round(counts.elapsed, 3)}
        line |= {"examples_per_second": rounded(counts.visits / counts.seconds)}
        line["cohort"] = result.cohort.tolist()
        if missing := result.cohort[~result.arrived].tolist():
            line["missing"] = missing
        if counts.diverged:
            line["diverged"] = counts.diverged
        if info := info_record(result.info):
            line["info"] = info
        if counts.between:
            line[TRAINED_BETWEEN] = {name: [one[name] for one in counts.between] for name in counts.between[0]}
            counts.between = []
        if self.experiment.privacy:
            line["epsilon"] = {budget.unit: budget.epsilon(result.round) for budget in self.experiment.privacy}
        counts.visits, counts.seconds = 0.0, 0.0
        # Without noise, epsilon is infinite; Info has whatever a method tells.
        line = strict(line)
        self._add(line)
        if self.track is not None and not self.is_finished:
            is_result = self.experiment.spec.patience is not None and self.final is line
            is_last = result.round == self.experiment.settings.rounds or self.has_ended()
            self.folder.log(line, is_last=is_result or is_last)
            self.track(line)

    def _add(self, line: Line) -> None:
        whole = [self.final, self.lines[-1]] if self.lines else []
        self.lines.append(line)
        for before in whole:
            if before is not self.final:
                large = {name for name, value in before.items() if name == "info" or isinstance(value, list)}
                for name in large - {PHASES, UNTRAINED}:
                    del before[name]

    def warn(self, result: RoundResult, console: Console) -> None:
        """Name the clients whose test loss is not finite, once in a run."""
        losses = [one.name for one in self.experiment.counts.task.scores if not one.higher_is_better]
        for protocol, scores in _scores(result).items() if losses and not self.has_warned else ():
            is_scored = np.any([~np.isnan(values) for values in scores.by_name.values()], axis=0)
            clients = np.flatnonzero(is_scored & ~np.isfinite(scores[losses[0]]))
            if clients.size and not self.has_warned:
                self.has_warned = True
                text = f"round {result.round}: the test loss of client {clients[0]}"
                text += f" (and {len(clients) - 1} more)" if len(clients) > 1 else ""
                text += f" is NaN or infinite ({protocol}); a prediction of NaN counts as wrong, and training goes on"
                print_notice(console, text)

    @property
    def is_complete(self) -> bool:
        """Whether no round is left."""
        done = self.lines[-1]["round"] if self.lines else 0
        return done == self.experiment.spec.rounds or self.has_ended()

    def has_reached_target(self) -> bool:
        """Whether the latest evaluation has --target-accuracy, on validation examples if there are any."""
        spec, target = self.experiment.spec, self.experiment.spec.target_accuracy
        if target is None or not self.lines:
            return False
        mean = self.lines[-1].get(VALIDATION, self.lines[-1])[spec.eval_protocol]["mean"]
        is_high = self.experiment.counts.task.primary.higher_is_better
        return mean is not None and (mean >= target if is_high else mean <= target)

    def has_ended(self) -> bool:
        """Whether the run stops before its last round: at its target, or since its patience has ended."""
        patience = self.experiment.spec.patience if self.lines and VALIDATION in self.lines[-1] else None
        is_over = patience is not None and self.lines[-1]["round"] - self.final["round"] >= patience
        return is_over or self.has_reached_target()


def run_rounds(
    runs: Sequence[ActiveRun],
    rounds: Iterable[Sequence[RoundResult]],
    state: State | None,
    console: Console,
    *,
    began: float,
    stop: Stop,
    save: Callable[[State], None],
    keep: Callable[[int, State], None],
    processes: Processes,
) -> State | None:
    """Run and record the remaining rounds; return the state after the last one.

    Args:
      runs: with equal options but for what a sweep varies.
      rounds: makes the rounds, a result for each run with the state of all.
      state: to resume from; None at the start.
      console: for the progress.
      began: `time.perf_counter()` at the start of this process's part.
      stop: asked after a signal; then there is a checkpoint, and KeyboardInterrupt.
      save: writes a checkpoint of all runs.
      keep: writes the state of one run, whose latest evaluation is the best.
      processes: that share the run.
    """
    first, before = runs[0].experiment, runs[0].counts.elapsed
    spec = first.spec
    if all(run.is_complete for run in runs):
        # Only the summary was missing.
        return state
    every = spec.checkpoint_every
    for run in runs:
        run.counts.starts.append(run.counts.round)
    with RoundProgress(console, spec.rounds, spec.eval_protocol, first.counts.task.primary) as progress:
        for results in rounds:
            stop.at_once = False
            state, number, seconds = results[0].state, results[0].round, results[0].seconds
            for index, (run, result) in enumerate(zip(runs, results, strict=True)):
                if run.has_ended():
                    # Others of its program go on.
                    run.counts.round = number
                    continue
                if len(result.diverged):
                    print_line(console, f"round {number}: left out as diverged: clients {result.diverged.tolist()}")
                run.add(result, seconds, before + time.perf_counter() - began)
                if result.received is not None:
                    with processes.synchronized():
                        run.evaluate(result)
                    if spec.patience is not None and run.final is run.lines[-1]:
                        keep(index, state)
                    run.warn(result, console)
            visited = sum(run.visits(result) for run, result in zip(runs, results, strict=True))
            known = [run.accuracy for run in runs if run.accuracy is not None]
            accuracy = float(np.mean(known)) if known else None
            progress.completed(number, seconds, accuracy, visited / seconds, runs[0].over)
            is_last = number == spec.rounds or all(run.has_ended() for run in runs)
            # A signal reaches one process or all, before or after the end of a round.
            stopping = processes.agree(stop.asked) and not is_last
            if stopping or (every is not None and (number % every == 0 or is_last)):
                save(state)
            if stopping:
                raise KeyboardInterrupt(f"interrupted after round {number} of {spec.rounds}")
            if is_last:
                break
    return state


def visits(spec: Spec, counts: np.ndarray) -> np.ndarray:
    """Examples [N] that clients with `counts` [N] training examples visit in a round, an example in each epoch."""
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
