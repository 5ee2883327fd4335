"""Driver of a run, or of several runs that share a program: start, rounds, stop, and the files that stay."""

import abc
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from experiments.folder.run_folder import CONFIG, KEPT, METRICS, RunFolder, lock_run
from experiments.host.console import RoundProgress, print_line, print_notice, print_text
from experiments.host.distributed import LOST, EndedAlone, Processes, is_peer_lost
from experiments.host.exit_codes import INTERRUPTED, INVALID, Stop, stoppable
from experiments.host.jax_config import SHORTAGE, is_shortage
from experiments.run import build, outcome
from experiments.run.records import check_identity, configuration, headline
from experiments.run.resume import add_rounds, check_data, record_code, refuse_finished
from experiments.run.rounds import ActiveRun
from experiments.run.trackers import open_trackers
from experiments.spec.option_notes import flag, identifier
from experiments.spec.own_code import CODE
from experiments.spec.spec import Spec
from pfl_jax import simulate
from pfl_jax.base import State
from pfl_jax.engine.checkpoint import FOLDER, Checkpoint, Checkpoints
from pfl_jax.errors import CannotWrite, Diverged, InvalidInput
from pfl_jax.primitives.tree import byte_count

MOST_BYTES = 2**28
"""Largest state in bytes that --keep-state auto keeps."""


