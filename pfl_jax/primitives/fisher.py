"""Diagonal of the empirical Fisher information and its trace, from per-example gradients.

The trace does not need individual gradients, only their squared norms; see `pfl_jax.primitives.per_example`.
"""

from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import ClientData, Loss, Model, Params, PRNGKey, PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.hyper_parameters import whole
from pfl_jax.primitives.aggregation import normalize
from pfl_jax.primitives.examples import map_examples
from pfl_jax.primitives.local_sgd import LocalSGD
from pfl_jax.primitives.losses import cross_entropy
from pfl_jax.primitives.per_example import NORMS, add_norms, is_tapped, rows_agree

MICROBATCH = 16
"""Examples whose gradients are computed at once; 16 was the fastest of 8 to 64 on a CPU, for both papers' networks."""


def _deployed_loss(model: Model) -> Callable[[Params, ClientData], jax.Array]:
    """Cross entropy of a model out of training."""
    return lambda params, batch: cross_entropy(model.apply(params, batch.x), batch.y, batch.mask)


def squared_gradient_norms(loss: Loss, params: PyTree, batch: ClientData) -> jax.Array:
    """Squared norms [B] of the per-example gradients, for any loss.

    Args:
      loss: (params, ClientData of one example) -> scalar.
      params: any pytree; the norm is over all leaves.
      batch: B examples.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import fisher
      >>> from pfl_jax.base import ClientData
      >>> batch = ClientData(x=jnp.array([1.0, 2.0]), y=jnp.array([0.0, 0.0]), mask=jnp.array([True, True]))
      >>> print(fisher.squared_gradient_norms(lambda w, b: jnp.sum(w * b.x - b.y), jnp.array(5.0), batch))
      [1. 4.]
    """

    def squared_norm(example):
        gradient = jax.grad(loss)(params, jax.tree.map(lambda leaf: leaf[None], example))
        return sum((jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)), jnp.zeros(()))

    return jax.vmap(squared_norm)(batch)


def _has_closed_form(model: Model, params: Params, inputs: jax.Array) -> bool:
    """Whether each parameter is used once, in an operation of NORMS that is applied to the rows of the batch."""
    used = []

    def record(call, args, kwargs, context):
        if is_tapped(context):
            used.append(args[1] if rows_agree(context, args[0], inputs.shape[0]) else None)
        return call(*args, **kwargs)

    def agrees(params):
        with nn.intercept_methods(record):
            model.apply(params, inputs)
        # Compared by identity: flax passes the same arrays on.
        return sorted(map(id, used)) == sorted(map(id, jax.tree.leaves(params)))

    answer = []
    jax.eval_shape(lambda params: answer.append(agrees(params)), params)
    return answer[0]


def _closed_form_norms(model: Model, params: Params, batch: ClientData) -> jax.Array:
    """Squared norms [B] of the gradients of log p(y|x), from one backward pass. Needs `_has_closed_form`."""

    def summed_loss(probe):
        def attach(call, args, kwargs, context):
            y = call(*args, **kwargs)
            if not is_tapped(context):
                return y
            x, *parameters = args
            norms = NORMS[context.method_name]
            return add_norms(lambda x, gradient: norms(x, gradient, *parameters), x, y, probe)

        with nn.intercept_methods(attach):
            logits = model.apply(params, batch.x)
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, batch.y))

    return jax.grad(summed_loss)(jnp.zeros(batch.mask.shape))


def fisher_trace(
    model: Model,
    params: Params,
    data: ClientData,
    *,
    microbatch: int = MICROBATCH,
    reduction: Literal["mean", "sum"] = "mean",
) -> jax.Array:
    """Trace of the diagonal of the empirical Fisher information of a model on one client's examples.

        tr diag F = (1/n) sum_b || grad_w log p_w(y_b | x_b) ||^2

    where w are all parameters of the model, backbone and head. The squared norms have a closed form if every parameter
    belongs to a `pfl_jax.networks.layers.Layer`; otherwise each example's gradient is computed.

    Args:
      model: any model.
      params: its parameters w.
      data: the client's examples [n, ...]; padding does not count.
      microbatch: examples processed at once; bounds the memory, not the result.
      reduction: mean over the real examples, or their sum; 0 without any.

    Returns:
      A scalar.

    Raises:
      InvalidInput: if the reduction is neither "mean" nor "sum", or microbatch is not positive.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from pfl_jax import ClientData, LocalSGD, models
      >>> from pfl_jax.primitives import fisher
      >>> model = models.mlp((3,), 2, hidden=(2,))
      >>> shapes = jax.eval_shape(model.init, jax.random.key(0))
      >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)
      >>> one = ClientData(x=jnp.ones((1, 3)), y=jnp.array([0]), mask=jnp.array([True]))
      >>> print(fisher.fisher_trace(model, params, one))  # only the head's bias has a gradient: (-1/2, 1/2)
      0.5

    Reference:
      Yang, Huang, Ye. FedAS: Bridging Inconsistency in Personalized Federated Learning. CVPR 2024. Eq. 5-6.
    """
    if reduction not in ("mean", "sum"):
        raise InvalidInput(f"reduction must be mean or sum, not {reduction!r}")
    whole("microbatch", microbatch)

    loss = _deployed_loss(model)
    closed_form = _has_closed_form(model, params, data.x[:2])

    def norms(rows):
        x, y = rows
        batch = ClientData(x, y, jnp.ones(y.shape, bool))
        return _closed_form_norms(model, params, batch) if closed_form else squared_gradient_norms(loss, params, batch)

    values = map_examples(norms, (data.x, data.y), data.mask, batch_size=microbatch)
    total = jnp.sum(jnp.where(data.mask, values, 0.0))
    return total if reduction == "sum" else total / jnp.maximum(jnp.sum(data.mask), 1)


