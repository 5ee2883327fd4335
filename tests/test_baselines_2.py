"""Baselines with several models, prototypes, neighbours or personal aggregation: their limits and their equations.

Equations are checked against float64 NumPy, with full batches so that no order is left.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import CLASSES, tiny_federation, tiny_model

from pfl_jax import simulate
from pfl_jax.ensembles import example_losses, init_models
from pfl_jax.fingerprint import fingerprint
from pfl_jax.methods.cd2pfed import cd2pfed, personal_entries
from pfl_jax.methods.fedala import fedala, last_layers
from pfl_jax.methods.fedas_cd2 import fedas_cd2
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.methods.fedem import fedem
from pfl_jax.methods.fedem_ft import fedem_ft
from pfl_jax.methods.fedproto import fedproto_g, fedproto_l
from pfl_jax.methods.hypcluster import hypcluster
from pfl_jax.methods.knn_per import Datastore, knn_per, neighbour_probabilities
from pfl_jax.methods.local import local
from pfl_jax.methods.pfedhn import pfedhn
from pfl_jax.simulate import Settings
from pfl_jax.subsets import fixed_subset

SIZES, EPOCHS = (9, 20, 14), 3
SGD = {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.01}
BETA = np.array(SIZES) / sum(SIZES)


def run(factory, rounds=2, sizes=SIZES, batch_size=32, **hyper_parameters):
    """The last round."""
    arguments = {"epochs": EPOCHS, **SGD, "batch_size": batch_size, **hyper_parameters}
    method = factory(tiny_model(), **arguments)
    *_, last = simulate.run(method, tiny_federation(sizes), Settings(rounds=rounds), jax.random.key(4))
    return last


def start_of(factory, **hyper_parameters):
    """The server's state as the engine draws it in `run`."""
    method = factory(tiny_model(), **hyper_parameters)
    return simulate.build(method, Settings(rounds=1)).init(tiny_federation(SIZES), jax.random.key(4)).server


@pytest.fixture(scope="module")
def clients():
    data = tiny_federation(SIZES)
    return [reference.examples(data, client) for client in range(len(SIZES))]


