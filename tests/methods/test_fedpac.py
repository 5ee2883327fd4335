"""FedPAC and its prototype variant: whole rounds against float64 NumPy, with full batches."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import CLASSES, FEATURES, tiny_model
from reference import part

from pfl_jax.methods.fedpac import fedpac
from pfl_jax.methods.fedpac_proto import fedpac_proto, prototype_weights
from pfl_jax.primitives.head_combination import head_weights

LAM, HEAD = 0.7, {"head_lr": 0.3, "head_epochs": 2}
CENTROIDS = np.random.default_rng(1).normal(size=(CLASSES, FEATURES))


def class_means(features, labels):
    """Mean features [K, d] and number [K] of each class."""
    members = np.eye(CLASSES)[labels]
    counts = members.sum(axis=0)
    return members.T @ features / np.maximum(counts, 1)[:, None], counts


def local(w, x, y, lam, centroids, known):
    """Eq. 15 and 16 from a received model: the trained one, and mean features of classes that the client may lack."""
    means, _ = class_means(reference.features(w, x), y)
    targets = np.where(known[:, None] > 0, centroids, means)[y]

    def gradient(w, name, strength):
        pull = reference.alignment_gradient(w, x, targets)
        slopes = part(reference.cross_entropy_gradient(w, x, y), name)
        return {key: slope + strength * pull.get(key, 0.0) for key, slope in slopes.items()}

    sgd = full.SGD | {"lr": HEAD["head_lr"]}
    w = reference.descend(w, lambda w: gradient(w, "head", 0), HEAD["head_epochs"], **sgd)
    return reference.descend(w, lambda w: gradient(w, "backbone", lam if known.any() else 0), full.EPOCHS, **full.SGD)


def play(factory, weigh, known, alignment=True, **options):
    """Two rounds with these counts of classes before the first; weigh(received models, trained ones) gives alpha."""
    clients, w = full.training_examples(), reference.to_numpy(full.start_of(factory))
    heads, centroids, counts = [part(w, "head")] * len(clients), CENTROIDS, np.array(known)
    for _ in range(2):
        received = [{**w, **head} for head in heads]
        lam = LAM if alignment else 0.0
        trained = [local(v, x, y, lam, centroids, counts) for v, (x, y) in zip(received, clients, strict=True)]
        weights = weigh(received, trained)
        heads = [part(reference.mean(row, trained), "head") for row in weights]
        w = {**w, **part(reference.mean(full.BETA, trained), "backbone")}
        sent = [class_means(reference.features(v, x), y) for v, (x, y) in zip(trained, clients, strict=True)]
        counts = sum(number for _, number in sent)
        centroids = sum(mean * number[:, None] for mean, number in sent) / counts[:, None]
    start = {"centroids": jnp.float32(CENTROIDS), "centroid_counts": jnp.float32(np.array(known))}
    last = full.run(
        factory,
        change=lambda state: state._replace(server=state.server._replace(**start)),
        **{"lam": LAM, "alignment": alignment, **HEAD, **options},
    )
    close = {"rtol": 2e-3, "atol": 2e-4}
    np.testing.assert_allclose(last.info["head_weights"], weights, atol=2e-3)
    full.assert_model(last.state.server, w, **close)
    full.assert_parts(last.state.clients, "head", heads, **close)
    np.testing.assert_allclose(last.state.server.centroids, centroids, **close)
    np.testing.assert_array_equal(last.state.server.centroid_counts, counts)
    full.assert_received(last, [{**w, **head} for head in heads], trained, **close)
    return last


def by_variances(received, _):
    """Alpha of Eq. 44 and 46."""
    statistics = []
    for w, (x, y) in zip(received, full.training_examples(), strict=True):
        features = reference.features(w, x)
        means, counts = class_means(features, y)
        mu = means * counts[:, None] / len(y)
        statistics.append((mu, np.mean(np.sum(features**2, axis=1)) - np.sum(mu**2), features.T @ features / len(y)))
    mu, variance, moments = map(np.array, zip(*statistics, strict=True))
    return reference.head_weights(mu, variance, np.array(full.SIZES)), mu, moments


@pytest.mark.parametrize("known", [(0, 0, 0), (7, 2, 0)])
def test_fedpac(known):
    last = play(fedpac, lambda *models: by_variances(*models)[0], known)
    assert last.info["gap"].shape == (3,)
    assert float(last.info["gap"].max()) < 1e-6


@pytest.mark.parametrize("option", ["alignment", "collaboration"])
def test_fedpac_without(option):
    weigh = (lambda *models: by_variances(*models)[0]) if option == "alignment" else (lambda *models: np.eye(3))
    play(fedpac, weigh, (7, 2, 5), **{option: False})


def test_fedpac_with_empirical_covariances():
    def weigh(*models):
        _, mu, moments = by_variances(*models)
        return np.float64(head_weights(jnp.float32(mu), jnp.float32(moments), jnp.array(full.SIZES)))

    play(fedpac, weigh, (0, 0, 0), covariance="empirical")


@pytest.mark.parametrize(("reduction", "reduce"), [("mean", np.mean), ("sum", np.sum)])
def test_fedpac_proto(reduction, reduce):
    """Eq. 12 and 13 with rows that sum to one, one pair of clients after another."""

    def weigh(_, trained):
        losses = np.zeros((3, 3))
        for j, (x, y) in enumerate(full.training_examples()):
            means, _ = class_means(reference.features(trained[j], x), y)
            for i, w in enumerate(trained):
                scores = reference.log_softmax(means @ w["head/kernel"] + w["head/bias"])
                losses[i, j] = reduce([-scores[k, k] for k in sorted(set(y))])
        return np.exp(-losses) / np.exp(-losses).sum(axis=1, keepdims=True)

    last = play(fedpac_proto, weigh, (0, 0, 0), reduction=reduction)
    assert set(last.info) == {"head_weights"}


def test_prototype_weights_of_a_client_without_examples_are_zero():
    heads = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), tiny_model().init(jax.random.key(0))["head"])
    counts = jnp.float32([[4, 3, 0], [0, 0, 0], [1, 19, 0]])
    got = prototype_weights(tiny_model(), heads, jnp.ones((3, CLASSES, FEATURES)), counts)
    np.testing.assert_array_equal(got[:, 1], 0)
    np.testing.assert_allclose(np.sum(got, axis=1), 1, atol=1e-6)
