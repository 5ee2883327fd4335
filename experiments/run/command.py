"""Command line of one run; every error that the user can correct is one line."""

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.cli import config_file
from experiments.cli import request as parsing
from experiments.cli.exit_codes import exit_code
from experiments.cli.own_code import CODE
from experiments.cli.parser import Group, options_of, split
from experiments.spec import Options
from pfl_jax.errors import InvalidInput

if TYPE_CHECKING:
    from experiments.host.processes import Processes


def main(dataset: str, arguments: Sequence[str] | None = None) -> int:
    """Run an experiment with command-line arguments, by default those of this process; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    codes: list[int] = []

    def work() -> None:
        request = parsing.parse(dataset, _with_method(arguments))
        if request.options.print_config:
            print(config_file.content(dataset, vars(request.options), request.hyper_parameters))
            return
        if not request.options.distributed:
            _run(request)
            return
        from experiments.host import distributed, jax_config

        if distributed.CHILD in os.environ:
            jax_config.prepare(request.options)
            distributed.work_as_child(functools.partial(_run, request), request)
        else:
            codes.append(distributed.supervise(dataset, arguments))

    return exit_code(work) or sum(codes)


def _with_method(arguments: Sequence[str]) -> Sequence[str]:
    """The arguments, with the method of the run that --resume names: it decides which other options there are."""
    some = {name: options_of(Options)[name] for name in ("resume", "trust", *CODE)}
    said, _ = split(arguments, [Group("", "", some)])
    if "method" in said or said.get("resume") is None:
        return arguments
    # Imported now, as all that only some commands need.
    from experiments.folder.load import read_config
    from experiments.run.resume import of_a_run, own_values

    folder = Path(said["resume"]).expanduser()
    try:
        config = read_config(folder)
    except InvalidInput:
        # `resumed` says what is wrong.
        return arguments
    with of_a_run(folder):
        method = own_values(config, folder, said, trust=said.get("trust", False))["method"]
    return [*arguments, f"--method={method}"]


def _run(request: parsing.Request, processes: "Processes | None" = None) -> None:
    """Run or resume, alone or as one of several processes."""
    # Imported now, so that errors and --help do not wait for it.
    from experiments.host.console import Terminal
    from experiments.host.processes import Processes
    from experiments.run import run

    processes = processes or Processes()
    with processes.synchronized():
        if request.options.resume is not None:
            from experiments.run.resume import resumed

            request = resumed(request)
    run.run(request, Terminal(quiet=not processes.is_first), processes=processes)
