"""Command line of one run; every error that the user can correct is one line."""

import sys
from collections.abc import Sequence

from rich.console import Console

from experiments import unknown_dataset
from experiments.config import request as parsing
from experiments.config.exit_codes import exit_code
from experiments.config.presets import DEFAULT_PRESET
from pfl_jax.errors import InvalidInput


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
        request = parsing.parse(dataset, arguments)
        if request.options.distributed:
            from experiments.runtime import supervise

            if supervise.is_supervised():
                supervise.attach()
                _run_distributed(request)
            else:
                codes.append(supervise.supervise(dataset, arguments))
            return
        request = _resumed(request)
        # Imported now, so that errors and --help do not wait for it.
        from experiments.execution import run

        run.run(request, Console())

    return exit_code(work) or sum(codes)


def _resumed(request: parsing.Request) -> parsing.Request:
    """Request of the run to resume; without --resume, the request itself."""
    if request.options.resume is None:
        return request
    from experiments.execution.resume import resumed

    return resumed(request)


def _run_distributed(request: parsing.Request) -> None:
    """Do the work of one process of a distributed run."""
    from experiments.execution import run
    from experiments.runtime import distributed, jax_config

    jax_config.prepare(request.options)
    with distributed.leaving_others():
        processes = distributed.start(request)
        with processes.synchronized():
            request = _resumed(request)
        run.run(request, Console(quiet=not processes.is_first), processes=processes)
