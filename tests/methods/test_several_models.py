"""Methods with prototypes, neighbors or several models: limits, and equations against float64 NumPy."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import CLASSES, tiny_federation, tiny_model
from trees import assert_same, row

from pfl_jax import Cohort
from pfl_jax.data import client_data
from pfl_jax.methods import fedem, fedem_ft, fedproto_g, fedproto_l, knn_per, make_method
from pfl_jax.methods.hypcluster import ClusterMessage
from pfl_jax.methods.knn_per import Datastore, KNNModel, neighbor_probabilities
from pfl_jax.primitives import fixed_subset, stratified_folds

# One program for each kind of call; operation by operation, each shape would compile a dozen.
stratified_folds = jax.jit(stratified_folds, static_argnums=2)
fixed_subset = jax.jit(fixed_subset, static_argnums=1, static_argnames="keep_rest")
neighbor_probabilities = jax.jit(neighbor_probabilities, static_argnums=(2, 3, 4))


# Prototypes


@pytest.mark.parametrize("factory", [fedproto_g, fedproto_l])
def test_fedproto(factory):
    clients = full.training_examples()
    lam, w = 2.0, reference.to_numpy(full.start_of("fedavg"))
    own, prototypes = [w] * len(clients), [{} for _ in clients]
    for _ in range(3):
        new = []
        for client, (x, y) in enumerate(clients):

            def pull(w, known=prototypes[client], x=x, y=y):
                targets = np.stack([known.get(k, f) for k, f in zip(y, reference.features(w, x), strict=True)])
                return lam * reference.alignment(w, x, targets)

            own[client] = full.train(own[client], x, y, pull)
            features = reference.features(own[client], x)
            new.append({k: (features[y == k].mean(0), np.sum(y == k)) for k in set(y)})
        if factory is fedproto_l:
            prototypes = [{k: centroid for k, (centroid, _) in mine.items()} for mine in new]
        else:
            classes = set().union(*new)
            merged = {}
            for k in classes:
                held = [mine[k] for mine in new if k in mine]
                merged[k] = sum(c * n for c, n in held) / sum(n for _, n in held)
            prototypes = [merged] * len(clients)
    last = full.run(factory, rounds=3, lam=lam)
    if factory is fedproto_g:
        labels = np.concatenate([y for _, y in clients])
        np.testing.assert_array_equal(last.info["counts"], np.bincount(labels, minlength=3))
    for client in range(len(clients)):
        if factory is fedproto_l:
            state = row(last.state.clients, client)
            params, got = state.params, state.prototypes.centroids
        else:
            params, got = row(last.state.clients, client), last.state.server.prototypes.centroids
        full.assert_model(params, own[client], rtol=5e-4, atol=5e-5)
        for k, centroid in prototypes[client].items():
            np.testing.assert_allclose(got[k], centroid, rtol=1e-3, atol=1e-4)


# Parts of a client's examples


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 17])
def test_fixed_subset(count):
    mask = jnp.arange(20) < count
    chosen = np.asarray(fixed_subset(mask, 0.2))
    assert not (chosen & ~np.asarray(mask)).any()
    assert chosen.sum() == (min(1, count) if count < 8 else round(0.2 * count))
    # The same rows whatever the padding, and whatever rows the real ones stand in.
    np.testing.assert_array_equal(fixed_subset(jnp.arange(33) < count, 0.2)[:20], chosen)
    # One row is left over, unless the subset may be everything.
    assert np.asarray(fixed_subset(mask, 1.0)).sum() == (count - 1 if count > 1 else count)
    np.testing.assert_array_equal(fixed_subset(mask, 1.0, keep_rest=False), mask)
    # Not just the first rows.
    assert np.asarray(fixed_subset(jnp.ones(50, bool), 0.5))[:25].sum() < 25


@pytest.mark.parametrize("folds", [2, 3])
def test_stratified_folds(folds):
    labels, mask = jnp.array([2, 0, 0, 2, 1, 0, 0, 2, 2, 2, 0, 1, 0, 0]), jnp.arange(14) < 12
    chosen = np.asarray(stratified_folds(labels, mask, folds))
    for k in range(3):
        sizes = np.bincount(chosen[np.asarray(mask & (labels == k))], minlength=folds)
        assert sizes.max() - sizes.min() <= 1
    # The same folds whatever the padding, and not the first rows against the others.
    padded = stratified_folds(jnp.pad(labels, (0, 9)), jnp.arange(23) < 12, folds)
    np.testing.assert_array_equal(padded[:12], chosen[:12])
    many = np.asarray(stratified_folds(jnp.zeros(40, int), jnp.ones(40, bool), folds))
    assert not (many == np.arange(40) % folds).all()


# Neighbors


KERNELS = {"exponential": lambda distance: np.exp(-distance), "gaussian": lambda distance: np.exp(-(distance**2) / 4)}
"""Weight of a neighbor at a distance in the four features of the tests."""


def numpy_neighbors(stored, labels, queries, neighbors, kernel):
    """Probabilities [B, K] from the nearest stored features, query by query."""
    found = []
    for query in queries:
        distances = np.linalg.norm(stored - query, axis=1)
        nearest = np.argsort(distances)[:neighbors]
        found.append(KERNELS[kernel](distances[nearest]) @ np.eye(CLASSES)[labels[nearest]])
    return np.array(found) / np.sum(found, axis=1, keepdims=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_neighbor_probabilities(kernel):
    generator = np.random.default_rng(0)
    stored, labels = generator.normal(size=(12, 4)), generator.integers(0, 3, 12)
    queries, mask = generator.normal(size=(5, 4)), np.arange(12) != 3
    want = numpy_neighbors(stored[mask], labels[mask], queries, 4, kernel)
    store = Datastore(jnp.float32(stored), jnp.int32(labels), jnp.asarray(mask))
    got = neighbor_probabilities(store, jnp.float32(queries), 4, 3, kernel)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    # All fewer than k examples count; far away, nothing underflows; without any, nothing is predicted.
    few = store._replace(mask=jnp.arange(12) < 2)
    far = neighbor_probabilities(few, jnp.float32(queries) + 1e3, 10, 3, kernel)
    np.testing.assert_allclose(far.sum(1), 1.0, rtol=1e-5)
    none = store._replace(mask=jnp.zeros(12, bool))
    assert float(neighbor_probabilities(none, jnp.float32(queries), 4, 3, kernel).max()) == 0


def test_a_class_without_neighbors_has_a_finite_loss():
    params, store = tiny_model().init(jax.random.key(0)), Datastore(jnp.eye(4), jnp.zeros(4, int), jnp.ones(4, bool))
    scores = knn_per(tiny_model(), mixing=1.0).predict(KNNModel(params, store, jnp.float32(1)), jnp.ones((2, 6)))
    np.testing.assert_allclose(scores[:, 0], 0.0, atol=1e-6)
    assert np.isfinite(scores).all()


@pytest.mark.parametrize(
    ("neighbors", "kernel"),
    [pytest.param(1, "exponential", marks=pytest.mark.slow), (5, "exponential"), (5, "gaussian")],
)
def test_knn_per_chooses_the_mixing_weight_on_held_out_examples(neighbors, kernel):
    clients = full.training_examples()
    method, data = knn_per(tiny_model(), neighbors=neighbors, held_out=0.4, kernel=kernel), tiny_federation(full.SIZES)
    # A head that overrates a class: how much of the neighbors is best differs from client to client.
    params = tiny_model().init(jax.random.key(8))
    params["head"]["bias"] = jnp.array([0.0, 0.0, 3.0])
    w = reference.to_numpy(params)
    personalize, chosen = jax.jit(method.personalize), []

    def mixture(store_x, store_y, x, a):
        stored, features = reference.features(w, store_x), reference.features(w, x)
        near = numpy_neighbors(stored, store_y, features, neighbors, kernel)
        return a * near + (1 - a) * np.exp(reference.log_softmax(reference.logits(w, x)))

    for client, (x, y) in enumerate(clients):
        train_data = client_data(data, client, "train")
        judged = np.asarray(fixed_subset(train_data.mask, 0.4))[np.asarray(train_data.mask)]

        def best(store, x=x, y=y, judged=judged):
            """The candidate with most of the judged examples right, among these neighbors."""
            candidates = (0.5, 0.6, 0.7, 0.8)
            models = [mixture(x[store], y[store], x[judged], a) for a in candidates]
            return candidates[int(np.argmax([np.mean(model.argmax(1) == y[judged]) for model in models]))]

        a = best(~judged)
        chosen.append((a, best(np.ones_like(judged))))
        personal = personalize(jax.random.key(0), params, (), train_data)
        np.testing.assert_allclose(personal.mixing, a, rtol=1e-6)
        # What it deploys has all the examples as neighbors.
        queries, _ = full.unseen_examples(client)
        predicted = method.predict(personal, jnp.float32(queries))
        np.testing.assert_allclose(np.exp(predicted), mixture(x, y, queries, a), rtol=1e-3, atol=1e-5)
    # Neither one value for everyone nor judged examples among their own neighbors would do.
    if (neighbors, kernel) == (5, "exponential"):
        assert len({a for a, _ in chosen}) == 3
        assert sum(a != with_itself for a, with_itself in chosen) == 2


@pytest.mark.parametrize("clusters", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_hypcluster(clusters):
    # Three clients share two clusters, or leave at least two of five empty.
    clients = full.training_examples()
    server = full.start_of("hypcluster", clusters=clusters)
    models = [reference.to_numpy(row(server, cluster)) for cluster in range(clusters)]
    for _ in range(2):
        chosen = np.array([np.argmin([full.losses(w, x, y).mean() for w in models]) for x, y in clients])
        trained = [full.train(models[c], x, y) for c, (x, y) in zip(chosen, clients, strict=True)]
        for cluster in set(chosen):
            members = np.flatnonzero(chosen == cluster)
            weights = full.BETA[members] / full.BETA[members].sum()
            models[cluster] = reference.mean(weights, [trained[i] for i in members])
    last = full.run("hypcluster", clusters=clusters)
    np.testing.assert_array_equal(last.info["cluster"], chosen)
    full.assert_models(last.state.server, models)
    # Each deploys the new model that fits it best.
    chosen = [int(np.argmin([full.losses(w, x, y).mean() for w in models])) for x, y in clients]
    assert any(chosen)
    full.assert_received(last, [models[cluster] for cluster in chosen])


def test_a_model_that_nobody_chose_stays():
    method = make_method("hypcluster", tiny_model(), clusters=3)
    server, sent = (method.init_server(jax.random.key(seed)) for seed in (0, 1))
    cohort = Cohort(jnp.arange(3), jnp.array([9, 5, 0]), jnp.array([True, True, False]), 4)
    # The third client, whose message does not arrive, has zeros: no choice of the first model.
    after, *_ = method.aggregate(None, server, (), ClusterMessage(sent, jnp.array([1, 1, 0])), cohort)
    for index in (0, 2):
        assert_same(row(after, index), row(server, index), rtol=0, atol=0)
    assert_same(row(after, 1), jax.tree.map(lambda leaf: np.average(leaf[:2], 0, [9, 5]), sent))


def test_fedem():
    clients = full.training_examples()
    server = full.start_of("fedem", learners=3)
    learners = [reference.to_numpy(row(server, m)) for m in range(3)]
    mixtures = np.full((len(clients), 3), 1 / 3)
    for _ in range(2):
        trained = []
        for client, (x, y) in enumerate(clients):
            joint = mixtures[client] * np.exp(-np.stack([full.losses(w, x, y) for w in learners], 1))
            q = joint / joint.sum(1, keepdims=True)
            mixtures[client] = q.mean(0)

            def weighted(m, x=x, y=y, q=q):
                return lambda v, now: np.mean(q[:, m] * full.losses(v, x, y))

            trained.append([full.fit(w, weighted(m)) for m, w in enumerate(learners)])
        learners = [reference.mean(full.BETA, [own[m] for own in trained]) for m in range(3)]
    last = full.run("fedem", learners=3)
    for got in (np.exp(last.state.clients), last.info["mixture"]):
        np.testing.assert_allclose(got, mixtures, rtol=1e-3, atol=1e-5)
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
    start = full.start_of("fedem", learners=3)["head"]["kernel"]
    whole = full.run("fedem", **plain, learners=3, epochs=5, batch_size=20).state.server["head"]["kernel"] - start
    batches = full.run("fedem", **plain, learners=3, epochs=1, batch_size=4).state.server["head"]["kernel"] - start
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