def row(tree, index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def train(w, x, y, weights=None, steps=EPOCHS, more=lambda w: {}):
    """Full-batch SGD on mean_l weights_l CE_l plus a term whose gradient is `more`."""

    def gradient(w):
        if weights is None:
            total = reference.cross_entropy_gradient(w, x, y)
        else:
            singles = [reference.cross_entropy_gradient(w, x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
            total = reference.mean(np.asarray(weights) / len(x), singles)
        extra = more(w)
        return {name: value + extra.get(name, 0.0) for name, value in total.items()}

    return reference.descend(w, gradient, steps, **SGD)


def log_softmax(scores):
    scores = scores - scores.max(1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(1, keepdims=True))


def losses(w, x, y):
    return -log_softmax(reference.logits(w, x))[np.arange(len(y)), y]


def test_examples(client):
    return reference.examples(tiny_federation(SIZES), client, "test")


test_examples.__test__ = False


def assert_model(got, want, rtol=2e-4, atol=2e-5):
    for name, value in reference.to_numpy(got).items():
        np.testing.assert_allclose(value, want[name], rtol=rtol, atol=atol, err_msg=name)


def assert_same(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), left, right)


def assert_like_fedavg(last, params, **settings):
    fedavg_last = run(fedavg, **settings)
    assert_same(params, fedavg_last.state.server)
    np.testing.assert_allclose(last.received, fedavg_last.received, atol=1e-6)
    np.testing.assert_allclose(last.trained, fedavg_last.trained, atol=1e-6)


# Several models


def test_initial_models_are_distinct_and_do_not_depend_on_their_number():
    three, five = (init_models(tiny_model(), jax.random.key(0), count) for count in (3, 5))
    assert_same(three, row(five, slice(3)))
    assert_same(row(three, 0), tiny_model().init(jax.random.key(0)))
    kernels = five["backbone"]["kernel"]
    assert all(float(jnp.abs(kernels[i] - kernels[j]).max()) > 0.1 for i in range(5) for j in range(i))


def test_example_losses(clients):
    models = init_models(tiny_model(), jax.random.key(1), 2)
    data = simulate.client_data(tiny_federation(SIZES), 0, "train")
    got = np.asarray(example_losses(tiny_model(), models, data))[np.asarray(data.mask)]
    for index in range(2):
        np.testing.assert_allclose(
            got[:, index], losses(reference.to_numpy(row(models, index)), *clients[0]), rtol=1e-4, atol=1e-5
        )


def test_hypcluster_with_one_cluster_is_fedavg():
    last = run(hypcluster, clusters=1, batch_size=8)
    assert_like_fedavg(last, row(last.state.server, 0), batch_size=8)


@pytest.mark.parametrize("clusters", [2, 5])
def test_hypcluster(clients, clusters):
    # Three clients share two clusters, or leave at least two of five empty.
    server = start_of(hypcluster, clusters=clusters)
    models = [reference.to_numpy(row(server, cluster)) for cluster in range(clusters)]
    for _ in range(2):
        chosen = np.array([np.argmin([losses(w, x, y).mean() for w in models]) for x, y in clients])
        trained = [train(models[c], x, y) for c, (x, y) in zip(chosen, clients, strict=True)]
        for cluster in set(chosen):
            members = np.flatnonzero(chosen == cluster)
            models[cluster] = reference.mean(BETA[members] / BETA[members].sum(), [trained[i] for i in members])
    last = run(hypcluster, clusters=clusters)
    np.testing.assert_array_equal(np.asarray(last.info["cluster"])[np.argsort(last.cohort)], chosen)
    for cluster in range(clusters):
        assert_model(row(last.state.server, cluster), models[cluster])


def test_fedem_with_one_learner_is_fedavg():
    last = run(fedem, learners=1, batch_size=8)
    assert_like_fedavg(last, row(last.state.server, 0), batch_size=8)
    np.testing.assert_allclose(last.state.clients, 0.0, atol=1e-6)


def test_fedem(clients):
    server = start_of(fedem, learners=3)
    learners = [reference.to_numpy(row(server, m)) for m in range(3)]
    mixtures = np.full((len(clients), 3), 1 / 3)
    for _ in range(2):
        trained = []
        for client, (x, y) in enumerate(clients):
            joint = mixtures[client] * np.exp(-np.stack([losses(w, x, y) for w in learners], 1))
            q = joint / joint.sum(1, keepdims=True)
            mixtures[client] = q.mean(0)
            trained.append([train(w, x, y, q[:, m]) for m, w in enumerate(learners)])
        learners = [reference.mean(BETA, [own[m] for own in trained]) for m in range(3)]
    last = run(fedem, learners=3)
    np.testing.assert_allclose(np.exp(last.state.clients), mixtures, rtol=1e-3, atol=1e-5)
    for m, want in enumerate(learners):
        assert_model(row(last.state.server, m), want)
    # Probabilities are mixed, not logits.
    x, _ = test_examples(1)
    probabilities = sum(
        pi * np.exp(log_softmax(reference.logits(w, x))) for pi, w in zip(mixtures[1], learners, strict=True)
    )
    predicted = fedem(tiny_model()).predict((last.state.server, last.state.clients[1]), jnp.float32(x))
    np.testing.assert_allclose(np.exp(predicted), probabilities, rtol=1e-3, atol=1e-5)


def test_fedem_responsibilities_follow_their_examples_through_shuffling():
    # With tiny steps, the five batches of an epoch move as far as five steps on all twenty examples together.
    plain = {"rounds": 1, "sizes": (20,), "lr": 1e-2, "momentum": 0.0, "weight_decay": 0.0}
    start = start_of(fedem, learners=3)["head"]["kernel"]
    whole = run(fedem, **plain, learners=3, epochs=5, batch_size=20).state.server["head"]["kernel"] - start
    batches = run(fedem, **plain, learners=3, epochs=1, batch_size=4).state.server["head"]["kernel"] - start
    assert float(jnp.linalg.norm(batches - whole) / jnp.linalg.norm(whole)) < 0.02


def test_fedem_ft_trains_like_fedem_and_deploys_tuned_learners():
    plain, tuned = run(fedem, rounds=1), run(fedem_ft, rounds=1, finetune_epochs=20)
    assert_same((tuned.state.server, tuned.state.clients), (plain.state.server, plain.state.clients))
    data, key = simulate.client_data(tiny_federation(SIZES), 1, "train"), jax.random.key(0)
    server, client = tuned.state.server, row(tuned.state.clients, 1)
    models, mixture = fedem_ft(tiny_model(), **SGD, finetune_epochs=20).personalize(key, server, client, data)
    want = fedem(tiny_model(), **SGD, epochs=20).local(key, server, client, data)
    assert_same((models, mixture), (want.message, want.client))
    assert float(jnp.abs(models["head"]["kernel"] - server["head"]["kernel"]).max()) > 0.05
    # Without an epoch only the mixture weights are taken anew: with one learner nothing changes.
    one, untuned = run(fedem, learners=1), run(fedem_ft, learners=1, finetune_epochs=0)
    np.testing.assert_array_equal(untuned.received, one.received)


# Prototypes


@pytest.mark.parametrize("factory", [fedproto_g, fedproto_l])
def test_fedproto_with_zero_lambda_is_local(factory):
    last, alone = run(factory, lam=0.0, batch_size=8), run(local, batch_size=8)
    own = last.state.clients.params if factory is fedproto_l else last.state.clients
    assert_same(own, alone.state.clients)
    np.testing.assert_array_equal(last.received, alone.received)
    pulled = run(factory, lam=5.0, batch_size=8).state.clients
    pulled = pulled.params if factory is fedproto_l else pulled
    assert float(jnp.abs(pulled["backbone"]["kernel"] - own["backbone"]["kernel"]).max()) > 1e-3


@pytest.mark.parametrize("factory", [fedproto_g, fedproto_l])
def test_fedproto(factory, clients):
    lam, w = 2.0, reference.to_numpy(start_of(fedavg))
    own, prototypes = [w] * len(clients), [{} for _ in clients]
    for _ in range(3):
        new = []
        for client, (x, y) in enumerate(clients):

            def pull(w, known=prototypes[client], x=x, y=y):
                targets = np.stack([known.get(k, f) for k, f in zip(y, reference.features(w, x), strict=True)])
                return {name: lam * value for name, value in reference.alignment_gradient(w, x, targets).items()}

            own[client] = train(own[client], x, y, more=pull)
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
    last = run(factory, rounds=3, lam=lam)
    for client in range(len(clients)):
        if factory is fedproto_l:
            state = row(last.state.clients, client)
            params, got = state.params, state.prototypes.centroids
        else:
            params, got = row(last.state.clients, client), last.state.server.prototypes.centroids
        assert_model(params, own[client], rtol=5e-4, atol=5e-5)
        for k, centroid in prototypes[client].items():
            np.testing.assert_allclose(got[k], centroid, rtol=1e-3, atol=1e-4)


# Parts of a client's examples


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 17])
def test_fixed_subset(count):
    mask = jnp.arange(20) < count
    chosen = np.asarray(fixed_subset(mask, 0.2))
    assert not (chosen & ~np.asarray(mask)).any()
    assert chosen.sum() == (min(1, count) if count < 8 else round(0.2 * count))
    assert count < 2 or (np.asarray(mask) & ~chosen).any()
    # The same rows whatever the padding, and whatever rows the real ones stand in.
    np.testing.assert_array_equal(fixed_subset(jnp.arange(33) < count, 0.2)[:20], chosen)


