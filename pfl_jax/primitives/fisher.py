"""Diagonal of the empirical Fisher information and its trace, from per-example gradients.

The trace does not need individual gradients, only their squared norms; see `pfl_jax.primitives.per_example`.
"""

import inspect
from typing import Literal

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, KeylessLoss, PRNGKey, PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.aggregation import normalize_weights
from pfl_jax.primitives.examples import map_examples
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.per_example import add_norms, have_closed_form, replace_operations
from pfl_jax.validation import Count, check_shapes, check_value

MICROBATCH = 16
"""Examples whose gradients are computed at once; 16 was the fastest of 8 to 64 on a CPU, for both papers' networks."""


def squared_gradient_norms(loss: KeylessLoss, params: PyTree, batch: ClientData) -> jax.Array:
    """Squared norms [B] of the per-example gradients, ||grad_w loss(w, example b)||^2.

    They have a closed form if every parameter is used once: as the matrix of a dense layer, the kernel of a
    convolution, the bias or the scale of either or of a normalization, of any library. Otherwise, as for embeddings,
    recurrent cells and layers inside `jax.checkpoint`, each example's gradient is computed.

    Args:
      loss: (params, ClientData) -> scalar, the mean of one term for each example, like `cross_entropy`.
      params: any pytree; the norm is over all leaves.
      batch: B examples; all count as real.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax import ClientData
      >>> from pfl_jax.primitives import squared_gradient_norms
      >>> batch = ClientData(x=jnp.array([1.0, 2.0]), y=jnp.array([0.0, 0.0]), mask=jnp.array([True, True]))
      >>> print(squared_gradient_norms(lambda w, b: jnp.mean(w * b.x - b.y), jnp.array(5.0), batch))
      [1. 4.]
    """
    _check_loss(loss)
    batch = batch._replace(mask=jnp.ones_like(batch.mask))
    return _norms(loss, params, batch, closed=have_closed_form(loss, params, batch, batch.mask.shape[0]))


def _check_loss(loss: KeylessLoss) -> None:
    """Raise InvalidInput for a loss that needs a key."""
    try:
        inspect.signature(loss).bind(None, None)
    except TypeError:
        raise InvalidInput(
            "the Fisher information needs a loss (params, batch) -> scalar, such as deployed_loss(model), not a loss "
            "of local training, which takes a key"
        ) from None
    except ValueError:
        # A function without a signature.
        pass


def _norms(loss: KeylessLoss, params: PyTree, batch: ClientData, *, closed: bool) -> jax.Array:
    """Squared norms [B], from one backward pass where they have a closed form."""
    if not closed:
        return _norms_one_by_one(loss, params, batch)
    (examples,) = batch.mask.shape

    def summed_loss(probe: jax.Array) -> jax.Array:
        return examples * replace_operations(loss, params, batch, lambda operation: add_norms(operation, probe))

    return jax.grad(summed_loss)(jnp.zeros(examples))


def _norms_one_by_one(loss: KeylessLoss, params: PyTree, batch: ClientData) -> jax.Array:
    """Squared norms [B] from a gradient of each example."""

    def squared_norm(example: ClientData) -> jax.Array:
        gradient = jax.grad(loss)(params, jax.tree.map(lambda leaf: leaf[None], example))
        return sum((jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)), jnp.zeros(()))

    return jax.vmap(squared_norm)(batch)


def fisher_trace(
    loss: KeylessLoss,
    params: PyTree,
    data: ClientData,
    *,
    microbatch: int = MICROBATCH,
    reduction: Literal["mean", "sum"] = "mean",
) -> jax.Array:
    """Trace of the diagonal of the empirical Fisher information on one client's examples.

        tr diag F = (1/n) sum_b || grad_w log p_w(y_b | x_b) ||^2

    where -log p_w(y_b | x_b) is the loss of example b, and w are all parameters. See `squared_gradient_norms`.

    Args:
      loss: (params, ClientData) -> scalar, the mean of one term for each example, such as `deployed_loss(model)`.
      params: w, any pytree.
      data: the client's examples [n, ...]; padding does not count.
      microbatch: examples processed at once; bounds the memory, not the result.
      reduction: mean over the real examples, or their sum; 0 without real examples.

    Returns:
      A scalar.

    Raises:
      InvalidInput: if the reduction is neither "mean" nor "sum", or microbatch is not positive.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from pfl_jax import ClientData
      >>> from pfl_jax.primitives import cross_entropy, fisher_trace
      >>> def loss(w, batch):  # softmax regression
      ...     return cross_entropy(batch.x @ w, batch.y, batch.mask)
      >>> one = ClientData(x=jnp.ones((1, 3)), y=jnp.array([0]), mask=jnp.array([True]))
      >>> print(fisher_trace(loss, jnp.zeros((3, 2)), one))  # three rows (-1/2, 1/2)
      1.5

    Reference:
      Yang, Huang, Ye. FedAS: Bridging Inconsistency in Personalized Federated Learning. CVPR 2024. Eq. 5-6.
    """
    if reduction not in ("mean", "sum"):
        raise InvalidInput(f"reduction must be mean or sum, not {reduction!r}")
    check_value("microbatch", microbatch, Count)
    _check_loss(loss)

    closed = have_closed_form(loss, params, data, min(microbatch, data.mask.shape[0]))

    def norms(rows: ClientData) -> jax.Array:
        return _norms(loss, params, rows._replace(mask=jnp.ones_like(rows.mask)), closed=closed)

    values = map_examples(norms, data, data.mask, batch_size=microbatch)
    total = jnp.sum(jnp.where(data.mask, values, 0.0))
    return total if reduction == "sum" else total / jnp.maximum(jnp.sum(data.mask), 1)


