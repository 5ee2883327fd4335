"""Command line of one run; every error that the user can correct is one line."""

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.cli.parser import Group, options_of, split
from experiments.cli.request import parse
from experiments.host.exit_codes import exit_code
from experiments.options import Options
from experiments.own_code import CODE
from experiments.spec import Spec
from pfl_jax.errors import InvalidInput

if TYPE_CHECKING:
    from experiments.host.processes import Processes


def main(dataset: str, arguments: Sequence[str] | None = None) -> int:
    """Run an experiment with command-line arguments, by default those of this process; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    codes: list[int] = []

    def work() -> None:
        spec = parse(dataset, _with_method(arguments))
        if spec.print_config:
            print(spec.as_json())
            return
        if not spec.distributed:
            _run(spec)
            return
        from experiments.host import distributed, jax_config

        if distributed.CHILD in os.environ:
            jax_config.prepare(spec)
            distributed.work_as_child(functools.partial(_run, spec), spec)
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


def _run(spec: Spec, processes: "Processes | None" = None) -> None:
    # Imported now, so that errors and --help do not wait for it.
    from experiments.run import run

    run.run(spec, processes=processes)
