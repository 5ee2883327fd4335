"""Command line of one run; every error that the user can correct is one line."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.cli.parser import Group, options_of, split
from experiments.cli.request import parse
from experiments.host.exit_codes import exit_code
from experiments.options import Options
from experiments.own_code import CODE
from pfl_jax.errors import InvalidInput

if TYPE_CHECKING:
    pass


def main(dataset: str, arguments: Sequence[str] | None = None) -> int:
    """Run an experiment with command-line arguments, by default those of this process; return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments

    def work() -> None:
        spec = parse(dataset, _with_method(arguments))
        if spec.print_config:
            print(spec.as_json())
            return
        # Imported now, so that errors and --help do not wait for it.
        from experiments.run.run import run

        if spec.distributed:
            from experiments.host import distributed, jax_config

            jax_config.prepare(spec)
            distributed.work_with_others(lambda processes: run(spec, processes=processes), spec)
        else:
            run(spec)

    return exit_code(work)


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