def test_fixed_subset_is_not_just_the_first_rows():
    assert np.asarray(fixed_subset(jnp.ones(50, bool), 0.5))[:25].sum() < 25


# Neighbours


def test_neighbour_probabilities():
    generator = np.random.default_rng(0)
    stored, labels, queries = (
        generator.normal(size=(12, 4)),
        generator.integers(0, 3, 12),
        generator.normal(size=(5, 4)),
    )
    mask = np.arange(12) != 3
    want = np.zeros((5, 3))
    for query, probabilities in zip(queries, want, strict=True):
        distances = np.linalg.norm(stored - query, axis=1)
        distances[~mask] = np.inf
        for index in np.argsort(distances)[:4]:
            probabilities[labels[index]] += np.exp(-distances[index])
    want /= want.sum(1, keepdims=True)
    store = Datastore(jnp.float32(stored), jnp.int32(labels), jnp.asarray(mask))
    np.testing.assert_allclose(neighbour_probabilities(store, jnp.float32(queries), 4, 3), want, rtol=1e-4, atol=1e-6)
    # All fewer than k examples count; far away, nothing underflows; without any, nothing is predicted.
    few = store._replace(mask=jnp.arange(12) < 2)
    far = neighbour_probabilities(few, jnp.float32(queries) + 1e3, 10, 3)
    np.testing.assert_allclose(far.sum(1), 1.0, rtol=1e-5)
    assert (
        float(neighbour_probabilities(store._replace(mask=jnp.zeros(12, bool)), jnp.float32(queries), 4, 3).max()) == 0
    )


