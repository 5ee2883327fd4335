"""float64 inside float32 programs: every operation, under every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pfl_jax.primitives.float64 import in_float64

SCALE = 1e-9


def statistics(x, weights):
    """What JAX expands late: argmin, top_k, projections with derivative rules, factorizations. Near 1 in float64."""
    x = 1 + SCALE * x.astype(jnp.float64)
    largest, places = jax.lax.top_k(x, 2)
    point = optax.projections.projection_simplex(x)
    factor = jnp.linalg.cholesky(jnp.outer(x, x) + jnp.eye(x.shape[0]))
    spread = (largest[0] - x[jnp.argmin(x)]) / SCALE
    parts = spread, (largest[1] - 1) / SCALE + places[0], weights @ (point - 1 / x.shape[0]) / SCALE, factor[0, 0]
    return jnp.stack(parts).astype(jnp.float32)


def by_hand(x, weights):
    x, weights = np.float64(x), np.float64(weights)
    ordered = np.sort(x)
    return [ordered[-1] - ordered[0], ordered[-2] + np.argmax(x), weights @ (x - x.mean()), np.sqrt(2)]


RNG = np.random.default_rng(0)
ROWS, WEIGHTS = RNG.normal(size=(4, 5)).astype(np.float32), RNG.normal(size=5).astype(np.float32)
WANTED = np.array([by_hand(row, WEIGHTS) for row in ROWS])


@pytest.mark.parametrize("one_by_one", [False, True])
def test_transformations(one_by_one):
    compute = in_float64(statistics, one_by_one=one_by_one)

    def scanned(rows):
        return jax.lax.scan(lambda carry, row: (carry, compute(row, WEIGHTS)), 0, rows)[1]

    ways = {
        "eager": lambda rows: jnp.stack([compute(row, WEIGHTS) for row in rows]),
        "jit": jax.jit(lambda rows: jnp.stack([compute(row, WEIGHTS) for row in rows])),
        "vmap of jit": lambda rows: jax.vmap(jax.jit(compute), (0, None))(rows, WEIGHTS),
        "vmap of scan": lambda rows: jax.jit(jax.vmap(scanned))(rows[:, None])[:, 0],
        "vmap of vmap": lambda rows: jax.vmap(jax.vmap(compute, (0, None)), (0, None))(rows[None], WEIGHTS)[0],
    }
    for name, way in ways.items():
        got = way(jnp.asarray(ROWS))
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, WANTED, rtol=1e-5, err_msg=name)


def test_within_a_program_of_several_devices():
    mesh = jax.make_mesh((1,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))
    compute, spec = in_float64(statistics), jax.sharding.PartitionSpec("clients")
    mapped = jax.shard_map(
        lambda rows: jax.lax.map(lambda row: compute(row, WEIGHTS), rows), mesh=mesh, in_specs=spec, out_specs=spec
    )
    np.testing.assert_allclose(jax.jit(mapped)(jnp.asarray(ROWS)), WANTED, rtol=1e-5)


def test_derivatives():
    compute = in_float64(statistics)

    def total(row, weights):
        return compute(row, weights) @ jnp.array([1.0, 10.0, 100.0, 0.0])

    row = ROWS[0]
    order = np.argsort(row)
    of_row = 100 * (WEIGHTS - WEIGHTS.mean())
    for place, derivative in ((order[-1], 1), (order[0], -1), (order[-2], 10)):
        of_row[place] += derivative
    got = jax.jit(jax.grad(total, (0, 1)))(row, WEIGHTS)
    np.testing.assert_allclose(got[0], of_row, rtol=1e-4)
    np.testing.assert_allclose(got[1], 100 * (row - row.mean()), rtol=1e-4)
    many = jax.vmap(jax.grad(total, (0, 1)), (0, None))(jnp.asarray(ROWS), WEIGHTS)
    np.testing.assert_allclose(many[0][0], of_row, rtol=1e-4)


def test_integers_have_no_derivative():
    compute = in_float64(lambda x, count: (x.astype(jnp.float64) * count).astype(jnp.float32))
    assert jax.grad(compute)(2.0, jnp.int32(3)) == 3
