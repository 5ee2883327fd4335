"""Measurements in a file of records, each written as soon as it is there."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab import committed
from lab.benchmark.records import Row


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
        self.there = committed.read(file)
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
        row |= {key: _number(value) for key, value in row.items() if hasattr(value, "__float__")}
        self.there[name] = row | {"took, s": time.perf_counter() - began}
        committed.write(self._file, name, self.there[name])
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in shown.items())}", flush=True)


def _number(value: Any) -> Any:
    """A number as JSON has it; one that is not finite as a text."""
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else str(value)
