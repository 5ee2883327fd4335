"""Other readings of the replication's Eq. 12 and 13, one pair of clients after another in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import CLASSES, FEATURES, tiny_federation, tiny_model

from lab import later_readings, readings
from pfl_jax import Cohort, Mean
from pfl_jax.data import client_data
from pfl_jax.methods.fedpac import FedPACMessage

COUNTS = np.array([[4, 3, 0], [1, 0, 9], [2, 2, 2]])


@pytest.mark.parametrize("reading", readings.READINGS | later_readings.READINGS)
def test_the_weights_of_a_reading(reading):
    rng = np.random.default_rng(0)
    heads = {"kernel": rng.normal(size=(3, FEATURES, CLASSES)), "bias": rng.normal(size=(3, CLASSES))}
    now, others = rng.normal(size=(2, 3, CLASSES, FEATURES))
    centroids, losses = others if reading in ("earlier_centroids", "received_centroids") else now, np.zeros((3, 3))
    for i, j in np.ndindex(3, 3):
        head, owner = (j, i) if reading == "own_centroids" else (i, j)
        scores = reference.log_softmax(centroids[owner] @ heads["kernel"][head] + heads["bias"][head])
        shares = COUNTS[owner] if reading == "class_shares" else COUNTS[owner] > 0
        losses[i, j] = -np.average(np.diag(scores), weights=shares)
    if reading == "above_own_head":
        losses = np.array([[losses[i, j] - losses[j, j] for j in range(3)] for i in range(3)]) / 0.1
    weights = np.exp(-losses) / np.exp(-losses).sum(axis=0 if reading == "printed_index" else 1, keepdims=True)

    file = readings if reading in readings.READINGS else later_readings
    method = file.fedpac_proto_reading(tiny_model(), reading=reading)
    server = method.init_server(jax.random.key(0))
    counts, heads = jnp.float32(COUNTS), jax.tree.map(jnp.float32, heads)
    message = FedPACMessage(Mean(server.backbone, jnp.ones(())), heads, (jnp.float32(now), counts), ())
    messages, cohort = (
        (message, (jnp.float32(others), counts)),
        Cohort(jnp.arange(3), counts.sum(1), jnp.ones(3, bool), 3),
    )
    clients = (heads, ()) if file is readings else heads
    _, after, info = jax.jit(method.aggregate)(jax.random.key(1), server, clients, messages, cohort)
    mixed = after[0] if file is readings else after
    np.testing.assert_allclose(info["head_weights"], weights, rtol=1e-4)
    np.testing.assert_allclose(mixed["bias"], weights @ np.float64(heads["bias"]), rtol=1e-3, atol=1e-5)


def test_the_centroids_of_the_received_backbone():
    method = later_readings.fedpac_proto_reading(tiny_model(), reading="received_centroids")
    server, federation = method.init_server(jax.random.key(0)), tiny_federation()
    x, y = reference.examples(federation, 0, "train")
    data = client_data(federation, 0, "train")
    client = method.init_client(jax.random.key(1), server, data)
    _, (centroids, counts) = jax.jit(method.local)(jax.random.key(2), server, client, data).message
    features = reference.features(reference.to_numpy(server), x)
    for label in range(CLASSES):
        held = y == label
        mean = features[held].mean(0) if held.any() else np.zeros(FEATURES)
        np.testing.assert_allclose(centroids[label], mean, atol=1e-5)
        assert counts[label] == held.sum()
