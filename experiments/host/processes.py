"""What the processes of a run need of each other, and nothing for the only one."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from experiments.host.exit_codes import INVALID
from pfl_jax.errors import InvalidInput

LOST = "another process of the run has died, or cannot be reached"

_PEERS = ("gloo", "connection closed by peer", "connection reset", "coordination", "barrier", "heartbeat", "nccl")
"""Words in errors of collective computations and barriers whose other participants are gone."""

_Result = TypeVar("_Result")


class EndedAlone(InvalidInput):
    """Error of one process in the middle of a collective computation; the others learn it from its end."""


def lost(error: BaseException) -> bool:
    """Whether the error of a computation or barrier means that another process is gone."""
    if isinstance(error, InvalidInput) or not isinstance(error, RuntimeError | ValueError):
        return False
    return any(part in str(error).lower() for part in _PEERS)


class Processes:
    """Processes of one run, seen from one of them; one of an ordinary run sends nothing, and the first prints and
    writes."""

    def __init__(self, index: int = 0, count: int = 1):
        self.index, self.count = index, count

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def exchange(self, text: str) -> list[str]:
        """Texts of all processes, in order of their indices; a collective call."""
        if self.count == 1:
            return [text]
        from jax.experimental.multihost_utils import process_allgather

        encoded = np.frombuffer(text.encode(), np.uint8)
        with without_output():
            sizes = np.asarray(process_allgather(np.array([len(encoded)], np.int32))).reshape(-1)
            if not sizes.any():
                return [""] * self.count
            # Padded to a power of two, because each length compiles a separate program.
            width = 2 ** int(np.ceil(np.log2(max(64, sizes.max()))))
            rows = np.asarray(process_allgather(np.pad(encoded, (0, width - len(encoded)))))
        return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]

    def agree(self, asked: bool) -> bool:
        """Whether `asked` is True in any process; a collective call."""
        return any(self.exchange("yes" if asked else ""))

    @contextlib.contextmanager
    def synchronized(self) -> Iterator[None]:
        """Context in which an error of one process ends all of them; none continues before all have left it.

        The first process raises InvalidInput with the reasons of all that failed, the others SystemExit.
        """
        if self.count == 1:
            yield
            return
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            # Any exception must be exchanged, because the other processes would wait for ever.
            failure = error
        reason = "interrupted" if isinstance(failure, KeyboardInterrupt) else str(failure) or type(failure).__name__
        problems = self.exchange("" if failure is None else reason)
        if failure is not None and not isinstance(failure, InvalidInput):
            raise failure
        if any(problems):
            if not self.is_first:
                raise SystemExit(INVALID) from None
            raise InvalidInput(_one_line(problems)) from None

    def first(self, work: Callable[[], _Result]) -> _Result | None:
        """Do the work in the first process alone, see `synchronized`; None in the others."""
        with self.synchronized():
            return work() if self.is_first else None

    def first_then_others(self, work: Callable[[], _Result]) -> _Result:
        """Do the work in the first process, then in the others, which can use the files that it downloaded."""
        found = self.first(work)
        with self.synchronized():
            return work() if found is None else found


@contextlib.contextmanager
def without_output() -> Iterator[None]:
    """Suppress stdout, also from C++: Gloo prints its connections there."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _one_line(problems: list[str]) -> str:
    """Reasons why the processes stopped, in one line; a reason that all processes have is given once."""
    by_process = {index: problem for index, problem in enumerate(problems) if problem}
    if set(by_process) == {0} or set(problems) == {problems[0]}:
        return problems[0]
    return "; ".join(f"process {index}: {problem}" for index, problem in by_process.items())
