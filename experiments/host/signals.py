"""Handling of Ctrl-C and SIGTERM: a one-line message at any time, and no loss of results.

Before a run has a folder, `experiments/__init__.py` ends the process at once. After that a signal raises
KeyboardInterrupt (`interruptible`), except that after the first round the run first completes the current round
(`stoppable`).

Python runs signal handlers only between its own instructions, and compiling a program takes XLA up to half a minute;
while JAX traces one, its callbacks can swallow the exception. A thread therefore watches for signals too. If the main
thread has not answered, or not ended, within a second, the thread ends the process (`leaving` says what to tidy up
before), unless a round is lost by that or a file is being written.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from rich.console import Console

from experiments.cli.exit_codes import INTERRUPTED, print_line

SIGNALS = (signal.SIGINT, signal.SIGTERM)

GRACE = 0.8
"""Seconds that the main thread has to answer a signal, and to end after an exception."""

Leave: TypeAlias = Callable[[str], str]
"""Tidies up in the place of the main thread: (what the inner one says, "" for nothing) -> line for the user."""


class _Raise:
    """Handler that raises KeyboardInterrupt and records it, because callbacks inside JAX can swallow exceptions."""

    def __init__(self):
        self.received = False

    def __call__(self, number: int, _: Any) -> None:
        self.received = True
        _watch.handled()
        raise KeyboardInterrupt


class _Watch:
    """Thread that answers signals that the main thread does not answer.

    Attributes:
      leave: innermost last, see `leaving`.
      stop: the run in `stoppable`.
      writing: whether the main thread writes what must be whole.
    """

    def __init__(self):
        self.leave: list[Leave] = []
        self.stop: Stop | None = None
        self.writing = False
        self._active = False
        self._answered = float("-inf")
        self._raised = False

    def handled(self, *, raised: bool = True) -> None:
        """Note that the main thread has run a handler, and whether that raises KeyboardInterrupt."""
        self._answered, self._raised = time.monotonic(), raised

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context with the thread; nested ones have that of the outermost."""
        if self._active or threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._active, self._raised = True, False
        thread = threading.Thread(target=self._watch, args=(reader,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._active = False
            signal.set_wakeup_fd(before)
            writer.send(b"\0")
            thread.join()
            reader.close()
            writer.close()

    def _watch(self, reader: socket.socket) -> None:
        pending = None
        while True:
            waiting = pending is not None or self._raised
            if select.select([reader], [], [], 0.1 if waiting else None)[0]:
                numbers = reader.recv(64)
                if 0 in numbers:
                    return
                pending = time.monotonic() if pending is None else pending
            if pending is not None and self._answered > pending - 0.1:
                pending = None
            if self.writing:
                continue
            now = time.monotonic()
            # The main thread is still here: the exception was swallowed.
            if self._raised and now - self._answered >= GRACE:
                self._leave()
            if pending is not None and now - pending >= GRACE:
                pending = None
                if self.stop is None or not self.stop.keep():
                    self._leave()

    def _leave(self) -> None:
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


_watch = _Watch()


@contextlib.contextmanager
def interruptible(*, watched: bool = True) -> Iterator[None]:
    """Turn SIGINT and SIGTERM into a KeyboardInterrupt.

    Args:
      watched: whether the process may end while the main thread compiles; False if others wait for it.
    """
    _raise_swallowed()

    def hook(unraisable: Any) -> None:
        # A swallowed KeyboardInterrupt is recorded by the handler and needs no traceback.
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            previous(unraisable)

    previous, sys.unraisablehook = sys.unraisablehook, hook
    try:
        with _watch.running() if watched else contextlib.nullcontext(), _handled(_Raise()):
            yield
    finally:
        sys.unraisablehook = previous


@contextlib.contextmanager
def leaving(leave: Leave) -> Iterator[None]:
    """Context in which this tidies up if the process ends while the main thread compiles, and says what remains."""
    _watch.leave.append(leave)
    try:
        yield
    finally:
        _watch.leave.remove(leave)


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Context in which no signal ends the process before the main thread returns to Python."""
    before, _watch.writing = _watch.writing, True
    try:
        yield
    finally:
        _watch.writing = before


class Stop:
    """Request to stop the run.

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


@contextlib.contextmanager
def stoppable(console: Console, *, at_once: bool = True) -> Iterator[Stop]:
    """Context in which the first SIGINT or SIGTERM stops the run after the current round, and a second one at once.

    Args:
      console: for the answer.
      at_once: whether the first one stops a run at once that has not completed a round.
    """
    _raise_swallowed()
    stop = Stop(console, completed=not at_once)

    def ask(number: int, _: Any) -> None:
        _watch.handled(raised=False)
        was_asked = stop.asked
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler)
        # The watching thread may have answered the same signal already.
        if not stop.keep() and not was_asked:
            _watch.handled()
            raise KeyboardInterrupt

    before, _watch.stop = _watch.stop, stop
    try:
        with _handled(ask):
            yield stop
    finally:
        _watch.stop = before


def _raise_swallowed() -> None:
    if getattr(signal.getsignal(signal.SIGINT), "received", False):
        raise KeyboardInterrupt


@contextlib.contextmanager
def _handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Install signal handlers; does nothing outside the main thread, where Python does not allow it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
