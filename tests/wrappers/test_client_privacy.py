"""Differential privacy for whole clients: the clipped sum of updates, its noise, and the methods that it applies to."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import HYPER_PARAMETERS, received, tiny_federation, tiny_model

from pfl_jax import Cohort, InvalidInput, LocalResult, Mean, Method
from pfl_jax.base import HandOver
from pfl_jax.data import client_data
from pfl_jax.methods import make_method
from pfl_jax.wrappers.attacks import attacked
from pfl_jax.wrappers.client_privacy import ClientPrivacy, private_clients
from pfl_jax.wrappers.compression import Compression, compressed
from pfl_jax.wrappers.server_mean import ServerMean, robust

KEY = jax.random.key(0)
START = {"a": np.arange(4.0), "b": np.full((2, 2), -1.0)}
CHANGES = np.random.default_rng(0).normal(size=(3, 8)) * np.array([[0.01], [1.0], [50.0]])


def tree(flat):
    return {"a": flat[:4], "b": flat[4:].reshape(2, 2)}


def echo(weight=1.0):
    """Method whose clients send the model they received plus their own state."""
    return Method(
        init_server=lambda key: jax.tree.map(jnp.float32, START),
        init_client=lambda key, server, data: (),
        local=lambda key, server, client, data: LocalResult(
            client, Mean(jax.tree.map(jnp.add, server, tree(client)), jnp.float32(weight)), ()
        ),
        aggregate=lambda key, server, clients, messages, cohort: (messages.value, clients, {}),
        personalize=lambda key, server, client, data: server,
        predict=lambda personal, inputs: inputs,
    )


@jax.jit
def one_round(seed, clip, noise, changes, present, weight):
    method, server = private_clients(echo(weight), ClientPrivacy(clip, noise)), jax.tree.map(jnp.float32, START)
    messages = jax.vmap(lambda change: method.local(KEY, server, change, None).message)(changes)
    cohort = Cohort(jnp.arange(3), 5 * present, present, 10)
    server, _, _ = method.aggregate(jax.random.key(seed), server, (), received(messages, present), cohort)
    return jnp.concatenate([jnp.ravel(leaf) for leaf in (server["a"], server["b"])])


def after(clip, noise=0.0, changes=CHANGES, present=(True, True, True), seed=0, weight=1.0):
    return np.asarray(one_round(seed, clip, noise, jnp.float32(changes), jnp.array(present), weight))


FLAT = np.concatenate([START["a"], START["b"].ravel()])


def clipped(change, clip):
    return change * min(1, clip / np.linalg.norm(change))


@pytest.mark.parametrize("present", [(True, True, True), (True, False, True), (False, False, False)])
def test_the_server_gets_the_clipped_sum_over_a_fixed_number(present):
    expected = FLAT + sum(clipped(CHANGES[i], 2.0) for i in range(3) if present[i]) / 3
    for weight in (1.0, 7.0):
        found = after(2.0, present=present, weight=weight)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_noise_is_added_once_whoever_is_there():
    noise = np.stack([after(0.5, 4.0, seed=seed) for seed in range(150)]) - after(0.5)
    assert np.std(noise) == pytest.approx(4.0 * 0.5 / 3, rel=0.07)
    np.testing.assert_allclose(np.corrcoef(noise.T) - np.eye(8), 0, atol=0.35)
    nobody = np.stack([after(0.5, 4.0, present=(False,) * 3, seed=seed) for seed in range(150)]) - FLAT
    np.testing.assert_allclose(nobody, noise, atol=1e-5)


def test_a_method_whose_server_takes_no_mean_of_parameters_is_refused():
    wrapped = private_clients(make_method("fedamp", tiny_model(), **HYPER_PARAMETERS), ClientPrivacy(1.0))
    data = client_data(tiny_federation(), 0, "train")

    def local(server):
        return wrapped.local(KEY, server, wrapped.init_client(KEY, server, data), data).message

    with pytest.raises(InvalidInput, match="whose server takes a mean of parameters"):
        jax.eval_shape(local, jax.eval_shape(wrapped.init_server, KEY))


def test_an_attacker_flips_its_clipped_update():
    private = private_clients(echo(), ClientPrivacy(client_clip=1.0))
    server, client = private.init_server(KEY), jnp.asarray(CHANGES[1])
    honest = private.local(KEY, server, client, ()).message
    flipped = attacked(private, "signs", jnp.array(True), scale=2.0, num_classes=2)
    found = flipped.local(KEY, server, client, ()).message
    assert float(optax.tree.norm(honest.value)) == pytest.approx(1.0)
    chex.assert_trees_all_close(found.value, jax.tree.map(lambda leaf: -2.0 * leaf, honest.value), rtol=1e-6)


def test_what_clients_hand_over_to_each_other_is_not_clipped():
    method = echo()._replace(hand_over=HandOver(lambda key, server, client, data: server))
    with pytest.raises(InvalidInput, match="whose clients hand nothing over to each other"):
        private_clients(method, ClientPrivacy(1.0))
    assert private_clients(method, ClientPrivacy()) is method


def test_wrappers_that_exclude_each_other_say_so():
    recipe, data = ClientPrivacy(client_clip=1.0), client_data(tiny_federation(), 0, "train")
    fedavg = make_method("fedavg", tiny_model(), **HYPER_PARAMETERS)
    private, small = private_clients(fedavg, recipe), compressed(fedavg, Compression("sign"))
    with pytest.raises(InvalidInput, match="client_clip cannot be given with compress"):
        private_clients(small, recipe)
    median, sign = ServerMean("median"), Compression("sign")
    for made, said in (
        (compressed(private, sign), "compress cannot be given with client_clip"),
        (robust(private, median), "server_mean cannot be given with client_clip"),
        (private_clients(robust(fedavg, median), recipe), "whose server takes a mean of parameters"),
        (private_clients(private, recipe), "whose server takes a mean of parameters"),
        (robust(robust(fedavg, median), median), "server_mean is there already"),
    ):

        def local(server, made=made):
            return made.local(KEY, server, made.init_client(KEY, server, data), data).message

        with pytest.raises(InvalidInput, match=said):
            jax.eval_shape(local, jax.eval_shape(made.init_server, KEY))
