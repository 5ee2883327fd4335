"""Held-out subset of a client's examples, the same in every round."""

import jax
import jax.numpy as jnp


def fixed_subset(mask: jax.Array, share: float | jax.Array, *, keep_rest: bool = True) -> jax.Array:
    """Random subset of the real examples, the same in every call.

    Methods that judge models on held-out examples must never train on them in another round. The choice depends on
    the rows alone, neither on a key nor on the padding.

    Args:
      mask: [n], bool; the real examples.
      share: of them, in [0, 1]; rounded, at least one example.
      keep_rest: leave at least one example to the complement where there are two; False lets a share of 1 take all.

    Returns:
      [n], bool; the complement is `mask & ~subset`.
    """
    (n,) = mask.shape
    count = jnp.sum(mask, dtype=jnp.int32)
    most = count - 1 if keep_rest else count
    size = jnp.clip(jnp.round(share * count).astype(jnp.int32), 1, jnp.maximum(most, 1))
    bits = jax.random.bits(jax.random.key(0), (n,), jnp.uint32)
    rows = jnp.arange(n, dtype=jnp.int32)
    _, _, order = jax.lax.sort((~mask, bits, rows), num_keys=2)
    rank = jnp.zeros((n,), jnp.int32).at[order].set(rows, unique_indices=True)
    return mask & (rank < size)
