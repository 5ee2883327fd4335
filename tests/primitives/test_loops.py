"""Derivatives of loops whose number of steps depends on a client's examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfl_jax import ClientData, LocalTraining
from pfl_jax.primitives import losses, map_examples

X = np.random.default_rng(0).normal(size=(7, 2)).astype(np.float32)
Y = X @ np.array([1.0, -2.0], np.float32)


def loss(w, batch, key):
    return losses.masked_mean(jnp.square(batch.x @ w - batch.y), batch.mask)


@pytest.mark.parametrize("steps", [{"epochs": 2}, {"local_steps": 3}])
def test_training_has_the_derivatives_of_its_steps(steps):
    def trained(lr, start, scale, count):
        # What the loss closes over has derivatives too.
        def own_loss(w, batch, key):
            return scale * loss(w, batch, key)

        data = ClientData(jnp.asarray(X), jnp.asarray(Y), jnp.arange(7) < count)
        w = LocalTraining(lr=lr, batch_size=2, **steps).fit(jax.random.key(0), start, data, own_loss)
        return jnp.sum(jnp.square(w - 1))

    counts = jnp.array([7, 4, 1, 0])
    arguments = jnp.float32(0.05), jnp.array([0.5, 0.5]), jnp.float32(0.7)

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
    def mapped(scale, count):
        return map_examples(lambda rows: jnp.square(scale * rows), X, jnp.arange(7) < count, batch_size=2)

    value, derivative = jax.jit(lambda count: jax.jvp(lambda one: mapped(one, count), (2.0,), (1.0,)))(3)
    np.testing.assert_allclose(derivative, value)
    np.testing.assert_allclose(value, jax.jit(lambda count: mapped(2.0, count))(3))
    gradient = jax.jit(jax.grad(lambda scale, count: jnp.sum(mapped(scale, count))))(2.0, 3)
    # The batches go up to the last real row: four rows.
    np.testing.assert_allclose(gradient, 4 * np.sum(np.square(X[:4])), rtol=1e-5)
