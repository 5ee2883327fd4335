"""The command line: words in, an exit code out; every error the user can mend is one line."""

import os
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from experiments import unknown_dataset
from experiments.config import request as parsing
from experiments.config.presets import DEFAULT_PRESET
from pfl_jax.errors import InvalidInput

INVALID, INTERRUPTED = 2, 130


def main(dataset: str, arguments: Sequence[str] | None = None) -> int:
    """Runs an experiment.

    Args:
      dataset: its name.
      arguments: the words after it; by default those of this process.

    Returns:
      The exit code, see `exit_code`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments

    def work() -> None:
        if dataset not in DEFAULT_PRESET:
            raise InvalidInput(unknown_dataset(dataset))
        request = parsing.parse(dataset, arguments)
        if request.options.distributed:
            _as_one_of_many(request)
            return
        request = _resumed(request)
        # Imported now, so that errors and --help do not wait for it.
        from experiments.execution import run

        run.run(request, Console())

    return exit_code(work)


def _resumed(request: parsing.Request) -> parsing.Request:
    """The request of the run that goes on, or the request as it is."""
    if request.options.resume is None:
        return request
    from experiments.execution.resume import resumed

    return resumed(request)


def _as_one_of_many(request: parsing.Request) -> None:
    """The work of one process of a distributed run."""
    from experiments.execution import run
    from experiments.runtime import distributed, jax_config

    jax_config.prepare(request.options)
    processes = distributed.start(request)
    with processes.together():
        request = _resumed(request)
    run.run(request, Console(quiet=not processes.reports), processes=processes)


def exit_code(work: Callable[[], None]) -> int:
    """Does the work of a command, and tells every error the user can mend in one line on stderr.

    Args:
      work: may raise InvalidInput, or KeyboardInterrupt with what is left of it.

    Returns:
      0, 2 for input that cannot be used, 130 after SIGINT, 1 if nobody reads the output any more.
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
        # Whoever read our output has left; Python would complain about it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def _say(message: str) -> None:
    """One line on stderr, whatever the message."""
    print(" ".join(message.split()), file=sys.stderr, flush=True)
