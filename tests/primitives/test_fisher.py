"""Fisher traces against per-example gradients taken one by one, in float64 where the model is simple enough."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfl_jax import ClientData
from pfl_jax.data.augment import CropAndFlip
from pfl_jax.networks import from_flax
from pfl_jax.networks.layers import Dense
from pfl_jax.networks.models import fedavg_cnn, fedpac_cnn, mlp
from pfl_jax.primitives import (
    LocalTraining,
    batch_fisher_trace,
    cross_entropy,
    diagonal_fisher,
    fisher_trace,
    squared_gradient_norms,
)
from pfl_jax.primitives.per_example import have_closed_form


def client(shape, num_classes, size, padded, seed=0):
    rng = np.random.default_rng(seed)
    return ClientData(
        x=jnp.asarray(rng.normal(size=(padded, *shape)), jnp.float32),
        y=jnp.asarray(rng.integers(0, num_classes, padded), jnp.int32),
        mask=jnp.arange(padded) < size,
    )


def loss_of(model):
    return lambda params, batch: cross_entropy(model.apply(params, batch.x), batch.y, batch.mask)


def squares(loss, params, data):
    """Squared gradients of the real examples in float64, one call of jax.grad each."""
    gradient, rows = jax.jit(jax.grad(loss)), np.flatnonzero(data.mask)
    examples = [jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], data) for row in rows]
    return [jax.tree.map(lambda leaf: np.square(leaf, dtype=np.float64), gradient(params, one)) for one in examples]


def one_by_one(loss, params, data):
    """Squared norms of the gradients of the real examples."""
    return np.array([sum(map(np.sum, jax.tree.leaves(one))) for one in squares(loss, params, data)])


class Twice(nn.Module):
    """Outside the closed form: one dense layer used twice."""

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(4)
        return nn.Dense(3, name="head")(jnp.tanh(layer(jnp.tanh(layer(x)))))


class Sequences(nn.Module):
    """Dense layers of the library, one at each of three places: its kernel is used three times for an example."""

    @nn.compact
    def __call__(self, x):
        return Dense(3, name="head")(jnp.tanh(Dense(4)(x)).mean(axis=1))


class Own(nn.Module):
    """A network as people write it, whose traces have a closed form."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.GroupNorm(2)(nn.Conv(4, (3, 2), strides=(2, 1))(x)))
        x = nn.avg_pool(nn.Conv(3, (1, 1), use_bias=False)(x), (2, 2), (2, 2))
        # A dense layer for each place of a sequence.
        x = nn.tanh(nn.LayerNorm()(nn.Dense(3)(x.reshape(len(x), 4, -1))))
        return nn.Dense(3, name="head")(x.reshape(len(x), -1))


CASES = {
    "mlp": (mlp, (4, 4, 1)),
    "fedpac_gray": (fedpac_cnn, (16, 16, 1)),
    "fedpac_color": (fedpac_cnn, (20, 20, 3)),
    "fedavg": (fedavg_cnn, (16, 17, 2)),
}


MODULES = {"shared": (Twice(), (4,)), "sequences": (Sequences(), (3, 4)), "own": (Own(), (8, 8, 2))}


def build(name):
    if name in MODULES:
        module, shape = MODULES[name]
        return from_flax(module, shape, 3), shape
    factory, shape = CASES[name]
    return factory(shape, 3), shape


