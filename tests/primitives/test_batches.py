"""Which examples a step and an epoch take, and everything that counts steps; a number of them in place of epochs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import tiny_federation, tiny_model

from experiments.cli.command import parse
from experiments.run.rounds import visits
from experiments.spec.identity import relevant_options
from pfl_jax import ClientData, InvalidInput, methods, models
from pfl_jax.data import client_data
from pfl_jax.methods import make_method
from pfl_jax.primitives import LocalTraining

RELEASED = {"drop_last": True, "shuffle": False}


@functools.cache
def program(rows, recipe):
    """Compiled (key, n), with n real rows -> row numbers of each step [50, 4], -1 for none, and how many steps."""
    training, examples = LocalTraining(batch_size=4, **dict(recipe)), jnp.arange(rows)

    def step(carry, batch, key):
        seen, index = carry
        taken = jnp.where(batch.mask, batch.x, -1)
        return seen.at[index, : len(taken)].set(taken), index + 1

    def run(key, n):
        data = ClientData(examples, examples, examples < n)
        return training.fold(key, (jnp.full((50, 4), -1), 0), data, step), training.num_steps(n)

    return jax.jit(run)


def taken(n, key=0, padding=2, **recipe):
    """The examples of each step: lists of row numbers."""
    (seen, steps), counted = program(n + padding, tuple(recipe.items()))(jax.random.key(key), n)
    assert steps == counted == LocalTraining(batch_size=4, **recipe).num_steps(np.array([n]))[0]
    return [[int(row) for row in batch if row >= 0] for batch in np.asarray(seen)[: int(steps)]]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("n", "sizes"), [(11, [4, 4]), (12, [4, 4, 4]), (5, [4]), (3, [3])])
def test_an_incomplete_batch_is_dropped_unless_it_is_the_only_one(n, sizes, shuffle):
    batches = taken(n, epochs=2, drop_last=True, shuffle=shuffle)
    assert [len(batch) for batch in batches] == sizes * 2
    kept = taken(n, epochs=2, shuffle=shuffle)
    assert sum(map(len, kept)) == 2 * n


@pytest.mark.parametrize(
    ("n", "padding", "sizes"),
    # Of nine rows the last batch has a size of its own; clients that end in it, before it, or within the first one.
    [(11, 2, [4, 4, 3]), (9, 0, [4, 4, 1]), (8, 1, [4, 4]), (6, 3, [4, 2]), (3, 6, [3])],
)
def test_every_epoch_sees_every_real_example_once_in_a_new_order(n, padding, sizes):
    batches, number = taken(n, padding=padding, epochs=3), len(sizes)
    epochs = [batches[start : start + number] for start in (0, number, 2 * number)]
    for epoch in epochs:
        # Full batches first: the last one holds the rest.
        assert [len(batch) for batch in epoch] == sizes
        assert sorted(row for batch in epoch for row in batch) == list(range(n))
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_fixed_order_is_the_same_in_all_epochs_runs_and_paddings():
    batches = taken(11, epochs=2, shuffle=False)
    assert batches[:3] == batches[3:] == taken(11, epochs=1, key=7, padding=9, shuffle=False)
    order = [row for batch in batches[:3] for row in batch]
    assert sorted(order) == list(range(11))
    # The rows of a client may be sorted by class: their own order will not do.
    assert order != sorted(order)
    assert taken(11, epochs=2)[:3] != taken(11, epochs=2)[3:]


@pytest.mark.parametrize("n", [11, 3])
@pytest.mark.parametrize("length", [{"epochs": 1}, {"local_steps": 2}, {"local_steps": 7}], ids=str)
@pytest.mark.parametrize("drop_last", [False, True])
def test_always_visited_examples(n, length, drop_last):
    mask, recipe = jnp.arange(n + 2) < n, {**length, "drop_last": drop_last}
    visited = LocalTraining(batch_size=4, shuffle=False, **recipe).always_visited(mask)
    assert set(np.flatnonzero(visited)) == {row for batch in taken(n, shuffle=False, **recipe) for row in batch}
    np.testing.assert_array_equal(LocalTraining(batch_size=4, **recipe).always_visited(mask), mask)


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"shuffle": False}])
@pytest.mark.parametrize(("n", "padding", "steps"), [(11, 2, 2), (11, 2, 8), (9, 4, 5), (3, 10, 5)])
def test_steps_are_the_first_of_as_many_epochs_as_they_need(n, padding, steps, options):
    whole = taken(n, padding=padding, epochs=8, **options)
    assert taken(n, padding=padding, local_steps=steps, **options) == whole[:steps]


@pytest.mark.parametrize("name", ["fedavg", "apfl", "pfedme", "fedrod"])
def test_every_method_has_the_recipes_batches(name):
    """What an epoch in a fixed order leaves out may be anything."""
    examples = client_data(tiny_federation((11,)), 0, "train")
    # Pixels far away in the examples that are never visited.
    visited = LocalTraining(batch_size=4, **RELEASED).always_visited(examples.mask)
    strange = examples._replace(x=jnp.where(visited[:, None, None, None], examples.x, 50.0))
    key = jax.random.key(1)

    def trained(data, **options):
        method = make_method(name, tiny_model(), lr=0.1, batch_size=4, epochs=2, **options)
        server = method.init_server(key)
        return jax.tree.leaves(method.local(key, server, method.init_client(key, server, examples), data).message)

    same = trained(examples, **RELEASED), trained(strange, **RELEASED)
    for one, other in zip(*same, strict=True):
        np.testing.assert_array_equal(one, other)
    shuffled = trained(strange)
    assert any(np.abs(np.asarray(one) - other).max() > 1e-3 for one, other in zip(same[0], shuffled, strict=True))


# Rows of the mini-batches


@pytest.mark.parametrize(
    ("n", "batch_size", "rows"),
    [
        # The short batch is the second, the third or the only one.
        *((60, 50, [50, 10]), (23, 10, [10, 3]), (9, 4, [4, 2]), (9, 8, [8, 2])),
        *((12, 4, [4]), (11, 4, [4]), (3, 8, [3]), (1, 8, [2]), (1, 1, [1])),
    ],
)
def test_a_mini_batch_has_no_more_rows_than_there_can_be(n, batch_size, rows):
    seen = []

    def step(total, batch, key):
        seen.append(len(batch.mask))
        return total + jnp.sum(jnp.where(batch.mask, batch.x, 0))

    # A row that is taken twice, or of padding, changes the sum: none is 0.
    examples = jnp.arange(1, n + 1)

    @jax.jit
    def total(count, **length):
        data = ClientData(examples, examples, examples <= count)
        return LocalTraining(batch_size=batch_size, **length).fold(jax.random.key(0), 0, data, step)

    for count in {n, 1, (n + 1) // 2, max(1, n - rows[-1])}:
        for length in ({"epochs": 2}, {"local_steps": 2 * -(-count // batch_size)}):
            assert total(count, **length) == 2 * sum(range(1, count + 1))
    assert sorted(set(seen), reverse=True) == rows


# A number of steps in place of epochs


def test_all_clients_take_as_many_steps_and_none_without_examples():
    assert taken(0, local_steps=5) == []
    np.testing.assert_array_equal(LocalTraining(local_steps=17).num_steps(np.array([0, 1, 1000])), [0, 17, 17])
    traced = jax.jit(lambda steps: LocalTraining(local_steps=steps).num_steps(jnp.int32(9)))(3)
    assert traced == 3


def test_epochs_and_local_steps_exclude_each_other():
    with pytest.raises(InvalidInput, match="epochs and local_steps exclude each other"):
        LocalTraining(epochs=5, local_steps=17)
    with pytest.raises(InvalidInput, match="exclude each other"):
        make_method("fedavg", models.mlp((8,), 3), epochs=5, local_steps=17)
    recipe = LocalTraining(local_steps=17)
    assert (recipe.epochs, recipe.replace(lr=1.0).local_steps) == (None, 17)
    assert recipe.replace(epochs=2) == LocalTraining(epochs=2)
    assert LocalTraining(epochs=2).replace(local_steps=17) == recipe
    assert LocalTraining().epochs == 5


def test_privacy_counts_a_use_in_every_step():
    """A client with one mini-batch visits each of its examples in all of them."""
    model = models.mlp((8,), 3)
    assert methods.fedavg(model, LocalTraining(local_steps=17)).privacy.passes == 17
    assert methods.fedrep(model, LocalTraining(local_steps=17), head_epochs=2).privacy.passes == 19
    assert methods.fedavg(model, LocalTraining(epochs=3)).privacy.passes == 3
    tuned = methods.fedavg_ft(model, LocalTraining(local_steps=17))
    assert (tuned.privacy.passes, tuned.privacy.deployment) == (17, 17)


SMALL = ["--source", "embedded", "--num-clients", "4", "--rounds", "1", "--train-size", "20", "--batch-size", "10"]


def test_the_option_is_in_place_of_epochs():
    plain, stepped = parse("digits", SMALL), parse("digits", [*SMALL, "--local-steps", "17"])
    assert stepped.hyper_parameters["epochs"] is None
    # Results that were stored before there was the option have its default, and are no results of this one.
    known = relevant_options(plain)
    assert known["local_steps"] is None
    assert known["epochs"] >= 1
    other = relevant_options(stepped)
    assert (other["local_steps"], other["epochs"]) == (17, None)
    sizes = np.array([20, 20, 20])
    assert (visits(plain, sizes).sum(), visits(stepped, sizes).sum()) == (60 * known["epochs"], 3 * 17 * 10)
    with pytest.raises(InvalidInput, match="--local-steps cannot be given with --epochs"):
        parse("digits", [*SMALL, "--local-steps", "17", "--epochs", "2"])
