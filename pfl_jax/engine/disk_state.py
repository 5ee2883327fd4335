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

import io
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfl_jax.atomic_write import cannot_write
from pfl_jax.base import PyTree
from pfl_jax.errors import InvalidInput

NAME = "clients.rows"
"""Name of the file in a run's folder."""

BLOCK = 256
"""Number of clients whose rows are in memory at a time when all are read."""


class _File(io.FileIO):
    """File that is closed when no table has it any more."""

    def __del__(self) -> None:
        self.close()


class Table:
    """States of all clients after a round. The next round may write over them: reading them is then an error.

    Attributes:
      file: that has the rows.
      path: of the file; None for a file without a name, which is gone with the process.
      row: layout of a row, with a field for each leaf.
      planes: uint8 [N], plane of each client's row.
      digests: uint32 [N], CRC-32 of each client's row.
      kept: `planes` of each checkpoint that is kept, shared by all tables of the file.
    """

    def __init__(
        self,
        file: io.FileIO,
        path: Path | None,
        row: np.dtype,
        planes: np.ndarray,
        digests: np.ndarray,
        kept: list[np.ndarray],
    ):
        self.file, self.path, self.row = file, path, row
        self.planes, self.digests, self.kept = planes, digests, kept

    @classmethod
    def create(cls, folder: Path | None, shapes: Sequence[Any], clients: int) -> "Table":
        """Table for N clients in a new file; each row has to be filled once.

        Args:
          folder: of the file; one that is there is replaced. None for a file without a name among the temporary files.
          shapes: objects with the shape [..., *] and the dtype of each leaf; the leading axis does not count.
          clients: N.

        Raises:
          InvalidInput: the disk has no room for the rows.
          CannotWrite: the file cannot be created.
        """
        place, row = Path(tempfile.gettempdir()) if folder is None else folder, _row(shapes)
        try:
            wanted, free = clients * row.itemsize, shutil.disk_usage(place).free
            if wanted > free:
                raise InvalidInput(
                    f"the states of {clients} clients take {wanted / 2**30:,.1f} GiB, and the disk of {place} has "
                    f"{free / 2**30:,.1f} GiB left: make room there, or name another folder"
                )
            if folder is None:
                with tempfile.TemporaryFile() as unnamed:
                    file = _File(os.dup(unnamed.fileno()), "r+")
            else:
                # Tables of an earlier file still read it.
                (folder / NAME).unlink(missing_ok=True)
                file = _File(folder / NAME, "x+")
        except OSError as error:
            raise cannot_write(place / NAME, error) from None
        path = None if folder is None else place / NAME
        return cls(file, path, row, np.zeros(clients, np.uint8), np.zeros(clients, np.uint32), [])

    @classmethod
    def open(cls, path: Path, shapes: Sequence[Any], digests: np.ndarray, kept: Sequence[np.ndarray]) -> "Table":
        """Table of a checkpoint, for reading; see `reopened` for writing.

        Args:
          path: of the file.
          shapes: see `create`.
          digests: of the checkpoint.
          kept: `planes` of the checkpoints that were kept, the last of them its own.

        Raises:
          InvalidInput: the file cannot be opened.
        """
        try:
            with path.open("rb") as regular:
                file = _File(os.dup(regular.fileno()), "r")
        except OSError as error:
            raise InvalidInput(f"the clients' states cannot be read from {path}: {error.strerror or error}") from None
        return cls(file, path, _row(shapes), kept[-1], digests, list(kept))

    def leaves(self) -> list["DiskLeaf"]:
        """Leaves [N, ...] of the states of all clients."""
        return [DiskLeaf(self, name) for name in self.row.names or ()]

    def tree(self, structure: Any) -> PyTree:
        """States of all clients as a tree of this structure."""
        return jax.tree.unflatten(structure, self.leaves())

    def read(self, ids: np.ndarray) -> list[np.ndarray]:
        """Leaves [B, ...] of the states of clients `ids` [B].

        Raises:
          InvalidInput: a row is not as it was written, or a later round has written over it.
        """
        rows = self.rows(ids)
        return [np.ascontiguousarray(rows[name]) for name in self.row.names or ()]

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Rows [B] of clients `ids` [B], of type `row`; InvalidInput as `read`."""
        rows = np.zeros(len(ids), self.row)
        for client, content in zip(ids.tolist(), _bytes(rows), strict=True):
            # Where the file is too short there are zeros.
            os.preadv(self.file.fileno(), [content], self._position(client))
            if zlib.crc32(content) != self.digests[client]:
                place = self.path or "the temporary file"
                raise InvalidInput(
                    f"the state of client {client} in {place} is damaged, or a later round has replaced it"
                )
        return rows

    def check(self) -> None:
        """Read all rows; InvalidInput as `read`."""
        for ids in self.blocks():
            self.rows(ids)

    def blocks(self) -> list[np.ndarray]:
        """Numbers of all clients, `BLOCK` at a time."""
        return np.split(np.arange(len(self.planes)), range(BLOCK, len(self.planes), BLOCK))

    def fill(self, ids: np.ndarray, leaves: Sequence[np.ndarray]) -> None:
        """Write the rows of clients `ids` [B], from leaves [at least B, ...]; CannotWrite on failure."""
        rows = np.zeros(len(ids), self.row)
        for name, leaf in zip(self.row.names or (), leaves, strict=True):
            rows[name] = np.asarray(leaf)[: len(ids)]
        try:
            for client, content in zip(ids.tolist(), _bytes(rows), strict=True):
                view, start = memoryview(content), self._position(client)
                while view:
                    count = os.pwrite(self.file.fileno(), view, start)
                    view, start = view[count:], start + count
                self.digests[client] = zlib.crc32(content)
        except OSError as error:
            raise cannot_write(self.path or Path(tempfile.gettempdir(), NAME), error) from None

    def replaced(self, ids: np.ndarray, leaves: Sequence[np.ndarray]) -> "Table":
        """Table with other rows for clients `ids` [B], from leaves [at least B, ...]; see the class for this one."""
        kept = np.array([planes[ids] for planes in self.kept], np.uint8).reshape(-1, len(ids))
        free = [(kept != plane).all(axis=0) for plane in range(len(kept) + 1)]
        planes = self.planes.copy()
        planes[ids] = np.where((kept == planes[ids]).any(axis=0), np.argmax(free, axis=0), planes[ids])
        table = Table(self.file, self.path, self.row, planes, self.digests.copy(), self.kept)
        table.fill(ids, leaves)
        return table

    def keep(self, count: int) -> list[np.ndarray]:
        """`kept` with this table as the newest of at most `count` checkpoints."""
        return [*self.kept, self.planes][-count:]

    def is_in(self, folder: Path | None) -> bool:
        """Whether its file is the one that a run in the folder uses, for None that it has no name."""
        if self.path is None or folder is None:
            return self.path is None and folder is None
        try:
            # A file that was replaced is still open here.
            return os.path.samestat(os.fstat(self.file.fileno()), (folder / NAME).stat())
        except OSError:
            return False

    def _position(self, client: int) -> int:
        return (int(self.planes[client]) * len(self.planes) + client) * self.row.itemsize


class DiskLeaf:
    """One leaf [N, ...] of the states of all clients on disk; `np.asarray` and an index read it.

    Args:
      table: of the states.
      name: of its field in a row.
    """

    def __init__(self, table: Table, name: str):
        self.table, self._name = table, name
        kind = table.row[name]
        self.shape: tuple[int, ...] = (len(table.planes), *kind.shape)
        self.dtype: np.dtype = kind.base
        self.ndim, self.size = len(self.shape), math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        if isinstance(index, tuple):
            raise IndexError("one index chooses clients: leaf[clients][:, 0] in place of leaf[clients, 0]")
        ids = np.arange(len(self))[index if isinstance(index, slice) else np.asarray(index)]
        rows = self.table.rows(np.ravel(ids))
        return np.ascontiguousarray(rows[self._name]).reshape((*np.shape(ids), *self.shape[1:]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("the states on disk have to be copied into memory")
        return self[:].astype(self.dtype if dtype is None else dtype, copy=False)

    def __repr__(self) -> str:
        return f"DiskLeaf({self.dtype} {list(self.shape)} in {self.table.path or 'a temporary file'})"


def table_of(clients: PyTree) -> Table | None:
    """Table of the clients' states; None if they are in memory, or there are none."""
    return next((leaf.table for leaf in jax.tree.leaves(clients) if isinstance(leaf, DiskLeaf)), None)


