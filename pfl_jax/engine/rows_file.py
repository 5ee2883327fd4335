"""One file with rows of bytes in slots, for states of clients on disk.

The file is read and written at positions instead of being mapped into memory. The operating system keeps as much of it
in memory as fits either way, but a full disk or a file that was cut short is then an error in one line, where access to
a mapping would end the process. `pfl_jax.engine.disk_state` says which row is whose.
"""

import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from pfl_jax.atomic_write import cannot_write, sync_folder
from pfl_jax.errors import InvalidInput
from pfl_jax.safe_read import open_file

NAME = "clients.rows"
"""Name of the file in a run's folder."""

_ALIGNMENT = 16
"""Bytes whose multiples are the offsets of leaves in a row, for any type of number."""


class HasSlots(Protocol):
    """Whatever refers to slots of a file: int32 [N]."""

    slots: np.ndarray


class Layout(NamedTuple):
    """Layout of a row.

    Attributes:
      shapes: shape of each leaf of one client.
      dtypes: type of each leaf.
      offsets: position of each leaf in the row, in bytes.
      size: bytes of a row.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    offsets: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, leaves: Sequence[tuple[Sequence[int], Any]]) -> "Layout":
        """Layout for leaves of these shapes (of one client) and types."""
        shapes, dtypes = tuple(tuple(shape) for shape, _ in leaves), tuple(np.dtype(dtype) for _, dtype in leaves)
        offsets, end = [], 0
        for shape, dtype in zip(shapes, dtypes, strict=True):
            offsets.append(end)
            end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return cls(shapes, dtypes, tuple(offsets), max(end, _ALIGNMENT))

    def pack(self, leaves: Sequence[np.ndarray], count: int) -> np.ndarray:
        """Rows, uint8 [count, size], from leaves [at least count, ...]."""
        rows = np.zeros((count, self.size), np.uint8)
        for leaf, shape, dtype, offset in zip(leaves, *self[:3], strict=True):
            content = np.ascontiguousarray(np.asarray(leaf)[:count], dtype).reshape(count, math.prod(shape))
            rows[:, offset : offset + math.prod(shape) * dtype.itemsize] = content.view(np.uint8)
        return rows

    def unpack(self, rows: np.ndarray, index: int) -> np.ndarray:
        """Leaf `index`, [B, ...], of rows uint8 [B, size]."""
        shape, dtype, start = self.shapes[index], self.dtypes[index], self.offsets[index]
        part = rows[:, start : start + math.prod(shape) * dtype.itemsize]
        return np.ascontiguousarray(part).view(dtype).reshape(len(rows), *shape)


class RowsFile:
    """Slots of rows in one file, shared by the tables that refer to them.

    Args:
      path: of the file; None for a file without a name, which is gone with the process.
      descriptor: of the open file, closed with this object.
      layout: of a row.
      slots: number of slots that the file has.
      write: whether it is open for writing.
    """

    def __init__(self, path: Path | None, descriptor: int, layout: Layout, slots: int = 0, *, write: bool = True):
        self.path, self.layout, self.is_writable = path, layout, write
        self._descriptor, self._slots = descriptor, slots
        # Checkpoints of an earlier process may refer to any slot that is there.
        self._reserved, self._free = slots, np.empty(0, np.int32)
        self._tables: weakref.WeakSet[HasSlots] = weakref.WeakSet()
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, folder: Path | None, layout: Layout, clients: int) -> "RowsFile":
        """New file for the rows of so many clients; one that is there is replaced.

        Args:
          folder: of the file; None for a file without a name in the folder for temporary files.
          layout: of a row.
          clients: number of clients N.

        Raises:
          InvalidInput: the disk has no room for the rows.
          CannotWrite: the file cannot be created.
        """
        place = Path(tempfile.gettempdir()) if folder is None else folder
        path = place / NAME
        try:
            if folder is not None:
                path.unlink(missing_ok=True)
            wanted, free = clients * layout.size, shutil.disk_usage(place).free
            if wanted > free:
                raise InvalidInput(
                    f"the states of {clients} clients take {wanted / 2**30:,.1f} GiB, and the disk of {place} has "
                    f"{free / 2**30:,.1f} GiB left: make room there, or name another folder"
                )
            if folder is not None:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                return cls(path, descriptor, layout)
            descriptor, name = tempfile.mkstemp(prefix="pfl_jax-", suffix=f"-{NAME}")
            # Without a name nothing is left of it, however the process ends.
            os.unlink(name)
        except OSError as error:
            raise cannot_write(path, error) from None
        return cls(None, descriptor, layout)

    @classmethod
    def open(cls, path: Path, layout: Layout, *, write: bool = False) -> "RowsFile":
        """File of an earlier process. With `write`, new rows never replace those that are there, see `release`.

        Raises:
          OSError: it is missing, or no regular file.
        """
        with open_file(path) as file:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC) if write else os.dup(file.fileno())
        size = os.fstat(descriptor).st_size
        return cls(path, descriptor, layout, -(-size // layout.size), write=write)

    def is_in(self, folder: Path | None) -> bool:
        """Whether this is the file that a run in the folder uses, for None that it has no name."""
        if self.path is None or folder is None:
            return self.path is None and folder is None
        try:
            # A file that was replaced is still open here.
            return os.path.samestat(os.fstat(self._descriptor), (folder / NAME).stat())
        except OSError:
            return False

    def read(self, slots: np.ndarray) -> np.ndarray:
        """Rows, uint8 [B, size], in these slots; zeros where the file is too short."""
        rows = np.zeros((len(slots), self.layout.size), np.uint8)
        for row, slot in zip(rows, slots.tolist(), strict=True):
            view, start = row.data, slot * self.layout.size
            while view and (content := os.pread(self._descriptor, len(view), start)):
                view[: len(content)] = content
                view, start = view[len(content) :], start + len(content)
        return rows

    def write(self, rows: np.ndarray, slots: np.ndarray) -> None:
        """Write rows, uint8 [B, size], into these slots; CannotWrite on failure."""
        try:
            for row, slot in zip(rows, slots.tolist(), strict=True):
                view, start = row.data, slot * self.layout.size
                while view:
                    count = os.pwrite(self._descriptor, view, start)
                    view, start = view[count:], start + count
        except OSError as error:
            raise cannot_write(self.path or Path(tempfile.gettempdir(), NAME), error) from None

    def take(self, count: int) -> np.ndarray:
        """Slots [count] to which no table refers, nor a checkpoint of an earlier process."""
        if len(self._free) < count:
            used = np.zeros(self._slots, bool)
            used[: self._reserved] = True
            for table in self._tables:
                used[table.slots] = True
            self._free = np.flatnonzero(~used).astype(np.int32)
        missing = max(0, count - len(self._free))
        new = np.arange(self._slots, self._slots + missing, dtype=np.int32)
        self._slots += missing
        taken, self._free = self._free[:count], self._free[count:]
        return np.concatenate([taken, new])

    def release(self) -> None:
        """Let new rows replace those of an earlier process, whose checkpoints are gone."""
        self._reserved = 0

    def hold(self, table: HasSlots) -> None:
        """Keep the rows of a table as long as it exists."""
        # The file may have been cut short.
        self._slots = max(self._slots, 1 + int(table.slots.max()))
        self._tables.add(table)

    def sync(self) -> None:
        """Write the content to the disk; OSError on failure."""
        os.fsync(self._descriptor)
        if self.path is not None:
            sync_folder(self.path.parent)
