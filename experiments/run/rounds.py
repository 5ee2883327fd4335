"""Rounds of one run, or of several runs that share a program, and what is recorded of them."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from rich.console import Console

from experiments.folder.run_folder import METRICS, Evaluation, RunFolder
from experiments.host.console import RoundProgress, print_notice
from experiments.host.processes import Processes
from experiments.host.signals import Stop, writing
from experiments.run.build import Experiment
from experiments.run.history import History
from experiments.run.records import info_record, summary, unused_shares
from pfl_jax.base import State
from pfl_jax.engine.chunking import Unused
from pfl_jax.engine.simulate import RoundResult

Observe: TypeAlias = Callable[[Experiment, RoundResult], None]
"""Called after every round of a run; after the last one, before the summary is written."""


@dataclass
class Run:
    """A run in progress.

    Attributes:
      experiment: what is run.
      folder: its own.
      history: its rounds so far.
      track: receives each evaluation, see `trackers.open_trackers`; None in processes that write nothing.
      accuracy: mean of the latest evaluation in percent, by --eval-protocol; None before the first.
      is_finished: whether its folder has all results already; then nothing is written there.
      has_warned: whether the user knows of clients without a loss, see `warn`.
    """

    experiment: Experiment
    folder: RunFolder
    history: History
    track: Callable[[Evaluation], None] | None = None
    accuracy: float | None = None
    is_finished: bool = False
    has_warned: bool = False

    def __post_init__(self) -> None:
        if self.history.evaluations:
            self._take(self.history.evaluations[-1])

    @property
    def log_bytes(self) -> int:
        """Size of the metrics log."""
        return (self.folder.path / METRICS).stat().st_size

    def evaluate(self, result: RoundResult) -> None:
        """Add a round's evaluation to the history, the log and the trackers."""
        assert result.received is not None
        evaluation = self.history.evaluate(
            result.round,
            result.received,
            result.trained,
            self.experiment.counts,
            newcomers=result.newcomers,
            before_aggregation=result.before_aggregation,
        )
        self._take(evaluation)
        if self.track is not None and not self.is_finished:
            epsilons = {budget.unit: budget.epsilon(result.round) for budget in self.experiment.privacy}
            self.folder.log(evaluation, **_log_entries(result), **({"epsilon": epsilons} if epsilons else {}))
            self.track(evaluation)

    def warn(self, console: Console) -> None:
        """Name the clients of the latest evaluation whose test loss is not finite, once in a run."""
        latest = self.history.evaluations[-1]
        losses = [one for one in latest.task.scores if not one.higher_is_better]
        for protocol in latest.protocols if losses else ():
            scores, loss = getattr(latest, protocol), losses[0].name
            is_scored = np.any([~np.isnan(values) for values in scores.by_name.values()], axis=0)
            clients = np.flatnonzero(is_scored & ~np.isfinite(scores[loss]))
            if clients.size and not self.has_warned:
                self.has_warned = True
                more = f" (and {len(clients) - 1} more)" if len(clients) > 1 else ""
                print_notice(
                    console,
                    f"round {latest.round}: the test loss of client {clients[0]}{more} is NaN or infinite "
                    f"({protocol}); a prediction of NaN counts as wrong, and training goes on",
                )

    def _take(self, evaluation: Evaluation) -> None:
        # Not in every round: it sorts the scores of all clients.
        self.accuracy = evaluation.summary(self.experiment.request.options.eval_protocol).mean

    def has_reached_target(self) -> bool:
        """Whether the latest evaluation has --target-accuracy, so that the run may stop early."""
        target = self.experiment.request.options.target_accuracy
        if target is None or self.accuracy is None:
            return False
        is_high = self.experiment.counts.task.primary.higher_is_better
        return self.accuracy >= target if is_high else self.accuracy <= target

    def write_summary(self, **further: Any) -> None:
        """Write the summary, which makes this a finished run."""
        history = self.history
        if self.is_finished:
            return
        unused = Unused(*(math.fsum(shares) / len(shares) for shares in (history.wasted, history.idle)))
        self.folder.finish(summary(self.experiment, history.evaluations, unused, history.steady_speeds) | further)


class Round(NamedTuple):
    """A round of all runs.

    Attributes:
      results: one for each run.
      state: after the round, of all runs.
      seconds: wall time of the round of all runs.
    """

    results: Sequence[RoundResult]
    state: State
    seconds: float


def run_rounds(
    runs: Sequence[Run],
    rounds: Iterable[Round],
    state: State | None,
    console: Console,
    *,
    began: float,
    stop: Stop,
    save: Callable[[State], None],
    processes: Processes,
    observe: Observe | None = None,
) -> State | None:
    """Run and record the remaining rounds.

    Args:
      runs: with equal options but for what a sweep varies.
      rounds: makes the rounds.
      state: to resume from; None at the start.
      console: for the progress.
      began: `time.perf_counter()` at the start of this process's part.
      stop: asked after a signal.
      save: writes a checkpoint of all runs.
      processes: that share the run.
      observe: see `Observe`.

    Returns:
      The state after the last round.

    Raises:
      KeyboardInterrupt: `stop` was asked; there is a checkpoint.
    """
    first, before = runs[0].experiment, runs[0].history.elapsed
    request, options = first.request, first.request.options
    if all(run.has_reached_target() for run in runs):
        # Only the summary was missing.
        return state
    every, sent = options.checkpoint_every, first.traffic
    for run in runs:
        run.history.starts.append(run.history.round)
    with RoundProgress(console, options.rounds, options.eval_protocol, first.counts.task.primary) as progress:
        for results, latest, seconds in rounds:
            stop.completed = True
            state, number = latest, results[0].round
            elapsed = before + time.perf_counter() - began
            for run, result in zip(runs, results, strict=True):
                run.history.add(request.visits(len(result.cohort), result.examples), seconds, elapsed)
                unused = unused_shares(run.experiment, result.cohort)
                run.history.wasted.append(unused.steps)
                run.history.idle.append(unused.devices)
                run.history.send(sent, result.arrived)
                run.history.diverged += len(result.diverged)
                if result.received is not None:
                    with processes.synchronized():
                        run.evaluate(result)
                    run.warn(console)
                if observe is not None:
                    observe(run.experiment, result)
            visits = sum(request.visits(len(result.cohort), result.examples) for result in results)
            progress.update(number, seconds, _accuracy(runs), visits / seconds)
            is_last = number == options.rounds or all(run.has_reached_target() for run in runs)
            # A signal reaches one process or all, before or after the end of a round.
            stopping = processes.agree(stop.asked) and not is_last
            if stopping or (every is not None and (number % every == 0 or is_last)):
                with writing():
                    save(latest)
            if stopping:
                raise KeyboardInterrupt(f"interrupted after round {number} of {options.rounds}")
            if is_last:
                break
    return state


def _accuracy(runs: Sequence[Run]) -> float | None:
    """Mean of the runs' latest accuracies in percent; None before the first evaluation."""
    latest = [run.accuracy for run in runs if run.accuracy is not None]
    return float(np.mean(latest)) if latest else None


def _log_entries(result: RoundResult) -> dict[str, Any]:
    """Entries of the metrics log beside the scores."""
    missing = result.cohort[~result.arrived].tolist()
    return {
        "cohort": result.cohort.tolist(),
        **({"missing": missing} if missing else {}),
        **({"info": info} if (info := info_record(result.info)) else {}),
    }