def batch_fisher_trace(
    key: PRNGKey, loss: KeylessLoss, params: PyTree, data: ClientData, training: LocalTraining
) -> jax.Array:
    """Sum over an epoch of the squared norms of mini-batch gradients.

        sum over batches B of || (1/|B|) sum_{b in B} grad_w log p_w(y_b | x_b) ||^2

    FedAS's released code uses this in place of the trace of the Fisher information. The two differ: gradients of the
    examples of a batch partly cancel, so this sum depends on the batch size and, unless it is fixed, on the order.

    Args:
      key: key of the order of the examples, if the training shuffles.
      loss: (params, ClientData) -> scalar, as in `fisher_trace`.
      params: w, any pytree.
      data: the client's examples [n, ...], not augmented.
      training: recipe that defines the mini-batches.

    Returns:
      A scalar.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from pfl_jax import ClientData, LocalTraining
      >>> from pfl_jax.primitives import batch_fisher_trace, cross_entropy
      >>> def loss(w, batch):
      ...     return cross_entropy(batch.x @ w, batch.y, batch.mask)
      >>> two = ClientData(x=jnp.ones((2, 3)), y=jnp.array([0, 1]), mask=jnp.ones(2, bool))
      >>> # Opposite gradients:
      >>> print(batch_fisher_trace(jax.random.key(0), loss, jnp.zeros((3, 2)), two, LocalTraining(batch_size=2)))
      0.0

    Reference:
      The released code of Yang, Huang, Ye. FedAS. CVPR 2024.
    """

    def add(total, batch, _):
        gradient = jax.grad(loss)(params, batch)
        return total + sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient))

    # Where training is private, the trace still is not: fedas declares this in its `pfl_jax.base.Privacy`.
    one_epoch = training.replace(epochs=1, augment=None, dp_clip=None, dp_noise=0.0)
    return one_epoch.fold(key, jnp.zeros(()), data, add)


def diagonal_fisher(loss: KeylessLoss, params: PyTree, data: ClientData, *, microbatch: int = MICROBATCH) -> PyTree:
    """Diagonal of the empirical Fisher information on one client's examples.

        diag F = (1/n) sum_b ( grad_w log p_w(y_b | x_b) )^2,  elementwise

    The sum of its entries is `fisher_trace`, which needs no individual gradients and is much faster.

    Args:
      loss: (params, ClientData) -> scalar, as in `fisher_trace`; its gradient on padding alone is zero.
      params: w, any pytree.
      data: the client's examples [n, ...]; padding does not count.
      microbatch: examples whose gradients are held at once; bounds the memory, not the result.

    Returns:
      A tree like params: the Fisher information of each entry, zero everywhere for a client without examples.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax import ClientData
      >>> from pfl_jax.primitives import diagonal_fisher, masked_mean
      >>> batch = ClientData(x=jnp.array([[1.0, 0.0], [3.0, 2.0]]), y=jnp.zeros(2), mask=jnp.array([True, True]))
      >>> print(diagonal_fisher(lambda w, b: masked_mean(b.x @ w, b.mask), jnp.zeros(2), batch))
      [5. 2.]

    Raises:
      InvalidInput: if microbatch is not positive.

    Reference:
      Yang, Huang, Ye. FedAS: Bridging Inconsistency in Personalized Federated Learning. CVPR 2024. Eq. 5-6, Fig. 3a.
    """
    check_value("microbatch", microbatch, Count)
    _check_loss(loss)

    def gradient(example):
        return jax.grad(loss)(params, jax.tree.map(lambda leaf: leaf[None], example))

    def add(total, batch, _):
        return jax.tree.map(
            lambda sums, leaf: sums + jnp.sum(jnp.square(leaf), axis=0), total, jax.vmap(gradient)(batch)
        )

    # One epoch visits every real example once; the order does not matter for a sum.
    start = jax.tree.map(jnp.zeros_like, params)
    total = LocalTraining(batch_size=microbatch, epochs=1).fold(jax.random.key(0), start, data, add)
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

    Returns:
      [M]; NaN where the trace of a present client is NaN.
    """
    check_shapes(traces=(traces, "M"))
    present = jnp.ones(traces.shape, bool) if present is None else present
    if normalization == "proportional":
        return normalize_weights(traces, present)
    if normalization == "softmax":
        return jax.nn.softmax(jnp.where(present, traces, -jnp.inf))
    if normalization == "min_max":
        return normalize_weights(traces - jnp.min(jnp.where(present, traces, jnp.inf)), present)
    raise InvalidInput(f"normalization must be proportional, softmax or min_max, not {normalization!r}")