DEAR = {"fedpac_color", "fedavg"}
"""Convolutions whose gradients one by one take long to compile; `fedpac_gray` has the same layers."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in DEAR else name for name in (*CASES, *MODULES)]
)
def test_equals_gradients_one_by_one(name):
    model, shape = build(name)
    params = model.init(jax.random.key(1))
    data = client(shape, 3, size=5, padded=8)
    assert have_closed_form(loss_of(model), params, data, 3) == (name != "shared")
    norms = one_by_one(loss_of(model), params, data)
    # Not a multiple of the microbatch, so that the last one is partly padding.
    trace = jax.jit(lambda params, data: fisher_trace(loss_of(model), params, data, microbatch=3))(params, data)
    np.testing.assert_allclose(trace, norms.mean(), rtol=1e-5)
    per_example = jax.jit(lambda params, data: squared_gradient_norms(loss_of(model), params, data))(
        params, data._replace(mask=jnp.ones(8, bool))
    )
    np.testing.assert_allclose(per_example[:5], norms, rtol=5e-5)


@pytest.mark.parametrize("name", ["mlp", pytest.param("fedpac_color", marks=pytest.mark.slow), "shared"])
def test_the_diagonal_is_the_mean_of_squared_gradients(name):
    model, shape = build(name)
    params = model.init(jax.random.key(1))
    data = client(shape, 3, size=5, padded=8)
    expected = jax.tree.map(lambda *leaves: sum(leaves) / 5, *squares(loss_of(model), params, data))
    noise = jnp.where(data.mask.reshape(-1, *[1] * len(shape)), data.x, 1e3)
    for microbatch in (2, 9):
        fisher = jax.jit(functools.partial(diagonal_fisher, loss_of(model), microbatch=microbatch))
        diagonal = fisher(params, data._replace(x=noise))
        assert jax.tree.structure(diagonal) == jax.tree.structure(params)
        jax.tree.map(
            lambda got, wanted: np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-9), diagonal, expected
        )
    np.testing.assert_allclose(
        sum(jnp.sum(leaf) for leaf in jax.tree.leaves(diagonal)), fisher_trace(loss_of(model), params, data), rtol=1e-4
    )


def test_batch_traces():
    """One batch: the squared norm of the mean gradient. Batches of one example: the sum over examples."""
    model, shape = build("mlp")
    params = model.init(jax.random.key(0))
    data = client(shape, 3, size=7, padded=9)
    traces = jax.jit(
        lambda params, data, training: batch_fisher_trace(jax.random.key(1), loss_of(model), params, data, training),
        static_argnums=2,
    )
    mean = jax.tree.leaves(jax.jit(jax.grad(loss_of(model)))(params, data))
    whole = sum(np.sum(np.square(leaf)) for leaf in mean)
    augment = CropAndFlip(shape, (-1.0,) * shape[-1])
    private = LocalTraining(batch_size=9, dp_clip=0.5, dp_noise=1.0)
    for training in (LocalTraining(batch_size=9, epochs=3), LocalTraining(batch_size=9, augment=augment), private):
        got = traces(params, data, training)
        np.testing.assert_allclose(got, whole, rtol=1e-5)
    single = traces(params, data, LocalTraining(batch_size=1))
    np.testing.assert_allclose(single, one_by_one(loss_of(model), params, data).sum(), rtol=1e-5)
    # A batch of seven examples that are fewer than eight is kept; of five in batches of four one is left out.
    five, fixed = data._replace(mask=jnp.arange(9) < 5), LocalTraining(batch_size=4, drop_last=True, shuffle=False)
    visited = five._replace(mask=fixed.always_visited(five.mask))
    assert visited.mask.sum() == 4
    got = traces(params, five, fixed)
    want = traces(params, visited, LocalTraining(batch_size=4))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_client_without_examples_has_no_information():
    model, shape = build("mlp")
    params = model.init(jax.random.key(0))
    nobody = client(shape, 3, size=0, padded=4)
    for information in (fisher_trace, diagonal_fisher):
        found = jax.jit(functools.partial(information, loss_of(model)))(params, nobody)
        assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(found))


def test_the_closed_form_is_for_losses_that_use_each_parameter_once_in_a_layer():
    model, other = mlp((4,), 3, hidden=(5,)), mlp((4,), 3, hidden=(5,)).init(jax.random.key(2))
    params, data, plain = model.init(jax.random.key(1)), client((4,), 3, size=5, padded=5), loss_of(model)

    def head_alone(params, batch):
        return plain({"backbone": other["backbone"], "head": params["head"]}, batch)

    def twice(params, batch):
        return plain(params, batch) + plain(params, batch._replace(x=-batch.x))

    def copied(params, batch):
        return plain(jax.tree.map(lambda leaf: 1.5 * leaf, params), batch)

    def both(params, batch):
        # The parameters of another model are no leaves.
        logits = model.apply(params, batch.x) + model.apply(other, batch.x)
        return cross_entropy(logits, batch.y, batch.mask)

    def regularized(params, batch):
        return plain(params, batch) + jnp.sum(jnp.square(params["head"]["bias"]))

    def weighted(params, batch):
        # A regularizer whose strength depends on an example.
        return plain(params, batch) + jnp.sum(batch.x[0]) * jnp.sum(jnp.square(params["head"]["bias"]))

    # Of these transformations, only jit leaves the operations as they are.
    jitted, checkpointed = jax.jit(plain), jax.checkpoint(plain)
    expected = dict.fromkeys((plain, head_alone, jitted, both), True)
    expected |= dict.fromkeys((twice, copied, checkpointed, regularized, weighted), False)

    for loss, closed in expected.items():
        want = one_by_one(loss, params, data)
        assert have_closed_form(loss, params, data, 5) == closed
        # Sums of clipped gradients have one beside terms that depend on no example.
        assert have_closed_form(loss, params, data, 5, free_terms=True) == (closed or loss is regularized)
        got = jax.jit(squared_gradient_norms, static_argnums=0)(loss, params, data)
        np.testing.assert_allclose(got, want, rtol=1e-4)
        if loss in (jitted, checkpointed):
            # JAX keeps what it traced while the loss was examined.
            np.testing.assert_allclose(loss(params, data), plain(params, data), rtol=1e-6)
