"""Mirror descent and optax's projection on the simplex, in float64 against NumPy and an exact active-set method."""

import jax
import jax.numpy as jnp
import numpy as np
from reference import minimizer_on_simplex

from pfl_jax.primitives import mirror_descent, projection_simplex, solve_simplex_qp

SIZE = 6
FACTOR = np.random.default_rng(0).normal(size=(SIZE, SIZE)) / np.sqrt(SIZE)
MATRIX = FACTOR @ FACTOR.T + 0.05 * np.eye(SIZE)
EQUAL = np.full(SIZE, 1 / SIZE)


def descend(matrix, start, lr, steps):
    return mirror_descent(lambda x: 2 * x @ matrix, start, lr=lr, steps=steps)


def test_the_steps_are_exponentiated_gradients():
    start, want = np.random.default_rng(1).dirichlet(np.ones(SIZE), 2), []
    for x in start:
        for _ in range(7):
            x = x * np.exp(-0.3 * 2 * MATRIX @ x)
            x = x / x.sum()
        want.append(x)
    with jax.enable_x64(True):
        got = jax.jit(descend, static_argnums=3)(jnp.asarray(MATRIX), jnp.asarray(start), 0.3, 7)
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_they_end_at_the_minimizer_and_none_increases_the_function():
    want = minimizer_on_simplex(MATRIX)
    assert want.min() == 0
    lr = 1 / (2 * np.abs(MATRIX).max())
    with jax.enable_x64(True):
        matrix = jnp.asarray(MATRIX)
        points = [descend(matrix, jnp.asarray(EQUAL), lr, steps) for steps in range(12)]
        last = descend(matrix, jnp.asarray(EQUAL), lr, 20_000)
    values = np.array([x @ MATRIX @ x for x in map(np.asarray, points)])
    assert (np.diff(values) < 0).all()
    np.testing.assert_allclose(last, want, atol=1e-6)
    # The exact solver for quadratic programs agrees.
    np.testing.assert_allclose(solve_simplex_qp(jnp.float32(MATRIX), tolerance=1e-7).weights, last, atol=1e-3)


def test_derivatives_go_through_the_steps():
    toward, step = np.arange(SIZE), 1e-6

    def value(lr):
        return jnp.asarray(toward) @ descend(jnp.asarray(MATRIX), jnp.asarray(EQUAL), lr, 5)

    with jax.enable_x64(True):
        got = jax.grad(value)(0.3)
        want = (value(0.3 + step) - value(0.3 - step)) / (2 * step)
        assert abs(want) > 0.05
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_what_is_nan_spoils_its_own_row_alone():
    rows = jnp.stack([jnp.ones(3), jnp.array([1.0, jnp.nan, 1.0])])
    weights = mirror_descent(lambda x: rows * x, jnp.full((2, 3), 1 / 3), lr=0.1, steps=3)
    np.testing.assert_allclose(weights[0], 1 / 3, rtol=1e-6)
    assert jnp.isnan(weights[1]).all()


def test_the_projection_is_the_nearest_point():
    far = np.random.default_rng(2).normal(size=SIZE)
    # ||x - v||^2 is x.x - 2 v.x, and on the simplex v.x is x.(v 1' + 1 v')x / 2; a multiple of 1 1' is a constant.
    ones = np.ones((SIZE, SIZE))
    want = minimizer_on_simplex(np.eye(SIZE) - far[:, None] * ones - far * ones + 1e3 * ones)
    assert min(want) == 0
    with jax.enable_x64(True):
        np.testing.assert_allclose(projection_simplex(jnp.asarray(far)), want, atol=1e-9)
