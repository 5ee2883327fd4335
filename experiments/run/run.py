"""Execution of one run: load the data, build the experiment, run its rounds, write its results."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import jax
import numpy as np
from rich.console import Console

from experiments.cli.exit_codes import INTERRUPTED, INVALID
from experiments.cli.own_code import identifier
from experiments.cli.request import Request
from experiments.folder.run_folder import CONFIG, METRICS, RunFolder
from experiments.host.console import print_line, print_notice, print_text
from experiments.host.jax_config import devices, prepare, repair_cache
from experiments.host.locks import lock_run
from experiments.host.processes import LOST, EndedAlone, Processes, lost, remember
from experiments.host.signals import interruptible, leaving, stoppable, writing
from experiments.run import build, outcome
from experiments.run.build import Experiment
from experiments.run.history import History
from experiments.run.memory import advice, is_kept, is_shortage, state_place
from experiments.run.records import configuration, headline, identity
from experiments.run.resume import add_rounds, check_data, record_code, refuse_finished
from experiments.run.rounds import Observe, Round, Run, run_rounds
from experiments.run.trackers import check, open_trackers
from pfl_jax import simulate
from pfl_jax.base import State
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints
from pfl_jax.errors import CannotWrite, Diverged, InvalidInput


def run(
    request: Request,
    console: Console,
    observe: Observe | None = None,
    processes: Processes | None = None,
) -> None:
    """Run an experiment and write its folder.

    Args:
      request: the checked command line.
      console: console for notices, progress and results; only errors go to stderr.
      observe: function that is called with every round, see `rounds.Observe`.
      processes: processes that share the run, see `distributed.start`; the first one writes.

    Raises:
      InvalidInput: the data cannot serve the request, or the folder cannot be written.
      KeyboardInterrupt: after SIGINT or SIGTERM; its message names the finished rounds and the folder.
    """
    processes = processes or Processes()
    name = identifier(request.options.method)
    if request.procedure:
        # Imported now, as below: other runs do without it.
        from experiments.run import in_place

        request, name = in_place.checked(request), in_place.FOLDER
    options = request.options
    prepare(options)
    with processes.synchronized():
        check(options)
    folder = _folder(request, processes, name)
    checkpoints = Checkpoints(folder.path / FOLDER, options.keep_checkpoints, processes.index, processes.count)
    work = _Work(request, folder, checkpoints, processes)
    try:
        with interruptible(), leaving(lambda said: str(_interrupted(work))):
            _run_to_end(work, console, observe)
    except BaseException as error:
        work.discard()
        told = _user_error(error, work)
        if told is error:
            raise
        if not processes.is_first and isinstance(error, Diverged | KeyboardInterrupt):
            # All processes raise it, and the first one reports it.
            raise SystemExit(INVALID if isinstance(error, Diverged) else INTERRUPTED) from None
        raise told from None


@dataclass
class _Work:
    """State of a run in progress.

    Attributes:
      request: the checked command line, with the smaller defaults on embedded data once the data is loaded.
      folder, checkpoints: its own.
      processes: processes that share it.
      history: its rounds so far.
      experiment: its parts; None until its data is loaded.
      locked: whether this process has had the lock of the folder, and so may remove it.
      place: place of the clients' states between rounds.
      saved: round of the last checkpoint that this process wrote or resumed from; 0 without one.
    """

    request: Request
    folder: RunFolder
    checkpoints: Checkpoints
    processes: Processes
    history: History = field(default_factory=History)
    experiment: Experiment | None = None
    locked: bool = False
    place: simulate.StateOn = "device"
    saved: int = 0

    @property
    def named(self) -> dict[str, str]:
        """Entry of the configuration and the summary for another procedure."""
        return {"procedure": self.request.procedure} if self.request.procedure else {}

    @property
    def go_on(self) -> str:
        """How the run can be resumed, for the end of an error; "" if it cannot."""
        saved = self.checkpoints.rounds()
        return f"; --resume {self.folder.path} goes on after round {saved[-1]}" if saved else ""

    def discard(self) -> None:
        """Remove the folder of a run without a result, unless it can be resumed; the states on disk with it."""
        if not self.locked or self.checkpoints.rounds():
            return
        self.folder.discard_rows()
        if not self.request.options.resume:
            self.folder.discard()


def _run_to_end(work: _Work, console: Console, observe: Observe | None) -> None:
    """Load the data, start the run or resume from its last checkpoint, and run it to its end."""
    began, folder, options, processes = time.perf_counter(), work.folder, work.request.options, work.processes
    notify = functools.partial(print_notice, console)
    with contextlib.ExitStack() as held:
        with processes.synchronized():
            if processes.is_first:
                held.enter_context(lock_run(folder.path / METRICS))
                work.locked = True
            if options.resume:
                # Another process may have finished it since `resume.resumed` looked.
                refuse_finished(folder.path, options.rounds)
                if processes.is_first:
                    folder.tidy()
        held.enter_context(repair_cache(notify))
        work.experiment = experiment = build.build_experiment(work.request, console, processes)
        work.request = experiment.request
        _choose_place(work, experiment)
        _start(work, experiment, console)
        history = work.history
        print_text(console, "; ".join([headline(experiment), *work.named.values()]))
        for budget in experiment.privacy:
            print_line(console, str(budget))
        one = Run(experiment, folder, history)
        with stoppable(console, at_once=processes.count == 1) as stop, contextlib.ExitStack() as stack:
            with processes.synchronized():
                if processes.is_first:
                    trackers = open_trackers(folder, options, configuration(experiment), history.evaluations)
                    one.track = stack.enter_context(trackers)
            last = run_rounds(
                *([one], _rounds(work, experiment, console), history.state, console),
                began=began,
                stop=stop,
                save=functools.partial(_save, work, experiment),
                processes=processes,
                observe=observe,
            )
            stack.close()
            # Nothing is stopped between the last round and the summary, which makes the run a finished one.
            _keep_state(work, experiment, last, notify)
            if processes.is_first and not work.checkpoints.rounds():
                work.folder.discard_rows()
            with processes.synchronized():
                if processes.is_first:
                    one.write_summary(**work.named)
    if processes.is_first:
        outcome.print_results(experiment, folder, console, history)


def _choose_place(work: _Work, experiment: Experiment) -> None:
    """Choose the place of the clients' states: the same in all processes, however full their machines are."""
    place = state_place(experiment)
    work.place = "host" if work.processes.agree(place == "host") else place


