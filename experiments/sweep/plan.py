"""Groups of a sweep's runs that share one program."""

import json
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.effects import relevant_options
from experiments.cli.run_command import RunCommand
from experiments.folder.load import read_json
from pfl_jax.errors import InvalidInput

RUNS = "runs.json"
"""File beside a group's checkpoints with the names of its runs."""


def groups(cells: Sequence[RunCommand]) -> list[list[int]]:
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


def checkpointed(root: Path) -> dict[Path, list[str]]:
    """Folder of the checkpoints of each group that was interrupted -> names of its runs, their paths in the sweep.

    Args:
      root: folder of all of them.

    Raises:
      InvalidInput: a file with the names is damaged.
    """
    found = {}
    for path in sorted(root.glob(f"*/{RUNS}")):
        found[path.parent] = names = read_json(path).get("runs")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidInput(f"{path} is damaged: remove {path.parent}, and its runs are made again")
    return found
