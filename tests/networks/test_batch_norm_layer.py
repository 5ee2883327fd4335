"""Batch normalization: formulas, padding, and running statistics under an optimizer."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batch_norm import Normalized
from problems import CLASSES, SHAPE

from pfl_jax import ClientData, InvalidInput
from pfl_jax.base import STATISTICS
from pfl_jax.networks import from_flax
from pfl_jax.networks.batch_norm import normalize
from pfl_jax.primitives import LocalTraining, supervised_loss, with_statistics

X = np.random.default_rng(0).normal(1.0, 2.0, (5, 2, 3, 4)).astype(np.float32)
SCALE, BIAS = np.array([1.0, 2.0, 0.5, 1.0], np.float32), np.array([0.0, 1.0, 0.0, -1.0], np.float32)
RUNNING = {"mean": np.full(4, 0.5, np.float32), "var": np.full(4, 3.0, np.float32)}


def test_formulas_and_padding():
    mask = np.array([True, False, True, True, False])
    real = np.float64(X[mask])

    y, running = normalize(X, SCALE, BIAS, RUNNING, mask)
    mean, variance = real.mean((0, 1, 2)), real.var((0, 1, 2))
    np.testing.assert_allclose(y[mask], (real - mean) / np.sqrt(variance + 1e-5) * SCALE + BIAS, rtol=1e-4, atol=1e-5)
    size = real[..., 0].size
    want = {"mean": 0.9 * 0.5 + 0.1 * mean, "var": 0.9 * 3.0 + 0.1 * variance * size / (size - 1)}
    for name, value in want.items():
        np.testing.assert_allclose(running[name], value, rtol=1e-5)
    # Padding may hold any finite number.
    again, same = normalize(np.where(mask[:, None, None, None], X, 1e3).astype(np.float32), SCALE, BIAS, RUNNING, mask)
    np.testing.assert_allclose(again[mask], y[mask], rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, same, running)
    # A single value has no unbiased variance.
    _, running = normalize(X[:, 0, 0], SCALE, BIAS, RUNNING, mask & (np.arange(5) < 1))
    np.testing.assert_allclose(running["var"], 0.9 * 3.0, rtol=1e-6)
    with pytest.raises(InvalidInput, match="gets 5 rows of a mini-batch of 4"):
        normalize(X, SCALE, BIAS, RUNNING, mask[:4])
    with pytest.raises(InvalidInput, match="at least two examples"):
        normalize(X[:1], SCALE, BIAS, RUNNING, mask[:1])


def test_out_of_training_the_running_statistics_have_no_gradient_and_are_never_negative():
    want = (np.float64(X) - 0.5) / np.sqrt(3.0 + 1e-5) * SCALE + BIAS
    y, running = normalize(X, SCALE, BIAS, RUNNING, None)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    assert running is RUNNING
    assert np.isfinite(normalize(X, SCALE, BIAS, {**RUNNING, "var": -RUNNING["var"]}, None)[0]).all()
    model = from_flax(Normalized(), SHAPE, CLASSES)
    params, x = model.init(jax.random.key(0)), X[:, :, :, :1]
    gradient = jax.jit(jax.grad(lambda params: jnp.sum(model.apply(params, x) ** 2)))(params)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient["backbone"][STATISTICS]))
    assert gradient["backbone"]["norm"]["scale"].any()


def everything_penalized(params):
    return 3 * sum(jnp.sum(jnp.square(leaf - 5.0)) for leaf in jax.tree.leaves(params))


MODEL = from_flax(Normalized(), SHAPE, CLASSES)
BATCH = ClientData(jnp.asarray(X[:, :, :, :1]), jnp.arange(5) % CLASSES, jnp.ones(5, bool))
STEPS = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.5, "clip_norm": 1e-3, "batch_size": 5, "epochs": 1}


def fitted(params, batch):
    loss = supervised_loss(MODEL, everything_penalized)
    return LocalTraining(**STEPS).fit(jax.random.key(0), params, batch, loss)


def users_own(params, batch):
    """A step as a program without this library's training has it."""
    loss, optimizer = supervised_loss(MODEL, everything_penalized), optax.adamw(0.3, weight_decay=0.5)
    gradient, statistics = jax.grad(loss, has_aux=True)(params, batch, jax.random.key(0))
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    return with_statistics(optax.apply_updates(params, updates), statistics)


@pytest.mark.parametrize("step", [fitted, users_own])
def test_neither_optimizers_nor_penalties_move_statistics(step):
    params = jax.jit(MODEL.init)(jax.random.key(0))
    hidden = BATCH.x.reshape(5, -1) @ np.float64(params["backbone"]["first"]["kernel"])
    trained = jax.jit(step)(params, BATCH)
    got = trained["backbone"][STATISTICS]["norm"]
    np.testing.assert_allclose(got["mean"], 0.2 * hidden.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got["var"], 0.8 + 0.2 * hidden.var(0, ddof=1), rtol=1e-4)
    assert (trained["head"]["kernel"] != params["head"]["kernel"]).all()


def test_the_clipped_norm_is_that_of_the_weights():
    params = MODEL.init(jax.random.key(0))
    recipe = LocalTraining(**{**STEPS, "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 0.1})
    loss = supervised_loss(MODEL, everything_penalized)
    changed = jax.jit(lambda params: recipe.fit(jax.random.key(0), params, BATCH, loss))(params)
    changes = jax.tree.map(lambda old, new: np.sum(np.square(np.float64(new) - old)), params, changed)
    assert sum(jax.tree.leaves(changes["backbone"].pop(STATISTICS))) > 0.01
    np.testing.assert_allclose(sum(jax.tree.leaves(changes)), 0.1**2, rtol=1e-4)


def test_a_loss_without_the_statistics_that_its_model_needs_is_refused():
    params, key = jax.eval_shape(MODEL.init, jax.random.key(0)), jax.random.key(0)

    def deployed(params, batch, key):
        return jnp.sum(MODEL.apply(params, batch.x))

    def fit(loss, trained=lambda params: params, **recipe):
        return jax.eval_shape(
            lambda params: LocalTraining(batch_size=5, **recipe).fit(key, trained(params), BATCH, loss), params
        )

    with pytest.raises(InvalidInput, match=r"BatchNorm has 2 arrays .* the loss gives 0: let it return \(value, stati"):
        fit(deployed)
    # Private training has none, and a head is trained without those of its backbone.
    fit(deployed, dp_clip=1.0)
    fit(
        lambda head, batch, key: supervised_loss(MODEL)({**MODEL.init(key), "head": head}, batch, key),
        lambda both: both["head"],
    )


class NormalizedHead(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Head(name="head")(nn.Dense(4)(x))


class Head(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.BatchNorm()(x))


class Spectral(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(nn.SpectralNorm(nn.Dense(4))(x, update_stats=False))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (NormalizedHead(), "the head head has BatchNorm, which only a backbone can have"),
        (Spectral(), "keeps statistics of its own: only those of BatchNorm"),
        (nn.Sequential([nn.Dense(4), nn.BatchNorm(axis=0), nn.Dense(3)]), "axis=0 is not supported"),
    ],
)
def test_what_is_refused(module, message):
    with pytest.raises(InvalidInput, match=message):
        from_flax(module, (8,), 3, head="layers_2" if isinstance(module, nn.Sequential) else "head")
