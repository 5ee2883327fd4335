"""Two more readings of FedPAC's replication, beside `lab.readings`, whose text is that of finished runs."""

from typing import Literal

import jax
import jax.numpy as jnp

from pfl_jax.base import Method, Model
from pfl_jax.methods.fedpac_proto import fedpac_proto, prototype_losses
from pfl_jax.primitives.aggregation import mix
from pfl_jax.primitives.feature_statistics import class_centroids
from pfl_jax.primitives.features import extract_features
from pfl_jax.primitives.local_training import LocalTraining

Reading = Literal["received_centroids", "above_own_head"]
READINGS: dict[str, str] = {
    "received_centroids": "Eq. 12 with the centroids of the received backbone",
    "above_own_head": "Eq. 12 minus the loss of client j's centroids under its own head, with temperature 0.1",
}
"""Reading -> the same in words."""

TEMPERATURE = 0.1
"""Of the softmax of `above_own_head`. What is subtracted is client j's: client i's own loss would cancel in row i."""


def fedpac_proto_reading(
    model: Model, training: LocalTraining = LocalTraining(), *, reading: Reading = "received_centroids"
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
        result = base.local(key, server, client, data)
        features = extract_features(model, server.backbone, data)
        received = class_centroids(features, data.y, data.mask, model.num_classes)
        return result._replace(message=(result.message, received))

    def aggregate(key, server, clients, messages, cohort):
        message, received = messages
        server, _, _ = base.aggregate(key, server, clients, message, cohort)
        centroids, counts = received if reading == "received_centroids" else message.centroids
        losses = prototype_losses(model, message.head, centroids, counts > 0)
        if reading == "above_own_head":
            losses = (losses - jnp.diagonal(losses)) / TEMPERATURE
        weights = jax.nn.softmax(-jnp.where(cohort.present, losses, 1e30), axis=1)
        return server, mix(weights, message.head), {"head_weights": weights}

    return base._replace(local=local, aggregate=aggregate)
