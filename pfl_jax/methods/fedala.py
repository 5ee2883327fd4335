"""Initial local models interpolated elementwise from global and own model with learned weights (Zhang et al. 2023)."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import ClientData, LocalResult, Method, Model, Params, Privacy, PRNGKey, PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.examples import map_examples
from pfl_jax.primitives.holdout import fixed_subset
from pfl_jax.primitives.local_training import LocalTraining, sgd
from pfl_jax.primitives.tree import choose, interpolate
from pfl_jax.streams import AGGREGATION_WEIGHTS
from pfl_jax.validation import Count, Epochs, Fraction, NotNegative, ReadWith

WINDOW = 10
"""Number of passes over which the standard deviation of the loss decides whether the weights have converged."""


class FedALAClient(NamedTuple):
    """State of a FedALA client.

    Attributes:
      params: the client's model after its previous local training.
      weights: W_i, one array with entries in [0, 1] for each array of the last p layers; initially ones.
      trained: bool scalar; False until the first local training, before which there is no own model to interpolate
        with.
      converged: bool scalar; whether the weights have already been trained to convergence.
    """

    params: Params
    weights: list[jax.Array]
    trained: jax.Array
    converged: jax.Array


def last_layers(params: Params, count: int) -> list[int]:
    """Positions of the arrays of the last `count` layers among the leaves of params.

    A layer consists of the arrays with the same parent. Layers are in tree order: backbone before head, then by name.
    """
    parents = [path[:-1] for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    layers = list(dict.fromkeys(parents))
    if count > len(layers):
        raise InvalidInput(f"layers must be at most {len(layers)}, the number of layers of the model, not {count}")
    chosen = layers[-count:] if count else []
    return [index for index, parent in enumerate(parents) if parent in chosen]


def mix_layers(weights: list[jax.Array], received: Params, own: Params) -> Params:
    """Interpolation W received + (1 - W) own on the last layers, which have weights W; `received` on all others."""
    leaves, structure = jax.tree.flatten(received)
    own_leaves = jax.tree.leaves(own)
    first = len(leaves) - len(weights)
    mixed = [interpolate(w, leaf, o) for w, leaf, o in zip(weights, leaves[first:], own_leaves[first:], strict=True)]
    return jax.tree.unflatten(structure, leaves[:first] + mixed)


def _project(updates: PyTree, params: PyTree) -> PyTree:
    """Updates after which the weights are in [0, 1]."""
    return jax.tree.map(lambda update, w: jnp.clip(w + update, 0, 1) - w, updates, params)


class _InterpolationLoss(NamedTuple):
    """Loss of the interpolated model as a function of the weights."""

    model: Model
    received: Params
    own: Params

    def batch_loss(self, weights: list[jax.Array], batch: ClientData, key: PRNGKey) -> jax.Array:
        """Loss of the deployed model on a mini-batch."""
        params = mix_layers(weights, self.received, self.own)
        return self.model.task.loss(self.model.apply(params, batch.x), batch.y, batch.mask)

    def full_loss(self, weights: list[jax.Array], data: ClientData) -> jax.Array:
        """Loss on all examples of a client."""
        params = mix_layers(weights, self.received, self.own)
        outputs = map_examples(lambda x: self.model.apply(params, x), data.x, data.mask)
        return self.model.task.loss(outputs, data.y, data.mask)


@method_factory
def fedala(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    layers: Count = 1,
    share: Annotated[Fraction, ReadWith("ala_lr")] = 0.8,
    ala_lr: NotNegative = 1.0,
    ala_epochs: Annotated[Epochs, ReadWith("ala_lr")] = 50,
    threshold: Annotated[NotNegative, ReadWith("ala_lr")] = 0.1,
) -> Method:
    r"""FedALA: clients start local training from a learned interpolation of the global and their own previous model.

        w^_i = w_i + (w - w_i) * W_i on the last p layers, w on the layers before
        W_i <- clip(W_i - eta dCE(w^_i)/dW_i, 0, 1) on mini-batches of a fixed share of the client's examples
        w_i = E epochs of SGD from w^_i;   w = sum_i beta_i w_i

    The weights W_i are first trained until the loss has converged, and in later rounds for one pass. In its first round
    a client starts from w. With all weights equal to 1 (ala_lr = 0) this is FedAvg.

    Args:
      training: recipe of local training; the weights are trained on mini-batches of the same size, by plain descent.
      layers: number p of last layers with learned weights; the other layers take the values of the global model.
      share: share of a client's examples on which the weights are trained, the same in every round; 1 for all.
      ala_lr: learning rate eta of the weights.
      ala_epochs: maximum number of passes of the first training of the weights.
      threshold: the weights have converged when the standard deviation of the losses of the last ten passes is below
        this value; 0.1 in the released code.

    Returns:
      A `Method` with the global model as server state and a `FedALAClient` as client state. Under `received` a client
      deploys its interpolation w^_i with the new global model.
      Trees: server model; client FedALAClient(params: model, weights: (numbers [K], numbers [d, K]), trained: flag,
      converged: flag).

    Reference:
      Zhang, Hua, Wang, Song, Xue, Ma, Guan. FedALA: Adaptive Local Aggregation for Personalized Federated Learning.
      AAAI 2023. The section on the ALA module.

    Deviations:
      The share of the examples is drawn once, not in every round. Convergence depends on the mean loss over that share
      after each pass (in the released code, the loss of the last mini-batch), with at most ala_epochs passes. Weights
      trained for an evaluation are not kept; the next round trains them again. In the released code all clients adapt
      to the global model in every round, also those outside the cohort, which then go on from their interpolation.
    """
    # The weights stay on the client and are trained until they have converged, which is never private.
    base, one_epoch = fedavg(model, training), training.replace(epochs=1, dp_clip=None, dp_noise=0.0)
    # The weights are trained by plain descent, whatever optimizer trains the models.
    descent = optax.chain(sgd(ala_lr), optax.stateless(_project))

    def adapt(key, received, client, data):
        """Train the weights; return the interpolated model and the weights."""
        data = data._replace(mask=fixed_subset(data.mask, share, keep_rest=False))
        limit = jnp.where(client.trained, jnp.where(client.converged, 1, ala_epochs), 0)
        objective = _InterpolationLoss(model, received, client.params)

        def unfinished(carry):
            index, _, losses = carry
            return (index < limit) & ((index <= WINDOW) | (jnp.std(losses) >= threshold))

        def one_pass(carry):
            index, weights, losses = carry
            pass_key = jax.random.fold_in(key, index)
            weights = one_epoch.fit(pass_key, weights, data, objective.batch_loss, transformation=descent)
            return index + 1, weights, losses.at[index % WINDOW].set(objective.full_loss(weights, data))

        _, weights, _ = jax.lax.while_loop(unfinished, one_pass, (0, client.weights, jnp.zeros(WINDOW)))
        adapted = mix_layers(weights, received, client.params)
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
        privacy=Privacy(
            training.most_passes,
            (SIZE, "gradients of the weights that interpolate the models, and when they have converged"),
            clients=(),
        ),
    )
