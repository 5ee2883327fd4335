"""Models combined along a collaboration graph that the server infers from their similarity (Ye et al. 2023)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import LocalResult, Method, Model, Params, Privacy, PyTree
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.primitives.aggregation import mix, size_weights
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.tree import map_statistics
from pfl_jax.validation import NotNegative, Positive

SIMILAR = 0.9
"""Cosine above which two clients' changes count as equal (released code)."""

TINY = 1e-8
"""Smallest norm by which a vector is divided."""


class PFedGraphClient(NamedTuple):
    """State of a client.

    Attributes:
      params: its combined model, from which the next local training starts.
      reference: r_i = sum_j W_ij w_j / ||w_j||, of the shape of params; zero before the client's first round.
    """

    params: Params
    reference: PyTree


def norms(trees: PyTree) -> jax.Array:
    """Euclidean norms [M] of trees stacked to leaves [M, ...], at least `TINY`."""
    squares = [jnp.sum(jnp.square(leaf.reshape(leaf.shape[0], -1)), axis=1) for leaf in jax.tree.leaves(trees)]
    return jnp.maximum(jnp.sqrt(sum(squares)), TINY)


def cosines(trees: PyTree) -> jax.Array:
    """Cosines [M, M] between trees stacked to leaves [M, ...]; 0 for trees that are zero."""
    rows = [leaf.reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(trees)]
    gram, lengths = sum(jnp.matmul(row, row.T, precision="highest") for row in rows), norms(trees)
    return gram / (lengths[:, None] * lengths)


def collaboration_graph(similarity: jax.Array, counts: jax.Array, prior: float | jax.Array) -> jax.Array:
    r"""Weights of all models in each client's combination: rows W_i that minimize distance plus deviation from sizes.

        W_i = argmin over the simplex of  alpha ||w - p||^2 - sum_j w_j s_ij
            = projection of p + s_i / (2 alpha) onto the simplex,   p_j = n_j / sum_k n_k

    Args:
      similarity: s [M, M], for example `cosines`.
      counts: n [M], examples of each client; clients without examples get weight zero.
      prior: strength alpha of the prior p, positive.

    Returns:
      W [M, M], rows on the simplex.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> from pfl_jax.methods.pfedgraph import collaboration_graph
      >>> graph = collaboration_graph(jnp.array([[1.0, 0.2], [0.2, 1.0]]), jnp.array([30, 10]), prior=1.0)
      >>> print(np.asarray(graph).round(2))
      [[0.95 0.05]
       [0.55 0.45]]
    """
    targets, present = size_weights(counts) + similarity / (2 * prior), counts > 0
    targets -= jnp.max(jnp.where(present, targets, -jnp.inf), axis=-1, keepdims=True)
    # A target more than 1 below the largest has weight zero.
    targets = jnp.where(present, targets, -2.0)
    return jax.vmap(optax.projections.projection_simplex)(targets)


@method_factory
def pfedgraph(
    model: Model, training: LocalTraining = LocalTraining(), *, prior: Positive = 0.8, lam: NotNegative = 0.01
) -> Method:
    r"""pFedGraph: every client gets its own mean of the cohort's models, with weights from an inferred graph.

        w'_i = E epochs of SGD from w_i on  CE - lambda sum_j W_ij cos(w, w'_j),   with W and w'_j of i's last round
        W_i = argmin over the simplex of  alpha sum_j (W_ij - n_j / n)^2 - sum_j W_ij s_ij,   n = sum_j n_j
        w_i = sum_j W_ij w'_j

    s_ij = cos(w'_i - w^0, w'_j - w^0) compares the clients' changes since the common initial model w^0; above 0.9 it
    counts as 1. In a client's first round the loss has no second term. With full participation, lambda = 0 and large
    alpha this is `fedavg`; for small alpha every client keeps its own model, as in `local`.

    Args:
      training: recipe of local training.
      prior: strength alpha of the prior, that clients are weighted by their numbers of examples; positive.
      lam: strength lambda of the similarity to the models of the client's combination.

    Returns:
      A `Method` with the initial model as server state and a `PFedGraphClient` as client state.
      Trees: server model; client PFedGraphClient(params: model, reference: model).

    Info:
      graph: [M, M], the weights W of the column's model in the row's combination.
      similarity: [M, M], the cosines s between the clients' changes.

    Reference:
      Ye, Ni, Wu, Chen, Wang. Personalized Federated Learning with Inferred Collaboration Graphs. ICML 2023. The
      equations follow the released code; alpha = 0.8 and lambda = 0.01 are its defaults, for CIFAR-10 with 10 clients.

    Deviations:
      The released code adds lambda sum_j W_ij cos(w, w'_j) to the loss, which moves a client away from the models of
      its combination; here it is subtracted, in line with the paper's aim. With partial participation the graph joins
      the clients of one round, and a client keeps its last reference until it takes part again; the released code has
      references only for the clients of the previous round. Compared with that code (commit 4f5f17c, with the sign of
      lambda reversed): two rounds of full batches give the same models and graph to 1e-5.
    """

    def train(key, server, client, data):
        def similarity(params):
            compared = map_statistics(jnp.zeros_like, params)
            return optax.tree.vdot(client.reference, compared) / jnp.maximum(optax.tree.norm(compared), TINY)

        loss = supervised_loss(model, lambda params: -lam * similarity(params))
        params = training.fit(key, client.params, data, loss)
        return LocalResult(client=client, message=params, personal=params)

    def aggregate(key, server, clients, messages, cohort):
        compared = map_statistics(jnp.zeros_like, messages)
        similarity = cosines(jax.tree.map(jnp.subtract, compared, map_statistics(jnp.zeros_like, server)))
        similarity = jnp.where(similarity > SIMILAR, 1.0, similarity)
        graph = collaboration_graph(similarity, cohort.weights, prior)
        clients = PFedGraphClient(mix(graph, messages), mix(graph / norms(compared), compared))
        return server, clients, {"graph": graph, "similarity": similarity}

    return Method(
        init_server=model.init,
        init_client=lambda key, server, data: PFedGraphClient(server, jax.tree.map(jnp.zeros_like, server)),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: client.params,
        predict=model.apply,
        download=lambda server, client: client,
        privacy=Privacy(training.most_passes, (SIZE,)),
    )