def _own_clients(experiment: Experiment) -> np.ndarray | None:
    """Clients of this process; None for all, in the only process."""
    return None if experiment.data.mesh is None else experiment.data.own_clients()


def _start(work: _Work, experiment: Experiment, console: Console) -> None:
    """Write the configuration, or restore the history of a run that is resumed."""
    folder, processes = work.folder.path, work.processes
    with processes.synchronized():
        if work.request.options.resume:
            check_data(folder, experiment.dataset.description)
            work.history = History.restore(
                *(work.checkpoints, experiment.state_shapes(), folder / METRICS, identity(experiment)),
                functools.partial(print_notice, console),
                counts=experiment.counts,
                clients=_own_clients(experiment) if work.place == "host" else None,
                cut=processes.is_first,
            )
            work.saved = work.history.round
            if processes.is_first:
                add_rounds(work.folder, experiment, work.history.round, functools.partial(print_notice, console))
                record_code(work.folder)
        elif processes.is_first:
            work.folder.write(CONFIG, configuration(experiment) | work.named)
    if work.request.options.resume:
        number = work.history.round
        processes.check_round(number)
        after = f"after round {number}" if number else "from the beginning"
        remember(work.go_on)
        print_line(console, f"continuing {folder} {after}")


def _user_error(error: BaseException, work: _Work) -> BaseException:
    """Message of an error for the user: what happened, what to do, and what remains of the run."""
    go_on = work.go_on
    if isinstance(error, Diverged):
        return outcome.run_diverged(error, work.request, work.checkpoints, work.folder)
    if isinstance(error, CannotWrite | EndedAlone):
        return type(error)(f"{error}{go_on}")
    if isinstance(error, jax.errors.JaxRuntimeError | MemoryError) and is_shortage(error):
        kind = InvalidInput if work.processes.count == 1 else EndedAlone
        return kind(advice(error, work.experiment) + go_on)
    if work.processes.count > 1 and lost(error):
        return EndedAlone(f"{LOST}{go_on}")
    return _interrupted(work) if isinstance(error, KeyboardInterrupt) else error


def _interrupted(work: _Work) -> KeyboardInterrupt:
    """Error of an interrupted run, with what remains of it; a folder without a result is removed."""
    work.discard()
    go_on = work.go_on
    if not work.history.evaluations:
        return KeyboardInterrupt(f"interrupted before the first evaluation{go_on or ': nothing is left'}")
    last, rounds = work.history.evaluations[-1].round, work.request.options.rounds
    return KeyboardInterrupt(
        f"interrupted: evaluated up to round {last} of {rounds}, see {work.folder.path / METRICS}"
        f"{go_on or '; no summary was written'}"
    )


def _folder(request: Request, processes: Processes, name: str) -> RunFolder:
    """Folder of the run: the first process claims it, the others are told its path."""
    options = request.options
    if options.resume:
        return RunFolder.reopen(options.resume)
    folder = None
    with processes.synchronized():
        if processes.is_first:
            folder = RunFolder.claim(options.out, f"{request.dataset}-{name}-seed{options.seed}")
    (path, *_) = processes.exchange(str(folder.path) if folder else "")
    return folder or RunFolder.reopen(path)


def _keep_state(work: _Work, experiment: Experiment, state: State | None, notify: Callable[[str], None]) -> None:
    """Write a checkpoint of the final state if it is to be kept, and there is none."""
    if state is not None and int(state.round) != work.saved and is_kept(experiment, notify):
        with writing():
            _save(work, experiment, state)


def _rounds(work: _Work, experiment: Experiment, console: Console) -> Iterator[Round]:
    """Remaining rounds, one by one."""
    options = experiment.request.options
    if work.request.procedure:
        from experiments.run import in_place

        results = in_place.rounds(experiment)
    else:
        results = simulate.run(
            experiment.method,
            experiment.data,
            experiment.settings,
            jax.random.key(options.seed),
            state=work.history.state,
            mesh=simulate.client_mesh(devices(options)),
            state_on=work.place,
            state_folder=work.folder.path if work.place == "disk" else None,
            on_nan=options.on_nan,
            newcomers=experiment.newcomers,
            donate=True,
        )
    for result in results:
        if len(result.diverged):
            print_line(console, f"round {result.round}: left out as diverged: clients {result.diverged.tolist()}")
        yield Round([result], result.state, result.seconds)


def _save(work: _Work, experiment: Experiment, state: State) -> None:
    """Write a checkpoint after a round, each process its part; with a procedure there is none to continue from."""
    if work.request.procedure:
        return
    log, own = work.folder.path / METRICS, _own_clients(experiment)
    with work.processes.synchronized():
        work.history.save(work.checkpoints, state, log, identity(experiment), own)
    work.saved = int(state.round)
    remember(work.go_on)