def test_knn_per_without_neighbours_is_fedavg():
    last = run(knn_per, mixing=0.0, batch_size=8)
    assert_like_fedavg(last, last.state.server, batch_size=8)


@pytest.mark.parametrize("neighbours", [1, 5])
def test_knn_per_chooses_the_mixing_weight_on_held_out_examples(clients, neighbours):
    method, data = knn_per(tiny_model(), neighbours=neighbours, held_out=0.4), tiny_federation(SIZES)
    params = tiny_model().init(jax.random.key(7))
    w = reference.to_numpy(params)

    def mixture(store_x, store_y, x, a):
        stored, features, near = reference.features(w, store_x), reference.features(w, x), []
        for feature in features:
            distances = np.linalg.norm(stored - feature, axis=1)
            nearest = np.argsort(distances)[:neighbours]
            near.append(np.exp(-distances[nearest]) @ np.eye(CLASSES)[store_y[nearest]])
        near = np.array(near) / np.sum(near, axis=1, keepdims=True)
        return a * near + (1 - a) * np.exp(log_softmax(reference.logits(w, x)))

    for client, (x, y) in enumerate(clients):
        train_data = simulate.client_data(data, client, "train")
        judged = np.asarray(fixed_subset(train_data.mask, 0.4))[np.asarray(train_data.mask)]
        scores = [
            np.mean(mixture(x[~judged], y[~judged], x[judged], a).argmax(1) == y[judged]) for a in (0.5, 0.6, 0.7, 0.8)
        ]
        personal = method.personalize(jax.random.key(0), params, (), train_data)
        a = (0.5, 0.6, 0.7, 0.8)[int(np.argmax(scores))]
        np.testing.assert_allclose(personal.mixing, a, rtol=1e-6)
        # What it deploys has all the examples as neighbours.
        queries, _ = test_examples(client)
        predicted = method.predict(personal, jnp.float32(queries))
        np.testing.assert_allclose(np.exp(predicted), mixture(x, y, queries, a), rtol=1e-3, atol=1e-5)


# Adaptive local aggregation


def test_fedala_with_weights_at_one_is_fedavg():
    # FedALA's training has the key of FedAvg's: the orders are the same.
    last = run(fedala, ala_lr=0.0, rounds=3, batch_size=8)
    assert_like_fedavg(last, last.state.server, rounds=3, batch_size=8)
    for weights in last.state.clients.weights:
        np.testing.assert_array_equal(weights, 1.0)
    # Neither has anything to interpolate in a client's first round, nor without layers.
    assert_same(run(fedala, rounds=1).state.server, run(fedavg, rounds=1).state.server)
    assert_same(run(fedala, rounds=3, layers=0).state.server, run(fedavg, rounds=3).state.server)


