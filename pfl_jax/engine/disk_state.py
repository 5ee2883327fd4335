"""States of all clients in one file, for federations whose states exceed the machine's memory.

A row is the state of one client, leaf after leaf, and stands in a slot of the file. A table says which slot is whose.
New rows go into free slots and give a new table; a slot is free only if no table refers to it (shadow paging). So a
state never changes while anyone holds it, and a checkpoint copies no rows: once the file's content is on the disk, it
stores the table with a digest of each row. What a killed process wrote after that stands in slots that the checkpoint's
table does not have, so there is nothing to replay and nothing to undo. The price is room for the rows that were written
since the oldest checkpoint that is kept. A log of undone rows would write every row twice, and sync it in each round.
"""

import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfl_jax.atomic_write import cannot_write
from pfl_jax.base import PyTree
from pfl_jax.engine.rows_file import NAME, Layout, RowsFile
from pfl_jax.errors import InvalidInput

BLOCK = 256
"""Number of clients whose rows are in memory at a time when all are read."""


class Missing(ValueError):
    """The file of the clients' states cannot be opened."""


class Table:
    """States of all clients at one moment: where each client's row is, and its digest.

    Attributes:
      file: that has the rows.
      slots: int32 [N], slot of each client's row.
      digests: uint32 [N], CRC-32 of each client's row.
    """

    def __init__(self, file: RowsFile, slots: np.ndarray, digests: np.ndarray):
        self.file, self.slots, self.digests = file, slots, digests
        file.hold(self)

    @classmethod
    def create(cls, folder: Path | None, shapes: Sequence[Any], clients: int) -> "Table":
        """Table for N clients in a new file; each row has to be filled once. See `RowsFile.create` for errors.

        Args:
          folder: see `RowsFile.create`.
          shapes: objects with the shape [..., *] and the dtype of each leaf; the leading axis does not count.
          clients: N.
        """
        layout = Layout.of([(leaf.shape[1:], leaf.dtype) for leaf in shapes])
        file = RowsFile.create(folder, layout, clients)
        return cls(file, file.take(clients), np.zeros(clients, np.uint32))

    def leaves(self) -> list["DiskLeaf"]:
        """Leaves [N, ...] of the states of all clients."""
        return [DiskLeaf(self, index) for index in range(len(self.file.layout.shapes))]

    def tree(self, structure: Any) -> PyTree:
        """States of all clients as a tree of this structure."""
        return jax.tree.unflatten(structure, self.leaves())

    def read(self, ids: np.ndarray) -> list[np.ndarray]:
        """Leaves [B, ...] of the states of clients `ids` [B].

        Raises:
          InvalidInput: a row is not as it was written.
        """
        rows = self._rows(ids)
        return [self.file.layout.unpack(rows, index) for index in range(len(self.file.layout.shapes))]

    def read_leaf(self, index: int, ids: np.ndarray) -> np.ndarray:
        """One leaf [B, ...] of the states of clients `ids` [B]; InvalidInput as `read`."""
        return self.file.layout.unpack(self._rows(ids), index)

    def _rows(self, ids: np.ndarray) -> np.ndarray:
        rows = self.file.read(self.slots[ids])
        for client, row, digest in zip(ids.tolist(), rows, self.digests[ids].tolist(), strict=True):
            if zlib.crc32(row) != digest:
                place = self.file.path or "the temporary file of the clients' states"
                raise InvalidInput(f"{place} is damaged: the state of client {client} is not as it was written")
        return rows

    def check(self) -> None:
        """Read all rows; InvalidInput if one is not as it was written."""
        for start in range(0, len(self.slots), BLOCK):
            self._rows(np.arange(start, min(start + BLOCK, len(self.slots))))

    def fill(self, ids: np.ndarray, leaves: Sequence[np.ndarray]) -> None:
        """Write the first rows of clients `ids` [B], from leaves [at least B, ...], into their slots."""
        rows = self.file.layout.pack(leaves, len(ids))
        self.file.write(rows, self.slots[ids])
        self.digests[ids] = [zlib.crc32(row) for row in rows]

    def replaced(self, ids: np.ndarray, leaves: Sequence[np.ndarray]) -> "Table":
        """Table with other rows for clients `ids` [B], from leaves [at least B, ...]; this table stays as it is."""
        slots = self.slots.copy()
        slots[ids] = self.file.take(len(ids))
        table = Table(self.file, slots, self.digests.copy())
        table.fill(ids, leaves)
        return table


