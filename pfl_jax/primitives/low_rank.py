"""Low-rank adapters in a tree of parameters: the pairs A [inputs, r] and B [r, outputs] of `pfl_jax.networks.adapters`.

An adapter is a dictionary {"lora_a": A, "lora_b": B}; it adds A B to a kernel, up to the scale of its model.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import PRNGKey, PyTree

A, B, RESIDUAL = "lora_a", "lora_b", "residual"
"""Names in an adapter; the residual [inputs, outputs] is added to A B."""


def is_adapter(tree: PyTree) -> bool:
    """Whether `tree` is one adapter with both an A and a B."""
    return isinstance(tree, Mapping) and A in tree and B in tree


def map_adapters(fn: Callable[..., Any], tree: PyTree, *others: PyTree) -> PyTree:
    """Copy of a tree of parameters in which fn has been applied to each adapter; everything else is unchanged.

    Args:
      fn: (adapter of tree, subtree of each other tree at the same path) -> its replacement.
      tree: parameters.
      others: trees with the same paths down to the adapters.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import low_rank
      >>> params = {"fc1": {"lora_a": jnp.ones((3, 2)), "lora_b": jnp.ones((2, 4))}, "bias": 0.0}
      >>> low_rank.map_adapters(lambda adapter: adapter["lora_a"].shape, params)
      {'bias': 0.0, 'fc1': (3, 2)}
    """

    def mapped(one, *rest):
        return fn(one, *rest) if is_adapter(one) else one

    return jax.tree.map(mapped, tree, *others, is_leaf=is_adapter)


def find_adapters(tree: PyTree) -> list[dict[str, jax.Array]]:
    """All adapters of a `tree` of parameters, in the order of `map_adapters`."""
    return [one for one in jax.tree.leaves(tree, is_leaf=is_adapter) if is_adapter(one)]


def keep_ranks(tree: PyTree, start: jax.Array | int, end: jax.Array | int) -> PyTree:
    """Copy of a tree of parameters whose adapters have zeros in all ranks but [start, end), which may be traced.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import low_rank
      >>> params = {"fc": {"lora_a": jnp.ones((1, 3)), "lora_b": jnp.ones((3, 1))}}
      >>> print(low_rank.keep_ranks(params, 0, 2)["fc"]["lora_a"])
      [[1. 1. 0.]]
    """

    def kept(adapter):
        ranks = jnp.arange(adapter[B].shape[0])
        inside = (ranks >= start) & (ranks < end)
        return {A: jnp.where(inside, adapter[A], 0.0), B: jnp.where(inside[:, None], adapter[B], 0.0)}

    return map_adapters(kept, tree)


def within_ranks(optimizer: optax.GradientTransformation, end: jax.Array | int) -> optax.GradientTransformation:
    """Optimizer that moves only the first `end` ranks of adapters, and moves all other parameters like the given one.

    Adapters that are zero in the other ranks stay so, even if gradients have noise in all ranks, from private training
    or from an optimizer.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from pfl_jax.primitives import low_rank
      >>> params = {"fc": {"lora_a": jnp.zeros((1, 3)), "lora_b": jnp.zeros((3, 1))}}
      >>> ones = {"fc": {"lora_a": jnp.ones((1, 3)), "lora_b": jnp.ones((3, 1))}}
      >>> optimizer = low_rank.within_ranks(optax.sgd(1.0), 2)
      >>> updates, _ = optimizer.update(ones, optimizer.init(params), params)
      >>> print(updates["fc"]["lora_a"])
      [[-1. -1.  0.]]
    """
    return optax.chain(optimizer, optax.stateless(lambda updates, params: keep_ranks(updates, 0, end)))


def draw_rank(key: PRNGKey, tree: PyTree, smallest: int) -> jax.Array:
    """Rank of a client, int32, drawn by a `key`: from `smallest` to a `tree`'s largest, which also replaces a
    larger `smallest`; 1 without adapters."""
    largest = max((one[B].shape[0] for one in find_adapters(tree)), default=1)
    return jax.random.randint(key, (), min(smallest, largest), largest + 1)


def adapter_product(adapter: Mapping[str, jax.Array]) -> jax.Array:
    """A B of an `adapter`, [inputs, outputs]."""
    return jnp.matmul(adapter[A], adapter[B], precision="highest")


def mean_product(weights: jax.Array, adapters: Mapping[str, jax.Array]) -> jax.Array:
    """Weighted sum of products, sum_i weights_i A_i B_i [inputs, outputs].

    Args:
      weights: [M].
      adapters: adapters of M clients, stacked: A [M, inputs, r] and B [M, r, outputs].
    """
    return jnp.einsum("m,mir,mro->io", weights, adapters[A], adapters[B], precision="highest")


def adapter_squared_norm(adapter: Mapping[str, jax.Array]) -> jax.Array:
    """Squared Frobenius norm of A B of an `adapter`, without computing the product: trace (A' A) (B B')."""
    gram = [jnp.matmul(*pair, precision="highest") for pair in ((adapter[A].T, adapter[A]), (adapter[B], adapter[B].T))]
    return jnp.maximum(jnp.sum(gram[0] * gram[1]), 0.0)


def mix_adapters(share: jax.Array | float, left: PyTree, right: PyTree) -> PyTree:
    """Parameters whose adapters add share A_l B_l + (1 - share) A_r B_r, of twice the rank; the rest is interpolated.

    Args:
      share: weight of the left parameters.
      left: parameters.
      right: parameters with the same adapters.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import low_rank
      >>> one = {"lora_a": jnp.array([[1.0]]), "lora_b": jnp.array([[2.0]])}
      >>> other = {"lora_a": jnp.array([[3.0]]), "lora_b": jnp.array([[1.0]])}
      >>> print(low_rank.adapter_product(low_rank.mix_adapters(0.25, one, other)))
      [[2.75]]
    """

    def mixture(one, other):
        if not is_adapter(one):
            return share * one + (1 - share) * other
        b = jnp.concatenate([share * one[B], (1 - share) * other[B]])
        return {A: jnp.concatenate([one[A], other[A]], axis=1), B: b}

    return jax.tree.map(mixture, left, right, is_leaf=is_adapter)
