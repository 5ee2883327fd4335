"""Baselines with several models, HypCluster and FedEM: their limits, and their equations against float64 NumPy."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import tiny_federation, tiny_model
from trees import assert_same, row

from pfl_jax.data.federated import client_data
from pfl_jax.methods import make_method
from pfl_jax.methods.fedem import fedem
from pfl_jax.methods.fedem_ft import fedem_ft
from pfl_jax.methods.hypcluster import hypcluster
from pfl_jax.primitives.ensembles import init_models


def test_initial_models_are_distinct_and_do_not_depend_on_their_number():
    three, five = (init_models(tiny_model(), jax.random.key(0), count) for count in (3, 5))
    assert_same(three, row(five, slice(3)))
    assert_same(row(three, 0), tiny_model().init(jax.random.key(0)))
    kernels = five["backbone"]["kernel"]
    assert all(float(jnp.abs(kernels[i] - kernels[j]).max()) > 0.1 for i in range(5) for j in range(i))


@pytest.mark.parametrize("clusters", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_hypcluster(clusters):
    # Three clients share two clusters, or leave at least two of five empty.
    clients = full.training_examples()
    server = full.start_of(hypcluster, clusters=clusters)
    models = [reference.to_numpy(row(server, cluster)) for cluster in range(clusters)]
    for _ in range(2):
        chosen = np.array([np.argmin([full.losses(w, x, y).mean() for w in models]) for x, y in clients])
        trained = [full.train(models[c], x, y) for c, (x, y) in zip(chosen, clients, strict=True)]
        for cluster in set(chosen):
            members = np.flatnonzero(chosen == cluster)
            weights = full.BETA[members] / full.BETA[members].sum()
            models[cluster] = reference.mean(weights, [trained[i] for i in members])
    last = full.run(hypcluster, clusters=clusters)
    np.testing.assert_array_equal(last.info["cluster"], chosen)
    full.assert_models(last.state.server, models)
    # Each deploys the new model that fits it best.
    chosen = [int(np.argmin([full.losses(w, x, y).mean() for w in models])) for x, y in clients]
    assert any(chosen)
    full.assert_received(last, [models[cluster] for cluster in chosen])


def test_fedem():
    clients = full.training_examples()
    server = full.start_of(fedem, learners=3)
    learners = [reference.to_numpy(row(server, m)) for m in range(3)]
    mixtures = np.full((len(clients), 3), 1 / 3)
    for _ in range(2):
        trained = []
        for client, (x, y) in enumerate(clients):
            joint = mixtures[client] * np.exp(-np.stack([full.losses(w, x, y) for w in learners], 1))
            q = joint / joint.sum(1, keepdims=True)
            mixtures[client] = q.mean(0)
            trained.append([full.train(w, x, y, q[:, m]) for m, w in enumerate(learners)])
        learners = [reference.mean(full.BETA, [own[m] for own in trained]) for m in range(3)]
    last = full.run(fedem, learners=3)
    np.testing.assert_allclose(np.exp(last.state.clients), mixtures, rtol=1e-3, atol=1e-5)
    full.assert_models(last.state.server, learners)
    # Probabilities are mixed, not logits, and each client deploys its own mixture.
    for client, mixture in enumerate(mixtures):
        x, y = full.unseen_examples(client)
        each = [np.exp(reference.log_softmax(reference.logits(w, x))) for w in learners]
        probabilities = sum(pi * p for pi, p in zip(mixture, each, strict=True))
        predicted = fedem(tiny_model()).predict((last.state.server, last.state.clients[client]), jnp.float32(x))
        np.testing.assert_allclose(np.exp(predicted), probabilities, rtol=1e-3, atol=1e-5)
        loss = -np.log(probabilities[np.arange(len(y)), y]).mean()
        np.testing.assert_allclose(last.received["loss"][client], loss, rtol=1e-3, atol=1e-5)
        assert np.abs(mixture - 1 / 3).max() > 0.03


def test_fedem_responsibilities_follow_their_examples_through_shuffling():
    # With tiny steps, the five batches of an epoch move as far as five steps on all twenty examples together.
    plain = {"rounds": 1, "sizes": (20,), "lr": 1e-2, "momentum": 0.0, "weight_decay": 0.0}
    start = full.start_of(fedem, learners=3)["head"]["kernel"]
    whole = full.run(fedem, **plain, learners=3, epochs=5, batch_size=20).state.server["head"]["kernel"] - start
    batches = full.run(fedem, **plain, learners=3, epochs=1, batch_size=4).state.server["head"]["kernel"] - start
    assert float(jnp.linalg.norm(batches - whole) / jnp.linalg.norm(whole)) < 0.02


def test_fedem_ft_deploys_tuned_learners():
    data, key = client_data(tiny_federation(full.SIZES), 1, "train"), jax.random.key(0)
    method = make_method(fedem_ft, tiny_model(), **full.SGD, finetune_epochs=20)
    server = method.init_server(key)
    client = jnp.log(jnp.array([0.2, 0.5, 0.3]))
    models, mixture = jax.jit(method.personalize)(key, server, client, data)
    train = jax.jit(make_method(fedem, tiny_model(), **full.SGD, epochs=20).local)
    want = train(key, server, client, data)
    assert_same((models, mixture), (want.message.value, want.client))
    assert float(jnp.abs(models["head"]["kernel"] - server["head"]["kernel"]).max()) > 0.05
    # A weight too small for float32 can grow again.
    assert np.isfinite(train(key, server, jnp.array([0.0, -200.0, -200.0]), data).client).all()
