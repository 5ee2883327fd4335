"""Ctrl-C and SIGTERM: the first one ends a run after its round, a second one ends the process at once.

A thread reads them, because XLA compiles for half a minute in the main thread.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

from rich.console import Console

from experiments.host.exit_codes import INTERRUPTED, print_line

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Request to stop the run after its round, or at once: there is nothing to lose before the first round is
    completed."""

    asked = False
    at_once = False


@contextlib.contextmanager
def stoppable(console: Console, last_words: Callable[[], str], *, at_once: bool = True) -> Iterator[Stop]:
    """Context in which the first SIGINT or SIGTERM asks to stop, and the next ends the process, after `last_words`."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    stop.at_once = at_once
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def answer() -> None:
        # A byte for each signal, and a zero at the end.
        while number := reader.recv(1)[0]:
            if number in SIGNALS:
                if stop.asked or stop.at_once:
                    _end(last_words)
                stop.asked = True
                console.print("stopping after this round; once more to stop at once", highlight=False)

    thread = threading.Thread(target=answer, daemon=True)
    # Python's own handlers do nothing: the number of each signal goes to the thread.
    with _handled(lambda number: None):
        descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        thread.start()
        try:
            yield stop
        finally:
            signal.set_wakeup_fd(descriptor)
            writer.send(b"\0")
            thread.join()
            reader.close()
            writer.close()


@contextlib.contextmanager
def _handled(handle: Callable[[int], None]) -> Iterator[None]:
    """Context in which a function gets the numbers of the signals."""
    handlers = {number: signal.signal(number, lambda number, _: handle(number)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end(last_words: Callable[[], str]) -> None:
    """Say what remains, and end the process."""
    said = "interrupted"
    # Nothing that fails here may keep the process.
    with contextlib.suppress(Exception):
        said = last_words()
    with contextlib.suppress(Exception):
        if sys.stdout.isatty():
            # A progress bar has hidden it.
            print("\x1b[?25h", flush=True)
        sys.stdout.flush()
    print_line(said)
    os._exit(INTERRUPTED)
