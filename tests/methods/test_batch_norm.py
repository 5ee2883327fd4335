"""Methods with batch normalization: whole rounds against float64 NumPy, and that every method trains such a model."""

import functools

import batch_norm
import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from batch_norm import MEAN, VARIANCE, with_batch_norm
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model
from rounds import last_round
from trees import assert_flat, assert_same, flatten, row

from pfl_jax import Cohort, Settings, simulate
from pfl_jax.data import client_data
from pfl_jax.methods import METHODS, make_method
from pfl_jax.methods.fedbn import is_normalization
from pfl_jax.primitives import LocalTraining, map_statistics
from pfl_jax.testing import CHECKS, Subject
from pfl_jax.wrappers.server_optimizer import ServerOptimizer, server_optimized

train = functools.partial(batch_norm.train, steps=full.EPOCHS, **full.SGD)


def start_of(factory):
    return flatten(full.start_of(with_batch_norm(METHODS[factory])))


def assert_losses(last, models):
    for client, w in enumerate(models):
        x, y = full.unseen_examples(client)
        np.testing.assert_allclose(last.received["loss"][client], batch_norm.loss(w, x, y, training=False), rtol=1e-3)


def personal_rounds(w, own):
    """Two rounds in which the clients keep these entries: their models, and the mean of all."""
    clients = full.training_examples()
    models = [w] * len(clients)
    for _ in range(2):
        models = [train(model, x, y) for model, (x, y) in zip(models, clients, strict=True)]
        mean = reference.mean(full.BETA, models)
        models = [{name: (model if name in own else mean)[name] for name in w} for model in models]
    return models, mean


def test_fedbn():
    w = start_of("fedbn")
    own = {name for name in w if "norm" in name}
    assert own == {MEAN, VARIANCE, "backbone/norm/scale", "backbone/norm/bias"}
    models, mean = personal_rounds(w, own)
    last = full.run(with_batch_norm(METHODS["fedbn"]))
    assert_flat(last.state.server, {name: (w if name in own else mean)[name] for name in w})
    names = [name for name, mine in zip(w, is_normalization(last.state.server), strict=True) if mine]
    assert set(names) == own
    for client, model in enumerate(models):
        for name, leaf in zip(names, row(last.state.clients, client), strict=True):
            np.testing.assert_allclose(leaf, model[name], rtol=1e-3, atol=1e-4)
    assert_losses(last, models)


@pytest.mark.slow
def test_statistics_of_fedcac_stay_with_the_clients():
    # Without critical parameters the rest is averaged.
    w, own = flatten(full.start_of(with_batch_norm(METHODS["fedcac"])).params), (MEAN, VARIANCE)
    models, mean = personal_rounds(w, own)
    last = full.run(with_batch_norm(METHODS["fedcac"]), share=0.0)
    assert_flat(last.state.server.params, mean)
    kept, start = flatten(last.state.clients.params), flatten(last.state.clients.critical)
    for name in w:
        np.testing.assert_array_equal(start[name], name in own)
    for name in own:
        np.testing.assert_allclose(kept[name], [model[name] for model in models], rtol=1e-3, atol=1e-4)
    assert_losses(last, models)
    # The server has no part in it: they stay also if the client's message is lost.
    method = make_method(with_batch_norm(METHODS["fedcac"]), tiny_model(), **HYPER_PARAMETERS)
    server, data = method.init_server(jax.random.key(0)), client_data(tiny_federation(), 1, "train")
    result = jax.jit(method.local)(jax.random.key(1), server, method.init_client(None, server, data), data)
    deployed, trained = flatten(method.personalize(None, server, result.client, data)), flatten(result.personal)
    assert [name for name in w if (deployed[name] == trained[name]).all()] == list(own)


def test_statistics_of_a_model_in_a_mixture_change_by_its_share():
    # APFL trains (1/4) v + (3/4) w. Without a learning rate the weights stay, those of v and w being equal.
    settings = {"alpha": 0.25, "lr": 0.0, "batch_size": 20, "epochs": 1}
    method = make_method(with_batch_norm(METHODS["apfl"]), tiny_model(), **settings)
    server, data = method.init_server(jax.random.key(0)), client_data(tiny_federation(), 1, "train")
    client = method.init_client(jax.random.key(0), server, data)
    client = client._replace(own=map_statistics(lambda leaf: leaf + 4.0, client.own))
    result = jax.jit(method.local)(jax.random.key(1), server, client, data)
    before, shared, own = map(flatten, (server, result.message.value, result.client.own))
    for name in (MEAN, VARIANCE):
        batch = (shared[name] - batch_norm.DECAY * before[name]) / (1 - batch_norm.DECAY)
        want = before[name] + 4.0 + 0.25 * (1 - batch_norm.DECAY) * (batch - (before[name] + 1.0))
        np.testing.assert_allclose(own[name], want, rtol=1e-4)


