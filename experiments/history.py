"""What a run has behind it, and how it stops and goes on: evaluations, checkpoints, signals."""

import contextlib
import fcntl
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from experiments.options import PROCESSES, Options, flag
from experiments.parsing import Request
from experiments.study import WITHOUT_BEARING, read_config
from pfl_jax.base import Scores, State
from pfl_jax.checkpoint import Checkpoints
from pfl_jax.errors import InvalidInput
from pfl_jax.reporting import CONFIG, METRICS, SUMMARY, Evaluation

CONTINUING = {"resume", "out", "checkpoint_every", "keep_checkpoints", "eval_protocol"}
"""Options that say how a run goes on, not what it is."""


@dataclass
class History:
    """A run's rounds so far.

    Attributes:
      evaluations: all of them.
      wasted: each round's share of wasted gradient steps.
      bytes_up, bytes_down: sent by and to all clients so far.
      diverged: how often a client was left out because it had diverged.
      visits, seconds: examples visited, and time taken, in the rounds since the last evaluation.
      elapsed: since the run began, of all processes that had a part in it.
      state: to go on from; None at the beginning.
    """

    evaluations: list[Evaluation] = field(default_factory=list)
    wasted: list[float] = field(default_factory=list)
    bytes_up: int = 0
    bytes_down: int = 0
    diverged: int = 0
    visits: float = 0.0
    seconds: float = 0.0
    elapsed: float = 0.0
    state: State | None = None

    @property
    def round(self) -> int:
        """The last round that was done."""
        return len(self.wasted)

    def evaluate(
        self, number: int, received: Scores, trained: Scores, newcomers: tuple[Scores, Scores] | None = None
    ) -> Evaluation:
        """Adds the evaluation that a round had, and begins the next stretch of rounds.

        Args:
          number: of the round.
          received, trained, newcomers: see `Evaluation`.
        """
        evaluation = Evaluation(
            round=number,
            received=received,
            trained=trained,
            seconds=self.elapsed,
            examples_per_second=self.visits / self.seconds,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            newcomers=newcomers,
        )
        self.evaluations.append(evaluation)
        self.visits, self.seconds = 0.0, 0.0
        return evaluation

    def save(self, checkpoints: Checkpoints, state: State, log: Path) -> None:
        """Writes a checkpoint after a round; InvalidInput if it cannot be.

        Args:
          checkpoints: of the run.
          state: after the round.
          log: the metrics as far as they are written.
        """
        checkpoints.save(state, self.arrays(), {"metrics_bytes": log.stat().st_size})

    def arrays(self) -> dict[str, np.ndarray]:
        """All but the state, for a checkpoint."""
        arrays: dict[str, np.ndarray] = {
            "wasted": np.array(self.wasted, np.float64),
            "since": np.array([self.visits, self.seconds, self.elapsed], np.float64),
            "sent": np.array([self.bytes_up, self.bytes_down, self.diverged], np.int64),
        }
        for name in Evaluation._fields:
            # [evaluations, 2, 4, newcomers] without entries where nobody is held out.
            values = [getattr(evaluation, name) for evaluation in self.evaluations]
            arrays[name] = np.array([np.zeros((2, 4, 0)) if value is None else value for value in values])
        return arrays

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], state: State | None = None) -> "History":
        """What `arrays` gave, with the state that belongs to it."""
        columns = [arrays[name] for name in Evaluation._fields]
        evaluations = [_evaluation(*values) for values in zip(*columns, strict=True)]
        visits, seconds, elapsed = map(float, arrays["since"])
        up, down, diverged = map(int, arrays["sent"])
        return cls(evaluations, arrays["wasted"].tolist(), up, down, diverged, visits, seconds, elapsed, state)

    @classmethod
    def restore(cls, checkpoints: Checkpoints, like: State, log: Path, *, cut: bool = True) -> "History":
        """The run up to its newest good checkpoint; what the log has beyond it is cut off, to be written anew.

        Args:
          checkpoints: of the run.
          like: shapes of its state.
          log: the metrics.
          cut: False leaves the log to the process that writes it.

        Raises:
          InvalidInput: there is no checkpoint, or none that can be read, or the log is not the one it was.
        """
        found = checkpoints.newest(like)
        if found is None:
            raise InvalidInput(f"there is no checkpoint in {checkpoints.folder}: start the run anew")
        cut_log(log, found.record["metrics_bytes"], cut=cut)
        return cls.from_arrays(found.arrays, found.state)


