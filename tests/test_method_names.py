"""METHODS is the only list of methods: what a method is, its own file says."""

import ast
from pathlib import Path

from pfl_jax.methods import METHODS

ROOT = Path(__file__).parents[1]

ALLOWED = {
    "pfl_jax/methods/__init__.py": "METHODS itself",
    "experiments/papers/settings.py": "rows of the papers' tables",
    "experiments/figures/fedpac.py": "curves of the papers' figures",
    "experiments/figures/fedas.py": "curves of the papers' figures",
    "experiments/lab/queue/planned.py": "runs of the laboratory's queue",
    "experiments/lab/queue/field.py": "methods that are compared with adapters",
    "experiments/lab/pages/picture.py": "methods of the page's picture",
    "experiments/lab/benchmark/client_counts.py": "measured methods",
    "experiments/lab/benchmark/large_cohorts.py": "measured methods",
    "experiments/lab/benchmark/sections.py": "measured methods",
    "experiments/lab/benchmark/pfllib.py": "names of PFLlib's algorithms",
}
"""Files that list methods, and why: they choose what is run or shown, and say nothing of what a method is."""

FILES = [str(path.relative_to(ROOT)) for name in ("pfl_jax", "experiments") for path in (ROOT / name).rglob("*.py")]


def lists_of_methods(text):
    """Lines of lists, tuples, sets and dictionaries that name three methods or more."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict):
            names = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
            if len(names & METHODS.keys()) >= 3:
                found.append(node.lineno)
    return found


def test_no_other_file_lists_methods():
    assert {file for file in FILES if lists_of_methods((ROOT / file).read_text())} == ALLOWED.keys()


def test_lists_are_found():
    assert lists_of_methods('KNOWN = {"fedavg": 1, "fedper": 2,\n  **dict.fromkeys(("local", "ditto", "apfl"))}') == [
        1,
        2,
    ]
    assert lists_of_methods('PAPERS = ("fedpac", "fedas")') == []
