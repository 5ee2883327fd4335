"""Handling of Ctrl-C and SIGTERM: one line at any time, and no loss of results.

Until a run has a folder there is nothing to lose, and `experiments/__init__.py` ends the process at once. From then on
a signal is a KeyboardInterrupt (`interruptible`), and between the first round and the summary it waits for the end of
the round (`stoppable`).
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Raise:
    """Handler that raises KeyboardInterrupt and records it: callbacks inside JAX can swallow exceptions."""

    def __init__(self):
        self.received = False

    def __call__(self, number: int, _: Any) -> None:
        self.received = True
        raise KeyboardInterrupt


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into a KeyboardInterrupt."""
    _raise_swallowed()

    def hook(unraisable: Any) -> None:
        # A swallowed one is recorded: no traceback is needed.
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            usual(unraisable)

    usual, sys.unraisablehook = sys.unraisablehook, hook
    try:
        with _handled(_Raise()):
            yield
    finally:
        sys.unraisablehook = usual


class Stop:
    """Whether someone asked the run to stop.

    Attributes:
      asked: by SIGINT or SIGTERM.
    """

    asked: bool = False


@contextlib.contextmanager
def stoppable(console: Console) -> Iterator[Stop]:
    """Let a round end before the first SIGINT or SIGTERM stops the run; a second one stops it at once."""
    _raise_swallowed()
    stop = Stop()

    def ask(number: int, _: Any) -> None:
        stop.asked = True
        for which in SIGNALS:
            signal.signal(which, signal.default_int_handler)
        console.print("stopping after this round; once more to stop at once", highlight=False)

    with _handled(ask):
        yield stop


def _raise_swallowed() -> None:
    if getattr(signal.getsignal(signal.SIGINT), "received", False):
        raise KeyboardInterrupt


@contextlib.contextmanager
def _handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Install signal handlers where that is possible: in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {which: signal.signal(which, handler) for which in SIGNALS}
    try:
        yield
    finally:
        for which, usual in before.items():
            signal.signal(which, usual)
