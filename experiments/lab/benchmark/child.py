"""Functions in a process of their own, by another interpreter."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from experiments.host import jax_config
from experiments.lab.benchmark.measure import ROOT
from experiments.lab.benchmark.records import Row
from experiments.lab.benchmark.workload import Scale
from pfl_jax.errors import InvalidInput


def in_process(function: Callable[[Scale], Row], scale: Scale, *, python: str | Path) -> Row:
    """Call a function of a module, which returns JSON, by an interpreter.

    Raises:
      InvalidInput: it failed; with the last line that it wrote.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    words = [python, "-m", __name__, function.__module__, function.__name__, json.dumps(dataclasses.asdict(scale))]
    ended = subprocess.run(words, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if ended.returncode:
        line = (ended.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        raise InvalidInput(f"{function.__name__} by {python} ended with exit code {ended.returncode}: {line}")
    return json.loads(ended.stdout.splitlines()[-1])


def main(module: str, function: str, scale: str) -> None:
    """Print what a function of a module returns, see `in_process`."""
    jax_config.prepare_jax()
    print(json.dumps(getattr(importlib.import_module(module), function)(Scale(**json.loads(scale)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
