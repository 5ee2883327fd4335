"""SCAFFOLD's control variates: whose steps they count, and that they are finite without any."""

import chex
import jax
import jax.numpy as jnp
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model
from trees import assert_same

from pfl_jax.data import client_data
from pfl_jax.methods import make_method, scaffold
from pfl_jax.methods.scaffold import ScaffoldClient
from pfl_jax.primitives import supervised_loss

KEY = jax.random.key(0)


def test_without_a_learning_rate_it_stands_still():
    @jax.jit
    def train(lr):
        method = make_method(scaffold, tiny_model(), **{**HYPER_PARAMETERS, "lr": lr})
        server = method.init_server(KEY)
        # As in a later round: controls that are not zero.
        server = server._replace(control=jax.tree.map(jnp.ones_like, server.control))
        twice = jax.tree.map(lambda leaf: 2 * leaf, server.control)
        client = ScaffoldClient(twice, twice)
        return server, client, method.local(KEY, server, client, client_data(tiny_federation(), 1, "train"))

    server, client, result = train(0.0)
    assert_same(result.client, client)
    assert_same(result.message.value.params, server.params)
    chex.assert_trees_all_equal(result.message.value.control_change, jax.tree.map(jnp.zeros_like, server.control))


@pytest.mark.parametrize(("drop_last", "steps"), [(False, (6, 10, 8, 4)), (True, (4, 10, 6, 2))])
def test_each_clients_own_steps_are_counted(drop_last, steps):
    """c_i+ = (w - w_i) / (S lr) in the first round, for S steps of batches of 4."""
    method = make_method(scaffold, tiny_model(), lr=0.05, momentum=0.0, batch_size=4, epochs=2, drop_last=drop_last)
    server, local = method.init_server(KEY), jax.jit(method.local)
    for client, own in enumerate(steps):
        start = ScaffoldClient(server.control, server.control)
        message = local(KEY, server, start, client_data(tiny_federation(), client, "train")).message.value
        moved = jax.tree.map(lambda a, b, s=own: (a - b) / (s * 0.05), server.params, message.params)
        chex.assert_trees_all_close(message.control_change, moved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("steps", [{"optimizer": "adam"}, {"clip_norm": 0.1}], ids=["adam", "clipped"])
def test_control_variates_with_adam_are_gradients(steps):
    """SCAFFOLD's option I where steps are no multiples of gradients: c_i+ is the gradient at w."""
    model, data = tiny_model(), client_data(tiny_federation(pad=3), 1, "train")
    adam = make_method("scaffold", model, **HYPER_PARAMETERS, **steps)
    server = adam.init_server(KEY)
    control = jax.tree.map(lambda leaf: leaf + 0.1, server.control)
    result = jax.jit(adam.local)(KEY, server, ScaffoldClient(control, control), data)
    want, _ = jax.jit(jax.grad(supervised_loss(model), has_aux=True))(server.params, data, jax.random.key(0))
    chex.assert_trees_all_close(result.client.trained, want, rtol=1e-4, atol=1e-6)
    change = jax.tree.map(jnp.subtract, want, control)
    chex.assert_trees_all_close(result.message.value.control_change, change, rtol=1e-4, atol=1e-6)
