"""Each client learns, element by element, how much of the global model to take over (Zhang et al. 2023)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import ClientData, LocalResult, Method, Model, Params, PyTree
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.holdout import fixed_subset
from pfl_jax.primitives.local_sgd import LocalSGD, map_examples, sgd
from pfl_jax.primitives.losses import cross_entropy
from pfl_jax.primitives.tree import choose, interpolate
from pfl_jax.streams import AGGREGATION_WEIGHTS

WINDOW = 10
"""The weights have converged when the losses of so many passes hardly differ."""


class FedALAClient(NamedTuple):
    """What a FedALA client keeps.

    Attributes:
      params: its model after its own last training.
      weights: W_i, one array in [0, 1] for each array of the last p layers, ones at the start.
      trained: bool scalar; False until the first local training, when there is no own model to interpolate with.
      converged: bool scalar; whether the weights have been learned to convergence once.
    """

    params: Params
    weights: list[jax.Array]
    trained: jax.Array
    converged: jax.Array


def last_layers(params: Params, count: int) -> list[int]:
    """Positions, among the leaves of params, of the arrays of the last `count` layers.

    A layer is the arrays with the same parent; layers are ordered as the tree is: backbone before head, by name.
    """
    parents = [path[:-1] for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    chosen = list(dict.fromkeys(parents))[-count:] if count else []
    return [index for index, parent in enumerate(parents) if parent in chosen]


def take_over(weights: list[jax.Array], received: Params, own: Params) -> Params:
    """W received + (1 - W) own on the last layers that W is there for, `received` on the others."""
    leaves, structure = jax.tree.flatten(received)
    own_leaves = jax.tree.leaves(own)
    first = len(leaves) - len(weights)
    mixed = [interpolate(w, leaf, o) for w, leaf, o in zip(weights, leaves[first:], own_leaves[first:], strict=True)]
    return jax.tree.unflatten(structure, leaves[:first] + mixed)


def _project(updates: PyTree, params: PyTree) -> PyTree:
    """Updates that end in [0, 1]: the clipping of the weights."""
    return jax.tree.map(lambda update, w: jnp.clip(w + update, 0, 1) - w, updates, params)


class _InterpolationLoss(NamedTuple):
    """Cross entropy of the interpolation, as a function of its weights."""

    model: Model
    received: Params
    own: Params

    def of_batch(self, weights: list[jax.Array], batch: ClientData) -> jax.Array:
        """Over a mini-batch."""
        params = take_over(weights, self.received, self.own)
        return cross_entropy(self.model.apply(params, batch.x), batch.y, batch.mask)

    def of_all(self, weights: list[jax.Array], data: ClientData) -> jax.Array:
        """Over all of a client's examples."""
        params = take_over(weights, self.received, self.own)
        logits = map_examples(lambda x: self.model.apply(params, x), data.x, data.mask)
        return cross_entropy(logits, data.y, data.mask)


def fedala(
    model: Model,
    training: LocalSGD = LocalSGD(),
    *,
    layers: int = 1,
    share: float = 0.8,
    ala_lr: float = 1.0,
    ala_epochs: int = 50,
    threshold: float = 0.1,
) -> Method:
    r"""FedALA: before training, a client interpolates the global model and its own last one with learned weights.

        w^_i = w_i + (w - w_i) * W_i on the last p layers, w on the layers below
        W_i <- clip(W_i - eta dCE(w^_i)/dW_i, 0, 1) on mini-batches of a fixed share of its examples
        w_i = E epochs of SGD from w^_i;   w = sum_i beta_i w_i

    The first time W_i is learned until the loss has converged, afterwards with one pass a round. A client's first
    round starts from w. With W_i at one (ala_lr = 0) this is FedAvg.

    Args:
      training: recipe of local training; the weights learn from mini-batches of its size, by plain descent.
      layers: number p of last layers whose weights are learned; lower ones take the global model's values.
      share: of a client's examples that the weights are learned on, the same ones in every round; 1 takes all.
      ala_lr: learning rate eta of the weights.
      ala_epochs: passes that the first learning of the weights takes at most.
      threshold: the weights have converged when the losses of the last ten passes have a smaller standard deviation;
        0.1 is the released code's.

    Returns:
      A `Method` with the global model as server state; a client keeps a `FedALAClient`. What a client deploys under
      `received` is its interpolation w^_i with the new global model.

    Reference:
      Zhang, Hua, Wang, Song, Xue, Ma, Guan. FedALA: Adaptive Local Aggregation for Personalized Federated Learning.
      AAAI 2023. The section on the ALA module.

    Deviations:
      The share of the examples is drawn once, not anew every round. Convergence is judged by the mean loss over that
      share after each pass (the released code takes its last mini-batch) and bounded by ala_epochs. Weights that are
      learned for an evaluation are not kept: the next round learns them itself.
    """
    base, one_epoch = fedavg(model, training), training.replace(epochs=1)
    # Plain descent on the weights, whatever trains the models.
    descent = optax.chain(sgd(ala_lr), optax.stateless(_project))

    def adapt(key, received, client, data):
        """The interpolated model, and the weights it was made with."""
        data = data._replace(mask=fixed_subset(data.mask, share, keep_rest=False))
        limit = jnp.where(client.trained, jnp.where(client.converged, 1, ala_epochs), 0)
        objective = _InterpolationLoss(model, received, client.params)

        def unfinished(carry):
            index, _, losses = carry
            return (index < limit) & ((index <= WINDOW) | (jnp.std(losses) >= threshold))

        def one_pass(carry):
            index, weights, losses = carry
            pass_key = jax.random.fold_in(key, index)
            weights = one_epoch.fit(pass_key, weights, data, objective.of_batch, transformation=descent)
            return index + 1, weights, losses.at[index % WINDOW].set(objective.of_all(weights, data))

        _, weights, _ = jax.lax.while_loop(unfinished, one_pass, (0, client.weights, jnp.zeros(WINDOW)))
        adapted = take_over(weights, received, client.params)
        return choose(client.trained, adapted, received), weights

    def train(key, server, client, data):
        start, weights = adapt(jax.random.fold_in(key, AGGREGATION_WEIGHTS), server, client, data)
        result = base.local(key, start, (), data)
        return LocalResult(
            client=FedALAClient(result.personal, weights, jnp.ones((), bool), client.trained),
            message=result.message,
            personal=result.personal,
        )

    def init_client(key, server, data):
        leaves = jax.tree.leaves(server)
        weights = [jnp.ones_like(leaves[index]) for index in last_layers(server, layers)]
        return FedALAClient(server, weights, jnp.zeros((), bool), jnp.zeros((), bool))

    return base._replace(
        init_client=init_client,
        local=train,
        personalize=lambda key, server, client, data: adapt(key, server, client, data)[0],
    )
