"""Plan of a sweep: its settings, their runs, and the groups that share one program."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.commands import batch
from experiments.config.cell import Cell
from experiments.config.options import flag
from experiments.config.request import relevant_options


class SweepRequest(NamedTuple):
    """Checked command line.

    Attributes:
      dataset: of all runs.
      grid: option -> its values, as given; their product gives the sweep's settings.
      seeds: how many, from 0.
      words: for every run.
      out: folder of the runs, the table and the picture.
      dry_run: only print the commands.
    """

    dataset: str
    grid: dict[str, tuple[str, ...]]
    seeds: int
    words: tuple[str, ...]
    out: Path
    dry_run: bool

    def settings(self) -> list[tuple[str, ...]]:
        """All combinations of the grid's values."""
        return list(itertools.product(*self.grid.values()))

    def name(self, setting: tuple[str, ...]) -> str:
        """Name for people and folders: "lam=0.1 lr=0.01"; the method's name if the grid is empty."""
        words = " ".join(f"{option}={value}" for option, value in zip(self.grid, setting, strict=True))
        return words or self.runs(setting)[0][0].request().options.method

    def runs(self, setting: tuple[str, ...]) -> list[tuple[Cell, Path]]:
        """Cells of a setting, one for each seed, and their folders."""
        words = [word for option, value in zip(self.grid, setting, strict=True) for word in (flag(option), value)]
        folder = self.out / batch.slug(" ".join(f"{o}={v}" for o, v in zip(self.grid, setting, strict=True)) or "runs")
        cells = [Cell(self.dataset, (*self.words, *words), seed) for seed in range(self.seeds)]
        return [(cell, folder / f"seed-{cell.seed}") for cell in cells]


def groups(cells: Sequence[Cell]) -> list[list[int]]:
    """Cells grouped by program: those that differ only in the seed and in the method's real-valued hyper-parameters.

    Args:
      cells: of one dataset.

    Returns:
      Positions in `cells`, group by group.
    """
    found: dict[str, list[int]] = {}
    for index, cell in enumerate(cells):
        request = cell.request()
        fixed = {name: value for name, value in relevant_options(request).items() if name not in request.real_numbers()}
        found.setdefault(json.dumps(fixed, sort_keys=True), []).append(index)
    return list(found.values())
