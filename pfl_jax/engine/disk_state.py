"""States of all clients in one file, for federations whose states exceed the machine's memory.

A row is the state of one client. The file has planes, each with a place for the row of every client, and a table says
in which plane each client's row is. A round writes a row over the one before it, unless a checkpoint that is kept
refers to that; then it goes into the first plane that none refers to. So a checkpoint copies no rows: it stores the
table with a digest of each row. What a killed process wrote after that is where the checkpoint's table does not look.
With k checkpoints there are at most k + 1 planes, and the file has holes where nothing was written.

The file is read and written at positions instead of being mapped into memory: a full disk or a file that was cut short
is then an error in one line, where access to a mapping would end the process. Tensorstore's OCDBT, measured with 200 of
20,000 rows of 26 KB a commit, takes 200 ms and grows with each commit, as it removes nothing; this file takes 30 ms.
"""

import dataclasses
import io
import os
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfl_jax.atomic_write import cannot_write
from pfl_jax.base import PyTree
from pfl_jax.data.rows import LazyArray
from pfl_jax.errors import InvalidInput

NAME = "clients.rows"
"""Name of the file in a run's folder."""

BLOCK = 256
"""Number of clients whose rows are in memory, or on the device, at a time when all are read."""


class _File(io.FileIO):
    """File that is closed when no table has it any more."""

    def __del__(self) -> None:
        self.close()


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """States of all clients after a round. The next round may write over them: reading them is then an error.

    Attributes:
      file: that has the rows.
      path: where it was created.
      row: layout of a row, with a field for each leaf.
      planes: uint8 [N], plane of each client's row.
      digests: uint32 [N], CRC-32 of each client's row.
      saved: `planes` of each checkpoint that is not removed yet, shared by all tables of the file.
    """

    file: _File
    path: Path
    row: np.dtype
    planes: np.ndarray
    digests: np.ndarray
    saved: list[np.ndarray]

    @classmethod
    def create(cls, folder: Path | None, shapes: Sequence[Any], clients: int) -> "Table":
        """Table for N clients in a new file; each row has to be filled once.

        Args:
          folder: of the file; one that is there is replaced. None for a temporary file, which ends with the process.
          shapes: objects with the shape [..., *] and the dtype of each leaf; the leading axis does not count.
          clients: N.

        Raises:
          CannotWrite: the file cannot be created.
        """
        if folder is None:
            with tempfile.TemporaryDirectory() as name:
                # The file is removed with its folder, and stays open.
                return cls.create(Path(name), shapes, clients)
        try:
            # Tables of an earlier file still read it.
            (folder / NAME).unlink(missing_ok=True)
            file = _File(folder / NAME, "x+")
        except OSError as error:
            raise cannot_write(folder / NAME, error) from None
        return cls(file, folder / NAME, _row(shapes), np.zeros(clients, np.uint8), np.zeros(clients, np.uint32), [])

    @classmethod
    def open(cls, path: Path, shapes: Sequence[Any], digests: np.ndarray, saved: Sequence[np.ndarray]) -> "Table":
        """Table of a checkpoint.

        Args:
          path: of the file.
          shapes: see `create`.
          digests: of the checkpoint.
          saved: `planes` of the checkpoints that there were, the last of them its own.

        Raises:
          InvalidInput: the file cannot be opened.
        """
        try:
            # The models of a run can be exported from a folder that nobody may write into.
            file = _File(path, "r+" if os.access(path, os.W_OK) else "r")
        except OSError as error:
            raise InvalidInput(f"the clients' states cannot be read from {path}: {error.strerror or error}") from None
        return cls(file, path, _row(shapes), saved[-1], digests, list(saved))

    def leaves(self) -> list["DiskLeaf"]:
        """Leaves [N, ...] of the states of all clients."""
        return [DiskLeaf(self, name) for name in self.row.names or ()]

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Rows [B] of clients `ids` [B], of type `row`.

        Raises:
          InvalidInput: a row is not as it was written, or a later round has written over it.
        """
        rows = np.zeros(len(ids), self.row)
        for client, content in zip(ids.tolist(), _bytes(rows), strict=True):
            # Where the file is too short there are zeros.
            os.preadv(self.file.fileno(), [content], self._position(client))
            if zlib.crc32(content) != self.digests[client]:
                raise InvalidInput(
                    f"the state of client {client} in {self.path} is damaged, or a later round has replaced it"
                )
        return rows

    def check(self) -> None:
        """Read all rows; InvalidInput as `read`."""
        for ids in blocks(np.arange(len(self.planes))):
            self.read(ids)

    def fill(self, ids: np.ndarray, leaves: Sequence[np.ndarray]) -> None:
        """Write the rows of clients `ids` [B], from leaves [B, ...]; CannotWrite on failure."""
        rows = np.zeros(len(ids), self.row)
        for name, leaf in zip(self.row.names or (), leaves, strict=True):
            rows[name] = leaf
        try:
            for client, content in zip(ids.tolist(), _bytes(rows), strict=True):
                view, start = memoryview(content), self._position(client)
                while view:
                    count = os.pwrite(self.file.fileno(), view, start)
                    view, start = view[count:], start + count
                self.digests[client] = zlib.crc32(content)
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def replaced(self, ids: np.ndarray, leaves: Sequence[np.ndarray]) -> "Table":
        """Table with other rows for clients `ids` [B], from leaves [B, ...]; see the class for this one."""
        saved = np.array([planes[ids] for planes in self.saved], np.uint8).reshape(-1, len(ids))
        free = [(saved != plane).all(axis=0) for plane in range(len(saved) + 1)]
        planes = self.planes.copy()
        planes[ids] = np.where((saved == planes[ids]).any(axis=0), np.argmax(free, axis=0), planes[ids])
        table = dataclasses.replace(self, planes=planes, digests=self.digests.copy())
        table.fill(ids, leaves)
        return table

    def saved_with_this(self, count: int) -> list[np.ndarray]:
        """`saved` once this table is the newest of at most `count` checkpoints."""
        return [*self.saved, self.planes][-count:]

    def is_in(self, folder: Path) -> bool:
        """Whether its file is the one in a folder: one that was replaced is still open here."""
        path = folder / NAME
        return path.exists() and os.path.samestat(os.fstat(self.file.fileno()), path.stat())

    def _position(self, client: int) -> int:
        return (int(self.planes[client]) * len(self.planes) + client) * self.row.itemsize


class DiskLeaf(LazyArray):
    """One leaf [N, ...] of the states of all clients on disk; `np.asarray` and an index read it.

    Args:
      table: of the states.
      name: of its field in a row.
    """

    def __init__(self, table: Table, name: str):
        self.table: Table = table
        kind = table.row[name]

        def read(ids):
            # Whole rows, of which this leaf may be a small part.
            return np.concatenate([table.read(part)[name] for part in blocks(ids)])

        super().__init__((len(table.planes), *kind.shape), kind.base, read)

    def __repr__(self) -> str:
        return f"DiskLeaf({self.dtype} {list(self.shape)} in {self.table.path})"


def table_of(clients: PyTree) -> Table | None:
    """Table of the clients' states; None if they are in memory, or there are none."""
    return next((leaf.table for leaf in jax.tree.leaves(clients) if isinstance(leaf, DiskLeaf)), None)


def blocks(ids: np.ndarray) -> list[np.ndarray]:
    """Client numbers [B], `BLOCK` at a time."""
    return np.split(ids, range(BLOCK, len(ids), BLOCK))


def _row(shapes: Sequence[Any]) -> np.dtype:
    """Layout of a row, with the fields "0", "1", ..., each aligned as its type asks."""
    fields = [(str(index), leaf.dtype, tuple(leaf.shape[1:])) for index, leaf in enumerate(shapes)]
    return np.dtype(fields, align=True)


def _bytes(rows: np.ndarray) -> np.ndarray:
    """The same memory as bytes, uint8 [B, size of a row]."""
    return rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize)
