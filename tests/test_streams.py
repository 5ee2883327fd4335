"""Random streams: every named one apart from the others of its key, and out of reach of every counter."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from message_shapes import message_shapes

import pfl_jax
from pfl_jax import Mean, streams
from pfl_jax.messages import has_means, is_mean, reference, references
from pfl_jax.methods import METHODS

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
    for group in (streams.RUN, streams.SERVER, streams.LOCAL, streams.AGGREGATION):
        assert len(set(group.values())) == len(group)
    # Whoever adds a stream says whose key it belongs to.
    assert {name.lower() for name in numbers()} == {
        name for group in (streams.RUN, streams.SERVER, streams.LOCAL, streams.AGGREGATION) for name in group
    }


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


PARTS = {
    # The change of the control variate is near nothing that was received.
    "scaffold": {"params"},
    # Class means are single arrays.
    "fedpac": {"backbone"},
    "fedproto_g": set(),
}
"""Methods with a `Mean` that is not trained from what the client received -> names of the parts that are."""


@pytest.mark.parametrize("name", METHODS)
def test_received_parts_of_every_method(name):
    _, _, message, known = message_shapes(name)
    found, (bases, flags) = {}, references(message, known)

    def note(path, part, base, flags):
        if is_mean(part):
            assert jax.tree.structure(base) == jax.tree.structure(part.value)
            for inner, flag in jax.tree_util.tree_leaves_with_path(flags):
                found[jax.tree_util.keystr((*path, *inner), simple=True, separator=".")] = flag

    jax.tree_util.tree_map_with_path(note, message, bases, flags, is_leaf=is_mean)
    assert bool(found) == has_means(message)
    if name in PARTS:
        parts = {path.split(".")[0] for path, flag in found.items() if flag}
        assert parts == PARTS[name]
        assert not all(found.values())
    else:
        assert all(found.values())


def test_the_reference_is_what_was_received():
    params = {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}
    other = jax.tree.map(lambda leaf: leaf + 7, params)
    server = {"params": params, "round": jnp.zeros(())}
    base, flags = reference(other, server)
    assert (base["kernel"] == 1).all()
    assert all(jax.tree.leaves(flags))
    # Two that fit: only a name can tell.
    twice = {"params": params, "control": other}
    assert not any(jax.tree.leaves(reference(params, twice)[1]))
    named, flags = reference({"params": params, "change": params}, twice)
    assert flags["params"]["bias"] is True
    assert (named["params"]["kernel"] == 1).all()
    assert flags["change"]["bias"] is False
    assert not named["change"]["kernel"].any()
    # Another type is another thing.
    assert not any(jax.tree.leaves(reference(jax.tree.map(jnp.int32, params), server)[1]))
    assert reference((), server) == ((), ())


def test_means_of_one_shape_are_told_apart_by_their_places():
    server = {name: {"w": jnp.full(2, float(number))} for number, name in enumerate(("first", "second"))}
    message = {name: Mean({"w": jnp.zeros(2)}, jnp.ones(())) for name in server}
    bases, flags = references(message, server)
    assert [bases[name]["w"].tolist() for name in server] == [[0, 0], [1, 1]]
    assert all(jax.tree.leaves(flags))
