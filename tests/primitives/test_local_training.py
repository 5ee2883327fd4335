"""`LocalTraining` and `map_examples` against plain NumPy loops; padding, masks, trip counts and derivatives."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import FEATURES, tiny_model

from pfl_jax import ClientData, InvalidInput
from pfl_jax.primitives import LocalTraining, fit_head, map_examples, masked_mean

PLAIN = LocalTraining(momentum=0.0, weight_decay=0.0)


def regression(n, real, seed=0):
    """n rows of which the first `real` count; the padding is wild on purpose."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(n, 3)).astype(np.float32)
    y = generator.normal(size=n).astype(np.float32)
    x[real:], y[real:] = 1e3, -1e3
    return ClientData(jnp.asarray(x), jnp.asarray(y), jnp.arange(n) < real)


def squared_error(params, batch, key):
    return masked_mean(jnp.square(batch.x @ params - batch.y), batch.mask)


def test_no_epochs_and_no_examples_leave_the_parameters_alone():
    data = regression(6, 6)
    training = PLAIN.replace(lr=0.1, batch_size=4, epochs=2)
    start = jnp.array([1.0, 2.0, 3.0])
    untouched = training.replace(epochs=jnp.int32(0)).fit(jax.random.key(0), start, data, squared_error)
    chex.assert_trees_all_equal(untouched, start)
    empty = data._replace(mask=jnp.zeros(6, bool))
    chex.assert_trees_all_equal(training.fit(jax.random.key(0), start, empty, squared_error), start)


def by_hand(steps, **recipe):
    """Weights after full-batch steps of the regression, in float64: steps(w, gradient, state) -> the next w."""
    data = regression(10, 10)
    x, y, w = np.float64(data.x), np.float64(data.y), np.ones(3)
    got = LocalTraining(batch_size=10, epochs=4, **recipe).fit(jax.random.key(1), jnp.ones(3), data, squared_error)
    for t in range(1, 5):
        w = steps(w, 2 * x.T @ (x @ w - y) / 10, t)
    np.testing.assert_allclose(got, w, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adam_against_numpy(optimizer):
    """Kingma, Ba 2015, Algorithm 1: decay in the gradient (adam), or beside it (adamw: Loshchilov, Hutter 2019)."""
    # Adam divides by the gradient's size: a small decay would be lost in it.
    lr, decay = 0.05, 5.0
    first, second = np.zeros(3), np.zeros(3)

    def step(w, gradient, t):
        if optimizer == "adam":
            gradient = gradient + decay * w
        first[:] = 0.9 * first + 0.1 * gradient
        second[:] = 0.999 * second + 0.001 * gradient**2
        toward = first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
        return w - lr * (toward + (decay * w if optimizer == "adamw" else 0))

    # The momentum of SGD is not Adam's.
    by_hand(step, lr=lr, momentum=0.5, weight_decay=decay, optimizer=optimizer)


def test_an_optimizer_of_ones_own_is_made_with_the_learning_rate():
    w, data = jnp.array([0.5, -2.0, 1.0]), regression(9, 7)

    def trained(optimizer, lr):
        return LocalTraining(lr=lr, batch_size=3, epochs=2, optimizer=optimizer).fit(
            jax.random.key(0), w, data, squared_error
        )

    np.testing.assert_array_equal(trained(optax.adam, 0.1), trained("adam", 0.1))
    rates = jnp.array([0.1, 0.2])
    several = jax.jit(jax.vmap(lambda lr: trained(optax.lion, lr)))(rates)
    np.testing.assert_allclose(several, [trained(optax.lion, float(lr)) for lr in rates], rtol=1e-6)


@pytest.mark.parametrize("clip_norm", [0.3, 1e3])
def test_clipping_scales_the_gradient_before_the_decay(clip_norm):
    def step(w, gradient, t):
        scale = min(1, clip_norm / np.linalg.norm(gradient))
        return w - 0.05 * (scale * gradient + 0.1 * w)

    by_hand(step, lr=0.05, momentum=0.0, weight_decay=0.1, clip_norm=clip_norm)


def test_an_optimizer_that_needs_the_loss_gets_that_of_the_batch():
    data = ClientData(jnp.array([1.0, 2.0, 3.0]), jnp.zeros(3), jnp.ones(3, bool))

    def loss(w, batch, key):
        return jnp.sum(jnp.square(w - batch.x)) / 2

    def plateau(lr):
        return optax.chain(optax.sgd(lr), optax.contrib.reduce_on_plateau())

    recipe = LocalTraining(lr=2.0, weight_decay=0.0, batch_size=3, epochs=1, optimizer=optax.polyak_sgd)
    # A step of length loss / |gradient|^2 from 0: 7 / 36 along -gradient = 6.
    fitted = jax.jit(lambda training: training.fit(jax.random.key(0), jnp.array(0.0), data, loss))
    np.testing.assert_allclose(fitted(recipe), 7 / 6, rtol=1e-6)
    steps = {"weight_decay": 0.0, "batch_size": 3, "lr": 0.1, "momentum": 0.0}
    np.testing.assert_allclose(
        fitted(LocalTraining(**steps, optimizer=plateau)), fitted(LocalTraining(**steps)), rtol=1e-6
    )
    with pytest.raises(InvalidInput, match=r"needs more than .* gives it, a gradient \(.*'value'\): choose another"):
        fitted(recipe.replace(dp_clip=1.0))


def test_a_recipe_is_a_pytree_of_its_numbers():
    recipe = LocalTraining(clip_norm=1.0, optimizer="adam", drop_last=True)
    doubled = jax.jit(lambda one: jax.tree.map(lambda leaf: 2 * leaf, one))(recipe)
    assert (float(doubled.lr), int(doubled.epochs), float(doubled.clip_norm)) == (pytest.approx(0.02), 10, 2.0)
    # What a tree of this type holds need not be a recipe: here a momentum of 1, elsewhere derivatives.
    assert float(doubled.momentum) == 1.0
    slope = jax.grad(lambda one: -one.lr * one.momentum, allow_int=True)(recipe)
    assert float(slope.lr) == -0.5
    assert (doubled.optimizer, doubled.drop_last, doubled.batch_size) == ("adam", True, 50)


@pytest.mark.parametrize(("n", "real", "batch_size"), [(10, 10, 3), (10, 4, 3), (10, 10, 64), (7, 1, 7), (5, 0, 2)])
def test_map_examples_is_the_function_row_by_row(n, real, batch_size):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(n, 2)), jnp.float32)
    mask = jnp.arange(n) < real
    got = jax.jit(lambda x, mask: map_examples(lambda r: (2 * r, r.sum(-1)), x, mask, batch_size=batch_size))(x, mask)
    np.testing.assert_allclose(got[0][:real], 2 * x[:real])
    np.testing.assert_allclose(got[1][:real], np.asarray(x).sum(-1)[:real], rtol=1e-6)
    assert got[0].shape == (n, 2)


