"""One run of a checked command line: data, federation, model, method, rounds, results."""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
from rich.console import Console

from experiments.config.exit_codes import INTERRUPTED, INVALID
from experiments.config.options import Options, flag
from experiments.config.request import Request
from experiments.execution import build
from experiments.execution.experiment import Experiment
from experiments.execution.memory import advice, is_shortage, state_place
from experiments.execution.records import (
    configuration,
    headline,
    identity,
    info_record,
    summary,
    wasted_step_share,
)
from experiments.execution.resume import History, check_data, refuse_finished
from experiments.execution.trackers import check, open_trackers
from experiments.papers import published, settings
from experiments.results.run_folder import CONFIG, METRICS, SUMMARY, Evaluation, Newcomers, RunFolder, results_table
from experiments.runtime.compilation_cache import repair_cache
from experiments.runtime.devices import devices
from experiments.runtime.distributed import Processes
from experiments.runtime.jax_config import prepare
from experiments.runtime.locks import lock_run
from experiments.runtime.progress import RoundProgress, duration
from experiments.runtime.signals import Stop, interruptible, stoppable
from pfl_jax import simulate
from pfl_jax.base import Scores
from pfl_jax.engine import host_state
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints
from pfl_jax.engine.communication import traffic
from pfl_jax.errors import CannotWrite, Diverged, InvalidInput

Observe: TypeAlias = Callable[[Experiment, simulate.RoundResult], None]
"""Sees every round of a run, before the next one begins and, after the last, before the summary is written."""


def run(request: Request, console: Console, observe: Observe | None = None, processes: Processes | None = None) -> None:
    """Run an experiment and write its folder.

    Args:
      request: the checked command line.
      console: for notices, progress and results; stderr is left to errors.
      observe: for what is wanted of the rounds beyond their accuracies.
      processes: that share the run, see `distributed.start`; the first one writes.

    Raises:
      InvalidInput: the data cannot serve the request, or the folder cannot be written.
      KeyboardInterrupt: after SIGINT or SIGTERM; its message names the finished rounds and the folder.
    """
    processes = processes or Processes()
    options = request.options
    prepare(options)
    with processes.together():
        check(options)
    folder = _folder(request, processes)
    work = _Work(request, folder, Checkpoints(folder.path / FOLDER, keep=options.keep_checkpoints), processes)
    try:
        with interruptible():
            _run_to_end(work, console, observe)
    except BaseException as error:
        # A run that can be resumed stays, with or without a result.
        if processes.reports and not options.resume and not work.checkpoints.rounds():
            folder.discard()
        told = _user_error(error, work)
        if told is error:
            raise
        if not processes.reports and isinstance(error, Diverged | KeyboardInterrupt):
            # All processes raise it, and the first one reports it.
            raise SystemExit(INVALID if isinstance(error, Diverged) else INTERRUPTED) from None
        raise told from None


@dataclass
class _Work:
    """State of a run in progress.

    Attributes:
      request: with the reductions for embedded data, once that is known.
      folder, checkpoints: its own.
      processes: that share it.
      history: its rounds so far.
      experiment: None until its data is loaded.
    """

    request: Request
    folder: RunFolder
    checkpoints: Checkpoints
    processes: Processes
    history: History = field(default_factory=History)
    experiment: Experiment | None = None


