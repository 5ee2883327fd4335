"""`Mean` messages against float64 NumPy, and what a round does with clients that are absent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import received

from pfl_jax import Mean, simulate
from pfl_jax.data import federate
from pfl_jax.data.federated import spread
from pfl_jax.engine.mapping import in_client_order, map_places
from pfl_jax.methods import make_method
from pfl_jax.networks import models as networks
from pfl_jax.primitives import byte_count, mean_by_class, size_weights, weighted_mean

WEIGHTS, PRESENT = np.array([3.0, 0.0, 5.0, 2.0]), np.array([True, True, False, True])


def random(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape)


def test_a_mean_is_weighted_and_leaves_out_who_is_absent():
    values, own = random(4, 2, 3), random(4, 5)
    # A client that diverged is absent: its NaN must not get through.
    values[2], own[2] = np.nan, np.nan
    messages = (Mean({"w": jnp.float32(values)}, jnp.float32(WEIGHTS)), jnp.float32(own))
    mean, rows = received(messages, jnp.asarray(PRESENT))
    weights = WEIGHTS * PRESENT
    np.testing.assert_allclose(mean.value["w"], np.tensordot(weights, np.nan_to_num(values), 1) / 5, rtol=1e-5)
    assert float(mean.weight) == 5.0
    np.testing.assert_allclose(rows, np.where(PRESENT[:, None], own, 0), rtol=1e-6)


def test_a_weight_may_lie_along_the_leading_axes():
    values, weights = random(4, 3, 2), np.array([[1.0, 0, 0], [2, 0, 4], [0, 0, 1], [5, 0, 3]])
    mean = received(Mean(jnp.float32(values), jnp.float32(weights)))
    want = np.einsum("mk,mkd->kd", weights, values) / np.maximum(weights.sum(0), 1)[:, None]
    np.testing.assert_allclose(mean.value, want, rtol=1e-5)
    np.testing.assert_array_equal(mean.weight, [8, 0, 8])
    # The same from values that the server has of every client.
    stacked = mean_by_class(jnp.float32(values), jnp.float32(weights))
    np.testing.assert_allclose(stacked.value, want, rtol=1e-5)
    np.testing.assert_array_equal(stacked.weight, mean.weight)


@pytest.mark.parametrize("chunk", [1, 2, 3, None])
@pytest.mark.parametrize("devices", [1, 2])
def test_terms_are_summed_over_real_clients_only(chunk, devices):
    # Five clients divide neither by two devices nor by two in a chunk: what fills up must not be counted.
    mesh = simulate.client_mesh(jax.devices()[:devices])
    clients = jnp.float32(random(5, 3))

    def fn(shared, client):
        return client[0], {"sum": shared * client, "count": jnp.ones(())}

    def map_all(shared, clients):
        places = spread(5, devices)
        rows, terms = map_places(fn, shared, clients[places], places < 5, chunk=chunk, mesh=mesh)
        return in_client_order(places, 5, rows, mesh), terms

    rows, terms = jax.jit(map_all)(2.0, clients)
    np.testing.assert_allclose(rows, clients[:, 0])
    np.testing.assert_allclose(terms["sum"], 2 * np.sum(np.float64(clients), axis=0), rtol=1e-5)
    assert float(terms["count"]) == 5


def test_a_round_of_many_models_takes_the_memory_of_few():
    """As a `Mean`, and with every client's model sent by itself."""
    clients, model = 300, networks.mlp((30,), 3, hidden=(50,))
    mean = make_method("fedavg", model, batch_size=5, epochs=1)

    def local(*arguments):
        result = mean.local(*arguments)
        return result._replace(message=result.message.value)

    def aggregate(key, server, clients, messages, cohort):
        return weighted_mean(size_weights(cohort.counts), messages), clients, {}

    def temporary_bytes(method):
        built = simulate.build(method, simulate.Settings(rounds=1, chunk=1)).jit(donate=True)
        data = federate([(np.zeros((5, 30), np.float32), np.arange(5) % 3)] * clients)
        state = jax.eval_shape(built.init, data, jax.random.key(0))
        return built.round.lower(data, state, clients).compile().memory_analysis().temp_size_in_bytes

    one, all_of_them = temporary_bytes(mean), temporary_bytes(mean._replace(local=local, aggregate=aggregate))
    assert all_of_them > clients * byte_count(jax.eval_shape(model.init, jax.random.key(0)))
    assert one < all_of_them / 10
