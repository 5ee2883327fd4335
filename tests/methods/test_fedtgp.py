"""FedTGP: its limit, and its rounds against float64 NumPy."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import CLASSES, FEATURES

from pfl_jax.methods.fedproto import Prototypes
from pfl_jax.methods.fedtgp import adaptive_margin, fedtgp
from pfl_jax.methods.fedtgp import distances as fedtgp_distances

LAM, STEPS, SERVER_LR = 2.0, 4, 0.1


def forward(g):
    hidden = np.maximum(g["e"] @ g["A"] + g["a"], 0)
    return hidden, hidden @ g["B"] + g["b"]


def distances(points, prototypes):
    return np.array([[np.linalg.norm(point - prototype) for prototype in prototypes] for point in points])


def largest_margin(rows, labels):
    """The largest distance of a class's mean prototype to the nearest other one."""
    means = [rows[labels == k].mean(0) for k in sorted(set(labels))]
    return max(min(np.linalg.norm(a - b) for b in means if b is not a) for a in means)


def server_step(g, rows, labels, delta):
    """One step of plain descent on the contrastive loss, with its gradients written out."""
    hidden, prototypes = forward(g)
    near, own = distances(rows, prototypes), np.eye(CLASSES)[labels]
    pull = (own - np.exp(reference.log_softmax(-near - delta * own))) / len(rows)
    d_prototypes = np.zeros_like(prototypes)
    for r, point in enumerate(rows):
        for k, prototype in enumerate(prototypes):
            d_prototypes[k] += pull[r, k] * (prototype - point) / near[r, k]
    d_hidden = d_prototypes @ g["B"].T * (hidden > 0)
    gradient = {
        "B": hidden.T @ d_prototypes,
        "b": d_prototypes.sum(0),
        "A": g["e"].T @ d_hidden,
        "a": d_hidden.sum(0),
        "e": d_hidden @ g["A"].T,
    }
    return {name: value - SERVER_LR * gradient[name] for name, value in g.items()}


@pytest.mark.parametrize(
    ("threshold", "inference"), [(100.0, "prototype"), pytest.param(0.3, "head", marks=pytest.mark.slow)]
)
def test_fedtgp(threshold, inference):
    settings = {"server_batch_size": 16, "server_epochs": STEPS, "inference": inference}
    start, clients = full.start_of(fedtgp, **settings), full.training_examples()
    generator = start.generator
    g = {
        "e": np.float64(generator.embeddings),
        "A": np.float64(generator.hidden["kernel"]),
        "a": np.float64(generator.hidden["bias"]),
        "B": np.float64(generator.output["kernel"]),
        "b": np.float64(generator.output["bias"]),
    }
    ws, prototypes = [reference.to_numpy(start.initial)] * len(clients), None
    for _ in range(2):
        rows, labels = [], []
        for client, (x, y) in enumerate(clients):

            def pull(w, x=x, y=y, known=prototypes):
                if known is None:
                    return {}
                return {name: LAM * value for name, value in reference.alignment_gradient(w, x, known[y]).items()}

            ws[client] = full.train(ws[client], x, y, more=pull)
            features = reference.features(ws[client], x)
            labels += sorted(set(y))
            rows += [features[y == k].mean(0) for k in sorted(set(y))]
        rows, labels = np.array(rows), np.array(labels)
        delta = min(largest_margin(rows, labels), threshold)
        for _ in range(STEPS):
            g = server_step(g, rows, labels, delta)
        prototypes = forward(g)[1]
    last = full.run(fedtgp, lam=LAM, margin=threshold, server_lr=SERVER_LR, **settings)
    np.testing.assert_allclose(last.info["margin"], delta, rtol=1e-4)
    np.testing.assert_allclose(last.state.server.prototypes, prototypes, rtol=1e-3, atol=1e-4)
    full.assert_models(last.state.clients, ws, rtol=5e-4, atol=5e-5)
    if inference == "head":
        full.assert_received(last, ws)
        return
    for client, w in enumerate(ws):
        x, y = full.unseen_examples(client)
        loss = reference.cross_entropy(-distances(reference.features(w, x), prototypes), y)
        np.testing.assert_allclose(last.received["loss"][client], loss, rtol=1e-3)


def test_the_margin_counts_only_classes_with_prototypes():
    centroids = jnp.zeros((2, CLASSES, FEATURES)).at[0, 1, 0].set(3.0).at[1, 1, 0].set(5.0).at[0, 2, 0].set(90.0)
    counts = jnp.array([[1.0, 7.0, 0.0], [2.0, 1.0, 0.0]])
    assert float(adaptive_margin(Prototypes(centroids, counts), 100.0)) == 4.0
    assert float(adaptive_margin(Prototypes(centroids, counts * jnp.array([1.0, 0.0, 0.0])), 7.0)) == 7.0
    assert float(adaptive_margin(Prototypes(centroids, 0 * counts), 7.0)) == 0.0
    # One client has the first class, the other one the second.
    assert float(adaptive_margin(Prototypes(centroids, jnp.eye(2, CLASSES)), 100.0)) == 5.0


def test_a_prototype_that_is_reached_has_no_gradient():
    gradient = jax.grad(lambda prototypes: fedtgp_distances(jnp.ones((1, 3)), prototypes).sum())(jnp.ones((1, 3)))
    np.testing.assert_array_equal(gradient, 0.0)
