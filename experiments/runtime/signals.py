"""Handling of Ctrl-C and SIGTERM: a one-line message at any time, and no loss of results.

Before a run has a folder, `experiments/__init__.py` ends the process at once. After that a signal raises
KeyboardInterrupt (`interruptible`), except that during the rounds the run first completes the current round
(`stoppable`).
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
    """Handler that raises KeyboardInterrupt and records it, because callbacks inside JAX can swallow exceptions."""

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
        # A swallowed KeyboardInterrupt is recorded by the handler and needs no traceback.
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            previous(unraisable)

    previous, sys.unraisablehook = sys.unraisablehook, hook
    try:
        with _handled(_Raise()):
            yield
    finally:
        sys.unraisablehook = previous


class Stop:
    """Request to stop the run.

    Attributes:
      asked: whether SIGINT or SIGTERM was received.
    """

    asked: bool = False


@contextlib.contextmanager
def stoppable(console: Console) -> Iterator[Stop]:
    """Context in which the first SIGINT or SIGTERM stops the run after the current round, and a second one at once."""
    _raise_swallowed()
    stop = Stop()

    def ask(number: int, _: Any) -> None:
        stop.asked = True
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler)
        console.print("stopping after this round; once more to stop at once", highlight=False)

    with _handled(ask):
        yield stop


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
