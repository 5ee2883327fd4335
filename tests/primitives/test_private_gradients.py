"""Clipped and noised gradients: against float64 NumPy, their sensitivity, and which losses have the closed form."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees

from pfl_jax import ClientData, InvalidInput
from pfl_jax.networks.adapters import lora
from pfl_jax.networks.layers import assemble
from pfl_jax.networks.models import Backbone, mlp
from pfl_jax.primitives import (
    LocalTraining,
    clipped_gradient_sum,
    cross_entropy,
    fisher_trace,
    masked_mean,
    private_gradient,
    private_gradients,
    proximal,
)

ROWS, REAL, INPUTS, CLASSES = 21, 18, 4, 3
MODEL = mlp((INPUTS,), CLASSES, hidden=(5,))


def examples(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    x = scale * rng.normal(size=(ROWS, INPUTS))
    # The padding would be far off.
    x[REAL:] = 1e3
    return ClientData(jnp.float32(x), jnp.int32(rng.integers(0, CLASSES, ROWS)), jnp.arange(ROWS) < REAL)


PARAMS = MODEL.init(jax.random.key(1))
ANCHOR = jax.tree.map(lambda leaf: leaf + 0.1, PARAMS)


def regularized(params, batch, key):
    """Loss with a part that depends on no example."""
    return cross_entropy(MODEL.apply(params, batch.x), batch.y, batch.mask) + 0.7 * proximal(params, ANCHOR)


@functools.cache
def program(closed_form):
    def sums(params, batch, clip):
        with pytest.MonkeyPatch.context() as patch:
            # The examples come in parts, the last of them incomplete.
            patch.setattr(private_gradients, "MICROBATCH", 8)
            if not closed_form:
                patch.setattr(private_gradients, "have_closed_form", lambda *_, **__: False)
            return clipped_gradient_sum(jax.random.key(0), regularized, params, batch, clip)

    return jax.jit(sums)


def own_gradients(params, batch):
    """Float64 gradients of the examples' cross entropies, by hand: dictionaries of [REAL, ...]."""
    flat = {jax.tree_util.keystr(path): np.float64(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    first = {name.rpartition("['")[2][:-2]: leaf for name, leaf in flat.items() if "backbone" in name}
    last = {name.rpartition("['")[2][:-2]: leaf for name, leaf in flat.items() if "head" in name}
    x, y = np.float64(batch.x)[:REAL], np.asarray(batch.y)[:REAL]
    before = x @ first["kernel"] + first["bias"]
    hidden = np.maximum(before, 0)
    logits = hidden @ last["kernel"] + last["bias"]
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    delta = shares / shares.sum(axis=1, keepdims=True) - np.eye(CLASSES)[y]
    back = (delta @ last["kernel"].T) * (before > 0)
    return {
        "backbone": {"bias": back, "kernel": x[:, :, None] * back[:, None]},
        "head": {"bias": delta, "kernel": hidden[:, :, None] * delta[:, None]},
    }


def clipped(gradients, clip):
    squares = sum(np.square(leaf.reshape(REAL, -1)).sum(axis=1) for leaf in jax.tree.leaves(gradients))
    factors = np.minimum(1, clip / np.sqrt(squares))
    return jax.tree.map(lambda leaf: np.tensordot(factors, leaf, 1), gradients)


@pytest.mark.parametrize("closed_form", [True, False])
@pytest.mark.parametrize("clip", [0.3, 1.2, 1e6])
def test_the_sum_of_clipped_gradients_against_float64(closed_form, clip):
    batch = examples()
    total, free = program(closed_form)(PARAMS, batch, clip)
    expected = clipped(own_gradients(PARAMS, batch), clip)
    chex.assert_trees_all_close(jax.tree.leaves(total), jax.tree.leaves(expected), rtol=2e-5, atol=2e-6)
    # The part without examples is neither clipped nor counted.
    chex.assert_trees_all_close(free, jax.tree.map(lambda leaf: jnp.full_like(leaf, -0.07), PARAMS), rtol=1e-4)


BLOCK = assemble(Backbone(((2, 3, 1),), (4,), jax.nn.relu), 4, (4, 4, 1), CLASSES)


@pytest.mark.parametrize(("base", "shape", "targets"), [(MODEL, (INPUTS,), "fc"), (BLOCK, (4, 4, 1), "conv")])
def test_of_a_model_with_adapters_these_are_clipped_and_counted(base, shape, targets):
    model = lora(base, shape, rank=2, targets=targets)
    # B is zero at first, and A then has no gradient.
    params = jax.tree.map(lambda leaf: leaf + 0.2, model.init(jax.random.key(1)))
    batch, clip = examples(), 0.3
    x = jax.random.normal(jax.random.key(2), (ROWS, *shape))
    batch = batch._replace(x=jnp.where(batch.mask.reshape(-1, *[1] * len(shape)), x, 1e3))

    def loss(params, batch, key=None):
        return cross_entropy(model.apply(params, batch.x), batch.y, batch.mask)

    @jax.jit
    def alone(row):
        return jax.grad(loss)(params, batch._replace(mask=jnp.arange(ROWS) == row))

    @jax.jit
    def summed(mask):
        return clipped_gradient_sum(jax.random.key(0), loss, params, batch._replace(mask=mask), clip)[0]

    rows = [alone(row) for row in range(REAL)]
    assert jax.tree.structure(rows[0]) == jax.tree.structure(params)
    expected = clipped(jax.tree.map(lambda *leaves: np.float64(np.stack(leaves)), *rows), clip)
    total = summed(batch.mask)
    chex.assert_trees_all_close(total, expected, rtol=1e-4, atol=1e-5)
    squares = sum(np.square(np.float64(leaf)).sum() for row in rows for leaf in jax.tree.leaves(row))
    trace = jax.jit(lambda params, batch: fisher_trace(loss, params, batch))(params, batch)
    np.testing.assert_allclose(trace, squares / REAL, rtol=1e-4)
    for row in range(REAL):
        assert distance(total, summed(batch.mask.at[row].set(False))) <= clip * (1 + 1e-4)


def distance(left, right):
    return np.sqrt(trees.distance(left, right))


def test_noise_has_the_standard_deviation_that_is_accounted():
    params = {"a": jnp.zeros(30_000), "b": jnp.zeros(30_000)}
    batch = ClientData(jnp.zeros((2, 1)), jnp.zeros(2), jnp.array([True, False]))

    def loss(params, batch, key):
        return masked_mean(0.0 * jnp.sum(batch.x, axis=1), batch.mask) + 0.0 * jnp.sum(params["a"])

    draw = jax.jit(lambda key, noise: private_gradient(key, loss, params, batch, clip=0.5, noise=noise, size=4))
    first, second = (draw(jax.random.key(seed), 3.0) for seed in (0, 1))
    for leaf in (*first.values(), *second.values()):
        assert np.std(leaf) == pytest.approx(3.0 * 0.5 / 4, rel=0.02)
        assert abs(np.mean(leaf)) < 0.01
    together = np.stack([first["a"], first["b"], second["a"]])
    np.testing.assert_allclose(np.corrcoef(together) - np.eye(3), 0, atol=0.03)
    assert not any(np.any(leaf) for leaf in draw(jax.random.key(0), 0.0).values())


@functools.cache
def fitting(clipped):
    recipe = LocalTraining(lr=0.1, batch_size=8, epochs=2, dp_clip=1.0 if clipped else None)

    def fit(clip, noise, data, seed):
        changed = recipe.replace(dp_clip=clip, dp_noise=noise) if clipped else recipe
        return changed.fit(jax.random.key(seed), PARAMS, data, regularized)

    return jax.jit(fit)


def test_no_noise_and_no_limit_are_ordinary_training_up_to_rounding():
    # Whole batches: a private step divides by the batch size.
    whole = examples()._replace(mask=jnp.arange(ROWS) < 16)
    ordinary, unlimited, limited = (fitting(clip is not None)(clip or 1.0, 0.0, whole, 0) for clip in (None, 1e6, 0.05))
    chex.assert_trees_all_close(unlimited, ordinary, rtol=1e-5, atol=1e-6)
    assert distance(limited, ordinary) > 0.1


def test_every_step_has_noise_of_its_own_and_padding_has_none():
    fit, data = fitting(True), examples()
    noisy, again, other = (fit(0.5, 2.0, data, seed) for seed in (0, 0, 1))
    chex.assert_trees_all_equal(noisy, again)
    longer = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:7]]), data)
    longer = longer._replace(mask=jnp.arange(ROWS + 7) < REAL)
    chex.assert_trees_all_close(fit(0.5, 2.0, longer, 0), noisy, rtol=1e-5, atol=1e-6)
    assert distance(noisy, other) > 0.1
    # Six independent steps of standard deviation lr * 2.0 * 0.5 / 8 (no velocity, decay or pull among them matters).
    size = sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    step = distance(noisy, fit(0.5, 0.0, data, 0)) / np.sqrt(size)
    assert 0.7 < step / (0.1 * 2.0 * 0.5 / 8 * np.sqrt(6)) < 2.5