def cut_log(log: Path, size: int, *, cut: bool = True) -> None:
    """Takes off what a run's metrics have beyond a checkpoint.

    Args:
      log: the metrics.
      size: their bytes at the checkpoint.
      cut: False only looks.

    Raises:
      InvalidInput: there is less than there was.
    """
    if not log.is_file() or log.stat().st_size < size:
        raise InvalidInput(f"{log} is shorter than at the last checkpoint: start the run anew, in another folder")
    if cut:
        with log.open("r+b") as file:
            file.truncate(size)


def _evaluation(
    number: np.ndarray,
    received: np.ndarray,
    trained: np.ndarray,
    seconds: np.ndarray,
    speed: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    newcomers: np.ndarray,
) -> Evaluation:
    """From the arrays that were stored."""
    of_newcomers = (Scores(*newcomers[0]), Scores(*newcomers[1])) if newcomers.size else None
    return Evaluation(
        int(number), Scores(*received), Scores(*trained), float(seconds), float(speed), int(up), int(down), of_newcomers
    )


def resumed(request: Request) -> Request:
    """The request of the run that --resume names, which goes on in its own folder.

    Args:
      request: the checked command line; what it gives beside --resume must be what the run has.

    Raises:
      InvalidInput: there is no such run, it is finished, or it is another one; the line says what differs.
    """
    options = request.options
    folder = Path(options.resume or "").expanduser()
    if "out" in request.given:
        raise InvalidInput("--out cannot be given with --resume: a run goes on in its own folder")
    if not (folder / CONFIG).is_file():
        raise InvalidInput(f"--resume {folder}: there is no run in it")
    if (folder / SUMMARY).exists():
        raise InvalidInput(f"--resume {folder}: the run is finished, its results are in {folder / SUMMARY}")
    if not (folder / METRICS).is_file():
        raise InvalidInput(f"--resume {folder}: {METRICS} is missing")
    config = read_config(folder)
    if config["dataset"] != request.dataset:
        raise InvalidInput(f"--resume {folder}: the run is on {config['dataset']}, not {request.dataset}")
    stored: dict[str, Any] = {**config["options"], **config["hyper_parameters"]}
    given = {**vars(options), **request.hyper_parameters}
    for name in sorted(request.given - CONTINUING - WITHOUT_BEARING):
        found, wanted = stored.get(name), given[name]
        wanted = list(wanted) if isinstance(wanted, tuple) else wanted
        if found != wanted:
            raise InvalidInput(f"--resume {folder}: the run has {flag(name)} {found}, not {wanted}")
    known = {name: tuple(v) if isinstance(v, list) else v for name, v in config["options"].items()}
    # Never those of the processes that began it.
    now = {name: getattr(options, name) for name in PROCESSES}
    changed = now | {name: getattr(options, name) for name in request.given & (CONTINUING | WITHOUT_BEARING) - {"out"}}
    restored = Options(**{**known, **changed, "resume": str(folder), "out": str(folder)})
    return Request(request.dataset, restored, config["hyper_parameters"], frozenset(config["given"]))


def check_data(folder: Path, description: str) -> None:
    """Raises InvalidInput where the data is not what the run in the folder began with."""
    began = read_config(folder)["data"]["description"]
    if began != description:
        raise InvalidInput(f"the run in {folder} began on {began}, and the data is {description} now; give --data-dir")


@contextlib.contextmanager
def alone(log: Path) -> Iterator[None]:
    """Holds a run for this process: as long as it lives, no other can write into the run's folder.

    Args:
      log: the run's metrics.

    Raises:
      InvalidInput: another process holds it.
    """
    with log.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidInput(f"another process is at work in {log.parent}: wait for it") from None
        yield


class Stop:
    """Whether someone asked the run to stop.

    Attributes:
      asked: by SIGINT or SIGTERM.
    """

    asked: bool = False


@contextlib.contextmanager
def stoppable(console: Console) -> Iterator[Stop]:
    """Lets a round end before the first SIGINT or SIGTERM stops the run; the second one stops it at once."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, _: Any) -> None:
        stop.asked = True
        for which in before:
            signal.signal(which, signal.default_int_handler)
        console.print("stopping after this round; once more to stop at once", highlight=False)

    for which in before:
        signal.signal(which, ask)
    try:
        yield stop
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
