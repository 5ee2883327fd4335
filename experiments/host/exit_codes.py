"""The end of a command: exit codes, errors that the user can correct in one line, Ctrl-C and SIGTERM.

The first signal ends a run after its round, a second one ends the process at once. A thread handles signals, because
XLA may compile for half a minute in the main thread.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from rich.console import Console

from pfl_jax.atomic_write import DISK_FULL
from pfl_jax.errors import InvalidInput

INVALID, INTERRUPTED = 2, 130

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_code(work: Callable[[], None]) -> int:
    """Run a command, and print one line on stderr for an error that the user can correct.

    The command may raise InvalidInput, or KeyboardInterrupt with a message on what remains to be done.
    Returns 0 for success, 2 for invalid input, 130 after SIGINT, and 1 if the reader of the output has exited.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Characters that the terminal's encoding lacks become "?", instead of ending the command.
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        work()
        if sys.stdout is not None:
            sys.stdout.flush()
    except InvalidInput as error:
        print_line(f"error: {error}")
        return INVALID
    except KeyboardInterrupt as stop:
        print_line(str(stop) or "interrupted while no run was going on")
        return INTERRUPTED
    except BrokenPipeError:
        close_output()
        return 1
    except OSError as error:
        # The error is about a path that the user gave, or about the output itself.
        if error.filename is None and error.errno not in DISK_FULL:
            raise
        if error.filename is None:
            close_output()
        print_line(f"error: {error.filename or 'cannot write the output'}: {error.strerror}")
        return INVALID
    except RuntimeError as error:
        if str(error) != "Could not determine home directory.":
            raise
        print_line("error: a path begins with ~, and the home folder cannot be found: give the whole path")
        return INVALID
    return 0


def exit_process(code: int) -> NoReturn:
    """End the process with an exit code; after SIGINT at once, unless other processes wait for this one.

    Python's own exit destroys JAX's client, which waits some ten seconds for XLA's threads if they compile, or crashes.
    """
    jax = sys.modules.get("jax")
    if code == INTERRUPTED and (jax is None or not jax.distributed.is_initialized()):
        with contextlib.suppress(OSError, AttributeError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def print_line(message: str) -> None:
    """Print a message to stderr as one line, without its line breaks."""
    # A full disk behind stderr must not change the exit code.
    with contextlib.suppress(OSError):
        print(" ".join(message.split()), file=sys.stderr, flush=True)


def close_output() -> None:
    """Discard the rest of the output; otherwise Python would report the same error again at exit."""
    with contextlib.suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Stop:
    """Request to stop the run after its round, or at once if no round is completed: then nothing is lost."""

    requested = False
    at_once = False


@contextlib.contextmanager
def stoppable(console: Console, last_words: Callable[[], str], *, at_once: bool = True) -> Iterator[Stop]:
    """Context in which the first SIGINT or SIGTERM asks to stop, and the next prints `last_words` and exits."""
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
                if stop.requested or stop.at_once:
                    _end(last_words)
                stop.requested = True
                console.print("stopping after this round; once more to stop at once", highlight=False)

    thread = threading.Thread(target=answer, daemon=True)
    # Python's own handlers do nothing: the number of each signal goes to the thread.
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
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
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end(last_words: Callable[[], str]) -> None:
    """Print the last words, and end the process."""
    words = "interrupted"
    # No failure here may keep the process alive.
    with contextlib.suppress(Exception):
        words = last_words()
    with contextlib.suppress(Exception):
        if sys.stdout.isatty():
            # Show the cursor, which a progress bar has hidden.
            print("\x1b[?25h", flush=True)
        sys.stdout.flush()
    print_line(words)
    os._exit(INTERRUPTED)