def test_parameters_of_half_precision_keep_their_type():
    key, kind = jax.random.key(0), jnp.bfloat16
    batch, params = examples(), jax.tree.map(lambda leaf: leaf.astype(kind), PARAMS)

    def loss(params, batch, key):
        return cross_entropy(MODEL.apply(params, batch.x.astype(kind)).astype(jnp.float32), batch.y, batch.mask)

    @jax.jit
    def gradient(params, noise):
        return private_gradient(key, loss, params, batch, clip=0.5, noise=noise, size=16)

    got = gradient(params, 2.0)
    chex.assert_trees_all_equal_dtypes(got, params)
    got, rounded = (jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree) for tree in (got, params))
    chex.assert_trees_all_close(got, gradient(rounded, 2.0), rtol=0.05, atol=0.02)
    sums = jax.eval_shape(lambda params: clipped_gradient_sum(key, loss, params, batch, 0.5), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(sums)} == {np.dtype("float32")}
    recipe = LocalTraining(batch_size=8, epochs=1, dp_clip=0.5, dp_noise=0.1)
    trained = jax.eval_shape(lambda params: recipe.fit(key, params, batch, loss), params)
    chex.assert_trees_all_equal_dtypes(trained, params)


def test_steps_of_ones_own_are_not_taken_for_private_ones():
    recipe = LocalTraining(batch_size=4, epochs=1, dp_clip=0.5)
    with pytest.raises(InvalidInput, match=r"fold takes no private steps, .*: train by LocalTraining\.fit"):
        recipe.fold(jax.random.key(0), 0, examples(), lambda count, batch, key: count + 1)
    assert recipe.replace(dp_clip=None).fold(jax.random.key(0), 0, examples(), lambda count, batch, key: count + 1) == 5