def _run_to_end(work: _Work, console: Console, observe: Observe | None) -> None:
    """Load the data, start the run or resume from its last checkpoint, and run it to its end."""
    began, folder, options, processes = time.perf_counter(), work.folder, work.request.options, work.processes

    def notify(message: str) -> None:
        console.print(message, style="bold yellow", soft_wrap=True, highlight=False, markup=False)

    with contextlib.ExitStack() as held:
        with processes.together():
            if processes.reports:
                held.enter_context(lock_run(folder.path / METRICS))
            if options.resume:
                # Another process may have finished it since `resume.resumed` looked.
                refuse_finished(folder.path)
        held.enter_context(repair_cache(notify))
        work.experiment = experiment = build.build_experiment(work.request, console, processes)
        work.request = experiment.request
        with processes.together():
            if options.resume:
                check_data(folder.path, experiment.dataset.description)
                like, log, same = _shapes(experiment), folder.path / METRICS, identity(experiment)
                work.history = History.restore(
                    *(work.checkpoints, like, log, same, notify),
                    test_counts=experiment.test_counts,
                    newcomer_counts=experiment.newcomer_counts,
                    cut=processes.reports,
                )
            elif processes.reports:
                folder.write(CONFIG, configuration(experiment))
        history = work.history
        if options.resume:
            processes.check_round(history.round)
            console.print(f"continuing {folder.path} after round {history.round}", soft_wrap=True)
        console.print(headline(experiment), soft_wrap=True, highlight=False)
        with stoppable(console) as stop, contextlib.ExitStack() as stack:
            track = None
            with processes.together():
                if processes.reports:
                    trackers = open_trackers(folder, options, configuration(experiment), history.evaluations)
                    track = stack.enter_context(trackers)
            _rounds(work, experiment, track, console, began, observe, stop)
            stack.close()
            # Nothing is stopped between the last round and the summary, which makes the run a finished one.
            wasted = math.fsum(history.wasted) / len(history.wasted)
            with processes.together():
                if processes.reports:
                    folder.write(SUMMARY, summary(experiment, history.evaluations, wasted))
    if processes.reports:
        _show(experiment, folder, console, history)


def _user_error(error: BaseException, work: _Work) -> BaseException:
    """Message of an error for the user: what happened, what to do, and what remains of the run."""
    saved = work.checkpoints.rounds()
    go_on = f"; --resume {work.folder.path} goes on after round {saved[-1]}" if saved else ""
    if isinstance(error, Diverged):
        return InvalidInput(_diverged(error, work.request, work.checkpoints, work.folder))
    if isinstance(error, CannotWrite):
        return CannotWrite(f"{error}{go_on}")
    if isinstance(error, jax.errors.JaxRuntimeError | MemoryError) and is_shortage(error):
        return InvalidInput(advice(error, work.experiment) + go_on)
    if not isinstance(error, KeyboardInterrupt):
        return error
    if not work.history.evaluations:
        return KeyboardInterrupt(f"interrupted before the first evaluation{go_on or ': nothing is left'}")
    last, rounds = work.history.evaluations[-1].round, work.request.options.rounds
    return KeyboardInterrupt(
        f"interrupted: evaluated up to round {last} of {rounds}, see {work.folder.path / METRICS}"
        f"{go_on or '; no summary was written'}"
    )


def _folder(request: Request, processes: Processes) -> RunFolder:
    """Folder of the run: the first process claims it, the others are told its path."""
    options = request.options
    if options.resume:
        return RunFolder.reopen(options.resume)
    folder = None
    with processes.together():
        if processes.reports:
            folder = RunFolder.claim(options.out, f"{request.dataset}-{options.method}-seed{options.seed}")
    (path, *_) = processes.exchange(str(folder.path) if folder else "")
    return folder or RunFolder.reopen(path)


def _shapes(experiment: Experiment) -> Any:
    """Shapes and types of the state's leaves."""
    engine = simulate.build(experiment.method, experiment.settings)
    return jax.eval_shape(engine.init, experiment.data, jax.random.key(0))


def _rounds(
    work: _Work,
    experiment: Experiment,
    track: Callable[[Evaluation], None] | None,
    console: Console,
    began: float,
    observe: Observe | None,
    stop: Stop,
) -> None:
    """Run the remaining rounds; log each evaluation and add it to the history."""
    request, options, history = experiment.request, experiment.request.options, work.history
    folder, checkpoints, processes = work.folder, work.checkpoints, work.processes
    mesh = simulate.client_mesh(devices(options))
    epochs = request.hyper_parameters.get("epochs", 1)
    results = simulate.run(
        experiment.method,
        experiment.data,
        experiment.settings,
        jax.random.key(options.seed),
        state=history.state,
        mesh=mesh,
        # The same in all processes, however full their machines are.
        state_on="host" if processes.agree(state_place(experiment) == "host") else "device",
        on_nan=options.on_nan,
        newcomers=experiment.newcomers,
    )
    if history.evaluations and _reached(options, history.evaluations[-1]):
        # All that was missing was the summary.
        return
    sent = traffic(experiment.method, experiment.data)
    before, every = history.elapsed, options.checkpoint_every
    with RoundProgress(console, options.rounds, options.eval_protocol) as progress:
        for result in results:
            history.visits += result.examples * epochs
            history.seconds += result.seconds
            history.elapsed = before + time.perf_counter() - began
            history.wasted.append(wasted_step_share(experiment, result.cohort))
            history.bytes_up += sent.up * int(result.arrived.sum())
            history.bytes_down += sent.down * len(result.cohort)
            history.diverged += len(result.diverged)
            if len(result.diverged):
                console.print(f"round {result.round}: left out as diverged: clients {result.diverged.tolist()}")
            reached = False
            if result.received is not None:
                evaluation = _evaluate(history, experiment, result, result.received)
                with processes.together():
                    if track is not None:
                        folder.log(evaluation, **_log_entries(result))
                        track(evaluation)
                reached = _reached(options, evaluation)
            if observe is not None:
                observe(experiment, result)
            accuracy = history.evaluations[-1].summary(options.eval_protocol).mean if history.evaluations else None
            progress.update(result.round, result.seconds, accuracy, result.examples * epochs / result.seconds)
            is_last = reached or result.round == options.rounds
            due = every is not None and (result.round % every == 0 or is_last)
            # A signal reaches one process or all, before or after the end of a round.
            stopping = processes.agree(stop.asked) and not is_last
            if due or stopping:
                state = host_state.whole(result.state, experiment.data)
                with processes.together():
                    if state is not None:
                        history.save(checkpoints, state, folder.path / METRICS, identity(experiment))
            if stopping:
                raise KeyboardInterrupt
            if is_last:
                break


