"""Exit codes, and one-line messages on stderr for errors that the user can correct."""

import codecs
import contextlib
import errno
import io
import os
import stat
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from pfl_jax.atomic_write import DISK_FULL
from pfl_jax.errors import InvalidInput

INVALID, INTERRUPTED = 2, 130

_OF_PATHS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG)
"""Numbers of errors of paths that the user gave."""

_PLAIN = {"±": "+-", "—": "-", "…": "...", "·": "*", "→": "->", "≤": "<=", "≥": ">="}
_PLAIN |= {"\N{EN DASH}": "-", "\N{MINUS SIGN}": "-", "\N{MULTIPLICATION SIGN}": "x"}


def exit_code(work: Callable[[], None]) -> int:
    """Run a command, and print one line on stderr for an error that the user can correct.

    The command may raise InvalidInput, or KeyboardInterrupt with a message on what remains to be done.
    Returns 0 for success, 2 for invalid input, and 130 after SIGINT.
    """
    _accept_all_characters()
    with _outliving_reader() as pipe:
        code = _code(work)
    return 1 if code == 0 and pipe is not None and pipe.broken else code


def _code(work: Callable[[], None]) -> int:
    """Exit code of a command whose output has a reader."""
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
    except OSError as error:
        if error.errno not in (*DISK_FULL, *_OF_PATHS) or (error.filename is None and error.errno not in DISK_FULL):
            raise
        if error.filename is None:
            _close_output()
        print_line(f"error: {error.filename or 'cannot write the output'}: {error.strerror}")
        return INVALID
    except RuntimeError as error:
        # Of Path.expanduser: there is no such user, or $HOME is not set for a user without a home folder.
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


class _Pipe(io.FileIO):
    """Pipe into which one can write on when its reader has exited: the rest goes nowhere.

    Attributes:
      broken: whether its reader has exited.
    """

    broken = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            self.broken = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return memoryview(data).nbytes


@contextlib.contextmanager
def _outliving_reader() -> Iterator[_Pipe | None]:
    """Context in which writing to stdout does not fail when its reader has exited; None if stdout is no pipe."""
    before = sys.stdout
    try:
        mode = os.fstat(before.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        mode = 0
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        yield None
        return
    pipe = _Pipe(before.fileno(), "wb", closefd=False)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(pipe), before.encoding, before.errors)
    try:
        yield pipe
    finally:
        sys.stdout.flush()
        sys.stdout = before


def _close_output() -> None:
    """Let the rest of the output go nowhere; otherwise Python would report the same error again at exit."""
    with contextlib.suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _accept_all_characters() -> None:
    """Print characters that the terminal's encoding lacks in another way, instead of ending the command."""
    codecs.register_error("pfl_jax.plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) in ("strict", "surrogateescape") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="pfl_jax.plain")  # pyright: ignore[reportAttributeAccessIssue]


def _plain(error: Any) -> tuple[str, int]:
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in text), error.end