class RunDriver(abc.ABC):
    """Driver of runs that share a program; it also handles their early ends.

    Attributes:
      specs: specs of the runs; with `resume`, all runs continue from their newest common checkpoint.
      processes: processes that share a single run.
      folders: folders of runs that this process has locked; empty in all processes but the first.
      runs: runs in progress, once they are built.
      place: storage of the clients' states.
    """

    place: simulate.StateOn = "device"

    def __init__(self, specs: Sequence[Spec], processes: Processes | None = None):
        self.specs, self.processes = list(specs), processes or Processes()
        self.folders, self.runs = list[RunFolder](), list[ActiveRun]()

    @abc.abstractmethod
    def build(self, folders: Sequence[RunFolder], console: Console) -> list[ActiveRun]:
        """Build the runs."""

    @abc.abstractmethod
    def rounds(self, state: State | None, console: Console) -> Iterable[Sequence[simulate.RoundResult]]:
        """Remaining rounds, a result for each run."""

    @abc.abstractmethod
    def states(self, state: State) -> Iterable[State]:
        """State of each run, from the joint state of all runs."""

    @abc.abstractmethod
    def state_of(self, states: list[State]) -> State:
        """Joint state of all runs, from the state of each run."""

    def checkpoints(self, folder: RunFolder, name: str = FOLDER) -> Checkpoints:
        """Checkpoints of a run in a subfolder; at least two if there are several runs, since some may have written a
        newer one than the others."""
        keep = 1 if name == KEPT else max(self.specs[0].keep_checkpoints, min(len(self.specs), 2))
        return Checkpoints(folder.path / name, keep, self.processes.index, self.processes.count)

    def drive(self, console: Console) -> list[dict[str, Any]]:
        """Do the runs to their end, from their start or newest checkpoint; return their summaries."""
        began, alone = time.perf_counter(), self.processes.count == 1
        with contextlib.ExitStack() as held, stoppable(console, self.last_words, at_once=alone) as stop:
            try:
                state, first = self.start(held, console), self.runs[0].experiment
                words = f"{len(self.runs)} runs together, the first: " if len(self.runs) > 1 else ""
                print_text(console, f"{words}{headline(first)}")
                for budget in first.privacy:
                    print_line(console, f"{words}{budget}")
                with contextlib.ExitStack() as tracked:
                    for run in self.runs:
                        trackers = functools.partial(open_trackers, run.folder, run.experiment.spec)
                        run.track = self.processes.first(lambda trackers=trackers: tracked.enter_context(trackers()))
                    state = self.train(state, console, began, stop)
                return self.finish(state, console)
            except BaseException as error:
                raise self.user_error(error) from None

    def start(self, held: contextlib.ExitStack, console: Console) -> State | None:
        """Claim and lock the folders, build the runs, write their configurations or restore their newest checkpoint;
        return the restored state, None for new runs."""
        claimed = [self._claim(spec, held) for spec in self.specs]
        self.runs = self.build(claimed, console)
        self.specs = [run.experiment.spec for run in self.runs]
        if self.specs[0].resume:
            return self._go_back(console)
        together = {"runs_together": len(self.runs)} if len(self.runs) > 1 else {}
        for run in self.runs:
            record = configuration(run.experiment) | together
            self.processes.first(functools.partial(run.folder.write, CONFIG, record))
        return None

    def _claim(self, spec: Spec, held: contextlib.ExitStack) -> RunFolder:
        """Claim the folder of a run, and lock it until the end."""

        def work() -> str:
            name = f"{spec.dataset}-{identifier(spec.method)}-seed{spec.seed}"
            folder = RunFolder(spec.resume) if spec.resume else RunFolder.claim(spec.out, name)
            held.enter_context(lock_run(folder.path))
            self.folders.append(folder)
            if spec.resume:
                # Another process may have finished the run since it was inspected.
                refuse_finished(folder.path, spec.rounds)
                folder.tidy()
            return str(folder.path)

        path, *_ = self.processes.exchange(self.processes.first(work) or "")
        return RunFolder(path)

    def _go_back(self, console: Console) -> State | None:
        """Go back to the newest good checkpoint that all runs have, and return its state; None without a checkpoint."""
        notify, processes = functools.partial(print_notice, console), self.processes
        with processes.synchronized():
            for run in self.runs:
                check_data(run.folder.path, run.experiment.dataset.description)
            found = self._newest(notify)
            for run, checkpoint in zip(self.runs, found, strict=True):
                if checkpoint is None and len(self.runs) == 1 and run.restore_from_log():
                    notify(f"{METRICS} has all rounds, only the summary is missing. No final state was kept.")
                else:
                    if checkpoint is None:
                        notify(f"No checkpoint was written to {run.folder.path / FOLDER}: the run begins anew.")
                    run.restore(checkpoint.record if checkpoint else None, cut=processes.is_first)
                if processes.is_first:
                    add_rounds(run.folder, run.experiment, run.counts.round, notify)
                    record_code(run.folder, notify)
        number = self.runs[0].counts.round
        rounds = processes.exchange(str(number))
        with processes.synchronized():
            if len(set(rounds)) > 1:
                raise InvalidInput(
                    f"the processes found checkpoints of rounds {', '.join(rounds)}: all must see the same folder"
                )
        who = f"{len(self.runs)} runs" if len(self.runs) > 1 else self.runs[0].folder.path
        print_line(console, f"continuing {who} {f'after round {number}' if number else 'from the beginning'}")
        states = [checkpoint.state for checkpoint in found if checkpoint is not None]
        return self.state_of(states) if states else None

    def _newest(self, notify: Callable[[str], None], until: int | None = None) -> list[Checkpoint | None]:
        """Newest checkpoints, one for each run, that are of the same round; of `until` at most."""
        found, shapes = list[Checkpoint | None](), self.runs[0].experiment.state_shapes()
        for run in self.runs:
            experiment, stored = run.experiment, self.checkpoints(run.folder)
            # Notify once for all runs.
            once = notify if run is self.runs[0] and until is None else lambda text: None
            check = functools.partial(check_identity, experiment=experiment, folder=stored.folder, notify=once)
            on_host = experiment.data.mesh is not None and self.place == "host"
            clients = experiment.data.own_clients() if on_host else None
            found.append(stored.newest(shapes, check, clients, by_rows=self.place == "disk", until=until))
        numbers = [int(checkpoint.state.round) if checkpoint else 0 for checkpoint in found]
        # If the process was killed while writing, some runs have a newer checkpoint than the others.
        return found if len(set(numbers)) == 1 else self._newest(notify, min(numbers))

    def train(self, state: State | None, console: Console, began: float, stop: Stop) -> State | None:
        """Run and record the remaining rounds; return the state after the last one.

        Args:
          state, console: state before these rounds (None at the start), and console for the progress.
          began: `time.perf_counter()` at the start of this process's part.
          stop: request of a signal to stop, which leads to a checkpoint and KeyboardInterrupt.
        """
        runs, first, before = self.runs, self.runs[0].experiment, self.runs[0].counts.elapsed
        spec, every = first.spec, first.spec.checkpoint_every
        if all(run.is_complete for run in runs):
            # Only the summary was missing.
            return state
        for run in runs:
            run.counts.starts.append(run.counts.round)
        with RoundProgress(console, spec.rounds, spec.eval_protocol, first.counts.task.primary) as progress:
            for results in self.rounds(state, console):
                stop.at_once = False
                state, number, seconds = results[0].state, results[0].round, results[0].seconds
                for index, result in enumerate(results):
                    self._record(index, result, before + time.perf_counter() - began, console)
                visited = sum(run.visits(result) for run, result in zip(runs, results, strict=True))
                known = [run.accuracy for run in runs if run.accuracy is not None]
                accuracy = float(np.mean(known)) if known else None
                progress.completed(number, seconds, accuracy, visited / seconds, runs[0].over)
                is_last = number == spec.rounds or all(run.has_ended() for run in runs)
                # A signal may reach one process or all, before or after the end of a round.
                stopping = self.processes.agree(stop.requested) and not is_last
                if stopping or (every is not None and (number % every == 0 or is_last)):
                    self.save(state)
                if stopping:
                    raise KeyboardInterrupt(f"interrupted after round {number} of {spec.rounds}")
                if is_last:
                    break
        return state

    def _record(self, index: int, result: simulate.RoundResult, elapsed: float, console: Console) -> None:
        """Count a round of one run, which ended `elapsed` seconds after the run began, and record its evaluation."""
        run, number = self.runs[index], result.round
        if run.has_ended():
            # Other runs of its program go on.
            run.counts.round = number
            return
        if len(result.diverged):
            where = f" in {run.folder.path}" if len(self.runs) > 1 else ""
            print_line(console, f"round {number}{where}: left out as diverged: clients {result.diverged.tolist()}")
        run.add(result, elapsed)
        if result.received is None:
            return
        with self.processes.synchronized():
            run.evaluate(result)
        if run.experiment.spec.patience is not None and run.final is run.lines[-1] and is_kept(run.experiment):
            self._save(run, next(itertools.islice(self.states(result.state), index, None)), KEPT)
        run.warn(result, console)

    def save(self, state: State) -> None:
        """Write a checkpoint of all runs after a round."""
        for run, own in zip(self.runs, self.states(state), strict=True):
            self._save(run, own)

    def _save(self, run: ActiveRun, state: State, folder: str = FOLDER) -> None:
        data = run.experiment.data
        with self.processes.synchronized():
            own_clients = None if data.mesh is None else data.own_clients()
            self.checkpoints(run.folder, folder).save(state, run.record(), own_clients)

    def finish(self, state: State | None, console: Console) -> list[dict[str, Any]]:
        """Keep the final states if requested, write the summaries and return them; an unknown state is None."""
        summaries, notify = [], functools.partial(print_notice, console)
        states = [None] * len(self.runs) if state is None else self.states(state)
        for run, own in zip(self.runs, states, strict=True):
            # If a run stopped before the others of its program, the state of its last round is gone.
            own = None if own is None or int(own.round) != run.lines[-1]["round"] else own
            is_saved = own is not None and int(own.round) in self.checkpoints(run.folder).rounds()
            if own is not None and not is_saved and is_kept(run.experiment, notify):
                self._save(run, own)
            summaries.append(self.processes.first(functools.partial(outcome.write, run)) or {})
        if self.processes.is_first and len(self.runs) == 1:
            outcome.print_results(self.runs[0], console)
        return summaries

    def last_words(self) -> str:
        """Message after an interruption: which results stay, and how to go on; folders without a result are removed."""
        self._discard()
        if len(self.specs) > 1:
            return "interrupted"
        if not self.runs or not self.runs[0].lines:
            return f"interrupted before the first evaluation{self._go_on or ': nothing is left'}"
        last, rounds = self.runs[0].lines[-1]["round"], self.specs[0].rounds
        return (
            f"interrupted: evaluated up to round {last} of {rounds}, see {self.runs[0].folder.path / METRICS}"
            f"{self._go_on or '; no summary was written'}"
        )

    @property
    def _go_on(self) -> str:
        """End of a message that says how to resume a single run; "" if it cannot be resumed."""
        spec, folders = self.specs[0], self.folders or [run.folder for run in self.runs]
        saved = self.checkpoints(folders[0]).rounds() if len(self.specs) == len(folders) == 1 else []
        # Own code runs only where the command names it.
        named = "".join(f" {flag(kind)} {getattr(spec, kind)}" for kind in CODE if kind in spec.own_code)
        resume = f"; --resume {folders[0].path}{named}" if folders else ""
        if not saved and len(self.runs) == 1 and self.runs[0].is_complete:
            return f"{resume} writes the summary, without the final state"
        return f"{resume} goes on after round {saved[-1]}" if saved else ""

    def _discard(self) -> None:
        """Remove the folders of runs without a result, unless they can be resumed."""
        for folder in () if self.specs[0].resume else self.folders:
            if not self.checkpoints(folder).rounds():
                folder.discard()

    def user_error(self, error: BaseException) -> BaseException:
        """Error for the user: what happened, what to do, and what remains of the runs."""
        self._discard()
        several, go_on = self.processes.count > 1, self._go_on
        if not self.processes.is_first and isinstance(error, Diverged | KeyboardInterrupt):
            # All processes raise it, and the first one reports it.
            return SystemExit(INVALID if isinstance(error, Diverged) else INTERRUPTED)
        if isinstance(error, Diverged):
            return outcome.run_diverged(error, self.specs[0], go_on)
        if isinstance(error, CannotWrite | EndedAlone):
            return type(error)(f"{error}{go_on}")
        if is_shortage(error):
            return (EndedAlone if several else InvalidInput)(SHORTAGE + go_on)
        if several and is_peer_lost(error):
            return EndedAlone(f"{LOST}{go_on}")
        return KeyboardInterrupt(self.last_words()) if isinstance(error, KeyboardInterrupt) else error


def is_kept(experiment: build.Experiment, notify: Callable[[str], None] = lambda text: None) -> bool:
    """Whether the final state of a run is kept; `notify` receives a message if it is too large for that."""
    wanted = experiment.spec.keep_state
    if wanted != "auto":
        return wanted == "always"
    size = byte_count(experiment.state_shapes()._replace(key=()))
    if size > MOST_BYTES:
        notify(f"The final state has {size / 2**20:,.0f} MiB and is not kept: --keep-state always would keep it.")
    return size <= MOST_BYTES
