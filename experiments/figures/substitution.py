"""Accuracy after some of a trained model's parameters are replaced: FedAS, Fig. 3a."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from pfl_jax.base import Model, Params, PRNGKey, PyTree
from pfl_jax.data.federated import FederatedData, client_data
from pfl_jax.primitives.fisher import diagonal_fisher
from pfl_jax.primitives.losses import deployed_loss
from pfl_jax.primitives.metrics import score
from pfl_jax.primitives.tree import gather


def replace_first(params: PyTree, fresh: PyTree, scores: PyTree, share: jax.Array | float) -> PyTree:
    """Replace the round(share P) of P entries of params with the highest scores by those of `fresh`, all of one
    structure."""
    values, rebuild = ravel_pytree(params)
    order = jnp.argsort(-ravel_pytree(scores)[0], stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    return rebuild(jnp.where(rank < jnp.round(share * order.size), ravel_pytree(fresh)[0], values))


def accuracies_after_replacement(
    key: PRNGKey, model: Model, params: Params, data: FederatedData, clients: np.ndarray, shares: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Test accuracies of clients' models (leaves [N, ...]) after shares of their parameters are reset.

    Those with the highest Fisher information on the client's training examples [S, C], or as many at random [S, C]. The
    untrained values are a fresh draw of the model's initialization, the same for both (FedAS, Fig. 3a).
    """

    loss = deployed_loss(model)

    @jax.jit
    def one(data, client, params):
        fresh_key, random_key = jax.random.split(jax.random.fold_in(key, client))
        fresh = model.init(fresh_key)
        fisher = diagonal_fisher(loss, params, client_data(data, client, "train"))
        flat, rebuild = ravel_pytree(params)
        random = rebuild(jax.random.uniform(random_key, flat.shape))
        test = client_data(data, client, "test")

        def accuracy(scores, share):
            return score(model.apply, replace_first(params, fresh, scores, share), test)["accuracy"]

        points = jnp.asarray(shares, jnp.float32)
        return tuple(jax.lax.map(lambda share, s=scores: accuracy(s, share), points) for scores in (fisher, random))

    # One client after another: the memory of one suffices.
    rows = [one(data, jnp.int32(client), gather(params, client)) for client in clients]
    highest, at_random = (np.stack([np.asarray(row[which]) for row in rows], axis=1) for which in (0, 1))
    return highest, at_random
