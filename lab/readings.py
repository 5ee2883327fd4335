"""Other readings of FedPAC's replication, whose Eq. 12 and 13 contradict its text: a run's own code, for the queue.

`fedpac_proto` has the reading that is the default; none of these is preferred because it fits.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pfl_jax.base import Method, Model
from pfl_jax.messages import downloaded
from pfl_jax.methods.fedpac_proto import fedpac_proto, prototype_losses
from pfl_jax.primitives.aggregation import mix
from pfl_jax.primitives.feature_statistics import class_centroids
from pfl_jax.primitives.features import extract_features
from pfl_jax.primitives.local_training import LocalTraining

Reading = Literal[
    "own_centroids", "printed_index", "class_shares", "earlier_centroids", "received_centroids", "above_own_head"
]
READINGS: dict[str, str] = {
    "own_centroids": "Eq. 12 as printed: a client's own centroids under the heads of the others",
    "printed_index": "Eq. 13 as printed: normalized over i, so that rows do not sum to 1",
    "class_shares": "Eq. 12 with losses weighted by the numbers of examples of client j's classes",
    "earlier_centroids": "Eq. 12 with the centroids that clients sent in the round before, as Eq. 8 numbers them",
    "received_centroids": "Eq. 12 with the centroids of the received backbone",
    "above_own_head": "Eq. 12 minus the loss of client j's centroids under its own head, with temperature 0.1",
}
"""Reading -> the same in words."""

TEMPERATURE = 0.1
"""Of the softmax of `above_own_head`. What is subtracted is client j's: client i's own loss would cancel in row i."""


def fedpac_proto_reading(
    model: Model, training: LocalTraining = LocalTraining(), *, reading: Reading = "own_centroids"
) -> Method:
    """FedPAC with prototype weights by another reading of Eq. 12 and 13, see READINGS.

    Args:
      training: recipe of local training.
      reading: the reading.

    Info:
      head_weights: [M, M], alpha_ij.
    """
    base = fedpac_proto(model, training)

    def local(key, server, client, data):
        head, others = client
        result = base.local(key, server, head, data)
        kept = result.client, result.message.centroids
        if reading == "received_centroids":
            features = extract_features(model, server.backbone, data)
            others = class_centroids(features, data.y, data.mask, model.num_classes)
        return result._replace(client=kept, message=(result.message, others))

    def aggregate(key, server, clients, messages, cohort):
        message, others = messages
        server, _, _ = base.aggregate(key, server, clients[0], message, cohort)
        centroids, counts = others if reading in ("earlier_centroids", "received_centroids") else message.centroids
        losses = prototype_losses(model, message.head, centroids, counts if reading == "class_shares" else counts > 0)
        losses = losses.T if reading == "own_centroids" else losses
        losses = (losses - jnp.diagonal(losses)) / TEMPERATURE if reading == "above_own_head" else losses
        # Nobody has earlier centroids in the first round: all weights are equal then.
        known = jnp.any(counts > 0, axis=-1) & cohort.present
        axis = 0 if reading == "printed_index" else 1
        weights = jax.nn.softmax(-jnp.where(jnp.expand_dims(known, 1 - axis), losses, 1e30), axis=axis)
        return server, (mix(weights, message.head), clients[1]), {"head_weights": weights}

    def init_client(key, server, data):
        return base.init_client(key, server, data), (jnp.zeros_like(server.centroids), jnp.zeros(model.num_classes))

    return base._replace(
        init_client=init_client,
        local=local,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: base.personalize(key, server, client[0], data),
        download=lambda server, client: downloaded(base, server, client[0]),
    )