def test_last_layers():
    params = {"backbone": {"conv1": {"bias": 0, "kernel": 0}, "fc1": {"bias": 0, "kernel": 0}}, "head": {"kernel": 0}}
    assert [last_layers(params, count) for count in range(4)] == [[], [4], [2, 3, 4], [0, 1, 2, 3, 4]]


def learn_weights(received, own, weights, x, y, names, passes, eta):
    """Eq. 4 and 5 on all examples at once: the weights, and the model they give."""

    def combine(weights):
        return {n: own[n] + (v - own[n]) * weights[n] if n in names else v for n, v in received.items()}

    for _ in range(passes):
        gradient = reference.cross_entropy_gradient(combine(weights), x, y)
        weights = {n: np.clip(weights[n] - eta * gradient[n] * (received[n] - own[n]), 0, 1) for n in names}
    return weights, combine(weights)


@pytest.mark.parametrize("layers", [1, 2])
def test_fedala(clients, layers):
    eta, w, data = 20.0, reference.to_numpy(start_of(fedavg)), tiny_federation(SIZES)
    names = [name for name in w if layers == 2 or name.startswith("head")]
    shares = []
    for client in range(len(clients)):
        mask = simulate.client_data(data, client, "train").mask
        shares.append(np.asarray(fixed_subset(mask, 0.8))[np.asarray(mask)])
    weights, own = [{name: np.ones_like(w[name]) for name in names}] * len(clients), [None] * len(clients)
    for passes in (0, 12, 1, 1):
        for client, (x, y) in enumerate(clients):
            start, part = w, shares[client]
            if passes:
                weights[client], start = learn_weights(
                    w, own[client], weights[client], x[part], y[part], names, passes, eta
                )
            own[client] = train(start, x, y)
        w = reference.mean(BETA, own)
    # A threshold of zero is never undercut: the first learning takes all its passes.
    last = run(fedala, rounds=4, layers=layers, ala_lr=eta, ala_epochs=12, threshold=0.0)
    assert_model(last.state.server, w, rtol=1e-3, atol=2e-4)
    for client in range(len(clients)):
        assert_model(row(last.state.clients.params, client), own[client], rtol=1e-3, atol=2e-4)
        learned = np.concatenate([np.ravel(weights[client][name]) for name in sorted(names)])
        got = np.concatenate([np.ravel(leaf[client]) for leaf in last.state.clients.weights])
        np.testing.assert_allclose(got, learned, atol=2e-3)
        assert ((learned > 0.01) & (learned < 0.95)).any()


def test_fedala_stops_learning_when_the_loss_has_converged():
    # With a wide threshold the first learning ends after the window of ten and one more, however many are allowed.
    settings = {"rounds": 2, "ala_lr": 5.0}
    early = run(fedala, threshold=1e9, ala_epochs=40, **settings).state.clients
    assert_same(early, run(fedala, threshold=0.0, ala_epochs=11, **settings).state.clients)
    late = run(fedala, threshold=0.0, ala_epochs=40, **settings).state.clients
    moved = [float(jnp.abs(a - b).max()) for a, b in zip(early.weights, late.weights, strict=True)]
    assert max(moved) > 1e-3


# The hypernetwork


def test_pfedhn_without_server_steps_generates_the_same_models():
    frozen = run(pfedhn, server_lr=0.0, embedding_lr=0.0)
    start = start_of(pfedhn)
    assert_same(frozen.state.server.hypernetwork, start.hypernetwork)
    # Different clients have different embeddings.
    embeddings = np.asarray(frozen.state.clients)
    assert np.abs(embeddings[0] - embeddings[1]).max() > 0.1


