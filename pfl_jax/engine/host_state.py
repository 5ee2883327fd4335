"""Engine with the clients' states in host memory or on disk, for federations whose states exceed the device's memory.

In a round the cohort's rows are moved to the device and back. The rows of all clients are initialized and evaluated in
blocks; with states on disk (`pfl_jax.engine.disk_state`) memory holds no more than these. With data sharded by client
(`pfl_jax.engine.sharding`), a process stores only the rows of its own clients, and evaluation sends no rows between
processes. Results equal those of `pfl_jax.engine.rounds.build`, because both use the functions of
`pfl_jax.engine.rounds.Stages`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pfl_jax.base import Method, MethodSchedule, PRNGKey, PyTree, Scores, State
from pfl_jax.engine.cohort import Settings
from pfl_jax.engine.disk_state import Table, in_memory, reopened, table_of
from pfl_jax.engine.programs import kept
from pfl_jax.engine.rounds import Engine, Federation, Stages
from pfl_jax.engine.sharding import (
    OwnerRows,
    PlacedData,
    gather_rows,
    own_clients,
    own_rows,
    replicate,
    shard_rows,
)
from pfl_jax.primitives.metrics import no_scores

BLOCK = 256
"""Number of clients whose rows are on the device at a time when all clients are initialized, evaluated or gathered."""


class Disk(NamedTuple):
    """Place of states on disk.

    Attributes:
      folder: of the file; None for a temporary file, which is gone with the process.
    """

    folder: Path | None = None


class _Programs(NamedTuple):
    """The stages of a run, compiled; `init_own` leaves the rows with the devices that own the clients."""

    init_server: Callable[..., Any]
    init_clients: Callable[..., Any]
    init_own: Callable[..., Any]
    sample: Callable[..., Any]
    gather_all: Callable[..., Any]
    train: Callable[..., Any]
    evaluated: Callable[..., Any]
    score: Callable[..., Any]
    score_new: Callable[..., Any]


@kept
def _programs(
    method: Method | MethodSchedule, settings: Settings, mesh: Mesh | None, num_labels: int, donate: bool
) -> _Programs:
    """Programs of the runs with these arguments, see `build`."""
    stages = Stages(method, settings, mesh, num_labels=num_labels)
    jit = partial(jax.jit, out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()))
    return _Programs(
        init_server=jit(stages.init_server),
        init_clients=jit(stages.init_clients),
        init_own=jax.jit(Stages(method, settings, keep_sharded=True).init_clients),
        sample=jit(stages.sample, static_argnums=3),
        gather_all=jit(gather_rows),
        train=jit(stages.train, donate_argnums=(1, 5, 6) if donate else (5, 6)),
        evaluated=jit(stages.evaluated),
        score=jit(stages.evaluate),
        score_new=jit(stages.evaluate_new),
    )


def build(
    method: Method | MethodSchedule,
    settings: Settings,
    mesh: Mesh | None = None,
    *,
    disk: Disk | None = None,
    donate: bool = False,
    block: int | None = None,
    num_labels: int = 0,
) -> Engine:
    """Engine of a method with clients' states in host memory or on disk.

    It has the functions of `pfl_jax.engine.rounds.build(...).jit(mesh)`, but they cannot be traced. The leaves of
    State.clients and State.trained are NumPy arrays [N, ...]; with `disk`, those of State.clients are
    `pfl_jax.engine.disk_state.DiskLeaf`. With `PlacedData`, State.clients has only the rows of the process's own
    clients.

    Args:
      method, settings, mesh: see `pfl_jax.engine.simulate.run`.
      disk: place of the clients' states on disk; None for host memory.
      donate: whether `round` writes into the arrays of its input state; otherwise it copies those of all clients.
        States on disk are not written into either way.
      block: number of clients that are initialized or evaluated at once; None for `BLOCK`.
      num_labels: see `pfl_jax.engine.rounds.Stages`.
    """
    block = BLOCK if block is None else block
    programs = _programs(method, settings.of_programs(), mesh, num_labels, donate)

    def init(data, key):
        server = programs.init_server(data, key)
        clients = _allocate(
            data, jax.eval_shape(programs.init_clients, data, server, key, jnp.arange(1, dtype=jnp.int32)), disk
        )
        for ids, size in _blocks(np.arange(data.num_clients, dtype=np.int32), block):
            if isinstance(data, PlacedData):
                own, rows = own_rows(
                    programs.init_own(data, server, key, replicate(ids, mesh)), ids, _owners(data, ids)
                )
                _fill(clients, _positions(data, own), rows)
            else:
                _fill(clients, ids[:size], programs.init_clients(data, server, key, replicate(ids, mesh)))
        return State(server, clients, _unscored(data), key, replicate(jnp.zeros((), jnp.int32), mesh))

    def round_(data, state, size):
        cohort = programs.sample(data, state.key, state.round, size)
        ids = np.asarray(cohort.clients)
        rows, scores = _fetch(data, state.clients, ids, mesh), replicate(_rows(state.trained, ids), mesh)
        rows = programs.gather_all(rows) if isinstance(rows, OwnerRows) else rows
        server, rows, trained, outcome = programs.train(
            data, state.server, state.key, state.round, cohort, rows, scores
        )
        owned = np.isin(ids, own_clients(data)) if isinstance(data, PlacedData) else slice(None)
        own = jax.tree.map(lambda leaf: np.asarray(leaf)[owned], rows)
        clients = _replaced(state.clients, _positions(data, ids[owned]), own, donate=donate)
        all_trained = _replaced(state.trained, ids, trained, donate=donate)
        return State(server, clients, all_trained, state.key, state.round + 1), outcome

    # The clients that are evaluated in all rounds of a run: to draw some of very many takes longer than a round.
    drawn: list[tuple[Federation, PRNGKey, np.ndarray]] = []

    def evaluate(data, state):
        if not drawn or drawn[0][0] is not data or drawn[0][1] is not state.key:
            drawn[:] = [(data, state.key, np.asarray(programs.evaluated(data, state.key)))]
        scores = _unscored(data)
        for ids, size in _blocks(drawn[0][2], block):
            rows = _fetch(data, state.clients, ids, mesh)
            block_scores = programs.score(data, state.server, state.key, state.round, replicate(ids, mesh), rows)
            _write(scores, ids[:size], block_scores)
        return scores

    def evaluate_new(data, state):
        return programs.score_new(data, state.server, state.key, state.round)

    return Engine(init, round_, evaluate, evaluate_new)


def _unscored(data: Federation) -> Scores:
    return no_scores(data.num_clients, validation=data.validation_count is not None)


def _fetch(data: Federation, clients: PyTree, ids: np.ndarray, mesh: Mesh | None) -> PyTree:
    """Rows of some clients on the devices: replicated, or as `OwnerRows` for sharded data."""
    if isinstance(data, PlacedData):
        return shard_rows(lambda own: _rows(clients, _positions(data, own)), ids, _owners(data, ids), data.mesh)
    return replicate(_rows(clients, ids), mesh)


def _allocate(data: Federation, shapes: PyTree, disk: Disk | None) -> PyTree:
    """Uninitialized rows of all clients that this process stores, given the shapes of one row."""
    count = len(own_clients(data)) if isinstance(data, PlacedData) else data.num_clients
    if disk is not None and jax.tree.leaves(shapes):
        return Table.create(disk.folder, jax.tree.leaves(shapes), count).tree(jax.tree.structure(shapes))
    return jax.tree.map(lambda leaf: np.empty((count, *leaf.shape[1:]), leaf.dtype), shapes)


def copy(state: State, data: Federation, mesh: Mesh | None = None, disk: Disk | None = None) -> State:
    """Independent copy of a state, with the clients' rows on the host.

    Args:
      state: state with the rows of all clients, or of this process's own clients.
      data: the federation's data; with `PlacedData` a process keeps the rows of its own clients only.
      mesh: devices for all other parts of the state.
      disk: place of the rows on disk; None for host memory. Rows that are there already are not copied.
    """
    if disk is not None and jax.tree.leaves(state.clients):
        clients = _on_disk(state.clients, data, disk)
    elif table_of(state.clients) is not None:
        clients = in_memory(state.clients)
    else:
        owned = own_clients(data) if isinstance(data, PlacedData) else slice(None)

        def own_part(leaf):
            return np.array(np.asarray(leaf)[owned if len(leaf) == data.num_clients else slice(None)])

        clients = jax.tree.map(own_part, state.clients)
    trained = jax.tree.map(np.array, state.trained)
    server, key, number = replicate(jax.tree.map(jnp.copy, (state.server, state.key, state.round)), mesh)
    return State(server, clients, trained, key, number)


def _on_disk(clients: PyTree, data: Federation, disk: Disk) -> PyTree:
    """Rows of all clients on disk, in one process."""
    table, structure = table_of(clients), jax.tree.structure(clients)
    there = None if table is None else reopened(table, disk.folder)
    if there is not None:
        return there.tree(structure)
    if table is None:
        clients = jax.tree.map(np.asarray, clients)
    copied = Table.create(disk.folder, jax.tree.leaves(clients), data.num_clients)
    for ids, size in _blocks(np.arange(data.num_clients, dtype=np.int32), BLOCK):
        copied.fill(ids[:size], jax.tree.leaves(_rows(clients, ids)))
    return copied.tree(structure)


def whole(state: State, data: Federation, *, block: int | None = None) -> State | None:
    """State with the rows of all clients in the first process, None in the others; a collective call.

    Args:
      state: state from the engine of `build`, or of `pfl_jax.engine.rounds.build`, which already has all rows.
      data: the federation's data.
      block: number of clients whose rows are sent at once; None for `BLOCK`.
    """
    first = jax.process_index() == 0
    if not isinstance(data, PlacedData) or not data.mesh.is_multi_process or _on_devices(state.clients):
        return state if first else None
    gather_all = jax.jit(gather_rows, out_shardings=NamedSharding(data.mesh, PartitionSpec()))
    count = data.num_clients if first else 0
    clients = jax.tree.map(lambda leaf: np.empty((count, *leaf.shape[1:]), leaf.dtype), state.clients)
    for ids, size in _blocks(np.arange(data.num_clients, dtype=np.int32), BLOCK if block is None else block):
        rows = gather_all(_fetch(data, state.clients, ids, None))
        if first:
            _write(clients, ids[:size], rows)
    return state._replace(clients=clients) if first else None


def _on_devices(tree: PyTree) -> bool:
    return any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))


def _positions(data: Federation, clients: np.ndarray) -> np.ndarray:
    """Positions of this process's own clients among its stored rows."""
    if not isinstance(data, PlacedData):
        return clients
    return np.searchsorted(own_clients(data), clients)