class DiskLeaf:
    """One leaf [N, ...] of the states of all clients on disk; `np.asarray` and an index read it.

    Args:
      table: of the states.
      index: number of the leaf.
    """

    def __init__(self, table: Table, index: int):
        self.table, self.index = table, index

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [N, ...]."""
        return (len(self.table.slots), *self.table.file.layout.shapes[self.index])

    @property
    def dtype(self) -> np.dtype:
        """Type of its numbers."""
        return self.table.file.layout.dtypes[self.index]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.table.slots)

    def __getitem__(self, index: Any) -> np.ndarray:
        if isinstance(index, tuple):
            raise IndexError("one index chooses clients: leaf[clients][:, 0] in place of leaf[clients, 0]")
        ids = np.arange(len(self))[index if isinstance(index, slice) else np.asarray(index)]
        return self.table.read_leaf(self.index, np.ravel(ids)).reshape((*np.shape(ids), *self.shape[1:]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("the states on disk have to be copied into memory")
        return self[:].astype(self.dtype if dtype is None else dtype, copy=False)

    def __repr__(self) -> str:
        return f"DiskLeaf({self.dtype} {list(self.shape)} in {self.table.file.path or 'a temporary file'})"


def table_of(clients: PyTree) -> Table | None:
    """Table of the clients' states; None if they are in memory, or there are none."""
    tables = {id(leaf.table): leaf.table for leaf in jax.tree.leaves(clients) if isinstance(leaf, DiskLeaf)}
    return next(iter(tables.values()), None)


def in_memory(clients: PyTree) -> PyTree:
    """The clients' states with leaves [N, ...] in memory; those on disk are read once."""
    table = table_of(clients)
    if table is None:
        return clients
    leaves = [np.empty(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(clients)]
    for start in range(0, len(table.slots), BLOCK):
        ids = np.arange(start, min(start + BLOCK, len(table.slots)))
        for leaf, rows in zip(leaves, table.read(ids), strict=True):
            leaf[ids] = rows
    return jax.tree.unflatten(jax.tree.structure(clients), leaves)


def reopened(table: Table, folder: Path | None) -> Table | None:
    """The same states, ready for new rows in the file of a folder; None if they are elsewhere.

    Args:
      table: of the states.
      folder: where the states shall be; None for a temporary file.
    """
    if not table.file.is_in(folder):
        return None
    if folder is None or table.file.is_writable:
        return table
    try:
        file = RowsFile.open(folder / NAME, table.file.layout, write=True)
    except OSError as error:
        raise cannot_write(folder / NAME, error) from None
    return Table(file, table.slots, table.digests)


def reference(table: Table | None, folder: Path) -> dict[str, Any] | None:
    """What a file beside the rows needs to find them again; None if they are not in this folder.

    Args:
      table: of the states.
      folder: of the run.

    Returns:
      "file": its name; "leaves": shape and type of each leaf of one client; "slots" and "digests" [N].
    """
    if table is None or table.file.path is None or table.file.path.parent.resolve() != folder.resolve():
        return None
    layout = table.file.layout
    kinds = [[list(shape), str(dtype)] for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)]
    return {"file": table.file.path.name, "leaves": kinds, "slots": table.slots, "digests": table.digests}


def resolve(found: dict[str, Any], folder: Path) -> Table:
    """States from the result of `reference`; Missing if the file cannot be opened."""
    path = folder / Path(str(found["file"])).name
    layout = Layout.of([(shape, dtype) for shape, dtype in found["leaves"]])
    try:
        file = RowsFile.open(path, layout)
    except OSError as error:
        raise Missing(f"the clients' states cannot be read from {path}: {error.strerror or error}") from None
    return Table(file, np.asarray(found["slots"], np.int32), np.asarray(found["digests"], np.uint32))
