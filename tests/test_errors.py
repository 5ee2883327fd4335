"""Errors of the library, and the words of their messages."""

import copy
import functools
import pickle

import numpy as np
import pytest

from pfl_jax.base import Model
from pfl_jax.errors import Diverged, InvalidInput, first_line, one_line, shortened, word


@pytest.mark.parametrize("clients", [[2, 5], []])
def test_a_divergence_can_be_sent_to_another_process_and_copied(clients):
    error = Diverged(3, clients)
    error.add_note("lr 9")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is Diverged
        assert (str(other), other.round, other.clients) == (str(error), 3, clients)
        assert other.__notes__ == ["lr 9"]


def test_an_error_is_told_in_one_line_of_limited_length():
    assert first_line(InvalidInput("one\ntwo")) == "one"
    assert first_line(InvalidInput()) == ""
    assert one_line(ValueError(" one\n  two")) == "one two"
    assert one_line(ValueError()) == "ValueError"
    assert shortened("a" * 200) == "a" * 200
    assert shortened("a" * 201) == "a" * 197 + "..."
    assert len(first_line("a" * 900)) == 200
    assert len(one_line("a" * 900)) == 300


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("mlp", "'mlp'"),
        (0.1, "0.1"),
        (True, "True"),
        (word, "the function word"),
        (Model, "the class Model"),
        (np, "a module"),
        (functools.partial(word), "a partial"),
        ([1], "a list"),
        (np.zeros((2, 8), np.float32), "float32 [2, 8]"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(value, words):
    assert word(value) == words
