"""Random streams: every named one apart from the others of its key, and out of reach of every counter."""

import ast
import itertools
import re
from pathlib import Path

import numpy as np

import pfl_jax
from pfl_jax import streams

ROOT = Path(pfl_jax.__file__).parent


def numbers():
    named = {name: value for name, value in vars(streams).items() if name.isupper() and isinstance(value, int)}
    return {name: value for name, value in named.items() if name not in ("LARGEST", "COUNTER_LIMIT")}


def fold_in_arguments():
    """(file, second argument) of every call of fold_in in the package."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fold_in":
                yield path, node.args[1]


def test_streams_of_one_key_are_distinct():
    _, *groups = (ROOT / "streams.py").read_text().split("# Streams of ")
    named = [re.findall(r"^([A-Z_]+) = ", group, re.MULTILINE) for group in groups]
    for group in named:
        assert len({numbers()[name] for name in group}) == len(group)
    # Whoever adds a stream says whose key it belongs to.
    assert sorted(numbers()) == sorted(itertools.chain(*named))
    assert len(named) == 4


def test_no_counter_reaches_a_stream():
    assert np.iinfo(np.int32).max < streams.COUNTER_LIMIT
    assert all(streams.COUNTER_LIMIT <= number <= streams.LARGEST for number in numbers().values())


def test_streams_are_named_here_alone():
    for path, argument in fold_in_arguments():
        assert not isinstance(argument, ast.Constant | ast.BinOp), f"{path.name} folds in a number without a name"
    for path in ROOT.rglob("*.py"):
        assert path.name == "streams.py" or "2**32" not in path.read_text(), f"{path.name} has a stream of its own"
    assert not any(
        isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(ast.parse((ROOT / "streams.py").read_text()))
    )


def test_runs_without_augmentation_keep_their_streams():
    # Stored results, and runs that go on from a checkpoint, depend on these.
    named = numbers()
    kept = ("INITIALIZATION", "COHORT", "EVALUATION", "STRAGGLERS", "DROPOUTS", "NEWCOMERS")
    assert [named[name] for name in kept] == [4294967295 - index for index in range(6)]
    assert named["PERSONAL_MODEL"] == 4294967295
