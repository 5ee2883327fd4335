"""Causes of large differences from the papers' accuracies, as far as they are known or suspected."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from experiments.papers import published
from experiments.papers.published import Published

FILE = Path(__file__).with_name("causes.json")


class Cause(NamedTuple):
    """Supposed cause of the difference in one row of a table.

    Attributes:
      row: the published accuracy.
      cause: what may differ from the paper's run, in a sentence.
      options: options of a run that removes it; {} if there is no such run. The cause counts as supported once this
        run, over all rounds of the table, is close to the paper.
    """

    row: Published
    cause: str
    options: dict[str, Any]


def load(dataset: str) -> list[Cause]:
    """All causes, on one dataset."""
    causes = []
    for entry in json.loads(FILE.read_text()):
        cause, options = entry.pop("cause"), entry.pop("options")
        wanted = entry | {"dataset": dataset}
        (row,) = [row for row in published.load() if wanted.items() <= row._asdict().items()]
        causes.append(Cause(row, cause, options))
    return causes
