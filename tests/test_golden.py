"""Golden values and the version of a method: neither changes without the other."""

import inspect
import json

import pytest
from golden import FILE, entry, moved, numbers_of, renewed, with_version

from pfl_jax.methods import METHODS
from pfl_jax.methods.factories import method_factory, unchecked, version_of

STORED = json.loads(FILE.read_text())
NUMBERS = {"received": [0.5, -2.0], "all/received": [0.25]}


@pytest.mark.parametrize("name", METHODS)
def test_values_are_those_of_the_version(name):
    assert STORED[name]["version"] == version_of(METHODS[name])
    assert STORED[name] == entry(STORED[name]["version"], numbers_of(STORED[name])), (
        f"the values of {name} were rewritten without a new version: python tests/support/golden.py {name}"
    )
    assert {"received", "all/received", "losses/trained", "all/losses/trained"} <= STORED[name].keys()


def test_all_methods_are_there():
    assert STORED.keys() == METHODS.keys()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({}, ""),
        ({"received": [0.5002, -2.0], "new": [1.0]}, ""),
        ({"received": [0.5004, -2.0]}, "received"),
        ({"all/received": [float("nan")]}, "all/received"),
        ({"all/received": [0.25, 0.25]}, "all/received"),
    ],
)
def test_values_that_move_raise_the_version(change, where):
    got = NUMBERS | change
    assert moved(NUMBERS, got) == where
    # Rounding changes nothing, not even the stored digits.
    assert renewed(entry(3, NUMBERS), got, 3) == (entry(4, got) if where else entry(3, got | NUMBERS))
    # A version that was raised by hand is enough.
    assert renewed(entry(3, NUMBERS), got, 7)["version"] == 7
    assert renewed(None, got, 1) == entry(1, got)


def test_the_version_stands_in_the_file_of_the_method():
    factory = unchecked(METHODS["fedproto_l"])
    raised = with_version(inspect.getsource(inspect.getmodule(factory)), "fedproto_l", 2)
    assert raised.count("@method_factory(version=2)\ndef fedproto_l(") == 1
    assert version_of(method_factory(version=5)(factory)) == 5
