"""Golden values and the version of a method: neither changes without the other."""

import json

import pytest
from golden import FILE, entry, moved, numbers_of

from pfl_jax.methods import METHODS
from pfl_jax.methods.factories import version_of

STORED = json.loads(FILE.read_text())
NUMBERS = {"received": [0.5, -2.0], "all/received": [0.25]}


@pytest.mark.parametrize("name", METHODS)
def test_values_are_those_of_the_version(name):
    assert STORED[name]["version"] == version_of(METHODS[name])
    assert STORED[name] == entry(STORED[name]["version"], numbers_of(STORED[name])), (
        f"the values of {name} were rewritten without a new version: raise it, and run tests/support/golden.py {name}"
    )
    assert {"received", "all/received", "losses/trained", "all/losses/trained"} <= STORED[name].keys()


def test_all_methods_are_there():
    assert STORED.keys() == METHODS.keys()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"received": [0.5002, -2.0], "new": [1.0]}, ""),
        ({"received": [0.5004, -2.0]}, "received"),
        ({"all/received": [float("nan")]}, "all/received"),
        ({"all/received": [0.25, 0.25]}, "all/received"),
    ],
)
def test_values_that_move_are_named(change, where):
    assert moved(NUMBERS, NUMBERS | change) == where
