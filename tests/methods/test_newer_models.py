"""Newer methods: whole rounds against float64 NumPy, with full batches, and their limits."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model
from rounds import last_round
from trees import assert_same, row

from pfl_jax import ClientData
from pfl_jax.data import client_data
from pfl_jax.methods import apple, make_method
from pfl_jax.methods.apple import size_shares
from pfl_jax.methods.moon import contrastive_loss
from pfl_jax.methods.per_fedavg import deal
from pfl_jax.primitives import fingerprint

# A shared model: Per-FedAvg, MOON, FedDyn and FedDBE


def move(w, distance, direction):
    return {name: value + distance * direction[name] for name, value in w.items()}


@pytest.mark.parametrize("kind", [pytest.param("first_order", marks=pytest.mark.slow), "hessian_free"])
def test_per_fedavg(kind):
    clients = full.training_examples()
    inner_lr, delta, parts = 0.3, 0.02, {"first_order": 2, "hessian_free": 3}[kind]
    w = reference.to_numpy(full.start_of("per_fedavg"))
    for _ in range(2):
        trained = []
        for x, y in clients:
            step = iter(range(3))

            def gradient(w, x=x, y=y, step=step):
                turn = next(step)

                def on(part, w):
                    rows = slice((part - turn) % parts, None, parts)
                    return reference.cross_entropy_gradient(w, x[rows], y[rows])

                meta = on(1, move(w, -inner_lr, on(0, w)))
                if kind == "first_order":
                    return meta
                ahead, behind = on(2, move(w, delta, meta)), on(2, move(w, -delta, meta))
                product = {name: (ahead[name] - behind[name]) / (2 * delta) for name in w}
                return move(meta, -inner_lr, product)

            trained.append(reference.descend(w, gradient, 3, **full.SGD))
        # Sizes do not matter.
        w = reference.mean(np.full(3, 1 / 3), trained)
    last = full.run("per_fedavg", inner_lr=inner_lr, delta=delta, meta_gradient=kind)
    full.assert_model(last.state.server, w)

    def adapted(models):
        pairs = zip(models, clients, strict=True)
        return [move(w, -inner_lr, reference.cross_entropy_gradient(w, x, y)) for w, (x, y) in pairs]

    full.assert_received(last, adapted([w] * 3), adapted(trained))


def test_per_fedavg_deals_rows_in_the_order_of_the_data():
    rows = jnp.array([7, 1, 4, 2, 0, 0])
    batch = ClientData(10.0 * rows, (rows + 20, rows), jnp.arange(6) < 4)
    for step, want in enumerate([[[10, 70], [20, 0], [40, 0]], [[40, 0], [10, 70], [20, 0]]]):
        dealt = deal(batch, 3, step)
        assert [one.x.tolist() for one in dealt] == want
        assert [one.y.tolist() for one in dealt] == [[x / 10 + 20 for x in one] for one in want]
        assert [one.mask.sum() for one in dealt] == [2 if 10 in one else 1 for one in want]
    # A part without an example has those of the first row.
    few = deal(batch._replace(mask=jnp.arange(6) < 2), 3, 2)
    assert [one.x[one.mask].tolist() for one in few] == [[70], [10], [10]]


def contrast(z, near, far, temperature):
    """MOON's term of features z for fixed z+ and z-."""

    def cosine(other):
        return (z * other).sum(1) / np.linalg.norm(z, axis=1) / np.linalg.norm(other, axis=1)

    return np.mean(np.log1p(np.exp((cosine(far) - cosine(near)) / temperature)))


def test_moon():
    clients = full.training_examples()
    mu, temperature = 2.0, 0.4
    w, previous = reference.to_numpy(full.start_of("moon")), [None] * len(clients)
    for _ in range(3):
        trained = []
        for (x, y), before in zip(clients, previous, strict=True):

            def loss(v, now, w=w, x=x, y=y, before=before):
                own = reference.risk(v, x, y)
                if before is None:
                    return own
                z, near, far = (reference.features(model, x) for model in (v, w, before))
                return own + mu * contrast(z, near, far, temperature)

            trained.append(full.fit(w, loss))
        w, previous = reference.mean(full.BETA, trained), trained
    last = full.run("moon", rounds=3, mu=mu, temperature=temperature)
    full.assert_model(last.state.server, w)
    full.assert_models(last.state.clients.params, previous)
    assert last.state.clients.trained.all()
    full.assert_received(last, [w] * 3)


