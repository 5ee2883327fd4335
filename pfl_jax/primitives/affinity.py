"""Affinity between clients (FedFomo): how useful other clients' models were, and the choice of models to download."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import PRNGKey
from pfl_jax.primitives.fingerprints import WORDS, same_fingerprint


class Affinity(NamedTuple):
    """Nonzero entries of a client's row p_i of the affinity matrix.

    The table has a fixed length and identifies clients by fingerprint, so that a method needs neither the number of
    clients nor their ids.

    Attributes:
      peers: [R, WORDS], uint32; `pfl_jax.primitives.fingerprints` of each other client's data.
      values: [R], p_ij; zero marks an unused entry.
    """

    peers: jax.Array
    values: jax.Array


def empty_affinity(length: int) -> Affinity:
    """Empty table of a client, with `length` unused entries."""
    return Affinity(jnp.zeros((length, WORDS), jnp.uint32), jnp.zeros(length))


def look_up(affinity: Affinity, peers: jax.Array) -> jax.Array:
    """Affinities p_ij [M] for the fingerprints `peers` [M, WORDS]; zero for fingerprints that are not in the table."""
    return jnp.sum(jnp.where(same_fingerprint(affinity.peers, peers[:, None]), affinity.values, 0.0), axis=1)


def add_affinity(affinity: Affinity, peers: jax.Array, weights: jax.Array) -> Affinity:
    """Add weights [M] >= 0 to p_ij for the fingerprints `peers` [M, WORDS]; a full table keeps the largest entries."""
    known = same_fingerprint(affinity.peers[:, None], peers) & (affinity.values[:, None] > 0)
    values = jnp.concatenate(
        [
            affinity.values + jnp.sum(jnp.where(known, weights, 0.0), axis=1),
            jnp.where(jnp.any(known, axis=0), 0.0, weights),
        ]
    )
    values, kept = jax.lax.top_k(values, affinity.values.shape[0])
    return Affinity(jnp.concatenate([affinity.peers, peers])[kept], values)


def choose_peers(
    key: PRNGKey, affinity: jax.Array, excluded: jax.Array, epsilon: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Epsilon-greedy choice, without replacement, of the clients to download from.

    Each choice is a random remaining client with probability epsilon, otherwise the remaining client with the largest
    affinity; ties are broken at random.

    Args:
      key: key of the random choices.
      affinity: p_ij [M] for the clients of the cohort.
      excluded: [M], bool; True for clients that must not be chosen, such as the client itself.
      epsilon: probability of a random choice, in [0, 1].
      count: number of choices.

    Returns:
      Positions in the cohort, [count] int32, and whether each is valid, [count] bool: False once no client remains.
    """

    def pick(left, key):
        draw_key, explore_key = jax.random.split(key)
        best = affinity == jnp.max(jnp.where(left, affinity, -jnp.inf))
        eligible = left & (best | jax.random.bernoulli(explore_key, epsilon))
        index = jnp.argmax(jnp.where(eligible, jax.random.uniform(draw_key, left.shape), -1.0)).astype(jnp.int32)
        return left.at[index].set(False), (index, jnp.any(left))

    _, choices = jax.lax.scan(pick, ~excluded, jax.random.split(key, count))
    return choices
