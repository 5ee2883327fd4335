"""Execution of one run: build the experiment, resume or start, run its rounds, write its results."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
from rich.console import Console

from experiments.cli.exit_codes import INTERRUPTED, INVALID
from experiments.cli.own_code import CODE, identifier
from experiments.cli.request import Request
from experiments.folder.run_folder import CONFIG, METRICS, RunFolder, lock_run
from experiments.host.console import print_line, print_notice, print_text
from experiments.host.jax_config import devices, prepare
from experiments.host.processes import LOST, EndedAlone, Processes, lost
from experiments.host.signals import stoppable
from experiments.run import build
from experiments.run.memory import SHORTAGE, is_kept, is_shortage, state_place
from experiments.run.records import check_identity, configuration, headline
from experiments.run.rounds import Run, run_rounds
from pfl_jax import simulate
from pfl_jax.base import State
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints
from pfl_jax.errors import CannotWrite, Diverged, InvalidInput


def run(request: Request, console: Console, processes: Processes | None = None) -> None:
    """Run an experiment and write its folder; only errors go to stderr.

    Args:
      request, console: the checked command line, and the place of notices, progress and results.
      processes: that share the run; the first one writes.
    """
    began, processes, options = time.perf_counter(), processes or Processes(), request.options
    prepare(options)
    work = _Work(request, _folder(request, processes), processes)
    at_once = processes.count == 1
    with contextlib.ExitStack() as held, stoppable(console, work.last_words, at_once=at_once) as stop:
        try:
            processes.first(lambda: work.lock(held))
            experiment = build.build_experiment(request, console, processes)
            work.request, work.run = experiment.request, (run := Run(experiment, work.folder))
            # The same in all processes, however full their machines are.
            place = "device" if request.procedure else state_place(experiment)
            place = "host" if processes.agree(place == "host") else place
            state = _resume(work, run, place, console) if options.resume else None
            if not options.resume:
                processes.first(lambda: run.folder.write(CONFIG, configuration(experiment)))
            print_text(console, headline(experiment))
            for budget in experiment.privacy:
                print_line(console, str(budget))
            if processes.is_first:
                run.track = lambda line: None
            results, save = _engine_rounds(run, place, state), functools.partial(_save, work, run)
            loop = {"began": began, "stop": stop, "save": save, "processes": processes}
            with contextlib.ExitStack() as tracked:
                if options.tensorboard or options.wandb or options.tracker:
                    from experiments.run.trackers import open_trackers

                    opened = open_trackers(run.folder, options, configuration(experiment))
                    run.track = processes.first(lambda: tracked.enter_context(opened))
                state = run_rounds([run], ([result] for result in results), state, console, **loop)
            _finish(work, run, state, save, console)
        except BaseException as error:
            raise work.told(error) from None


@dataclass
class _Work:
    """A run in progress, and what remains of it when it ends early.

    Attributes:
      run: its rounds; None until its data is loaded.
      locked: whether this process has had the lock of the folder, and so may remove it.
    """

    request: Request
    folder: RunFolder
    processes: Processes
    run: Run | None = None
    locked: bool = False

    @property
    def checkpoints(self) -> Checkpoints:
        keep = self.request.options.keep_checkpoints
        return Checkpoints(self.folder.path / FOLDER, keep, self.processes.index, self.processes.count)

    @property
    def go_on(self) -> str:
        """How the run can be resumed, for the end of an error; "" if it cannot."""
        saved, trust = self.checkpoints.rounds(), " --trust" * any(kind in CODE for kind in self.request.own_code)
        return f"; --resume {self.folder.path}{trust} goes on after round {saved[-1]}" if saved else ""

    def lock(self, held: contextlib.ExitStack) -> None:
        """Lock the folder until the end."""
        held.enter_context(lock_run(self.folder.path))
        self.locked = True
        if self.request.options.resume:
            from experiments.run.resume import refuse_finished

            # Another process may have finished it since `resume.resumed` looked.
            refuse_finished(self.folder.path, self.request.options.rounds)
            self.folder.tidy()

    def last_words(self) -> str:
        """What remains of an interrupted run; a folder without a result is removed."""
        self.discard()
        go_on = self.go_on
        if self.run is None or not self.run.lines:
            return f"interrupted before the first evaluation{go_on or ': nothing is left'}"
        last, rounds = self.run.lines[-1]["round"], self.request.options.rounds
        return (
            f"interrupted: evaluated up to round {last} of {rounds}, see {self.folder.path / METRICS}"
            f"{go_on or '; no summary was written'}"
        )

    def discard(self) -> None:
        """Remove the folder of a run without a result, unless it can be resumed; the states on disk with it."""
        if not self.locked or self.checkpoints.rounds():
            return
        self.folder.discard_rows()
        if not self.request.options.resume:
            self.folder.discard()

    def told(self, error: BaseException) -> BaseException:
        """Error for the user: what happened, what to do, and what remains of the run."""
        self.discard()
        several, go_on = self.processes.count > 1, self.go_on
        if not self.processes.is_first and isinstance(error, Diverged | KeyboardInterrupt):
            # All processes raise it, and the first one reports it.
            return SystemExit(INVALID if isinstance(error, Diverged) else INTERRUPTED)
        if isinstance(error, Diverged):
            from experiments.run.outcome import run_diverged

            return run_diverged(error, self.request, go_on)
        if isinstance(error, CannotWrite | EndedAlone):
            return type(error)(f"{error}{go_on}")
        if is_shortage(error):
            return (EndedAlone if several else InvalidInput)(SHORTAGE + go_on)
        if several and lost(error):
            return EndedAlone(f"{LOST}{go_on}")
        return KeyboardInterrupt(self.last_words()) if isinstance(error, KeyboardInterrupt) else error


def _folder(request: Request, processes: Processes) -> RunFolder:
    """Folder of the run: the first process claims it, the others are told its path."""
    options = request.options

    def claim() -> RunFolder:
        if options.resume:
            return RunFolder(options.resume)
        name = f"{request.dataset}-{identifier(options.method)}-seed{options.seed}"
        return RunFolder.claim(options.out, name)

    folder = processes.first(claim)
    (path, *_) = processes.exchange(str(folder.path) if folder else "")
    return folder or RunFolder(path)


def _resume(work: _Work, run: Run, place: simulate.StateOn, console: Console) -> State | None:
    """Go back to the newest good checkpoint and return its state; None for a run killed before its first one."""
    # Imported now: other runs do without it.
    from experiments.run.resume import add_rounds, check_data, record_code

    notify = functools.partial(print_notice, console)
    processes, path, experiment = work.processes, run.folder.path, run.experiment
    placed = experiment.data.mesh is not None and place == "host"
    with processes.synchronized():
        check_data(path, experiment.dataset.description)
        found = work.checkpoints.newest(
            experiment.state_shapes(),
            lambda record: check_identity(record["identity"], experiment, work.checkpoints.folder, notify),
            clients=experiment.data.own_clients() if placed else None,
        )
        if found is None:
            notify(f"No checkpoint was written to {work.checkpoints.folder}: the run begins anew.")
        run.restore(found.record if found else None, cut=processes.is_first)
        if processes.is_first:
            add_rounds(run.folder, experiment, run.counts.round, notify)
            record_code(run.folder)
    number = run.counts.round
    rounds = processes.exchange(str(number))
    with processes.synchronized():
        if len(set(rounds)) > 1:
            raise InvalidInput(
                f"the processes found checkpoints of rounds {', '.join(rounds)}: all must see the same folder"
            )
    print_line(console, f"continuing {path} {f'after round {number}' if number else 'from the beginning'}")
    return found.state if found else None


def _engine_rounds(run: Run, place: simulate.StateOn, state: State | None) -> Iterator[simulate.RoundResult]:
    """Remaining rounds of the engine."""
    experiment, options = run.experiment, run.experiment.request.options
    if run.experiment.request.procedure:
        from experiments.run import in_place

        engine, key = in_place.engine_of(experiment).jit(), jax.random.key(options.seed)
        return simulate.run(experiment.method, experiment.data, experiment.settings, key, state=state, engine=engine)
    return simulate.run(
        experiment.method,
        experiment.data,
        experiment.settings,
        jax.random.key(options.seed),
        state=state,
        mesh=simulate.client_mesh(devices(options)),
        state_on=place,
        state_folder=run.folder.path if place == "disk" else None,
        on_nan=options.on_nan,
        newcomers=experiment.newcomers,
        donate=True,
    )


def _save(work: _Work, run: Run, state: State) -> None:
    """Write a checkpoint after a round, each process its part."""
    data = run.experiment.data
    with work.processes.synchronized():
        work.checkpoints.save(state, {}, run.record(), None if data.mesh is None else data.own_clients())


def _finish(work: _Work, run: Run, state: State | None, save: Callable[[State], None], console: Console) -> None:
    """Keep the final state if that is asked for, write the summary, and print the results."""
    from experiments.run import outcome

    notify, saved = functools.partial(print_notice, console), work.checkpoints.rounds()
    if state is not None and int(state.round) not in saved and is_kept(run.experiment, notify):
        save(state)
    if work.processes.is_first and not work.checkpoints.rounds():
        run.folder.discard_rows()
    work.processes.first(lambda: run.folder.finish(outcome.summary(run)))
    if work.processes.is_first:
        outcome.print_results(run, console)