def test_fingerprints_depend_on_the_data_alone():
    data = simulate.client_data(tiny_federation(SIZES, pad=7), 1, "train")
    same = (
        simulate.client_data(tiny_federation(SIZES), 1, "train"),
        data._replace(x=jnp.where(data.mask[:, None, None, None], data.x, 3.0)),
        data._replace(x=data.x * (1 + 1e-6)),
    )
    other = (
        data._replace(y=data.y.at[0].add(1)),
        data._replace(x=data.x.at[2].add(0.5)),
        data._replace(x=data.x[::-1], y=data.y[::-1], mask=data.mask[::-1]),
        simulate.client_data(tiny_federation(SIZES), 0, "train"),
    )
    assert {int(fingerprint(rows)) for rows in same} == {int(fingerprint(data))}
    assert len({int(fingerprint(rows)) for rows in (data, *other)}) == 5


def test_pfedhn(clients):
    sizes = {"embedding_size": 3, "hidden_size": 5, "hidden_layers": 1}
    rates = {"server_lr": 0.3, "embedding_lr": 0.2, "server_momentum": 0.5}
    names = ("backbone/bias", "backbone/kernel", "head/bias", "head/kernel")
    shapes = {name: value.shape for name, value in reference.to_numpy(tiny_model().init(jax.random.key(0))).items()}
    (kernel1, bias1), (kernel2, bias2) = jax.tree.map(np.float64, start_of(pfedhn, **sizes).hypernetwork)
    embeddings = np.float64(run(pfedhn, rounds=1, server_lr=0.0, embedding_lr=0.0, **sizes).state.clients)

    def model_of(flat):
        ends = np.cumsum([np.prod(shapes[name]) for name in names])[:-1]
        return {name: part.reshape(shapes[name]) for name, part in zip(names, np.split(flat, ends), strict=True)}

    velocity = [0.0] * 4
    for _ in range(2):
        gradients, new = [0.0] * 4, []
        for (x, y), v in zip(clients, embeddings, strict=True):
            before = v @ kernel1 + bias1
            hidden = np.maximum(before, 0)
            flat = hidden @ kernel2 + bias2
            trained = train(model_of(flat), x, y)
            change = np.concatenate([trained[name].ravel() for name in names]) - flat
            back = (kernel2 @ change) * (before > 0)
            terms = np.outer(v, back), back, np.outer(hidden, change), change
            gradients = [total + term for total, term in zip(gradients, terms, strict=True)]
            new.append(v + rates["embedding_lr"] * (kernel1 @ back))
        velocity = [rates["server_momentum"] * v + g for v, g in zip(velocity, gradients, strict=True)]
        kernel1, bias1, kernel2, bias2 = (
            leaf + rates["server_lr"] * v for leaf, v in zip((kernel1, bias1, kernel2, bias2), velocity, strict=True)
        )
        embeddings = np.array(new)
    last = run(pfedhn, rounds=2, **sizes, **rates)
    np.testing.assert_allclose(last.state.clients, embeddings, rtol=1e-3, atol=1e-4)
    got = [leaf for layer in last.state.server.hypernetwork for leaf in layer]
    for leaf, want in zip(got, (kernel1, bias1, kernel2, bias2), strict=True):
        np.testing.assert_allclose(leaf, want, rtol=1e-3, atol=1e-4)


# Channels


@pytest.mark.parametrize("factory", [cd2pfed, fedas_cd2])
def test_without_personal_channels_is_fedavg(factory):
    # Keys are split between alignment and training: with full batches, order is all that keys decide.
    align = {"align_epochs": 0} if factory is fedas_cd2 else {}
    last = run(factory, share=0.0, lam=3.0, **align)
    assert_like_fedavg(last, last.state.server.params)
    # The first round of a growing share has no personal channels, the second has.
    first, second = (run(factory, rounds=rounds, growth_rounds=2, share=0.5, **align) for rounds in (1, 2))
    fedavg_first = run(fedavg, rounds=1)
    assert_same(first.state.server.params, fedavg_first.state.server)
    np.testing.assert_array_equal(first.trained, fedavg_first.trained)
    np.testing.assert_allclose([first.info["share"], second.info["share"]], [0.0, 0.25])
    np.testing.assert_allclose(run(factory, rounds=3, growth_rounds=2, **align).info["share"], 0.5)
    assert run(factory, rounds=1, growth_rounds=0, **align).info["share"] == 0.5


