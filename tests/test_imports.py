"""Imports go down only, and never in a circle: also those inside functions, and those for type checkers alone."""

import ast
import itertools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FLOORS = [
    # The library.
    {"pfl_jax.errors", "pfl_jax.outputs"},
    {"pfl_jax.compare", "pfl_jax.frozen", "pfl_jax.tasks"},
    {*(f"pfl_jax.{name}" for name in ("atomic_write", "base", "hyper_parameters", "safe_read", "streams"))},
    {"pfl_jax.data", "pfl_jax.networks"},
    {"pfl_jax.primitives"},
    {"pfl_jax.messages"},
    {"pfl_jax.wrappers"},
    {"pfl_jax.engine", "pfl_jax.methods"},
    {"pfl_jax.deploy", "pfl_jax.privacy", "pfl_jax.testing"},
    {"pfl_jax"},
    # The experiments. The package itself knows their names, and imports nothing.
    {"experiments"},
    {"experiments.cli"},
    {"experiments.papers"},
    {"experiments.folder"},
    {"experiments.show"},
    {"experiments.host"},
    {"experiments.run"},
    {f"experiments.{name}" for name in ("figures", "report", "sweep", "tables")},
    {"commands that Python is started with"},
    {"experiments.lab"},
]
"""From the bottom to the top. What stands on one floor, a module or a folder with all that is in it, imports what
stands below, and folders import of themselves."""

HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}


def modules(root):
    """Every module of both packages: dotted name -> file."""
    found = {}
    for path in sorted(
        itertools.chain.from_iterable((root / name).rglob("*.py") for name in ("pfl_jax", "experiments"))
    ):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def graph(root):
    """Module -> the modules that it imports, anywhere in its file."""
    files, found = modules(root), {}
    for module, path in files.items():
        wanted = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{module}: imports have full names here"
                full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                wanted |= {name if name in files else node.module for name in full.values()}
        found[module] = wanted & files.keys() - {module}
    return found


def room(module):
    """What a module belongs to in FLOORS."""
    first, *rest = module.split(".")
    is_command = rest and (rest[-1] == "__main__" or f"{first}.{rest[0]}" not in HEIGHT)
    if first == "experiments" and is_command and rest[0] != "lab":
        return "commands that Python is started with"
    return ".".join([first, *rest[:1]])


def upward(imports):
    """All imports that do not go down, in words."""
    return [
        f"{module} imports {other}"
        for module, others in sorted(imports.items())
        for other in sorted(others)
        if room(module) != room(other) and HEIGHT[room(module)] <= HEIGHT[room(other)]
    ]


def test_imports_go_down():
    assert not upward(graph(ROOT))


def test_there_is_no_cycle():
    try:
        TopologicalSorter(graph(ROOT)).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_every_folder_has_its_floor():
    assert {room(module) for module in modules(ROOT)} == HEIGHT.keys()
