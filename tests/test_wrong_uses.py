"""Wrong uses of the Python API: each ends in one clear error before anything is compiled, or is made right."""

import re

import jax
import numpy as np
import pytest
import wrong_uses

from pfl_jax.errors import InvalidInput

REFUSED, RIGHT = list(wrong_uses.refused()), list(wrong_uses.right())


@pytest.mark.parametrize(("name", "call", "text"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_it_is_refused_in_one_line(name, call, text):
    with pytest.raises(InvalidInput) as raised:
        call()
    message = str(raised.value)
    assert re.search(text, message)
    assert "\n" not in message
    assert len(message) < 500


@pytest.mark.parametrize(("call", "wanted"), [case[1:] for case in RIGHT], ids=[name for name, *_ in RIGHT])
def test_it_is_made_right(call, wanted):
    found, expected = map(jax.tree.leaves, (call(), wanted()))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype


def test_all_uses_have_names_of_their_own():
    names = [name for name, *_ in [*REFUSED, *RIGHT]]
    assert len(set(names)) == len(names) >= 200
