"""Exit codes, and one-line messages on stderr for errors that the user can correct."""

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from pfl_jax.atomic_write import DISK_FULL
from pfl_jax.errors import InvalidInput

INVALID, INTERRUPTED = 2, 130

_OF_PATHS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG)
"""Numbers of errors of paths that the user gave."""


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
        if error.filename is None and error.errno in DISK_FULL:
            close_output()
        elif error.filename is None or error.errno not in (*DISK_FULL, *_OF_PATHS):
            raise
        print_line(f"error: {error.filename or 'cannot write the output'}: {error.strerror}")
        return INVALID
    except RuntimeError as error:
        if str(error) != "Could not determine home directory.":
            raise
        print_line("error: a path begins with ~, and the home folder cannot be found: give the whole path")
        return INVALID
    return 0


def leave(code: int) -> NoReturn:
    """End the process with an exit code; after SIGINT at once, unless other processes wait for this one.

    Python's own way out destroys JAX's client, which waits for XLA's threads while they compile, for some ten seconds,
    or crashes.
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
    """Let the rest of the output go nowhere; otherwise Python would report the same error again at exit."""
    with contextlib.suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
