"""Combinations of a cohort's trees, stacked along a leading client axis."""

from string import ascii_lowercase

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, Mean, PyTree
from pfl_jax.primitives.tree import running_statistics
from pfl_jax.validation import check_shapes


def normalize_weights(weights: jax.Array, present: jax.Array | None = None) -> jax.Array:
    """Nonnegative weights [M] scaled to sum to one; equal if all are zero, NaN where a present client's weight is NaN.

    Args:
      weights: [M].
      present: [M], bool; absent clients get weight zero. None means that all are present.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import aggregation
      >>> print(aggregation.normalize_weights(jnp.array([1.0, 3.0])), aggregation.normalize_weights(jnp.zeros(2)))
      [0.25 0.75] [0.5 0.5]
    """
    present = jnp.ones(weights.shape, bool) if present is None else present
    weights = jnp.where(present, weights, jnp.float32(0))
    total = jnp.sum(weights)
    # NaN stays: it must not be replaced.
    nothing = total <= 0
    return jnp.where(nothing, present / jnp.sum(present), weights / jnp.where(nothing, 1.0, total))


def size_weights(counts: jax.Array) -> jax.Array:
    """Weights beta_i = n_i / sum_j n_j [M] for example counts [M] (McMahan et al. 2017; FedPAC, Eq. 18).

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import aggregation
      >>> print(aggregation.size_weights(jnp.array([10, 30])))
      [0.25 0.75]
    """
    check_shapes(counts=(counts, "M"))
    return normalize_weights(counts.astype(jnp.float32))


def mean_by_size(value: PyTree, data: ClientData) -> Mean:
    """`Mean` weighted by a client's number of examples: the mean over the cohort is sum_i beta_i value_i.

    Args:
      value: value that the client sends, a tree of float arrays.
      data: the client's examples.
    """
    return Mean(value, jnp.sum(data.mask, dtype=jnp.float32))


def mean_by_class(values: jax.Array, counts: jax.Array) -> Mean:
    """`Mean` over clients of per-class vectors, weighted by examples of the class.

    Args:
      values: vectors of each client and class [M, K, d].
      counts: examples of each client and class, the weights [M, K].

    Returns:
      The mean [K, d], zero for classes without examples, and the sum of the weights [K].
    """
    total = jnp.sum(counts, axis=0)
    sums = jnp.einsum("mk,mkd->kd", counts, values, precision="highest")
    return Mean(sums / jnp.where(total > 0, total, 1.0)[:, None], total)


def weighted_mean(weights: jax.Array, trees: PyTree) -> PyTree:
    """Weighted sum sum_i weights_i tree_i for weights [M] and trees stacked to leaves [M, ...].

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import aggregation
      >>> models = {"w": jnp.array([[0.0, 4.0], [8.0, 0.0]])}  # two clients
      >>> print(aggregation.weighted_mean(jnp.array([0.25, 0.75]), models)["w"])
      [6. 1.]
    """
    _check_stacked(trees, weights=(weights, "M"))
    return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, axes=1, precision="highest"), trees)


def follow_mixture(share: jax.Array, own: PyTree, mixture: PyTree, statistics: PyTree) -> list[jax.Array]:
    """New running statistics of one model of a mixture, with which the mixture's statistics move toward new ones.

    Args:
      share: weight of the model in the mixture; its statistics change by this share of the mixture's change.
      own: the model.
      mixture: weighted sum of this and other models.
      statistics: new statistics of the mixture, from a pass in training.
    """
    parts = running_statistics(own), running_statistics(mixture), jax.tree.leaves(statistics)
    return [leaf + share * (new - old) for leaf, old, new in zip(*parts, strict=True)]


def mix(matrix: jax.Array, trees: PyTree) -> PyTree:
    """Combination sum_j matrix_ij tree_j for every client i: leaves [M, ...] to leaves [M, ...].

    Args:
      matrix: [M, M], rows usually on the simplex (FedPAC, Eq. 4).
      trees: a tree of leaves [M, ...].

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import aggregation
      >>> heads = {"w": jnp.array([[0.0, 4.0], [8.0, 0.0]])}
      >>> print(aggregation.mix(jnp.array([[1.0, 0.0], [0.5, 0.5]]), heads)["w"])
      [[0. 4.]
       [4. 2.]]
    """
    _check_stacked(trees, matrix=(matrix, "NM"))
    return jax.tree.map(lambda leaf: jnp.tensordot(matrix, leaf, axes=1, precision="highest"), trees)


def _check_stacked(trees: PyTree, **given: tuple[jax.Array, str]) -> None:
    """Raise InvalidInput unless all leaves of `trees` have the first axis M of the given arrays."""
    for leaf in jax.tree.leaves(trees):
        check_shapes(**given, leaf=(leaf, f"M{ascii_lowercase[: jnp.ndim(leaf) - 1]}"))
