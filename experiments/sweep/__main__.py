"""Sweeps: every combination of values and seeds, trained together where their programs have one shape.

    python -m experiments.sweep --dataset digits --method fedpac --seeds 4 --grid lam=0.1,1,10 --grid lr=0.02,0.05

Numbers among the method's hyper-parameters and the seeds are inputs of one compiled program; runs that differ in
anything else (epochs, batch size, clients, ...) are groups, one after another. Each run has its own folder, as if it
had been started alone. The same command again goes on where it was stopped: finished runs stay, and a group that was
interrupted goes on from its last checkpoint (--checkpoint-every writes them meanwhile). All other words are options of
`python -m experiments.DATASET`, and go to every run.
"""

import inspect
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from experiments import datasets, unknown_dataset
from experiments.commands import batch
from experiments.config.options import flag
from experiments.config.presets import DEFAULT_PRESET
from experiments.config.request import Request
from experiments.execution import cached_runs
from experiments.execution.cached_runs import Cell
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import METHODS

ROOT = Path("runs/sweeps")

GROUPS = "groups"
"""Folder of the checkpoints, in that of the sweep."""


class Order(NamedTuple):
    """A checked command line.

    Attributes:
      dataset: of all runs.
      grid: option -> its values, as words; their product are the sweep's settings.
      seeds: how many, from 0.
      words: for every run.
      out: folder of the runs, the table and the picture.
      dry_run: only say what there is to do.
    """

    dataset: str
    grid: dict[str, tuple[str, ...]]
    seeds: int
    words: tuple[str, ...]
    out: Path
    dry_run: bool

    def settings(self) -> list[tuple[str, ...]]:
        """A value for each option of the grid, in all combinations."""
        return list(itertools.product(*self.grid.values()))

    def name(self, setting: tuple[str, ...]) -> str:
        """For people and folders: "lam=0.1 lr=0.01"; the method's name where the grid is empty."""
        words = " ".join(f"{option}={value}" for option, value in zip(self.grid, setting, strict=True))
        return words or self.runs(setting)[0][0].request().options.method

    def runs(self, setting: tuple[str, ...]) -> list[tuple[Cell, Path]]:
        """The cells of a setting, one for each seed, and their folders."""
        words = [word for option, value in zip(self.grid, setting, strict=True) for word in (flag(option), value)]
        folder = self.out / batch.slug(" ".join(f"{o}={v}" for o, v in zip(self.grid, setting, strict=True)) or "runs")
        cells = [Cell(self.dataset, (*self.words, *words), seed) for seed in range(self.seeds)]
        return [(cell, folder / f"seed-{cell.seed}") for cell in cells]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a sweep.

    Args:
      arguments: the words of the command line; by default those of this process.

    Returns:
      The exit code, see `main.exit_code`.
    """
    return batch.command(arguments, parse, _say_what_there_is_to_do, _run)


def _parser() -> batch.Parser:
    parser = batch.Parser("experiments.sweep", __doc__)
    parser.add_argument("--dataset", required=True, help=", ".join(datasets()))
    parser.add_argument("--seeds", type=int, default=1, metavar="K", help="seeds 0 to K - 1 (default 1)")
    parser.add_argument(
        "--grid", action="append", default=[], metavar="NAME=V,V,...", help="values of an option; may be repeated"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs; by default in runs/sweeps")
    parser.add_argument("--dry-run", action="store_true", help="say each command and what is there, and run nothing")
    return parser


def parse(words: Sequence[str]) -> Order:
    """Checks a command line, that of every run included.

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
    twice = sorted(batch.given(rest) & set(grid))
    if twice:
        raise InvalidInput(f"{flag(twice[0])} is in the grid already")
    named = [own.dataset, *rest, *(f"--grid {name}={','.join(values)}" for name, values in grid.items())]
    out = (own.out or ROOT / batch.slug(" ".join(named))).expanduser()
    order = Order(own.dataset, grid, own.seeds, tuple(rest), out, own.dry_run)
    for setting in order.settings():
        order.runs(setting)[0][0].request()
    return order


def groups(cells: Sequence[Cell]) -> list[list[int]]:
    """Which cells are one program: those that differ in the seed and in the method's real numbers only.

    Args:
      cells: of one dataset.

    Returns:
      Positions in `cells`, group by group.
    """
    found: dict[str, list[int]] = {}
    for index, cell in enumerate(cells):
        request = cell.request()
        fixed = {
            name: value for name, value in cached_runs.bearing(request).items() if name not in real_numbers(request)
        }
        found.setdefault(json.dumps(fixed, sort_keys=True), []).append(index)
    return list(found.values())


def real_numbers(request: Request) -> dict[str, float]:
    """The hyper-parameters that may be inputs of a compiled program: real numbers by their annotation."""
    parameters = inspect.signature(METHODS[request.options.method], eval_str=True).parameters
    return {name: value for name, value in request.hyper_parameters.items() if parameters[name].annotation is float}


def _say_what_there_is_to_do(order: Order, console: Console) -> None:
    runs = [run for setting in order.settings() for run in order.runs(setting)]
    for number, group in enumerate(groups([cell for cell, _ in runs]), start=1):
        console.print(f"group {number}: {len(group)} runs together", style="bold", highlight=False)
        for index in group:
            cached_runs.say_state(*runs[index], console)


def _run(order: Order, console: Console) -> None:
    """Runs what is not there yet, group by group, and saves the table and the picture."""
    runs = [run for setting in order.settings() for run in order.runs(setting)]
    # All folders first: what is refused is refused before hours of work.
    states = [cached_runs.inspect(*run) for run in runs]
    missing = [run for run, state in zip(runs, states, strict=True) if state != "finished"]
    console.print(f"{len(runs) - len(missing)} of {len(runs)} runs are there, in {order.out}", soft_wrap=True)
    # Imported now, so that errors and --help do not wait for them.
    from experiments.sweep import execute
    from experiments.sweep.results import save

    if missing:
        try:
            for group in groups([cell for cell, _ in runs]):
                of_group = [runs[index] for index in group]
                unfinished = [run for run in of_group if run in missing]
                if unfinished:
                    execute.run(of_group, unfinished, order.out / GROUPS, console)
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(
                f"{stop or 'interrupted'}; finished runs stay in {order.out}: the same command goes on"
            ) from None
    save(order, console)


if __name__ == "__main__":
    sys.exit(main())
