"""Batch normalization: formulas, padding, running statistics under an optimizer, and what Flax computes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batch_norm import Normalized
from problems import CLASSES, SHAPE

from pfl_jax.base import STATISTICS, ClientData
from pfl_jax.errors import InvalidInput
from pfl_jax.networks import from_flax
from pfl_jax.networks.batch_norm import normalize
from pfl_jax.primitives.local_sgd import LocalSGD, descend
from pfl_jax.primitives.losses import supervised_loss

X = np.random.default_rng(0).normal(1.0, 2.0, (5, 2, 3, 4)).astype(np.float32)
SCALE, BIAS = np.array([1.0, 2.0, 0.5, 1.0], np.float32), np.array([0.0, 1.0, 0.0, -1.0], np.float32)
RUNNING = {"mean": np.full(4, 0.5, np.float32), "var": np.full(4, 3.0, np.float32)}


def test_formulas_and_padding():
    mask = np.array([True, False, True, True, False])
    real = np.float64(X[mask])

    def loss(running, x):
        y = normalize(x, SCALE, BIAS, running, mask)
        return 3.0 * jnp.sum(jnp.sin(y) * mask[:, None, None, None]), y

    def both(x, running):
        changes, y = jax.jit(jax.grad(loss, has_aux=True))(running, x)
        return y, changes

    y, changes = both(X, RUNNING)
    mean, variance = real.mean((0, 1, 2)), real.var((0, 1, 2))
    np.testing.assert_allclose(y[mask], (real - mean) / np.sqrt(variance + 1e-5) * SCALE + BIAS, rtol=1e-4, atol=1e-5)
    size = real[..., 0].size
    want = {"mean": 0.9 * 0.5 + 0.1 * mean, "var": 0.9 * 3.0 + 0.1 * variance * size / (size - 1)}
    for name, value in want.items():
        np.testing.assert_allclose(RUNNING[name] - changes[name], value, rtol=1e-5)
    # Padding may hold any finite number.
    again, same = both(np.where(mask[:, None, None, None], X, 1e3).astype(np.float32), RUNNING)
    np.testing.assert_allclose(again[mask], y[mask], rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, same, changes)
    # A single value has no unbiased variance.
    changes = jax.grad(lambda running: normalize(X[:, 0, 0], SCALE, BIAS, running, mask & (np.arange(5) < 1)).sum())(
        RUNNING
    )
    np.testing.assert_allclose(RUNNING["var"] - changes["var"], 0.9 * 3.0, rtol=1e-6)
    with pytest.raises(InvalidInput, match="gets 5 rows of a mini-batch of 4"):
        normalize(X, SCALE, BIAS, RUNNING, mask[:4])
    with pytest.raises(InvalidInput, match="at least two examples"):
        normalize(X[:1], SCALE, BIAS, RUNNING, mask[:1])


def test_out_of_training_the_running_statistics_have_no_gradient_and_are_never_negative():
    want = (np.float64(X) - 0.5) / np.sqrt(3.0 + 1e-5) * SCALE + BIAS
    np.testing.assert_allclose(normalize(X, SCALE, BIAS, RUNNING, None), want, rtol=1e-5, atol=1e-6)
    assert np.isfinite(normalize(X, SCALE, BIAS, {**RUNNING, "var": -RUNNING["var"]}, None)).all()
    model = from_flax(Normalized(), SHAPE, CLASSES)
    params, x = model.init(jax.random.key(0)), X[:, :, :, :1]
    gradient = jax.jit(jax.grad(lambda params: jnp.sum(model.apply(params, x) ** 2)))(params)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient["backbone"][STATISTICS]))
    assert gradient["backbone"]["norm"]["scale"].any()


def test_a_flax_module_with_batch_normalization_computes_what_flax_does():
    class Told(nn.Module):
        training: bool

        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, name="first")(x.reshape(x.shape[0], -1))
            x = nn.BatchNorm(not self.training, momentum=0.8, epsilon=1e-3, name="norm")(x)
            return nn.Dense(CLASSES, name="head")(nn.tanh(x))

    x, model = X[:, :, :, :1], from_flax(Normalized(), SHAPE, CLASSES)
    params = jax.tree.map(lambda leaf: leaf + 0.1, model.init(jax.random.key(0)))
    backbone = dict(params["backbone"])
    variables = {STATISTICS: backbone.pop(STATISTICS), "params": {**backbone, "head": params["head"]}}
    plain = Told(training=False).apply(variables, x)
    np.testing.assert_allclose(model.apply(params, x), plain, rtol=1e-5, atol=1e-6)
    trained, _ = Told(training=True).apply(variables, x, mutable=[STATISTICS])
    batch = ClientData(x, np.zeros(5, np.int32), np.ones(5, bool))
    np.testing.assert_allclose(model.training_logits(params, batch), trained, rtol=1e-4, atol=1e-5)
    assert np.abs(plain - trained).max() > 1e-2


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])
def test_no_optimizer_moves_statistics(optimizer):
    model = from_flax(Normalized(), SHAPE, CLASSES)
    batch = ClientData(X[:, :, :, :1], np.arange(5) % CLASSES, np.ones(5, bool))
    recipe = LocalSGD(lr=0.3, momentum=0.9, weight_decay=0.5, clip_norm=1e-3, optimizer=optimizer).transformation()

    @jax.jit
    def step(params):
        gradient = jax.grad(lambda params: 7 * supervised_loss(model)(params, batch))(params)
        return descend(recipe, gradient, params, recipe.init(params))[0]

    params = jax.jit(model.init)(jax.random.key(0))
    hidden = batch.x.reshape(5, -1) @ np.float64(params["backbone"]["first"]["kernel"])
    got = step(params)["backbone"][STATISTICS]["norm"]
    np.testing.assert_allclose(got["mean"], 0.2 * hidden.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got["var"], 0.8 + 0.2 * hidden.var(0, ddof=1), rtol=1e-4)


def test_the_clipped_norm_is_that_of_the_weights():
    model = from_flax(Normalized(), SHAPE, CLASSES)
    batch = ClientData(X[:, :, :, :1], np.arange(5) % CLASSES, np.ones(5, bool))
    recipe = LocalSGD(lr=1.0, momentum=0.0, weight_decay=0.0, clip_norm=0.1).transformation()
    params = model.init(jax.random.key(0))
    gradient = jax.jit(jax.grad(lambda params: 7 * supervised_loss(model)(params, batch)))(params)
    changed, _ = descend(recipe, gradient, params, recipe.init(params))
    changes = jax.tree.map(lambda old, new: np.sum(np.square(np.float64(new) - old)), params, changed)
    assert sum(jax.tree.leaves(changes["backbone"].pop(STATISTICS))) > 0.01
    np.testing.assert_allclose(sum(jax.tree.leaves(changes)), 0.1**2, rtol=1e-4)


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
