"""`fit` and `map_examples` against plain NumPy loops; padding, masks and trip counts."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pfl_jax.base import ClientData
from pfl_jax.primitives.local_sgd import fit, map_examples, num_steps, sgd
from pfl_jax.primitives.losses import masked_mean


def regression(n, real, seed=0):
    """n rows of which the first `real` count; the padding is wild on purpose."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(n, 3)).astype(np.float32)
    y = generator.normal(size=n).astype(np.float32)
    x[real:], y[real:] = 1e3, -1e3
    return ClientData(jnp.asarray(x), jnp.asarray(y), jnp.arange(n) < real)


def squared_error(params, batch):
    return masked_mean(jnp.square(batch.x @ params - batch.y), batch.mask)


def test_sgd_is_pytorchs_sgd():
    # v = momentum v + (g + decay w); w -= lr v, written out for a quadratic with gradient 2w.
    lr, momentum, decay = 0.1, 0.9, 0.05
    optimizer = sgd(lr, momentum, decay)
    w, velocity = np.array([1.0, -2.0]), np.zeros(2)
    params, state = jnp.asarray(w, jnp.float32), optimizer.init(jnp.asarray(w, jnp.float32))
    for _ in range(5):
        velocity = momentum * velocity + 2 * w + decay * w
        w = w - lr * velocity
        updates, state = optimizer.update(2 * params, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params, w, rtol=1e-6)


def test_sgd_takes_traced_hyper_parameters():
    data = regression(8, 8)

    def train(lr, momentum, decay):
        optimizer = sgd(lr, momentum, decay)
        return fit(jax.random.key(0), jnp.zeros(3), data, squared_error, optimizer=optimizer, epochs=2, batch_size=4)

    traced = jax.vmap(train)(jnp.array([0.1, 0.01]), jnp.array([0.5, 0.0]), jnp.array([1e-3, 0.0]))
    np.testing.assert_allclose(traced[0], train(0.1, 0.5, 1e-3), rtol=1e-5)
    np.testing.assert_allclose(traced[1], train(0.01, 0.0, 0.0), rtol=1e-5)


@pytest.mark.parametrize("real", [1, 7, 8, 10])
def test_fit_with_full_batches_is_gradient_descent(real):
    data = regression(10, real)
    got = fit(
        jax.random.key(1), jnp.zeros(3), data, squared_error, optimizer=sgd(0.05, 0.5, 0.1), epochs=4, batch_size=10
    )
    x, y = np.float64(data.x[:real]), np.float64(data.y[:real])
    w, velocity = np.zeros(3), np.zeros(3)
    for _ in range(4):
        velocity = 0.5 * velocity + 2 * x.T @ (x @ w - y) / real + 0.1 * w
        w = w - 0.05 * velocity
    np.testing.assert_allclose(got, w, rtol=1e-4, atol=1e-6)


def test_every_epoch_sees_every_real_example_once_in_a_new_order():
    n, real, batch_size, epochs = 13, 11, 4, 3
    data = ClientData(jnp.arange(n, dtype=jnp.float32), jnp.zeros(n), jnp.arange(n) < real)
    steps = epochs * 3

    # The "gradient" writes the rows of each batch into the parameters, at the step that a counter names.
    def record(params, batch):
        rows, counter = params
        one_hot = jax.nn.one_hot(jax.lax.stop_gradient(counter).astype(int), steps)
        seen = jnp.where(batch.mask, batch.x + 1, 0.0)
        return -jnp.sum(rows * one_hot[:, None] * seen) - counter

    rows, counter = fit(
        jax.random.key(2),
        (jnp.zeros((steps, batch_size)), jnp.zeros(())),
        data,
        record,
        optimizer=sgd(1.0),
        epochs=epochs,
        batch_size=batch_size,
    )
    assert counter == steps == num_steps(real, batch_size, epochs)
    by_epoch = np.asarray(rows).reshape(epochs, -1)
    orders = [epoch[epoch > 0] - 1 for epoch in by_epoch]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(real))
    assert not np.array_equal(orders[0], orders[1])
    # Full batches first: the last one holds the rest.
    np.testing.assert_array_equal((np.asarray(rows) > 0).sum(1).reshape(epochs, 3), [[4, 4, 3]] * epochs)


@pytest.mark.parametrize("transform", ["plain", "jit", "vmap", "map"])
def test_padding_and_transformations_change_nothing(transform):
    real = 9
    small, large = regression(real, real), regression(23, real)
    large = large._replace(x=large.x.at[:real].set(small.x), y=large.y.at[:real].set(small.y))

    def train(data):
        return fit(
            jax.random.key(3), jnp.ones(3), data, squared_error, optimizer=sgd(0.05, 0.5), epochs=3, batch_size=4
        )

    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), large)
    got = {
        "plain": lambda: train(large),
        "jit": lambda: jax.jit(train)(large),
        "vmap": lambda: jax.vmap(train)(stacked)[1],
        "map": lambda: jax.lax.map(train, stacked)[1],
    }[transform]()
    np.testing.assert_allclose(got, train(small), rtol=1e-5)


def test_clients_under_one_vmap_stop_at_their_own_step_count():
    data = regression(20, 20)
    masks = jnp.stack([jnp.arange(20) < 3, jnp.arange(20) < 17])

    def train(mask):
        return fit(
            jax.random.key(4),
            jnp.zeros(3),
            data._replace(mask=mask),
            squared_error,
            optimizer=sgd(0.01, 0.9),
            epochs=5,
            batch_size=4,
        )

    together = jax.vmap(train)(masks)
    for got, mask in zip(together, masks, strict=True):
        np.testing.assert_allclose(got, train(mask), rtol=1e-5)


def test_a_mask_with_holes_selects_its_rows():
    data = regression(12, 12)
    mask = jnp.arange(12) % 3 == 1
    kept = jax.tree.map(lambda leaf: leaf[np.asarray(mask)], data)
    arguments = {"optimizer": sgd(0.05), "epochs": 3, "batch_size": 12}
    got = fit(jax.random.key(5), jnp.zeros(3), data._replace(mask=mask), squared_error, **arguments)
    want = fit(jax.random.key(5), jnp.zeros(3), kept, squared_error, **arguments)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_no_epochs_and_no_examples_leave_the_parameters_alone():
    data = regression(6, 6)
    arguments = {"optimizer": sgd(0.1), "batch_size": 4}
    start = jnp.array([1.0, 2.0, 3.0])
    untouched = fit(jax.random.key(0), start, data, squared_error, epochs=jnp.int32(0), **arguments)
    chex.assert_trees_all_equal(untouched, start)
    empty = data._replace(mask=jnp.zeros(6, bool))
    chex.assert_trees_all_equal(fit(jax.random.key(0), start, empty, squared_error, epochs=2, **arguments), start)


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
