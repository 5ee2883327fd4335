"""Functions in a process of their own: for its peak memory, and for a cold start."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.host import jax_config
from experiments.lab.benchmark.measure import ROOT
from experiments.lab.benchmark.records import Row
from experiments.lab.benchmark.workload import Scale
from pfl_jax.errors import InvalidInput


def in_process(
    function: Callable[..., Row],
    scale: Scale | None = None,
    *,
    python: str | Path = sys.executable,
    prefix: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    compilation_cache: bool = True,
    **request: Any,
) -> Row:
    """Call a function in a process of its own.

    Args:
      function: of a module; returns JSON.
      scale: its first argument; None for none, and then the function prepares JAX itself.
      python, prefix, environment: of the command.
      compilation_cache: whether the process uses the cache of programs on disk.
      **request: further arguments, for JSON.

    Raises:
      InvalidInput: it failed; with the last line that it wrote.
    """
    if scale is not None:
        request |= {"scale": dataclasses.asdict(scale), "compilation_cache": compilation_cache}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    words = [*prefix, str(python), "-m", __name__, function.__module__, function.__name__, json.dumps(request)]
    variables = os.environ | {"PYTHONPATH": path} | (environment or {})
    ended = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    if ended.returncode:
        line = last_line(ended.stderr)
        raise InvalidInput(f"{function.__name__} by {python} ended with exit code {ended.returncode}: {line}")
    return json.loads(ended.stdout.splitlines()[-1])


def last_line(text: str) -> str:
    """Last line of what a failed process wrote."""
    return (text.strip().splitlines() or ["it wrote nothing"])[-1]


def main(module: str, function: str, text: str) -> Row:
    """Call a function of a module with arguments in JSON, see `in_process`."""
    request = json.loads(text)
    if "scale" in request:
        request["scale"] = Scale(**request["scale"])
        jax_config.prepare_jax(compilation_cache=request.pop("compilation_cache"))
    return getattr(importlib.import_module(module), function)(**request)


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
