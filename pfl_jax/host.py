"""An engine whose clients' states lie in the host's memory: for more clients than a device can hold the states of.

The cohort's rows go to the device for a round and come back after it. All clients' rows are made, and evaluated, in
blocks. The functions are those of `pfl_jax.engine.pieces`, so that the results are the same.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pfl_jax.base import Method, PyTree, Scores, State
from pfl_jax.engine import Engine, Settings, by_size, pieces, train_without_diverged

BLOCK = 256
"""Clients whose rows are on the device at once where all clients are visited."""


def build(
    method: Method,
    settings: Settings,
    mesh: Mesh | None = None,
    *,
    block: int | None = None,
    skip_diverged: bool = False,
) -> Engine:
    """The engine of a method with states on the host.

    The same functions as `pfl_jax.engine.build(...).jit(mesh)` has, but for calls only, not for tracing. The leaves of
    State.clients and State.trained are NumPy arrays [N, ...], which `round` writes into.

    Args:
      method, settings, mesh: see `pfl_jax.simulate.run`.
      block: clients that are initialised or evaluated at once, by default `BLOCK`.
      skip_diverged: leave out of a round the clients whose work is not finite.
    """
    block = BLOCK if block is None else block
    parts = pieces(method, settings, mesh)
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    jit = partial(jax.jit, out_shardings=everywhere)
    start_server, start_clients, score = jit(parts.start_server), jit(parts.start_clients), jit(parts.score)
    sample = jit(parts.sample, static_argnums=3)

    adapt_all = jit(parts.adapt)
    skipping = train_without_diverged(parts, jit)

    @partial(jit, donate_argnums=(1, 5))
    def together(data, server, key, index, cohort, rows):
        # As an array the number of clients would be unknown while tracing.
        cohort = cohort._replace(num_clients=data.train_count.shape[0])
        return parts.train(data, server, key, index, cohort, rows)

    def train(data, server, key, index, cohort, rows, scores):
        if skip_diverged:
            return skipping(data, server, key, index, cohort, rows, scores)
        return together(data, server, key, index, cohort, rows)

    def put(tree: PyTree) -> PyTree:
        return jax.device_put(tree, everywhere)

    def init(data, key):
        data, key = put((data, key))
        num_clients = data.train_count.shape[0]
        server = start_server(data, key)
        shapes = jax.eval_shape(parts.start_clients, data, server, key, jnp.arange(1, dtype=jnp.int32))
        clients = jax.tree.map(lambda leaf: np.empty((num_clients, *leaf.shape[1:]), leaf.dtype), shapes)
        for ids, size in _blocks(np.arange(num_clients, dtype=np.int32), block):
            _write(clients, ids[:size], start_clients(data, server, key, put(ids)))
        never = Scores(*(np.full(num_clients, np.nan, np.float32) for _ in Scores._fields))
        return State(server, clients, never, key, put(jnp.zeros((), jnp.int32)))

    def round_(data, state, size):
        cohort = sample(data, state.key, state.round, size)
        ids = np.asarray(cohort.clients)
        rows, scores = put(_rows((state.clients, state.trained), ids))
        server, rows, trained, outcome = train(data, state.server, state.key, state.round, cohort, rows, scores)
        # Arrays of a caller, or those of JAX, cannot be written into.
        clients, all_trained = jax.tree.map(_writable, (state.clients, state.trained))
        _write((clients, all_trained), ids, (rows, trained))
        return State(server, clients, all_trained, state.key, state.round + 1), outcome

    def evaluate(data, state):
        scores = Scores(*(np.empty(data.train_count.shape[0], np.float32) for _ in Scores._fields))
        for ids, size in _blocks(np.asarray(by_size(data)), block):
            rows = put(_rows(state.clients, ids))
            _write(scores, ids[:size], score(data, state.server, state.key, state.round, put(ids), rows))
        return scores

    def adapt(data, state):
        return adapt_all(data, state.server, state.key, state.round)

    return Engine(init, round_, evaluate, adapt)


def copy(state: State) -> State:
    """A state of one's own, with the clients' part on the host."""
    clients, trained = jax.tree.map(np.array, (state.clients, state.trained))
    server, key, number = jax.tree.map(jnp.copy, (state.server, state.key, state.round))
    return State(server, clients, trained, key, number)


def _blocks(ids: np.ndarray, block: int) -> Iterator[tuple[np.ndarray, int]]:
    """Equal blocks of ids, and how many count: the last one is filled up with its last id."""
    width = min(block, len(ids))
    for start in range(0, len(ids), width):
        part = ids[start : start + width]
        yield np.pad(part, (0, width - len(part)), mode="edge"), len(part)


def _rows(tree: PyTree, ids: np.ndarray) -> PyTree:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[ids], tree)


def _write(tree: PyTree, ids: np.ndarray, rows: PyTree) -> None:
    def one(leaf, row):
        leaf[ids] = np.asarray(row)[: len(ids)]

    jax.tree.map(one, tree, rows)


def _writable(leaf: np.ndarray | jax.Array) -> np.ndarray:
    leaf = np.asarray(leaf)
    return leaf if leaf.flags.writeable else leaf.copy()