def _owners(data: PlacedData, clients: np.ndarray) -> np.ndarray:
    """Devices [M] that own clients [M]."""
    return np.asarray(data.owner)[clients]


def _blocks(ids: np.ndarray, block: int) -> Iterator[tuple[np.ndarray, int]]:
    """Blocks of ids of equal length, each with its number of real ids; the last block is padded with its last id."""
    width = min(block, len(ids))
    for start in range(0, len(ids), width):
        part = ids[start : start + width]
        yield np.pad(part, (0, width - len(part)), mode="edge"), len(part)


def _rows(tree: PyTree, ids: np.ndarray) -> PyTree:
    table = table_of(tree)
    if table is not None:
        return jax.tree.unflatten(jax.tree.structure(tree), table.read(ids))
    return jax.tree.map(lambda leaf: np.asarray(leaf)[ids], tree)


def _fill(clients: PyTree, ids: np.ndarray, rows: PyTree) -> None:
    """Write the first rows of some clients."""
    table = table_of(clients)
    if table is None:
        _write(clients, ids, rows)
    else:
        table.fill(ids, jax.tree.leaves(rows))


def _replaced(tree: PyTree, ids: np.ndarray, rows: PyTree, *, donate: bool) -> PyTree:
    """Tree with other rows `ids`; on disk, or with `donate`, the others are not copied."""
    table = table_of(tree)
    if table is not None:
        return table.replaced(ids, jax.tree.leaves(rows)).tree(jax.tree.structure(tree))
    # Read-only arrays, such as views of JAX arrays, are always copied before they are written into.
    tree = jax.tree.map(_writable if donate else np.array, tree)
    _write(tree, ids, rows)
    return tree


def _write(tree: PyTree, ids: np.ndarray, rows: PyTree) -> None:
    def write(leaf, row):
        leaf[ids] = np.asarray(row)[: len(ids)]

    jax.tree.map(write, tree, rows)


def _writable(leaf: np.ndarray | jax.Array) -> np.ndarray:
    leaf = np.asarray(leaf)
    return leaf if leaf.flags.writeable else leaf.copy()
