"""One driver for a run, or for several that share a program: start, resume, stop, trackers, and the files that stay."""

import abc
import contextlib
import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from rich.console import Console

from experiments.folder.run_folder import CONFIG, METRICS, RunFolder, lock_run
from experiments.host.console import Terminal, print_line, print_notice, print_text
from experiments.host.exit_codes import INTERRUPTED, INVALID
from experiments.host.jax_config import devices, prepare
from experiments.host.processes import LOST, EndedAlone, Processes, lost
from experiments.host.signals import stoppable
from experiments.own_code import CODE, identifier
from experiments.run import build
from experiments.run.memory import SHORTAGE, is_kept, is_shortage, state_place
from experiments.run.records import check_identity, configuration, headline
from experiments.run.rounds import Run, run_rounds
from experiments.spec import Spec
from pfl_jax import simulate
from pfl_jax.base import State
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints
from pfl_jax.errors import CannotWrite, Diverged, InvalidInput


def run(spec: Spec, console: Console | None = None, processes: Processes | None = None) -> dict[str, Any]:
    """Do a run and write its folder; only errors go to stderr.

    Args:
      spec: the run; with `resume`, the one that goes on in that folder.
      console: place of notices, progress and results; stdout by default.
      processes: that share the run; the first one writes.

    Returns:
      The content of summary.json; nothing in other processes than the first.

    Raises:
      InvalidInput: the run cannot be done, cannot go on, or has diverged.
      KeyboardInterrupt: after SIGINT or SIGTERM, with a message on what remains.
    """
    processes = processes or Processes()
    console = console or Terminal(quiet=not processes.is_first)
    with processes.synchronized():
        if "resume" in spec.given:
            # Imported now: other runs do without it.
            from experiments.run.resume import resumed

            spec = resumed(spec)
    prepare(spec)
    return drive(_Alone(spec, processes), console)[0]


class Work(abc.ABC):
    """Runs that share a program, in progress, and what remains of them when they end early."""

    runs: Sequence[Run] = ()
    processes = Processes()

    @abc.abstractmethod
    def start(self, held: contextlib.ExitStack, console: Console) -> State | None:
        """Claim and lock the folders, build the runs, write what they are or go back to their newest checkpoint; return
        the state there, None at the beginning."""

    @abc.abstractmethod
    def rounds(self, state: State | None, console: Console) -> Iterable[Sequence[simulate.RoundResult]]:
        """Remaining rounds, a result for each run."""

    @abc.abstractmethod
    def save(self, state: State) -> None:
        """Write a checkpoint of all runs after a round."""

    @abc.abstractmethod
    def finish(self, state: State | None, console: Console) -> list[dict[str, Any]]:
        """Keep the final states if that is asked for, write the summaries and return them; None is an unknown state."""

    @abc.abstractmethod
    def last_words(self) -> str:
        """What remains of interrupted runs; folders without a result are removed."""

    def told(self, error: BaseException) -> BaseException:
        """Error for the user: what happened, what to do, and what remains of the runs."""
        self.last_words()
        return InvalidInput(SHORTAGE) if is_shortage(error) else error


def drive(work: Work, console: Console) -> list[dict[str, Any]]:
    """Do runs that share a program, from their start or newest checkpoint to their end; return their summaries."""
    began, processes = time.perf_counter(), work.processes
    with contextlib.ExitStack() as held, stoppable(console, work.last_words, at_once=processes.count == 1) as stop:
        try:
            state, together = work.start(held, console), len(work.runs)
            words = f"{together} runs together, the first: " if together > 1 else ""
            first = work.runs[0].experiment
            print_text(console, f"{words}{headline(first)}")
            for budget in first.privacy:
                print_line(console, f"{words}{budget}")
            loop = {"began": began, "stop": stop, "save": work.save, "processes": processes}
            with contextlib.ExitStack() as tracked:
                for one in work.runs:
                    one.track = processes.first(functools.partial(_tracked, one, tracked))
                state = run_rounds(work.runs, work.rounds(state, console), state, console, **loop)
            return work.finish(state, console)
        except BaseException as error:
            raise work.told(error) from None


def _tracked(one: Run, stack: contextlib.ExitStack) -> Any:
    """Receiver of a run's evaluations beside its log."""
    spec = one.experiment.spec
    if not (spec.tensorboard or spec.wandb or spec.tracker):
        return lambda line: None
    # Imported now: most runs have none.
    from experiments.run.trackers import open_trackers

    return stack.enter_context(open_trackers(one.folder, spec, configuration(one.experiment)))


