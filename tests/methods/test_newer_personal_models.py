"""FedAMP, APPLE, FedGH and FedBN: whole rounds against float64 NumPy, with full batches, and their limits."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model
from rounds import last_round
from trees import assert_same, row

from pfl_jax.data import client_data
from pfl_jax.methods import apple, fedamp, fedgh, make_method
from pfl_jax.methods.apple import size_shares
from pfl_jax.primitives import fingerprint


# With the second alpha_k the weights for others would sum to more than 1.
@pytest.mark.parametrize("alpha_k", [0.4, 2.0])
def test_fedamp(alpha_k):
    clients = full.training_examples()
    lam, sigma = 0.1, 1.5
    start = reference.to_numpy(full.start_of(fedamp))
    clouds = [start] * 3
    for _ in range(2):
        models = [
            full.train(u, x, y, more=lambda w, u=u: {name: lam / alpha_k * (w[name] - u[name]) for name in w})
            for u, (x, y) in zip(clouds, clients, strict=True)
        ]
        xi = np.zeros((3, 3))
        for i in range(3):
            for j in set(range(3)) - {i}:
                distance = sum(((models[i][name] - models[j][name]) ** 2).sum() for name in start)
                xi[i, j] = alpha_k * np.exp(-distance / sigma) / sigma
            xi[i] /= max(xi[i].sum(), 1)
            xi[i, i] = 1 - xi[i].sum()
        clouds = [reference.mean(xi[i], models) for i in range(3)]
    assert (xi.diagonal() < 1e-6).all() if alpha_k > 1 else (xi.diagonal() > 0.1).all()
    last = full.run(fedamp, lam=lam, alpha_k=alpha_k, sigma=sigma)
    order = np.argsort(last.cohort)
    np.testing.assert_allclose(np.asarray(last.info["attention"])[np.ix_(order, order)], xi, rtol=1e-3, atol=1e-5)
    full.assert_models(last.state.clients.params, models)
    full.assert_models(last.state.clients.cloud, clouds)
    full.assert_received(last, models)


def relate(core, relations, others, shares, x, y, strength, relation_lr):
    """A client's full-batch steps on its core model and its relations (own first), with PyTorch's momentum."""
    velocity = dict.fromkeys(core, 0.0)
    relation_velocity = 0.0
    for _ in range(full.EPOCHS):
        models = [core, *others]
        gradient = reference.cross_entropy_gradient(reference.mean(relations, models), x, y)
        on_relations = np.array([sum((gradient[name] * w[name]).sum() for name in w) for w in models])
        on_relations += 2 * strength * (relations - shares)
        for name in core:
            total = relations[0] * gradient[name] + full.SGD["weight_decay"] * core[name]
            velocity[name] = full.SGD["momentum"] * velocity[name] + total
        relation_velocity = full.SGD["momentum"] * relation_velocity + on_relations
        core = {name: core[name] - full.SGD["lr"] * velocity[name] for name in core}
        relations = relations - relation_lr * relation_velocity
    return core, relations


def test_apple():
    clients = full.training_examples()
    relation_lr, mu = 0.05, 8.0
    sizes = np.array(full.SIZES, float)
    cores = [reference.to_numpy(full.start_of(apple, peers=4).initial)] * 3
    others = [[], [], []]
    relations, shares = [np.ones(1)] * 3, [np.ones(1)] * 3
    for index in range(3):
        strength = mu * 1e-3 ** (index / 2) if index < 2 else 0.0
        results = [
            relate(core, p, [cores[j] for j in more], share, x, y, strength, relation_lr)
            for core, p, more, share, (x, y) in zip(cores, relations, others, shares, clients, strict=True)
        ]
        cores, relations = map(list, zip(*results, strict=True))
        if index == 0:
            others = [[1, 2], [0, 2], [0, 1]]
            shares = [sizes[[i, *others[i]]] / sizes.sum() for i in range(3)]
            relations = [np.append(p * share[0], share[1:]) for p, share in zip(relations, shares, strict=True)]
    last = full.run(apple, rounds=3, relation_lr=relation_lr, mu=mu, relation_rounds=2, peers=4)
    data, state = tiny_federation(full.SIZES), last.state.clients
    identities = [fingerprint(client_data(data, client, "train")) for client in range(3)]
    full.assert_models(state.core, cores)
    for client in range(3):
        held = np.asarray(state.peers.identities[client])
        slots = [int(np.flatnonzero((held == identities[j]).all(axis=1))[0]) for j in others[client]]
        got = np.asarray(state.relations[client])
        np.testing.assert_allclose(got[[0, *(1 + slot for slot in slots)]], relations[client], rtol=2e-4, atol=2e-5)
        assert np.count_nonzero(got) == 3
        # It knew all the others already.
        np.testing.assert_array_equal(last.info["relations"][client], got)
        for j, slot in zip(others[client], slots, strict=True):
            full.assert_model(row(row(state.peers.models, client), slot), cores[j])
    personal = [reference.mean(p, [cores[i], *(cores[j] for j in others[i])]) for i, p in enumerate(relations)]
    full.assert_received(last, personal)


def test_apple_stores_the_first_peers_that_it_meets():
    settings = {"lr": 0.1, "batch_size": 8, "epochs": 1, "relation_lr": 0.0, "peers": 2}
    states = [last_round(apple, tiny_federation(), 5, rounds, 0.5, **settings).state.clients for rounds in (2, 6)]
    early, late = states
    for client in range(4):
        # Relations that are not learned remain the shares of examples, whoever is met when.
        assert_same(row(late.relations, client), size_shares(row(late, client)))
        kept = np.asarray(early.peers.sizes[client]) > 0
        np.testing.assert_array_equal(late.peers.identities[client][kept], early.peers.identities[client][kept])
    np.testing.assert_allclose(late.relations.sum(1), 1.0, rtol=1e-6)
    assert (np.count_nonzero(late.peers.sizes, axis=1) == 2).any()
    for client in range(4):
        held = np.asarray(late.peers.identities[client])[np.asarray(late.peers.sizes[client]) > 0]
        assert len(np.unique(held, axis=0)) == np.count_nonzero(late.peers.sizes[client])


def test_fedgh():
    clients = full.training_examples()
    server_lr, server_epochs = 0.3, 4
    start = reference.to_numpy(full.start_of(fedgh))
    models = [start] * 3
    head = reference.part(start, "head")
    for _ in range(2):
        models = [full.train({**w, **head}, x, y) for w, (x, y) in zip(models, clients, strict=True)]
        means, labels = [], []
        for w, (x, y) in zip(models, clients, strict=True):
            for k in np.unique(y):
                means.append(reference.features(w, x[y == k]).mean(0))
                labels.append(k)
        means, labels = np.stack(means), np.array(labels)

        def gradient(head, means=means, labels=labels):
            scores = means @ head["head/kernel"] + head["head/bias"]
            error = (np.exp(reference.log_softmax(scores)) - np.eye(3)[labels]) / len(labels)
            return {"head/kernel": means.T @ error, "head/bias": error.sum(0)}

        head = reference.descend(head, gradient, server_epochs, server_lr)
    last = full.run(fedgh, server_lr=server_lr, server_epochs=server_epochs, server_batch_size=32)
    deployed = [{**w, **head} for w in models]
    full.assert_parts(last.state.clients, "backbone", deployed)
    full.assert_parts(jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), last.state.server["head"]), "head", deployed)
    full.assert_received(last, deployed)


@pytest.mark.parametrize("name", ["apple", "fedfomo"])
def test_a_client_keeps_its_first_fingerprint(name):
    """Another compilation, as of a run that is resumed elsewhere, may round its inputs to another one."""
    method, data = make_method(name, tiny_model(), **HYPER_PARAMETERS), client_data(tiny_federation(), 0, "train")
    server = method.init_server(jax.random.key(0))
    client = method.init_client(jax.random.key(1), server, data)
    np.testing.assert_array_equal(client.identity, fingerprint(data))
    known = client._replace(identity=jnp.uint32([7, 8]))
    result = jax.jit(method.local)(jax.random.key(2), server, known, data)
    np.testing.assert_array_equal(result.message.identity, [7, 8])
    np.testing.assert_array_equal(result.client.identity, [7, 8])
