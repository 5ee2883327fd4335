"""Golden values and the version of a method: neither changes without the other."""

import json

import pytest
from golden import FILE, entry, numbers_of

from pfl_jax.methods import METHODS
from pfl_jax.methods.factories import version_of

STORED = json.loads(FILE.read_text())


@pytest.mark.parametrize("name", METHODS)
def test_values_are_those_of_the_version(name):
    assert STORED[name]["version"] == version_of(METHODS[name])
    assert STORED[name] == entry(STORED[name]["version"], numbers_of(STORED[name])), (
        f"the values of {name} were rewritten without a new version: raise it, and run tests/support/golden.py {name}"
    )
    assert {"received", "all/received", "losses/trained", "all/losses/trained"} <= STORED[name].keys()


def test_all_methods_are_there():
    assert STORED.keys() == METHODS.keys()
