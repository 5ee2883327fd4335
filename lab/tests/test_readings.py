"""Other readings of the replication's Eq. 12 and 13, one pair of clients after another in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import CLASSES, FEATURES, tiny_model

from lab.readings import READINGS, fedpac_proto_reading
from pfl_jax import Cohort, Mean
from pfl_jax.methods.fedpac import FedPACMessage

COUNTS = np.array([[4, 3, 0], [1, 0, 9], [2, 2, 2]])


@pytest.mark.parametrize("reading", READINGS)
def test_the_weights_of_a_reading(reading):
    rng = np.random.default_rng(0)
    heads = {"kernel": rng.normal(size=(3, FEATURES, CLASSES)), "bias": rng.normal(size=(3, CLASSES))}
    now, earlier = rng.normal(size=(2, 3, CLASSES, FEATURES))
    centroids, losses = earlier if reading == "earlier_centroids" else now, np.zeros((3, 3))
    for i, j in np.ndindex(3, 3):
        head, owner = (j, i) if reading == "own_centroids" else (i, j)
        scores = reference.log_softmax(centroids[owner] @ heads["kernel"][head] + heads["bias"][head])
        shares = COUNTS[owner] if reading == "class_shares" else COUNTS[owner] > 0
        losses[i, j] = -np.average(np.diag(scores), weights=shares)
    weights = np.exp(-losses) / np.exp(-losses).sum(axis=0 if reading == "printed_index" else 1, keepdims=True)

    method = fedpac_proto_reading(tiny_model(), reading=reading)
    server = method.init_server(jax.random.key(0))
    counts, heads = jnp.float32(COUNTS), jax.tree.map(jnp.float32, heads)
    message = FedPACMessage(Mean(server.backbone, jnp.ones(())), heads, (jnp.float32(now), counts), ())
    messages, cohort = (
        (message, (jnp.float32(earlier), counts)),
        Cohort(jnp.arange(3), counts.sum(1), jnp.ones(3, bool), 3),
    )
    _, (mixed, _), info = jax.jit(method.aggregate)(jax.random.key(1), server, (heads, ()), messages, cohort)
    np.testing.assert_allclose(info["head_weights"], weights, rtol=1e-4)
    np.testing.assert_allclose(mixed["bias"], weights @ np.float64(heads["bias"]), rtol=1e-3, atol=1e-5)
