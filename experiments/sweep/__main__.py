"""Sweeps: every combination of values and seeds, trained together where their programs have one shape.

    python -m experiments.sweep --dataset digits --method fedpac --seeds 4 --grid lam=0.1,1,10 --grid lr=0.02,0.05

Numbers among the method's hyper-parameters and the seeds are inputs of one compiled program; runs that differ in
anything else (epochs, batch size, clients, ...) are groups, one after another. Each run has its own folder, as if it
had been started alone. Repeating the command resumes where it stopped: finished runs stay, and a group that was
interrupted goes on from its last checkpoint (--checkpoint-every writes them meanwhile). All other words are options of
`python -m experiments.DATASET`, and go to every run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments import DATASETS, unknown_dataset
from experiments.commands import batch
from experiments.config.options import flag
from experiments.config.presets import DEFAULT_PRESET
from experiments.execution import cached_runs
from experiments.sweep.plan import SweepRequest, groups
from pfl_jax.errors import InvalidInput

ROOT = Path("runs/sweeps")

GROUPS = "groups"
"""Folder of the checkpoints, in that of the sweep."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sweep.

    Args:
      arguments: command-line arguments; by default those of this process.

    Returns:
      The exit code, see `exit_codes.exit_code`.
    """
    return batch.command(arguments, parse, _dry_run, _run)


def _parser() -> batch.Parser:
    parser = batch.Parser("experiments.sweep", __doc__)
    parser.add_argument("--dataset", required=True, help=", ".join(DATASETS))
    parser.add_argument("--seeds", type=int, default=1, metavar="K", help="seeds 0 to K - 1 (default 1)")
    parser.add_argument(
        "--grid", action="append", default=[], metavar="NAME=V,V,...", help="values of an option; may be repeated"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs; by default in runs/sweeps")
    parser.add_argument("--dry-run", action="store_true", help="say each command and what is there, and run nothing")
    return parser


def parse(words: Sequence[str]) -> SweepRequest:
    """Check a command line, and that of every run.

    Raises:
      InvalidInput: an unknown dataset, option or value, or an option that a sweep cannot take.
    """
    own, rest = _parser().parse_known_args(words)
    if own.dataset not in DEFAULT_PRESET:
        raise InvalidInput(unknown_dataset(own.dataset))
    if own.seeds < 1:
        raise InvalidInput(f"--seeds must be at least 1, not {own.seeds}")
    if {"-h", "--help"} & set(rest):
        raise InvalidInput("--help stands alone")
    grid: dict[str, tuple[str, ...]] = {}
    for text in own.grid:
        name, equals, values = text.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        parts = tuple(dict.fromkeys(filter(None, values.split(","))))
        if not equals or not name or not parts:
            raise InvalidInput(f"--grid {text}: give a name and its values, such as --grid lam=0.1,1,10")
        if name in grid:
            raise InvalidInput(f"--grid {name} is there twice: give all its values at once")
        grid[name] = parts
    hints = {
        "seed": "use --seeds",
        "out": "every run has its folder in the sweep's --out",
        "resume": "the same command goes on where it was stopped",
        "distributed": "a command of many runs has one process",
        "wandb": "its runs go side by side in one process, where W&B has one run at a time",
        "held_out_clients": "newcomers are measured in single runs",
        "target_accuracy": "its runs end together",
        "on_nan": "a run that diverges is told, and the others go on",
        "state_on": "its runs keep their clients' states on the devices",
    }
    for name, hint in hints.items():
        if name in grid or name in batch.given(rest):
            raise InvalidInput(f"{flag(name)} cannot be given for a sweep: {hint}")
    if "eval_protocol" in grid:
        raise InvalidInput("--eval-protocol cannot be in the grid: it is what all settings are compared by")
    twice = sorted(batch.given(rest) & set(grid))
    if twice:
        raise InvalidInput(f"{flag(twice[0])} is in the grid already")
    named = [own.dataset, *rest, *(f"--grid {name}={','.join(values)}" for name, values in grid.items())]
    out = (own.out or ROOT / batch.slug(" ".join(named))).expanduser()
    request = SweepRequest(own.dataset, grid, own.seeds, tuple(rest), out, own.dry_run)
    for setting in request.settings():
        request.runs(setting)[0][0].request()
    return request


def _dry_run(request: SweepRequest, console: Console) -> None:
    runs = [run for setting in request.settings() for run in request.runs(setting)]
    for number, group in enumerate(groups([cell for cell, _ in runs]), start=1):
        console.print(f"group {number}: {len(group)} runs together", style="bold", highlight=False)
        for index in group:
            cached_runs.print_state(*runs[index], console)


def _run(request: SweepRequest, console: Console) -> None:
    """Run what is missing, group by group, and save the table and the picture."""
    runs = [run for setting in request.settings() for run in request.runs(setting)]
    # All folders first: what is refused is refused before hours of work.
    states = [cached_runs.inspect(*run) for run in runs]
    missing = [run for run, state in zip(runs, states, strict=True) if state != "finished"]
    console.print(f"{len(runs) - len(missing)} of {len(runs)} runs are there, in {request.out}", soft_wrap=True)
    # Imported now, so that errors and --help do not wait for them.
    from experiments.sweep import execute
    from experiments.sweep.results import save

    if missing:
        try:
            for group in groups([cell for cell, _ in runs]):
                of_group = [runs[index] for index in group]
                unfinished = [run for run in of_group if run in missing]
                if unfinished:
                    execute.run(of_group, unfinished, request.out / GROUPS, console)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(
                f"{stop or 'interrupted'}; finished runs stay in {request.out}: the same command goes on"
            ) from None
    save(request, console)


if __name__ == "__main__":
    sys.exit(main())