def _evaluate(history: History, experiment: Experiment, result: simulate.RoundResult, received: Scores) -> Evaluation:
    """Add a round's evaluation to the history."""
    counts = experiment.newcomer_counts
    return history.evaluate(
        result.round,
        received,
        result.trained,
        experiment.test_counts,
        newcomers=None if result.newcomers is None or counts is None else Newcomers(*result.newcomers, counts),
        before_aggregation=result.before_aggregation,
    )


def _log_entries(result: simulate.RoundResult) -> dict[str, Any]:
    """Entries of the metrics log beside the scores."""
    missing = result.cohort[~result.arrived].tolist()
    return {
        "cohort": result.cohort.tolist(),
        **({"missing": missing} if missing else {}),
        **({"info": info} if (info := info_record(result.info)) else {}),
    }


def _reached(options: Options, evaluation: Evaluation) -> bool:
    """Whether the run has reached its target and may stop early."""
    return (
        options.target_accuracy is not None
        and evaluation.summary(options.eval_protocol).mean >= options.target_accuracy
    )


def _diverged(error: Diverged, request: Request, checkpoints: Checkpoints, folder: RunFolder) -> str:
    """Message on a diverged run, with the likely cause and what can be done."""
    saved = checkpoints.rounds()
    kept = f"; the checkpoint of round {saved[-1]} stays in {folder.path}" if saved else ""
    rates = [f"{flag(name)} {value:g}" for name, value in request.hyper_parameters.items() if name.endswith("lr")]
    skip = ", or leave such clients out with --on-nan skip-client"
    return (
        f"{request.options.method}: {error}; most likely {' or '.join(rates)} is too large: use a smaller one"
        f"{skip if error.clients and request.options.on_nan == 'stop' else ''}{kept}"
    )


def _show(experiment: Experiment, folder: RunFolder, console: Console, history: History) -> None:
    """Print the table of a finished run, and draw its curves if requested."""
    request, options, evaluations = experiment.request, experiment.request.options, history.evaluations
    figure = published.find(request, is_real=experiment.dataset.is_real)
    beside = None if figure is None else f"{figure.accuracy_percent:.2f} ({figure.source})"
    title = f"{options.method} on {experiment.dataset.description}"
    pooled = figure is not None and settings.MEASURES[figure.paper].average == "examples"
    paper_is = "best pooled" if pooled else "last"
    console.print(results_table(evaluations, title, options.eval_protocol, beside, paper_is=paper_is))
    if evaluations[-1].round < options.rounds:
        console.print(f"reached --target-accuracy {options.target_accuracy:g} in round {evaluations[-1].round}")
    if history.diverged:
        console.print(f"clients were left out {history.diverged} times because they had diverged", style="bold yellow")
    if options.plot:
        # Imported now: matplotlib takes seconds.
        from experiments.plots.curves import save_curves

        save_curves(folder.path)
    console.print(
        f"{evaluations[-1].round} rounds in {duration(evaluations[-1].seconds)}; results in {folder.path}",
        soft_wrap=True,
        highlight=False,
    )
