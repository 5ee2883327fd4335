"""What a method says that its clients trained from: true of what they send, like their messages, kept by wrappers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model, usual_model

from pfl_jax import InvalidInput, Mean
from pfl_jax.data import client_data
from pfl_jax.messages import bases, has_means, map_means, trained_from
from pfl_jax.methods import METHODS, fedavg, fedpac, make_method
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.wrappers import with_server_state
from pfl_jax.wrappers.client_privacy import ClientPrivacy, private_clients
from pfl_jax.wrappers.compression import Compression, compressed

KEY = jax.random.key(0)


SAYING = [
    name
    if name == "fedavg" or make_method(name, tiny_model()).trained_from
    else pytest.param(name, marks=pytest.mark.slow)
    for name in METHODS
]
"""Methods, those slow that leave it at what `download` gives; except for FedAvg."""
MORE = {"cd2pfed": {"growth_rounds": 0}, "fedas_cd2": {"growth_rounds": 0}}
"""Methods that would send everything in their first rounds -> further hyper-parameters."""
CHANGED = {
    # Without training, these are moved toward the client's own.
    "fedcp": lambda value: value._replace(head=()),
    "pfedfda": lambda value: value._replace(features=()),
}
"""Methods that compute more from what was received than local training does -> the rest of what they send."""


@pytest.mark.parametrize("name", SAYING)
def test_without_training_a_client_sends_what_it_received(name):
    method = make_method(name, usual_model(name), **HYPER_PARAMETERS | {"lr": 0.0, "epochs": 1} | MORE.get(name, {}))
    data = client_data(tiny_federation(), 1, "train")

    @jax.jit
    def sent(key):
        server = method.init_server(key)
        client = method.init_client(key, server, data)
        # A later server, which is not what a client began with.
        server = jax.tree.map(lambda leaf: leaf + jnp.asarray(0.25, leaf.dtype), server)
        message = method.local(key, server, client, data).message
        if not has_means(message):
            return (), (), ()
        known, flags = trained_from(method, server, client, message)
        return map_means(lambda part: part.value, message, rest=lambda leaf: leaf), known, flags

    values, known, flags = sent(KEY)
    if name in CHANGED:
        values, known, flags = map(CHANGED[name], (values, known, flags))
    for value, base, flag in zip(*map(jax.tree.leaves, (values, known, flags)), strict=True):
        np.testing.assert_allclose(base, value if flag else 0, atol=1e-6)


def test_the_tree_of_a_message():
    server = {"w": jnp.ones(2), "b": jnp.full(1, 3.0)}
    message = {
        "model": Mean((server, jnp.ones(4)), jnp.ones(())),
        "own": Mean(server, jnp.ones(())),
        "row": jnp.ones(5),
    }
    method = fedavg(tiny_model())._replace(
        trained_from=lambda server, client: {"model": (server, None), "own": None, "row": None}
    )
    known, flags = trained_from(method, server, (), message)
    chex.assert_trees_all_equal(known["model"], (server, jnp.zeros(4)))
    chex.assert_trees_all_equal(known["own"], jax.tree.map(jnp.zeros_like, server))
    assert flags == {"model": ({"w": True, "b": True}, False), "own": {"w": False, "b": False}, "row": False}


@pytest.mark.parametrize(
    "bases",
    [
        {"own": None},
        {"model": {"w": jnp.ones(2)}},
        {"model": {"w": jnp.ones(3), "b": jnp.ones(1)}},
        {"model": {"w": jnp.ones(2, jnp.int32), "b": jnp.ones(1)}},
        {"model": jnp.ones(2)},
    ],
    ids=["name", "structure", "shape", "type", "array"],
)
def test_what_is_not_like_the_message_is_refused(bases):
    message = {"model": Mean({"w": jnp.ones(2), "b": jnp.ones(1)}, jnp.ones(()))}
    method = fedavg(tiny_model())._replace(trained_from=lambda server, client: bases)
    with pytest.raises(InvalidInput, match="must give a tree like the message"):
        trained_from(method, (), (), message)


def test_wrappers_keep_it():
    plain = fedpac(tiny_model(), LocalTraining())
    server = plain.init_server(KEY)
    want = bases(plain, server, server.head)
    extended = with_server_state(plain, lambda server: (), lambda extra, old, new: (new, extra))
    chex.assert_trees_all_equal(bases(extended, extended.init_server(KEY), server.head), want)
    small, data = compressed(plain, Compression("sign")), client_data(tiny_federation(), 1, "train")
    chex.assert_trees_all_equal(bases(small, server, small.init_client(KEY, server, data)), want)
    # A clipped update is a change.
    private = bases(private_clients(plain, ClientPrivacy(1.0)), server, server.head)
    chex.assert_trees_all_equal(private, jax.tree.map(jnp.zeros_like, want))
    small = compressed(make_method("fedper", tiny_model()), Compression("sign"))
    server = small.init_server(KEY)
    chex.assert_trees_all_equal(bases(small, server, small.init_client(KEY, server, data)), server["backbone"])
