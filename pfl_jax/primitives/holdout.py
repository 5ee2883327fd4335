"""Held-out subset of a client's examples, the same in every round."""

import jax
import jax.numpy as jnp


def fixed_subset(mask: jax.Array, share: float | jax.Array, *, keep_rest: bool = True) -> jax.Array:
    """Random subset of the real examples, the same in every call.

    For methods that judge models on held-out examples, which must not be trained on in another round. The choice
    depends neither on a key nor on the padding.

    Args:
      mask: [n], bool; the real examples.
      share: share of the real examples, in [0, 1]; the size is rounded and at least 1.
      keep_rest: whether at least one of several examples stays outside the subset; False lets a share of 1 take all.

    Returns:
      The subset as bool [n]; the other examples are `mask & ~subset`.
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
