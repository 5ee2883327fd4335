"""Committed results: a small file for each finished run, in place of its folder.

    results/COLUMN/METHOD/seed-N.json

has the command, the commit, the method's version, the configuration, the summary, and the means over clients of every
evaluation, but no results of single clients. A file with the same dataset, options, seed and version of the method as a
run counts as that finished run; its name only helps people to find it. `experiments.lab.results` writes them.
"""

import functools
import itertools
from pathlib import Path
from typing import Any

from experiments.cli.cell import Cell
from experiments.cli.request import Request
from experiments.folder import load
from experiments.folder.load import Result
from experiments.folder.version import method_version
from experiments.run.cached_runs import difference, unmeasured
from pfl_jax.errors import InvalidInput

ROOT = Path(__file__).parents[2] / "results"
"""Folder of the committed results in the checkout."""

FIELDS = ("command", "commit", "version", "config", "summary", "rounds")
"""Entries of a file."""


class Library:
    """Committed results of a folder, those of today's versions of their methods.

    Args:
      root: the folder; a missing one counts as empty.

    Raises:
      InvalidInput: a file in it is damaged.
    """

    def __init__(self, root: Path = ROOT):
        self.root = root
        self._by_kind: dict[tuple[Any, ...], list[Result]] = {}
        found = [_read(path) for path in sorted(root.glob("*/*/seed-*.json"))]
        self.all = [one for one in found if one.version == method_version(one.config["options"]["method"])]
        for one in self.all:
            self._by_kind.setdefault(_kind(one.config["dataset"], one.config["options"]), []).append(one)

    def find(self, cell: Cell) -> Result | None:
        """Result of a cell; None if there is none."""
        # Before the arguments are parsed, which takes its time for the hundred places of a table.
        named = dict(itertools.pairwise(cell.arguments)).get("--method")
        if not any(
            (dataset, seed) == (cell.dataset, cell.seed) and named in (None, method)
            for dataset, method, _, seed in self._by_kind
        ):
            return None
        request = cell.request()
        there = self._by_kind.get(_kind(cell.dataset, vars(request.options)), [])
        return next((one for one in there if _is_of(request, one)), None)


def _is_of(request: Request, one: Result) -> bool:
    return not (difference(request, one.config) or unmeasured(request, one.config, finished=True))


def _kind(dataset: str, options: dict[str, Any]) -> tuple[Any, ...]:
    """Key that is compared first, because it is quick to compare."""
    return dataset, options["method"], options["num_clients"], options["seed"]


@functools.lru_cache(maxsize=4096)
def _parsed(path: Path, changed: int) -> Result:
    content = load.read_json(path)
    try:
        return Result(path, **{name: content[name] for name in FIELDS})
    except KeyError as error:
        raise InvalidInput(f"{path} has no {error}: remove it, and collect its run again") from None


def _read(path: Path) -> Result:
    return _parsed(path, path.stat().st_mtime_ns)