def test_map_examples_goes_on_to_the_last_real_row():
    # Masks of parts of a client's examples have holes.
    x, mask = jnp.arange(6.0), jnp.array([False, True, False, False, True, False])
    np.testing.assert_array_equal(map_examples(lambda rows: rows + 1, x, mask, batch_size=2)[mask], [2, 5])


def test_a_head_is_trained_on_the_features_as_they_are():
    model = tiny_model()
    data = ClientData(jnp.ones((4, FEATURES)), jnp.array([0, 1, 2, 0]), jnp.ones(4, bool))
    plain = PLAIN.replace(lr=0.1, batch_size=2, epochs=2)
    given = jax.random.key(0), model, model.init(jax.random.key(1))["head"], data.x, data
    heads = [fit_head(*given, one) for one in (plain, plain.replace(augment=lambda key, x: 0 * x))]
    chex.assert_trees_all_equal(*heads)


@pytest.mark.parametrize("steps", [{"epochs": 2}, {"local_steps": 3}])
def test_training_has_the_derivatives_of_its_steps(steps):
    def trained(lr, start, scale, count):
        # What the loss closes over has derivatives too.
        def loss(w, batch, key):
            return scale * squared_error(w, batch, key)

        data = regression(7, 7)._replace(mask=jnp.arange(7) < count)
        w = LocalTraining(lr=lr, batch_size=2, **steps).fit(jax.random.key(0), start, data, loss)
        return jnp.sum(jnp.square(w - 1))

    counts = jnp.array([7, 4, 1, 0])
    arguments = jnp.float32(0.05), jnp.array([0.5, 0.5, 1.0]), jnp.float32(0.7)

    def of_all(*arguments):
        # Clients of several sizes under one vmap, and inside a compiled program.
        return jax.vmap(lambda count: trained(*arguments, count))(counts)

    value, found = jax.jit(of_all)(*arguments), jax.jit(jax.jacrev(of_all, argnums=(0, 1, 2)))(*arguments)
    forward = jax.jit(jax.jacfwd(of_all, argnums=(0, 1, 2)))(*arguments)
    for got, other, argument, index in zip(found, forward, arguments, range(3), strict=True):
        np.testing.assert_allclose(got, other, rtol=1e-4, atol=1e-5)
        shift = 1e-2 * jnp.ones_like(argument)
        sides = [of_all(*arguments[:index], argument + sign * shift, *arguments[index + 1 :]) for sign in (1, -1)]
        change = jnp.sum(got.reshape(4, -1), axis=1)
        np.testing.assert_allclose(change, (sides[0] - sides[1]) / 0.02, rtol=0.03, atol=1e-3)
    # A client without examples keeps what it received.
    np.testing.assert_allclose(found[0][3], 0)
    np.testing.assert_allclose(value[3], 0.5)
    # The value beside the derivative is that of the loops.
    both, _ = jax.jit(jax.value_and_grad(lambda *arguments: jnp.sum(of_all(*arguments))))(*arguments)
    np.testing.assert_allclose(both, jnp.sum(value), rtol=1e-5)


def test_mapped_examples_have_derivatives_and_zeros_for_padding():
    x = regression(7, 7).x

    def mapped(scale, count):
        return map_examples(lambda rows: jnp.square(scale * rows), x, jnp.arange(7) < count, batch_size=2)

    value, derivative = jax.jit(lambda count: jax.jvp(lambda one: mapped(one, count), (2.0,), (1.0,)))(3)
    np.testing.assert_allclose(derivative, value)
    np.testing.assert_allclose(value, jax.jit(lambda count: mapped(2.0, count))(3))
    gradient = jax.jit(jax.grad(lambda scale, count: jnp.sum(mapped(scale, count))))(2.0, 3)
    # The batches go up to the last real row: four rows.
    np.testing.assert_allclose(gradient, 4 * np.sum(np.square(x[:4])), rtol=1e-5)