def test_moons_term_ignores_padding_and_features_of_zero():
    z = jnp.array([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    near, far = jnp.array([[3.0, 4.0], [1.0, 1.0], [9.0, 9.0]]), jnp.array([[-3.0, -4.0], [1.0, 0.0], [0.0, 9.0]])
    mask = jnp.array([True, True, False])
    value, gradient = jax.value_and_grad(contrastive_loss)(z, near, far, mask, 0.5)
    # Cosines 1 and -1 in the first row, 0 and 0 in the second.
    np.testing.assert_allclose(value, (np.log1p(np.exp(-4)) + np.log(2)) / 2, rtol=1e-5)
    assert np.isfinite(gradient).all()
    assert not gradient[2].any()


def test_feddyn():
    clients = full.training_examples()
    lam = 0.3
    w = reference.to_numpy(full.start_of("feddyn").params)
    zero = {name: np.zeros_like(value) for name, value in w.items()}
    linear, drift = [zero] * len(clients), zero
    for _ in range(3):
        trained = [
            full.train(w, x, y, lambda v, r=r, w=w: lam / 2 * sum(((r[n] + v[n] - w[n]) ** 2).sum() for n in v))
            for (x, y), r in zip(clients, linear, strict=True)
        ]
        linear = [{name: r[name] + v[name] - w[name] for name in w} for r, v in zip(linear, trained, strict=True)]
        mean = reference.mean(np.full(3, 1 / 3), trained)
        drift = {name: drift[name] + mean[name] - w[name] for name in w}
        w = {name: mean[name] + drift[name] for name in w}
    last = full.run("feddyn", rounds=3, lam=lam)
    full.assert_model(last.state.server.params, w)
    full.assert_model(last.state.server.drift, drift)
    full.assert_models(last.state.clients.drift, linear)
    full.assert_received(last, [w] * 3)


def test_feddbe():
    clients = full.training_examples()
    kappa, mean_rate = 5.0, 0.4
    w = reference.to_numpy(full.start_of("feddbe").params)
    consensus = np.zeros(4)
    for beta, (x, y) in zip(full.BETA, clients, strict=True):
        # Before the first round: plain training, in which the mean follows the features.
        mean = np.zeros(4)
        for steps in range(3):
            mean = (1 - mean_rate) * mean + mean_rate * reference.features(full.train(w, x, y, steps=steps), x).mean(0)
        consensus = consensus + beta * mean
    biases = [np.zeros(4)] * 3
    for _ in range(2):
        trained = []
        for client, (x, y) in enumerate(clients):
            means = [np.zeros(4)]

            def moved(v, x=x, means=means):
                return (1 - mean_rate) * means[-1] + mean_rate * reference.features(v, x).mean(0)

            def loss(v, x=x, y=y, moved=moved):
                scores = (reference.features(v, x) + v["bias"]) @ v["head/kernel"] + v["head/bias"]
                return reference.cross_entropy(scores, y) + kappa / 2 * np.mean((moved(v) - consensus) ** 2)

            v, velocity = {**w, "bias": biases[client]}, {}
            for _ in range(full.EPOCHS):
                now = moved(v)
                v = full.step(v, velocity, loss)
                means.append(now)
            trained.append(v)
        biases = [v.pop("bias") for v in trained]
        w = reference.mean(full.BETA, trained)
    last = full.run("feddbe", kappa=kappa, mean_rate=mean_rate)
    np.testing.assert_allclose(last.state.server.consensus, consensus, rtol=2e-4, atol=2e-5)
    full.assert_model(last.state.server.params, w)
    np.testing.assert_allclose(last.state.clients, biases, rtol=2e-4, atol=2e-5)
    for client, bias in enumerate(biases):
        x, y = full.unseen_examples(client)
        scores = (reference.features(w, x) + bias) @ w["head/kernel"] + w["head/bias"]
        np.testing.assert_allclose(last.received["loss"][client], reference.cross_entropy(scores, y), rtol=2e-4)


def test_moon_has_no_term_without_a_previous_model():
    # A model that has moved since the client's first one: features of that one would be seen.
    data, key = client_data(tiny_federation(full.SIZES), 1, "train"), jax.random.key(3)
    method, plain = (make_method(name, tiny_model(), epochs=full.EPOCHS, **full.SGD) for name in ("moon", "fedavg"))
    first, later = (method.init_server(jax.random.key(seed)) for seed in (0, 1))
    client, local = method.init_client(key, first, data), jax.jit(method.local)
    want = jax.jit(plain.local)(key, later, (), data).personal
    assert_same(local(key, later, client, data).personal, want)
    moved = local(key, later, client._replace(trained=jnp.ones((), bool)), data).personal
    assert float(jnp.abs(moved["backbone"]["kernel"] - want["backbone"]["kernel"]).max()) > 1e-3


# Personal models: FedAMP, APPLE and FedGH


# With the second alpha_k the weights for others would sum to more than 1.
@pytest.mark.parametrize("alpha_k", [0.4, 2.0])
def test_fedamp(alpha_k):
    clients = full.training_examples()
    lam, sigma = 0.1, 1.5
    start = reference.to_numpy(full.start_of("fedamp"))
    clouds = [start] * 3
    for _ in range(2):
        models = [
            full.train(u, x, y, lambda w, u=u: lam / alpha_k / 2 * reference.squared_distance(w, u))
            for u, (x, y) in zip(clouds, clients, strict=True)
        ]
        xi = np.zeros((3, 3))
        for i in range(3):
            for j in set(range(3)) - {i}:
                xi[i, j] = alpha_k * np.exp(-reference.squared_distance(models[i], models[j]) / sigma) / sigma
            xi[i] /= max(xi[i].sum(), 1)
            xi[i, i] = 1 - xi[i].sum()
        clouds = [reference.mean(xi[i], models) for i in range(3)]
    assert (xi.diagonal() < 1e-6).all() if alpha_k > 1 else (xi.diagonal() > 0.1).all()
    last = full.run("fedamp", lam=lam, alpha_k=alpha_k, sigma=sigma)
    np.testing.assert_allclose(last.info["attention"], xi, rtol=1e-3, atol=1e-5)
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
    cores = [reference.to_numpy(full.start_of("apple", peers=4).initial)] * 3
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
    last = full.run("apple", rounds=3, relation_lr=relation_lr, mu=mu, relation_rounds=2, peers=4)
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
    start = reference.to_numpy(full.start_of("fedgh"))
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

        def loss(head, now, means=means, labels=labels):
            return reference.cross_entropy(means @ head["head/kernel"] + head["head/bias"], labels)

        head = full.fit(head, loss, server_epochs, lr=server_lr, momentum=0.0, weight_decay=0.0)
    last = full.run("fedgh", server_lr=server_lr, server_epochs=server_epochs, server_batch_size=32)
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