def batch_fisher_trace(key: PRNGKey, model: Model, params: Params, data: ClientData, training: LocalSGD) -> jax.Array:
    """Sum over an epoch of the squared norms of mini-batch gradients.

        sum over batches B of || (1/|B|) sum_{b in B} grad_w log p_w(y_b | x_b) ||^2

    FedAS's released code uses this in place of the trace of the Fisher information. The two differ: gradients of the
    examples of a batch partly cancel, so this sum depends on the batch size and, unless it is fixed, on the order.

    Args:
      key: key of the order of the examples, if the training shuffles.
      model: any model.
      params: its parameters w.
      data: the client's examples [n, ...], not augmented.
      training: recipe that defines the mini-batches.

    Returns:
      A scalar.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from pfl_jax import ClientData, LocalSGD, models
      >>> from pfl_jax.primitives import fisher
      >>> model = models.mlp((3,), 2, hidden=(2,))
      >>> shapes = jax.eval_shape(model.init, jax.random.key(0))
      >>> params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), shapes)
      >>> two = ClientData(x=jnp.ones((2, 3)), y=jnp.array([0, 1]), mask=jnp.ones(2, bool))
      >>> # Opposite gradients:
      >>> print(fisher.batch_fisher_trace(jax.random.key(0), model, params, two, LocalSGD(batch_size=2)))
      0.0

    Reference:
      The released code of Yang, Huang, Ye. FedAS. CVPR 2024.
    """

    loss = _deployed_loss(model)

    def add(total, batch):
        gradient = jax.grad(loss)(params, batch)
        return total + sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient))

    # Also where training is private, the trace is not: fedas says so in its `pfl_jax.base.Privacy`.
    one_epoch = training.replace(epochs=1, augment=None, dp_clip=None, dp_noise=0.0)
    return one_epoch.fold(key, jnp.zeros(()), data, add)


def fisher_diagonal(model: Model, params: Params, data: ClientData, *, microbatch: int = MICROBATCH) -> Params:
    """Diagonal of the empirical Fisher information of a model on one client's examples.

        diag F = (1/n) sum_b ( grad_w log p_w(y_b | x_b) )^2,  elementwise

    The sum of its entries is `fisher_trace`, which needs no individual gradients and is much faster.

    Args:
      model: any model.
      params: its parameters w.
      data: the client's examples [n, ...]; padding does not count.
      microbatch: examples whose gradients are held at once; bounds the memory, not the result.

    Returns:
      As params: the Fisher information of each entry, zero everywhere for a client without examples.

    Raises:
      InvalidInput: if microbatch is not positive.

    Reference:
      Yang, Huang, Ye. FedAS: Bridging Inconsistency in Personalized Federated Learning. CVPR 2024. Eq. 5-6, Fig. 3a.
    """
    whole("microbatch", microbatch)

    def gradient(example):
        rows = jax.tree.map(lambda leaf: leaf[None], example)
        return jax.grad(_deployed_loss(model))(params, rows)

    def add(total, batch):
        # The loss of a padding row has no gradient.
        return jax.tree.map(
            lambda sums, leaf: sums + jnp.sum(jnp.square(leaf), axis=0), total, jax.vmap(gradient)(batch)
        )

    # One epoch visits every real example once; the order does not matter for a sum.
    start = jax.tree.map(jnp.zeros_like, params)
    total = LocalSGD(batch_size=microbatch, epochs=1).fold(jax.random.key(0), start, data, add)
    return jax.tree.map(lambda leaf: leaf / jnp.maximum(jnp.sum(data.mask), 1), total)


def trace_weights(
    traces: jax.Array, normalization: str = "proportional", present: jax.Array | None = None
) -> jax.Array:
    """Aggregation weights alpha' [M] >= 0 with sum 1, from Fisher traces alpha [M] (FedAS, Eq. 7 and Fig. 6a).

    Args:
      traces: [M], nonnegative.
      normalization: "proportional": alpha / sum alpha (Eq. 7); "softmax": softmax(alpha); "min_max":
        alpha - min alpha, normalized to sum to 1. If all traces are equal, so are the weights.
      present: [M], bool; absent clients get weight zero. None means that all are present.
    """
    present = jnp.ones(traces.shape, bool) if present is None else present
    if normalization == "proportional":
        return normalize(traces, present)
    if normalization == "softmax":
        return jax.nn.softmax(jnp.where(present, traces, -jnp.inf))
    if normalization == "min_max":
        return normalize(traces - jnp.min(jnp.where(present, traces, jnp.inf)), present)
    raise ValueError(f"normalization must be proportional, softmax or min_max, not {normalization!r}")