class _Alone(Work):
    """A single run, which several processes may share.

    Attributes:
      spec: the run, from the start of its rounds on as it is on its data.
      folder: that the first process has claimed.
    """

    def __init__(self, spec: Spec, processes: Processes):
        self.spec, self.processes, self.is_locked = spec, processes, False
        name = f"{spec.dataset}-{identifier(spec.method)}-seed{spec.seed}"
        folder = processes.first(
            lambda: RunFolder(spec.resume) if spec.resume else RunFolder.claim(spec.out, name),
        )
        (path, *_) = processes.exchange(str(folder.path) if folder else "")
        self.folder = folder or RunFolder(path)

    @property
    def checkpoints(self) -> Checkpoints:
        index, count = self.processes.index, self.processes.count
        return Checkpoints(self.folder.path / FOLDER, self.spec.keep_checkpoints, index, count)

    @property
    def go_on(self) -> str:
        """How the run can be resumed, for the end of an error; "" if it cannot."""
        saved, trust = self.checkpoints.rounds(), " --trust" * any(kind in CODE for kind in self.spec.own_code)
        return f"; --resume {self.folder.path}{trust} goes on after round {saved[-1]}" if saved else ""

    def start(self, held: contextlib.ExitStack, console: Console) -> State | None:
        self.processes.first(lambda: self._lock(held))
        experiment = build.build_experiment(self.spec, console, self.processes)
        self.spec, self.runs = experiment.spec, [one := Run(experiment, self.folder)]
        # The same in all processes, however full their machines are.
        self.place: simulate.StateOn = "device" if self.spec.kind_of_rounds else state_place(experiment)
        self.place = "host" if self.processes.agree(self.place == "host") else self.place
        if self.spec.resume:
            return self._go_back(one, console)
        self.processes.first(lambda: one.folder.write(CONFIG, configuration(experiment)))
        return None

    def _lock(self, held: contextlib.ExitStack) -> None:
        """Lock the folder until the end."""
        held.enter_context(lock_run(self.folder.path))
        self.is_locked = True
        if self.spec.resume:
            from experiments.run.resume import refuse_finished

            # Another process may have finished it since `resume.resumed` looked.
            refuse_finished(self.folder.path, self.spec.rounds)
            self.folder.tidy()

    def _go_back(self, one: Run, console: Console) -> State | None:
        """Go back to the newest good checkpoint; None for a run killed before its first one."""
        from experiments.run.resume import add_rounds, check_data, record_code

        notify = functools.partial(print_notice, console)
        processes, path, experiment = self.processes, self.folder.path, one.experiment
        placed = experiment.data.mesh is not None and self.place == "host"
        with processes.synchronized():
            check_data(path, experiment.dataset.description)
            found = self.checkpoints.newest(
                experiment.state_shapes(),
                lambda record: check_identity(record["identity"], experiment, self.checkpoints.folder, notify),
                clients=experiment.data.own_clients() if placed else None,
                by_rows=self.place == "disk",
            )
            if found is None:
                notify(f"No checkpoint was written to {self.checkpoints.folder}: the run begins anew.")
            one.restore(found.record if found else None, cut=processes.is_first)
            if processes.is_first:
                add_rounds(one.folder, experiment, one.counts.round, notify)
                record_code(one.folder)
        number = one.counts.round
        rounds = processes.exchange(str(number))
        with processes.synchronized():
            if len(set(rounds)) > 1:
                raise InvalidInput(
                    f"the processes found checkpoints of rounds {', '.join(rounds)}: all must see the same folder"
                )
        print_line(console, f"continuing {path} {f'after round {number}' if number else 'from the beginning'}")
        return found.state if found else None

    def rounds(self, state: State | None, console: Console) -> Iterable[Sequence[simulate.RoundResult]]:
        experiment, key = self.runs[0].experiment, jax.random.key(self.spec.seed)
        how: dict[str, Any] = {"state": state}
        if self.spec.kind_of_rounds:
            from experiments.run import in_place

            how |= {"engine": in_place.engine_of(experiment).jit()}
        else:
            how |= {"mesh": simulate.client_mesh(devices(self.spec)), "newcomers": experiment.newcomers, "donate": True}
            how |= {"state_on": self.place, "state_folder": self.folder.path if self.place == "disk" else None}
            how |= {"on_nan": self.spec.on_nan}
        for result in simulate.run(experiment.method, experiment.data, experiment.settings, key, **how):
            yield [result]

    def save(self, state: State) -> None:
        (one,), data = self.runs, self.runs[0].experiment.data
        with self.processes.synchronized():
            self.checkpoints.save(state, {}, one.record(), None if data.mesh is None else data.own_clients())

    def finish(self, state: State | None, console: Console) -> list[dict[str, Any]]:
        from experiments.run import outcome

        (one,), notify = self.runs, functools.partial(print_notice, console)
        if state is not None and int(state.round) not in self.checkpoints.rounds() and is_kept(one.experiment, notify):
            self.save(state)
        summary = self.processes.first(lambda: self.folder.finish(outcome.summary(one)))
        if self.processes.is_first:
            outcome.print_results(one, console)
        return [summary or {}]

    def last_words(self) -> str:
        self._discard()
        if not self.runs or not self.runs[0].lines:
            return f"interrupted before the first evaluation{self.go_on or ': nothing is left'}"
        last = self.runs[0].lines[-1]["round"]
        return (
            f"interrupted: evaluated up to round {last} of {self.spec.rounds}, see {self.folder.path / METRICS}"
            f"{self.go_on or '; no summary was written'}"
        )

    def _discard(self) -> None:
        """Remove the folder of a run without a result, unless it can be resumed."""
        # Another process may have the lock.
        if not self.is_locked or self.checkpoints.rounds():
            return
        if not self.spec.resume:
            self.folder.discard()

    def told(self, error: BaseException) -> BaseException:
        self._discard()
        several, go_on = self.processes.count > 1, self.go_on
        if not self.processes.is_first and isinstance(error, Diverged | KeyboardInterrupt):
            # All processes raise it, and the first one reports it.
            return SystemExit(INVALID if isinstance(error, Diverged) else INTERRUPTED)
        if isinstance(error, Diverged):
            from experiments.run.outcome import run_diverged

            return run_diverged(error, self.spec, go_on)
        if isinstance(error, CannotWrite | EndedAlone):
            return type(error)(f"{error}{go_on}")
        if is_shortage(error):
            return (EndedAlone if several else InvalidInput)(SHORTAGE + go_on)
        if several and lost(error):
            return EndedAlone(f"{LOST}{go_on}")
        return KeyboardInterrupt(self.last_words()) if isinstance(error, KeyboardInterrupt) else error
