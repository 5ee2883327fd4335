"""Exit codes, and one line on stderr for every error that the user can correct."""

import os
import sys
from collections.abc import Callable

from pfl_jax.errors import InvalidInput

INVALID, INTERRUPTED = 2, 130


def exit_code(work: Callable[[], None]) -> int:
    """Run a command; report every error that the user can correct in one line on stderr.

    Args:
      work: may raise InvalidInput, or KeyboardInterrupt with what is left of it.

    Returns:
      0, 2 for input that cannot be used, 130 after SIGINT, 1 if the output is no longer read.
    """
    try:
        work()
    except InvalidInput as error:
        _say(f"error: {error}")
        return INVALID
    except KeyboardInterrupt as stop:
        _say(str(stop) or "interrupted while no run was going on")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has exited; Python would report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _say(message: str) -> None:
    """Print one line to stderr, whatever the message contains."""
    print(" ".join(message.split()), file=sys.stderr, flush=True)
