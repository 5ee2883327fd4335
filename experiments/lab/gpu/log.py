"""Measurements in a file, a line of JSON each, written as soon as it is there."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.lab.benchmark.records import Row
from pfl_jax.atomic_write import append_line


class OutOfTime(Exception):
    """No measurement may begin any more."""


class Log:
    """The measurements of a part, beside those of the others.

    Args:
      file: of all measurements; those that are there are not measured again, errors too.
      part: its name.
      until: time in seconds, as of time.time(), after which no measurement begins.
    """

    def __init__(self, file: Path, part: str, until: float):
        self.there = {line["name"]: line for line in read(file)}
        self._file, self._part, self._until = file, part, until

    def add(self, name: str, work: Callable[..., Row], *arguments: Any) -> None:
        """Measure work(*arguments) unless it is there, store the row or the error, and print it.

        Raises:
          OutOfTime: it is not there, and there is no time.
        """
        name = f"{self._part}/{name}"
        if name in self.there:
            return
        if time.time() >= self._until:
            raise OutOfTime
        began = time.perf_counter()
        try:
            row = work(*arguments)
        except Exception as error:
            # One form that needs too much memory, say, must not cost the others.
            row = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        self.there[name] = {"name": name} | row | {"took, s": time.perf_counter() - began}
        append_line(self._file, json.dumps(self.there[name], default=float))
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in shown.items())}", flush=True)


def read(file: Path) -> list[Row]:
    """Measurements of a file in their order, none of a missing one; a last line that is cut is removed from it."""
    if not file.exists():
        return []
    whole, _, cut = file.read_text().rpartition("\n")
    if cut:
        file.write_text(f"{whole}\n" if whole else "")
    return [json.loads(line) for line in whole.splitlines()]
