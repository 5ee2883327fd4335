"""Graphs between the clients of a round without a server, and the matrices by which clients mix their models."""

import re
from typing import Annotated, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Cohort, PRNGKey, PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.aggregation import normalize_weights, weighted_mean
from pfl_jax.primitives.fingerprints import fingerprint_key, order_by_fingerprint
from pfl_jax.validation import AboveZero, Check, Words

NAMED = Words(("ring", "torus", "exponential", "full"), {"erdos_renyi": AboveZero})
"""Graphs that have a name."""


def _check(name: str, value: Any) -> None:
    if not re.fullmatch(r"\d{1,9}-\d{1,9}( \d{1,9}-\d{1,9})*", str(value)):
        try:
            NAMED.parse(value, name)
        except InvalidInput as error:
            raise InvalidInput(f"{error}; or links between clients, as in '0-1 1-2'") from None


Topology: TypeAlias = Annotated[str, Check(_check)]
"""Graph of a round's clients: a name of `NAMED`, or links between clients by number, as in "0-1 1-2 2-0"."""


def graph_links(
    topology: str, key: PRNGKey, identities: jax.Array, cohort: Cohort, *, directed: bool = False
) -> jax.Array:
    """Links of a round's graph, bool [M, M]: whether client i receives from client j, never from itself.

    A graph with a name has the present clients as nodes, 0 to m - 1 in the order of the fingerprints of their data: a
    client's place does not depend on its number, and the graph closes around absent clients. Node r sends to

        ring          r + 1 (mod m)
        torus         its neighbors below and to the right, on a grid of m nodes as nearly square as m allows
        exponential   r + 1, r + 2, r + 4, ... (mod m)
        full          all
        erdos_renyi:P  each other node with probability P, drawn anew in every round

    and "0-1 1-2" are links between clients by number; a round has the links whose two ends are present. Without
    `directed` each link goes both ways.

    Args:
      topology: see `Topology`.
      key: key of the round, for random graphs.
      identities: fingerprint of each client's data [M, WORDS].
      cohort: clients of the round.
      directed: whether a link has one direction; from the first to the second client of a pair by number.

    Raises:
      InvalidInput: unknown text, a client that the federation does not have, or links by number that do not connect all
        of its clients (if directed: in which one client cannot reach another).
    """
    _check("topology", topology)
    name, _, number = topology.partition(":")
    count = jnp.maximum(jnp.sum(cohort.present), 1)
    place = jnp.argsort(order_by_fingerprint(identities, cohort.present))
    ahead = (place[:, None] - place) % count
    if name == "full":
        links = jnp.ones(ahead.shape, bool)
    elif name == "ring":
        links = ahead == 1
    elif name == "exponential":
        links = (ahead & (ahead - 1)) == 0
    elif name == "torus":
        heights = jnp.arange(1, int(len(place) ** 0.5) + 1)
        height = jnp.max(jnp.where((count % heights == 0) & (heights**2 <= count), heights, 1))
        width = count // height
        down = (place[:, None] // width - place // width) % height
        right = (place[:, None] % width - place % width) % width
        links = ((down == 1) & (right == 0)) | ((down == 0) & (right == 1))
    elif name == "erdos_renyi":
        of_pair = jax.vmap(jax.vmap(_drawn, in_axes=(None, None, 0)), in_axes=(None, 0, None))
        links = (of_pair(key, identities, identities) < float(number)) & (directed | (place[:, None] > place))
    else:
        links = jnp.asarray(_table(topology, cohort.num_clients, directed))[cohort.clients][:, cohort.clients]
    links = links if directed else links | links.T
    return links & cohort.present & cohort.present[:, None] & ~jnp.eye(len(place), dtype=bool)


def _drawn(key: PRNGKey, receiver: jax.Array, sender: jax.Array) -> jax.Array:
    return jax.random.uniform(fingerprint_key(fingerprint_key(key, receiver), sender))


def _table(topology: str, num_clients: int, directed: bool) -> np.ndarray:
    """Links by number as bool [N, N], receivers in rows."""
    pairs = [tuple(map(int, pair.split("-"))) for pair in topology.split()]
    if (most := max(map(max, pairs))) >= num_clients:
        raise InvalidInput(f"topology links client {most}, and the {num_clients} clients are 0 to {num_clients - 1}")
    table = np.zeros((num_clients, num_clients), bool)
    for sender, receiver in pairs:
        table[receiver, sender] = True
    # Imported now: every command would wait for scipy.sparse.
    from scipy.sparse import csgraph

    parts, _ = csgraph.connected_components(table, directed=directed, connection="strong")
    if parts > 1:
        raise InvalidInput(f"topology does not connect the {num_clients} clients: it has {parts} separate parts")
    return table


def is_connected(links: jax.Array, present: jax.Array) -> jax.Array:
    """Whether each present client reaches all others along links: bool scalar.

    Args:
      links: bool [M, M], receivers in rows.
      present: bool [M].
    """
    reached = links | jnp.eye(len(present), dtype=bool)
    for _ in range(max(1, (len(present) - 1).bit_length())):
        reached = (reached.astype(jnp.float32) @ reached.astype(jnp.float32)) > 0
    return jnp.all(reached | ~(present & present[:, None]))


def metropolis_weights(links: jax.Array) -> jax.Array:
    """Symmetric, doubly stochastic mixing matrix W of an undirected graph: [M, M].

        W_ij = 1 / (1 + max(deg_i, deg_j)) for linked i and j;   W_ii = 1 - sum_j W_ij

    Args:
      links: symmetric bool [M, M], without links of a client to itself.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> from pfl_jax.primitives import topology
      >>> line = jnp.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]], bool)
      >>> print(np.float64(topology.metropolis_weights(line)).round(2))
      [[0.67 0.33 0.  ]
       [0.33 0.33 0.33]
       [0.   0.33 0.67]]
    """
    degrees = jnp.sum(links, axis=1)
    weights = jnp.where(links, 1 / (1.0 + jnp.maximum(degrees[:, None], degrees)), 0.0)
    return weights + jnp.diag(1 - jnp.sum(weights, axis=1))


def push_weights(links: jax.Array) -> jax.Array:
    """Column-stochastic matrix P of a directed graph: P_ij = 1 / (1 + out-degree of j) for j = i and j's receivers.

    Args:
      links: bool [M, M], receivers in rows, without links of a client to itself.
    """
    sends = links | jnp.eye(len(links), dtype=bool)
    return sends / jnp.sum(sends, axis=0)


def consensus_distance(models: PyTree, present: jax.Array) -> jax.Array:
    """Root mean squared distance of the present clients' models to their mean: sqrt(mean_i ||w_i - mean||^2).

    Args:
      models: trees stacked to leaves [M, ...].
      present: bool [M].
    """
    weights = normalize_weights(present.astype(jnp.float32), present)
    apart = jax.tree.map(lambda leaf, mean: jnp.square(leaf - mean), models, weighted_mean(weights, models))
    return jnp.sqrt(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(weighted_mean(weights, apart))))
