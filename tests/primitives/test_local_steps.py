"""A number of gradient steps in place of epochs: which examples they visit, and all that counts steps."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.cli.effects import relevant_options
from experiments.cli.request import parse
from experiments.run.command import main
from experiments.run.estimate import examples_visited
from pfl_jax import Settings, methods, models
from pfl_jax.base import ClientData
from pfl_jax.engine import chunking
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import make_method
from pfl_jax.primitives.local_training import LocalTraining


def batches(n, *, key=0, padding=2, **recipe):
    """Rows of each mini-batch."""
    training, rows = LocalTraining(batch_size=4, **recipe), np.arange(n + padding)

    def step(carry, batch, key):
        seen, index = carry
        return seen.at[index].set(jnp.where(batch.mask, batch.x, -1)), index + 1

    seen, steps = jax.jit(lambda key, data: training.fold(key, (jnp.full((50, 4), -2), 0), data, step))(
        jax.random.key(key), ClientData(rows, rows, rows < n)
    )
    assert steps == training.num_steps(jnp.int32(n)) == training.num_steps(np.array([n]))[0]
    return [[int(row) for row in batch if row >= 0] for batch in np.asarray(seen)[: int(steps)]]


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"shuffle": False}])
@pytest.mark.parametrize(("n", "steps"), [(11, 2), (11, 3), (11, 8), (3, 5)])
def test_steps_are_the_first_of_as_many_epochs_as_they_need(n, steps, options):
    assert batches(n, local_steps=steps, **options) == batches(n, epochs=8, **options)[:steps]


def test_all_clients_take_as_many_steps_and_none_without_examples():
    assert batches(0, local_steps=5) == []
    np.testing.assert_array_equal(LocalTraining(local_steps=17).num_steps(np.array([0, 1, 1000])), [0, 17, 17])
    traced = jax.jit(lambda steps: LocalTraining(local_steps=steps).num_steps(jnp.int32(9)))(3)
    assert traced == 3


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_always_visited_examples(steps, drop_last):
    mask, recipe = jnp.arange(13) < 11, {"local_steps": steps, "drop_last": drop_last}
    visited = LocalTraining(batch_size=4, shuffle=False, **recipe).always_visited(mask)
    assert set(np.flatnonzero(visited)) == {row for batch in batches(11, shuffle=False, **recipe) for row in batch}
    np.testing.assert_array_equal(LocalTraining(batch_size=4, **recipe).always_visited(mask), mask)


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
    with pytest.raises(InvalidInput, match="local_steps must be at least 1"):
        LocalTraining(local_steps=0)


def test_privacy_counts_a_use_in_every_step():
    """A client with one mini-batch visits each of its examples in all of them."""
    model = models.mlp((8,), 3)
    assert methods.fedavg(model, LocalTraining(local_steps=17)).privacy.passes == 17
    assert methods.fedrep(model, LocalTraining(local_steps=17), head_epochs=2).privacy.passes == 19
    assert methods.fedavg(model, LocalTraining(epochs=3)).privacy.passes == 3
    tuned = methods.fedavg_ft(model, LocalTraining(local_steps=17))
    assert (tuned.privacy.passes, tuned.privacy.deployment) == (17, 17)


def test_clients_of_all_sizes_go_under_one_vmap():
    model, sizes = models.mlp((8,), 3), np.array([1000, 10, 10, 10])

    def chunk(**recipe):
        method = methods.fedavg(model, LocalTraining(batch_size=10, **recipe))
        return chunking.resolved(Settings(1), method, sizes, backend="gpu").chunk

    assert (chunk(epochs=1), chunk(local_steps=17)) == (1, 4)


SMALL = ["--source", "embedded", "--num-clients", "4", "--rounds", "1", "--train-size", "20", "--batch-size", "10"]


def test_the_option_is_in_place_of_epochs():
    plain, stepped = parse("digits", SMALL), parse("digits", [*SMALL, "--local-steps", "17"])
    assert stepped.hyper_parameters["epochs"] is None
    # Results that were stored before there was the option keep their identity, and are no results of this one.
    known = relevant_options(plain)
    assert "local_steps" not in known
    assert known["epochs"] >= 1
    other = relevant_options(stepped)
    assert (other["local_steps"], other["epochs"]) == (17, None)
    assert (plain.visits(3, 60), stepped.visits(3, 60)) == (60 * known["epochs"], 3 * 17 * 10)
    assert examples_visited(stepped) * 2 == examples_visited(parse("digits", [*SMALL, "--local-steps", "34"]))
    with pytest.raises(InvalidInput, match="--local-steps cannot be given with --epochs"):
        parse("digits", [*SMALL, "--local-steps", "17", "--epochs", "2"])
    with pytest.raises(InvalidInput, match="--local-steps must be at least 1, not 0"):
        parse("digits", [*SMALL, "--local-steps", "0"])


def test_a_run_takes_as_many_steps(tmp_path):
    """One step of all of the 20 examples is an epoch of them."""
    scores = {}
    for words in ("--epochs 1", "--local-steps 1", "--local-steps 3"):
        folder = tmp_path / words.replace(" ", "")
        arguments = [*SMALL, "--batch-size", "64", "--method", "fedavg", *words.split(), "--out", str(folder)]
        assert main("digits", arguments) == 0
        scores[words] = json.loads((folder / "summary.json").read_text())
    losses = {words: one["received_per_client"] for words, one in scores.items()}
    assert losses["--epochs 1"] == losses["--local-steps 1"] != losses["--local-steps 3"]
    assert scores["--local-steps 3"]["wasted_step_share"] == 0
