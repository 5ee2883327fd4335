"""Command line of one run; every error that the user can correct is one line."""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments import unknown_dataset
from experiments.cli import request as parsing
from experiments.cli.exit_codes import exit_code
from experiments.cli.own_code import check_unchanged
from experiments.cli.parser import given
from experiments.cli.presets import DEFAULT_PRESET
from experiments.folder.load import read_config
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import METHODS


def main(dataset: str, arguments: Sequence[str] | None = None) -> int:
    """Run an experiment.

    Args:
      dataset: name of the experiment.
      arguments: command-line arguments; by default those of this process.

    Returns:
      The exit code, see `exit_codes.exit_code`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    codes: list[int] = []

    def work() -> None:
        if dataset not in DEFAULT_PRESET:
            raise InvalidInput(unknown_dataset(dataset))
        request = parsing.parse(dataset, _with_method(arguments))
        if request.options.distributed:
            from experiments.host import distributed

            if distributed.is_supervised():
                distributed.attach()
                _run_distributed(request)
            else:
                codes.append(distributed.supervise(dataset, arguments))
            return
        request = _resumed(request)
        # Imported now, so that errors and --help do not wait for it.
        from experiments.run import run

        run.run(request, Console())

    return exit_code(work) or sum(codes)


def _with_method(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments, with the method of the run that --resume names: it decides which other options there are."""
    if "method" in given(arguments):
        return arguments
    folders = [word.partition("=")[2] for word in arguments if word.startswith("--resume=")]
    folders += [value for word, value in itertools.pairwise(arguments) if word == "--resume"]
    if not folders or not folders[-1]:
        return arguments
    try:
        config = read_config(Path(folders[-1]).expanduser())
        method = config["options"]["method"]
        if method not in METHODS:
            # Before it is executed.
            check_unchanged("method", entry := config["own_code"]["method"])
            method = f"{entry['file']}:{method.rpartition(':')[2]}"
    except (InvalidInput, KeyError, TypeError, AttributeError):
        # `resumed` says what is wrong.
        return arguments
    return [*arguments, f"--method={method}"]


def _resumed(request: parsing.Request) -> parsing.Request:
    """Request of the run to resume; without --resume, the request itself."""
    if request.options.resume is None:
        return request
    from experiments.run.resume import resumed

    return resumed(request)


def _run_distributed(request: parsing.Request) -> None:
    """Do the work of one process of a distributed run."""
    from experiments.host import distributed, jax_config
    from experiments.run import run

    jax_config.prepare(request.options)
    with distributed.leaving_others():
        processes = distributed.start(request)
        with processes.synchronized():
            request = _resumed(request)
        run.run(request, Console(quiet=not processes.is_first), processes=processes)
