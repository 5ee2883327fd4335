"""Groups of a sweep's runs that share one program."""

import inspect
import json
from collections.abc import Sequence

from experiments.config.cell import Cell
from experiments.config.request import Request, relevant_options
from pfl_jax.methods import METHODS


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
        fixed = {name: value for name, value in relevant_options(request).items() if name not in real_numbers(request)}
        found.setdefault(json.dumps(fixed, sort_keys=True), []).append(index)
    return list(found.values())


def real_numbers(request: Request) -> dict[str, float]:
    """Hyper-parameters that may be inputs of a compiled program: real numbers by their annotation."""
    parameters = inspect.signature(METHODS[request.options.method], eval_str=True).parameters
    return {name: value for name, value in request.hyper_parameters.items() if parameters[name].annotation is float}