def test_personal_entries():
    params = tiny_model().init(jax.random.key(0))
    for share, channels in ((0.0, 0), (0.25, 1), (0.49, 1), (0.5, 2), (1.0, 4)):
        mask = jax.tree.map(np.asarray, personal_entries(params, share))
        want = np.arange(4) >= 4 - channels
        np.testing.assert_array_equal(mask["backbone"]["kernel"], np.tile(want, (6, 1)))
        np.testing.assert_array_equal(mask["backbone"]["bias"], want)
        np.testing.assert_array_equal(mask["head"]["kernel"], np.tile(want[:, None], (1, CLASSES)))
        assert not mask["head"]["bias"].any()


def distillation_value(w, x, own):
    """The two paths' divergences and their gradient by central differences, each target held fixed."""

    def paths(w):
        keep = {name: np.ones_like(value) for name, value in w.items()}
        keep["backbone/kernel"], keep["backbone/bias"] = np.tile(own, (6, 1)), own
        keep["head/kernel"] = np.tile(own[:, None], (1, CLASSES))
        mine = {name: value * keep[name] for name, value in w.items()}
        common = {n: value * (1 - keep[n]) if n != "head/bias" else value for n, value in w.items()}
        return [log_softmax(reference.logits(path, x)) for path in (mine, common)]

    fixed = paths(w)[::-1]

    def value(w):
        return 0.5 * sum(np.mean(np.sum(np.exp(t) * (t - p), 1)) for t, p in zip(fixed, paths(w), strict=True))

    gradient = {}
    for name, entries in w.items():
        gradient[name] = np.zeros_like(entries)
        for index in np.ndindex(entries.shape):
            step = np.zeros_like(entries)
            step[index] = 1e-5
            up, down = value({**w, name: entries + step}), value({**w, name: entries - step})
            gradient[name][index] = (up - down) / 2e-5
    return gradient


@pytest.mark.parametrize("aligned", [False, True])
def test_cd2pfed_and_its_alignment(clients, aligned):
    lam, align_lr, own = 1.5, 0.5, np.array([0.0, 0.0, 1.0, 1.0])
    w = reference.to_numpy(start_of(fedavg))
    mask = {"backbone/kernel": np.tile(own, (6, 1)), "backbone/bias": own, "head/bias": np.zeros(CLASSES)}
    mask["head/kernel"] = np.tile(own[:, None], (1, CLASSES))

    def choose(left, right):
        return {name: np.where(mask[name] > 0, left[name], right[name]) for name in right}

    def pull(x):
        return lambda w: {name: lam * value for name, value in distillation_value(w, x, own).items()}

    def align(received, last, x):
        def gradient(w):
            entries = reference.alignment_gradient(w, x, reference.features(last, x))
            return {name: value * (1 - mask[name]) for name, value in entries.items()}

        return reference.descend(received, gradient, 1, align_lr)

    last_models = [None] * len(clients)
    for _ in range(2):
        for client, (x, y) in enumerate(clients):
            start = w
            if last_models[client] is not None:
                start = choose(last_models[client], w)
                if aligned:
                    start = align(start, last_models[client], x)
            last_models[client] = train(start, x, y, more=pull(x))
        w = choose(w, reference.mean(BETA, last_models))
    more = {"align_lr": align_lr, "align_batch_size": 32} if aligned else {}
    last = run(fedas_cd2 if aligned else cd2pfed, share=0.5, growth_rounds=0, lam=lam, **more)
    assert_model(last.state.server.params, w, rtol=1e-3, atol=1e-4)
    for client in range(len(clients)):
        assert_model(row(last.state.clients.params, client), last_models[client], rtol=1e-3, atol=1e-4)
    assert np.abs(last_models[0]["head/kernel"][3] - last_models[1]["head/kernel"][3]).max() > 1e-3
