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
from pfl_jax.primitives.local_training import LocalTraining

Reading = Literal["own_centroids", "printed_index", "class_shares", "earlier_centroids"]
READINGS: dict[str, str] = {
    "own_centroids": "Eq. 12 as printed: a client's own centroids under the heads of the others",
    "printed_index": "Eq. 13 as printed: normalized over i, so that rows do not sum to 1",
    "class_shares": "Eq. 12 with losses weighted by the numbers of examples of client j's classes",
    "earlier_centroids": "Eq. 12 with the centroids that clients sent in the round before, as Eq. 8 numbers them",
}
"""Reading -> the same in words."""


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
        head, earlier = client
        result = base.local(key, server, head, data)
        kept = result.client, result.message.centroids
        return result._replace(client=kept, message=(result.message, earlier))

    def aggregate(key, server, clients, messages, cohort):
        message, earlier = messages
        server, _, _ = base.aggregate(key, server, clients[0], message, cohort)
        centroids, counts = earlier if reading == "earlier_centroids" else message.centroids
        losses = prototype_losses(model, message.head, centroids, counts if reading == "class_shares" else counts > 0)
        losses = losses.T if reading == "own_centroids" else losses
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
