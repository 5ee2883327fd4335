"""What the processes of a run need of each other, and nothing for the only one."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from experiments.cli.exit_codes import INVALID
from pfl_jax.errors import InvalidInput

LOST = "another process of the run has died, or cannot be reached"

_PEERS = ("gloo", "connection closed by peer", "connection reset", "coordination", "barrier", "heartbeat", "nccl")
"""Words in errors of collective computations and barriers whose other participants are gone."""

_note: int | None = None
"""File in which the supervisor finds the note of `remember`; None without a supervisor."""

_Result = TypeVar("_Result")


class EndedAlone(InvalidInput):
    """Error of one process in the middle of a collective computation; the others learn it from its end."""


def lost(error: BaseException) -> bool:
    """Whether the error of a computation or barrier means that another process is gone."""
    if isinstance(error, InvalidInput) or not isinstance(error, RuntimeError | ValueError):
        return False
    return any(part in str(error).lower() for part in _PEERS)


class Processes:
    """Group of processes of one run, with the index of the current process.

    Args:
      index: index of this process; the first one is 0.
      count: number of processes; 1 for an ordinary run, in which nothing is sent.
    """

    def __init__(self, index: int = 0, count: int = 1):
        self.index, self.count = index, count

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes."""
        return self.index == 0

    def exchange(self, text: str) -> list[str]:
        """Texts of all processes, in order of their indices; a collective call."""
        if self.count == 1:
            return [text]
        with without_output():
            return self._exchange(text)

    def _exchange(self, text: str) -> list[str]:
        from jax.experimental.multihost_utils import process_allgather

        encoded = text.encode()
        sizes = np.asarray(process_allgather(np.array([len(encoded)], np.int32))).reshape(-1)
        if not sizes.any():
            return [""] * self.count
        # Padded to a power of two, because each length compiles a separate program.
        width = 2 ** int(np.ceil(np.log2(max(64, sizes.max()))))
        padded = np.zeros(width, np.uint8)
        padded[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        rows = np.asarray(process_allgather(padded))
        return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]

    def agree(self, asked: bool) -> bool:
        """Whether `asked` is True in any process; a collective call."""
        return any(self.exchange("yes" if asked else ""))

    @contextlib.contextmanager
    def synchronized(self) -> Iterator[None]:
        """Context in which an error of one process ends all of them; none continues before all have left it.

        Raises:
          InvalidInput: in the first process, if one or more processes failed; the message has their reasons.
          SystemExit: in all other processes then.
        """
        if self.count == 1:
            yield
            return
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
        # Any exception must be exchanged, because the other processes would wait for ever.
        reason = "interrupted" if isinstance(failure, KeyboardInterrupt) else str(failure) or type(failure).__name__
        problem = "" if failure is None else reason
        problems = self.exchange(problem)
        if failure is not None and not isinstance(failure, InvalidInput):
            raise failure
        if any(problems):
            if not self.is_first:
                raise SystemExit(INVALID) from None
            raise InvalidInput(_one_line(problems)) from None

    def first_then_others(self, work: Callable[[], _Result]) -> _Result:
        """Do the work in the first process, then in the others, which can use the files that it downloaded."""
        results: list[_Result] = []
        for first in (True, False):
            with self.synchronized():
                if self.is_first == first:
                    results.append(work())
        return results[0]

    def check_round(self, number: int) -> None:
        """Raise InvalidInput, see `synchronized`, unless all processes resume after the same round."""
        found = self.exchange(str(number))
        with self.synchronized():
            if len(set(found)) > 1:
                raise InvalidInput(
                    f"the processes found checkpoints of rounds {', '.join(found)}: all must see the same folder"
                )


@contextlib.contextmanager
def without_output() -> Iterator[None]:
    """Suppress stdout, also from C++: Gloo prints its connections there."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def remember(text: str) -> None:
    """Set the end of the line that the supervisor says if this process is lost; no effect without a supervisor."""
    if _note is None:
        return
    os.ftruncate(_note, 0)
    os.pwrite(_note, text.encode(errors="replace"), 0)


def note_in(file: int) -> None:
    """Give `remember` the supervisor's file."""
    global _note
    _note = file


def _one_line(problems: list[str]) -> str:
    """Reasons why the processes stopped, in one line; a reason that all processes have is given once."""
    by_process = {index: problem for index, problem in enumerate(problems) if problem}
    if set(by_process) == {0} or set(problems) == {problems[0]}:
        return problems[0]
    return "; ".join(f"process {index}: {problem}" for index, problem in by_process.items())