LEARNED = {
    "pfedgraph": {"lam": 1.0},
    "fedamp": {"sigma": 1.0},
    "apfl": {"adaptive": True},
    "apple": {"relation_lr": 0.1, "peers": 3},
}
"""Methods that learn which models to mix, with hyper-parameters that show it."""


@pytest.mark.parametrize(
    "name", ["fedamp", *(pytest.param(name, marks=pytest.mark.slow) for name in LEARNED if name != "fedamp")]
)
def test_which_models_to_mix_is_learned_from_the_weights_alone(name):
    def beginning_with(size):
        """Running statistics that differ from entry to entry, and so from client to client."""

        def rows(leaf):
            return np.float32(size) * np.ones_like(leaf) * np.arange(len(leaf)).reshape(-1, *[1] * (leaf.ndim - 1))

        return lambda state: state._replace(
            server=map_statistics(rows, state.server), clients=map_statistics(rows, state.clients)
        )

    def learned(size):
        last = last_round(
            factory, tiny_federation(), 0, 2, change=beginning_with(size), **HYPER_PARAMETERS, **LEARNED[name]
        )
        found = flatten((last.state.server, last.state.clients, last.info))
        return {path: value for path, value in found.items() if "batch_stats" not in path}

    factory = with_batch_norm(METHODS[name])
    without, others = learned(0.0), learned(2.0)
    for path, value in without.items():
        np.testing.assert_allclose(others[path], value, rtol=1e-4, atol=1e-5, err_msg=path)


def test_the_step_of_feddyns_server_leaves_statistics_alone():
    data, key = client_data(tiny_federation(), 1, "train"), jax.random.key(0)

    @jax.jit
    def run(value):
        # Without a learning rate nothing moves but the statistics, which have none.
        settings = {**HYPER_PARAMETERS, "lr": 0.0, "lam": value}
        method = make_method(with_batch_norm(METHODS["feddyn"]), tiny_model(), **settings)
        server = method.init_server(key)
        client = jax.tree.map(jnp.ones_like, method.init_client(key, server, data))
        sent = method.local(key, server, client, data).message
        cohort = Cohort(jnp.arange(1), jnp.array([20]), jnp.ones(1, bool), 4)
        return sent.value, method.aggregate(key, server, client, sent, cohort)[0]

    (plain, _), (pulled, server) = run(0.0), run(3.0)
    assert_same(pulled, plain)
    assert np.abs(plain["backbone"]["batch_stats"]["norm"]["mean"]).max() > 0.05
    # The server has them as they were sent, and moves the weights further.
    assert_same(server.params["backbone"]["batch_stats"], pulled["backbone"]["batch_stats"])


@pytest.mark.slow
def test_a_servers_optimizer_takes_statistics_as_they_are():
    base = with_batch_norm(METHODS["fedavg"])

    def optimized(model, training=LocalTraining()):
        return server_optimized(base(model, training), ServerOptimizer("adam", 0.1))

    data, settings = tiny_federation(), Settings(rounds=1)
    states = []
    for factory in (base, optimized):
        engine = simulate.build(make_method(factory, tiny_model(), **HYPER_PARAMETERS), settings)
        states.append(jax.jit(lambda engine=engine: engine.round(data, engine.init(data, jax.random.key(0)), 3)[0])())
    plain, adam = flatten(states[0].server), flatten(states[1].server.plain)
    for name in (MEAN, VARIANCE):
        np.testing.assert_allclose(plain[name], adam[name], rtol=1e-6)
    assert np.abs(plain["head/kernel"] - adam["head/kernel"]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_fedbn_conforms_with_batch_normalization(check):
    CHECKS[check](Subject(with_batch_norm(METHODS["fedbn"])))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_a_model_with_batch_normalization(name):
    data, last = tiny_federation(), None
    settings = Settings(rounds=12, participation=1.0, eval_every=12)
    method = make_method(with_batch_norm(METHODS[name]), tiny_model(), **HYPER_PARAMETERS)
    *_, last = simulate.run(method, data, settings, jax.random.key(0))
    # What pFedMe deploys is fitted to one mini-batch, whose statistics it has: with eight examples it varies by 0.2.
    assert last.received["accuracy"].mean() > (0.6 if name == "pfedme" else 0.75)
    kept = {**flatten(last.state.server), **flatten(last.state.clients)}
    statistics = {name: value for name, value in kept.items() if "batch_stats" in name}
    for path, value in statistics.items():
        assert np.isfinite(value).all(), path