def in_memory(clients: PyTree) -> PyTree:
    """The clients' states with leaves [N, ...] in memory; those on disk are read once."""
    table = table_of(clients)
    if table is None:
        return clients
    leaves = [np.empty(leaf.shape, leaf.dtype) for leaf in table.leaves()]
    for ids in table.blocks():
        for leaf, rows in zip(leaves, table.read(ids), strict=True):
            leaf[ids] = rows
    return jax.tree.unflatten(jax.tree.structure(clients), leaves)


def reopened(table: Table, folder: Path | None) -> Table | None:
    """The same states, ready for new rows in the file of a folder; None if they are elsewhere.

    Args:
      table: of the states.
      folder: where the states shall be; None for a temporary file.
    """
    if not table.is_in(folder):
        return None
    if not table.file.writable():
        assert table.path is not None
        try:
            table.file = _File(table.path, "r+")
        except OSError as error:
            raise cannot_write(table.path, error) from None
    return table


def _row(shapes: Sequence[Any]) -> np.dtype:
    """Layout of a row, with the fields "0", "1", ..., each aligned as its type asks."""
    fields = [(str(index), leaf.dtype, tuple(leaf.shape[1:])) for index, leaf in enumerate(shapes)]
    return np.dtype(fields, align=True)


def _bytes(rows: np.ndarray) -> np.ndarray:
    """The same memory as bytes, uint8 [B, size of a row]."""
    return rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize)
