"""Ctrl-C and SIGTERM: the first one ends a run after its round, a second one ends the process at once.

Before a run has a folder, `experiments/__init__.py` ends the process at once. After that a thread reads the signals
(`interruptible`). It need not wait for the main thread, which is in native code for half a minute while XLA compiles:
it notes that the run is to stop (`stoppable`), or tidies up, says what remains (`leaving`) and ends the process, where
no round has been completed or one has been asked to stop before.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from rich.console import Console

from experiments.cli.exit_codes import INTERRUPTED, print_line

SIGNALS = (signal.SIGINT, signal.SIGTERM)

Leave: TypeAlias = Callable[[str], str]
"""Tidies up in the place of the main thread: (what the inner one says, "" for nothing) -> line for the user."""


class Stop:
    """Request to stop the run after its round.

    Args:
      console: for the answer.

    Attributes:
      asked: whether SIGINT or SIGTERM was received.
      completed: whether a round was completed; until then there is nothing to lose, and a signal ends the run at once.
    """

    def __init__(self, console: Console, *, completed: bool = False):
        self.asked: bool = False
        self.completed = completed
        self._console = console

    def keep(self) -> bool:
        """Ask for the run to stop after its round; False if it may end at once, because it was asked before."""
        if self.asked or not self.completed:
            return False
        self.asked = True
        self._console.print("stopping after this round; once more to stop at once", highlight=False)
        return True


class _Process:
    """What the thread has to know.

    Attributes:
      leave: innermost last, see `leaving`.
      stop: the run in `stoppable`; None outside.
      writing: whether the main thread writes what must be whole.
      listens: whether there is a thread.
    """

    def __init__(self):
        self.leave: list[Leave] = []
        self.stop: Stop | None = None
        self.writing = False
        self.listens = False

    def answer(self, signals: socket.socket) -> None:
        """Answer signals, a byte each, until a zero."""
        while number := signals.recv(1)[0]:
            if number not in SIGNALS or (self.stop is not None and self.stop.keep()):
                continue
            while self.writing:
                time.sleep(0.01)
            self.end()

    def end(self) -> None:
        """Tidy up, say what remains, and end the process."""
        said = ""
        for one in reversed(self.leave):
            # Nothing that fails here may keep the process.
            with contextlib.suppress(Exception):
                said = one(said)
        with contextlib.suppress(Exception):
            if sys.stdout.isatty():
                # A progress bar has hidden it.
                print("\x1b[?25h", flush=True)
            sys.stdout.flush()
        print_line(said or "interrupted")
        os._exit(INTERRUPTED)


_process = _Process()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Context in which SIGINT and SIGTERM are answered; nested ones, and threads, have that of the main thread."""
    if _process.listens or threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    # Python's own handlers do nothing: the number of each signal goes to the thread.
    handlers = {number: signal.signal(number, lambda number, frame: None) for number in SIGNALS}
    descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    _process.listens = True
    thread = threading.Thread(target=_process.answer, args=(reader,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        _process.listens = False
        signal.set_wakeup_fd(descriptor)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        writer.send(b"\0")
        thread.join()
        reader.close()
        writer.close()


@contextlib.contextmanager
def leaving(leave: Leave) -> Iterator[None]:
    """Context in which this tidies up before a signal ends the process, and says what remains."""
    _process.leave.append(leave)
    try:
        yield
    finally:
        _process.leave.remove(leave)


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Context that no signal ends before what is written in it is whole."""
    before, _process.writing = _process.writing, True
    try:
        yield
    finally:
        _process.writing = before


@contextlib.contextmanager
def stoppable(console: Console, *, at_once: bool = True) -> Iterator[Stop]:
    """Context in which the first SIGINT or SIGTERM stops the run after the current round, and a second one at once.

    Args:
      console: for the answer.
      at_once: whether the first one stops a run at once that has not completed a round.
    """
    before, _process.stop = _process.stop, Stop(console, completed=not at_once)
    try:
        yield _process.stop
    finally:
        _process.stop = before
