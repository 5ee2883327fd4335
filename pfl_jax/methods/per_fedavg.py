"""Meta-learning of a model that one gradient step adapts to each client (Fallah, Mokhtari, Ozdaglar 2020)."""

from typing import Annotated, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import ClientData, LocalResult, Mean, Method, Model, Params, Privacy, PRNGKey, PyTree
from pfl_jax.methods.factories import OWN_GRADIENTS, method_factory
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.methods.scaffold import mean_gradient
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.optimizers import descend, initial_state
from pfl_jax.primitives.tree import choose
from pfl_jax.validation import NotNegative, Positive, ReadWith

MetaGradient: TypeAlias = Literal["first_order", "hessian_free"]
"""Approximation of the gradient of the loss after a step, see `per_fedavg`."""


def deal(batch: ClientData, parts: int, step: int | jax.Array) -> list[ClientData]:
    """Deal the rows of a mini-batch in turn to `parts` mini-batches of equal length.

    Rows are dealt in the order of the client's data, so that results depend on which examples a mini-batch has, as in
    other methods, and not on their order in it. The first row goes to mini-batch `step` modulo `parts`: where all steps
    see the same examples, each serves all purposes in turn.

    Args:
      batch: rows, at least one of them real, with y = (labels, numbers of the rows in the client's data).
      parts: number of mini-batches.
      step: number of the step.

    Returns:
      Mini-batches with y = labels. The one with the first row replaces any that has no real example.
    """
    # Equal numbers of rows for all; the surplus rows are not real.
    surplus = -batch.mask.shape[0] % parts
    batch = jax.tree.map(lambda leaf: jnp.pad(leaf, [(0, surplus)] + [(0, 0)] * (leaf.ndim - 1)), batch)
    labels, rows = batch.y
    order = jnp.lexsort((rows, ~batch.mask))
    dealt = jax.tree.map(lambda leaf: leaf[order].reshape(-1, parts, *leaf.shape[1:]), batch._replace(y=labels))
    first = jax.tree.map(lambda leaf: leaf[:, 0], dealt)
    turned = jax.tree.map(lambda leaf: jnp.roll(leaf, step, axis=1), dealt)
    batches = [jax.tree.map(lambda leaf, part=part: leaf[:, part], turned) for part in range(parts)]
    return [choose(jnp.any(one.mask), one, first) for one in batches]


@method_factory
def per_fedavg(
    model: Model,
    training: LocalTraining = LocalTraining(momentum=0.0),
    *,
    inner_lr: NotNegative = 0.01,
    meta_gradient: MetaGradient = "hessian_free",
    delta: Annotated[Positive, ReadWith("meta_gradient", ("hessian_free",))] = 1e-3,
) -> Method:
    r"""Per-FedAvg: a shared initialization whose loss is small after one gradient step on a client's data.

    The server minimizes the mean over clients of F_i(w) = f_i(w - alpha grad f_i(w)). Every step of a client draws
    independent mini-batches D, D' (and D'' for the Hessian) and descends on an estimate of grad F_i:

        g = grad f_i(w - alpha grad f_i(w; D); D')
        first_order:   w <- w - beta g
        hessian_free:  w <- w - beta (g - alpha h),
                       h = [grad f_i(w + delta g; D'') - grad f_i(w - delta g; D'')] / (2 delta)

    where h approximates the product of the Hessian and g. The server takes the unweighted mean of the w_i. A client
    deploys w - alpha grad f_i(w), with the gradient over all of its examples, as in the definition of F_i.

    Args:
      training: recipe of local training. lr is the paper's beta; batch_size examples are in each of the two (three)
        mini-batches of a step, so an epoch has half (a third) as many steps as in other methods.
      inner_lr: learning rate alpha of the step that adapts the model to a client.
      meta_gradient: approximation of the gradient of F_i: without the Hessian (first_order), or with its product with a
        vector from a difference of gradients (hessian_free).
      delta: distance of that difference, in units of g; used only by hessian_free.

    Returns:
      A `Method` with the model w as server state and no client state. Under `trained` a client deploys its own w_i
      after the step.
      Trees: server model; client nothing.

    Reference:
      Fallah, Mokhtari, Ozdaglar. Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
      Meta-Learning Approach. NeurIPS 2020. Algorithm 1, with the approximations (FO) and (HF) of Section 5. alpha =
      0.01 is the paper's value on MNIST.

    Deviations:
      The number of steps follows from epochs. The mini-batches of a step are disjoint, where the paper draws them
      independently; a client with fewer examples than mini-batches uses one of them twice. Optimizer, momentum,
      weight decay and clipping apply to the estimate of grad F_i (the paper has plain descent); the step of alpha has
      none of them. The variant with the exact Hessian is left out, and so is the variant with one mini-batch a step.
      delta is not stated in the paper; 1e-3 is FL-bench's. The authors have released no code. A full-batch round of
      hessian_free with three clients agrees with FL-bench's (github.com/KarhouTam/FL-bench, commit 06e658b) to 1e-6.
    """
    loss, parts = supervised_loss(model), 2 if meta_gradient == "first_order" else 3
    gradient_and_statistics = jax.grad(loss, has_aux=True)
    optimizer = training.transformation()
    sampling = training.replace(batch_size=parts * training.batch_size)

    def move(params: Params, distance: float | jax.Array, direction: Params) -> Params:
        return jax.tree.map(lambda leaf, step: leaf + distance * step, params, direction)

    def gradient(params: Params, batches: list[ClientData], key: PRNGKey) -> tuple[Params, PyTree]:
        (inner, outer, *curvature), (inner_key, outer_key, curvature_key) = batches, jax.random.split(key, 3)
        adapted = move(params, -inner_lr, gradient_and_statistics(params, inner, inner_key)[0])
        meta, statistics = gradient_and_statistics(adapted, outer, outer_key)
        for batch in curvature:
            moved = (move(params, sign * delta, meta) for sign in (1, -1))
            # One key for both, so that only the parameters differ.
            ahead, behind = (gradient_and_statistics(one, batch, curvature_key)[0] for one in moved)
            product = jax.tree.map(lambda a, b: (a - b) / (2 * delta), ahead, behind)
            meta = move(meta, -inner_lr, product)
        return meta, statistics

    def adapt(key: PRNGKey, params: Params, data: ClientData) -> Params:
        return move(params, -inner_lr, mean_gradient(key, training, loss, params, data))

    def train(key, server, client, data):
        def step(carry, batch, key):
            params, opt_state, index = carry
            direction = gradient(params, deal(batch, parts, index), key)
            return *descend(optimizer, *direction, params, opt_state), index + 1

        numbered = data._replace(y=(data.y, jnp.arange(data.mask.shape[0], dtype=jnp.int32)))
        params, *_ = sampling.fold(key, (server, initial_state(optimizer, server), 0), numbered, step)
        return LocalResult(client=(), message=Mean(params, np.float32(1)), personal=adapt(key, params, data))

    return fedavg(model, training)._replace(
        local=train,
        personalize=lambda key, server, client, data: adapt(key, server, data),
        privacy=Privacy(refused=OWN_GRADIENTS, clients=()),
    )
