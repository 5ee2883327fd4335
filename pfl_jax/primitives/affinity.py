"""Affinity between clients (FedFomo): how useful others were to a client, and whom it downloads from next."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import PRNGKey


class Affinity(NamedTuple):
    """Row p_i of the affinity matrix of a client, without its zeros.

    A table of fixed length, so that a method needs to know neither how many clients there are nor their numbers.

    Attributes:
      peers: [R], uint32; the other clients' `pfl_jax.primitives.fingerprint`s.
      values: [R], p_ij; zero marks a free place.
    """

    peers: jax.Array
    values: jax.Array


def no_affinity(length: int) -> Affinity:
    """Empty table of a client, with this many places."""
    return Affinity(jnp.zeros(length, jnp.uint32), jnp.zeros(length, jnp.float32))


def look_up(affinity: Affinity, peers: jax.Array) -> jax.Array:
    """Affinities p_ij [M] to the clients with these fingerprints [M], zero for unknown ones."""
    return jnp.sum(jnp.where(affinity.peers == peers[:, None], affinity.values, 0.0), axis=1)


def remember(affinity: Affinity, peers: jax.Array, weights: jax.Array) -> Affinity:
    """Add weights [M] >= 0 to the entries of these fingerprints [M] in p_i; the largest entries are kept."""
    known = (affinity.peers[:, None] == peers) & (affinity.values[:, None] > 0)
    values = jnp.concatenate(
        [
            affinity.values + jnp.sum(jnp.where(known, weights, 0.0), axis=1),
            jnp.where(jnp.any(known, axis=0), 0.0, weights),
        ]
    )
    values, kept = jax.lax.top_k(values, affinity.values.shape[0])
    return Affinity(jnp.concatenate([affinity.peers, peers])[kept], values)


def choose(
    key: PRNGKey, affinity: jax.Array, own: jax.Array, epsilon: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Epsilon-greedy choice without replacement of whom to download from.

    Each choice takes a random one of those left with probability epsilon, else one with the largest affinity; equals
    are drawn at random.

    Args:
      key: draws.
      affinity: p_ij [M] of the cohort.
      own: [M], bool; True for the client itself, which is not to choose.
      epsilon: in [0, 1].
      count: how many to choose.

    Returns:
      Positions in the cohort, [count] int32, and whether each is a choice, [count] bool: False once none is left.
    """

    def pick(left, key):
        draw_key, explore_key = jax.random.split(key)
        best = affinity == jnp.max(jnp.where(left, affinity, -jnp.inf))
        eligible = left & (best | jax.random.bernoulli(explore_key, epsilon))
        index = jnp.argmax(jnp.where(eligible, jax.random.uniform(draw_key, left.shape), -1.0)).astype(jnp.int32)
        return left.at[index].set(False), (index, jnp.any(left))

    _, chosen = jax.lax.scan(pick, ~own, jax.random.split(key, count))
    return chosen
