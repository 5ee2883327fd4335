"""Arrays that stay in their file: only the rows that are asked for are read.

A process of many (`pfl_jax.engine.placement`) needs the examples of its own clients alone. Files are read and not
memory-mapped, since the pages of a mapping count as the process's memory.
"""

import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfl_jax.errors import InvalidInput
from pfl_jax.safe_read import open_npz

BLOCK = 2**22
"""Bytes that are read at a time."""


class LazyArray:
    """Array [P, ...] whose rows are read when they are asked for, a block at a time.

    Args:
      shape: of the whole array.
      dtype: of its entries.
      read: function from row numbers [B] to these rows [B, ...]; its errors are InvalidInput.

    Example:
      >>> import numpy as np
      >>> from pfl_jax.data import rows
      >>> x = rows.as_rows(np.arange(8).reshape(4, 2)).astype(np.float32)
      >>> x.shape, x[np.array([3, 0])].tolist()
      ((4, 2), [[6.0, 7.0], [0.0, 1.0]])
    """

    def __init__(self, shape: Sequence[int], dtype: Any, read: Callable[[np.ndarray], np.ndarray]):
        self.shape: tuple[int, ...] = tuple(shape)
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.read: Callable[[np.ndarray], np.ndarray] = read

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Rows in memory, by a slice, a mask or row numbers in any order; IndexError for rows that do not exist."""
        numbers = np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else np.arange(len(self))[rows]
        flat, size = np.ravel(numbers), _rows_of_a_block(self)
        found = np.empty((len(flat), *self.shape[1:]), self.dtype)
        for start in range(0, len(flat), size):
            found[start : start + size] = self.read(flat[start : start + size])
        return found.reshape((*np.shape(numbers), *self.shape[1:]))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole array, for functions that need it in memory."""
        return self[:] if dtype is None else self[:].astype(dtype, copy=False)

    def take(self, numbers: np.ndarray) -> "LazyArray":
        """Rows of these numbers, still unread."""
        return LazyArray((len(numbers), *self.shape[1:]), self.dtype, lambda rows: self.read(numbers[rows]))

    def map(self, change: Callable[[np.ndarray], np.ndarray], shape: Sequence[int], dtype: Any) -> "LazyArray":
        """Rows changed as they are read.

        Args:
          change: function from rows [B, ...] to as many rows.
          shape: of one row of the result.
          dtype: of the result.
        """
        return LazyArray((len(self), *shape), dtype, lambda rows: change(self.read(rows)))

    def astype(self, dtype: Any, copy: bool = True) -> "LazyArray":
        """Rows of another type; `copy` is there for NumPy's sake."""
        return self.map(lambda part: part.astype(dtype), self.shape[1:], dtype)

    def view(self, dtype: Any) -> "LazyArray":
        """Rows whose entries are read as another type of the same size."""
        return self.map(lambda part: part.view(dtype), self.shape[1:], dtype)

    def min(self) -> Any:
        """Smallest entry."""
        return np.min([part.min() for _, part in blocks(self)])

    def max(self, initial: Any = None) -> Any:
        """Largest entry, at least `initial`."""
        found = [part.max() for _, part in blocks(self)]
        return np.max(found if initial is None else [*found, initial])


def _rows_of_a_block(x: np.ndarray | LazyArray) -> int:
    return max(1, BLOCK // max(1, int(np.prod(x.shape[1:], dtype=np.int64)) * x.dtype.itemsize))


def blocks(x: np.ndarray | LazyArray) -> Iterator[tuple[int, np.ndarray]]:
    """Consecutive parts of an array, each with the number of its first row; the same parts for both kinds of arrays."""
    size = _rows_of_a_block(x)
    for start in range(0, len(x), size):
        yield start, x[start : start + size]


def as_rows(x: Any) -> LazyArray:
    """An array in memory as `LazyArray`, `LazyArray` as they are."""
    return x if isinstance(x, LazyArray) else LazyArray(x.shape, x.dtype, lambda rows: x[rows])


def take(x: Any, rows: Any) -> Any:
    """Rows of an array by a slice or by their numbers; unread for `LazyArray`."""
    return x.take(np.arange(len(x))[rows]) if isinstance(x, LazyArray) else x[rows]


def concatenate(parts: Sequence[Any]) -> Any:
    """Arrays one after another; `LazyArray` if one of them is."""
    if not any(isinstance(part, LazyArray) for part in parts):
        return np.concatenate(parts)
    starts = np.cumsum([0, *map(len, parts)])
    shape, dtype = parts[0].shape[1:], parts[0].dtype

    def read(rows):
        found = np.empty((len(rows), *shape), dtype)
        for part, start, end in zip(parts, starts[:-1], starts[1:], strict=True):
            mine = (start <= rows) & (rows < end)
            found[mine] = part[rows[mine] - start]
        return found

    return LazyArray((int(starts[-1]), *shape), dtype, read)


def of_file(path: str | Path, offset: int, shape: Sequence[int], dtype: Any) -> LazyArray:
    """Rows of an uncompressed file, in which the array begins at the byte `offset`, in C order."""

    def read(rows):
        found = np.empty((len(rows), *shape[1:]), dtype)
        # Rows that follow each other are read at once.
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        try:
            with open(path, "rb") as file:
                for number, part in zip(rows[[0, *breaks]].tolist(), np.split(found, breaks), strict=True):
                    file.seek(offset + number * found[0].nbytes)
                    if file.readinto(part.data) < part.nbytes:
                        raise InvalidInput(f"{path} is damaged: it ends too early")
        except OSError as error:
            raise InvalidInput(f"{path} cannot be read: {error}") from error
        return found

    return LazyArray(shape, dtype, read)


def of_npz(path: str | Path, name: str) -> Any:
    """An array of an .npz file: `LazyArray` if it is stored uncompressed, as `np.savez` does, otherwise in memory.

    Errors are those of `pfl_jax.safe_read.BAD_NPZ`.
    """
    with open_npz(path) as stored, open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        member = archive.getinfo(f"{name}.npy")
        if member.compress_type != zipfile.ZIP_STORED:
            return stored[name]
        # The sizes of the name and of further fields, which stand before the content, end a header of 30 bytes.
        file.seek(member.header_offset + 26)
        between = np.frombuffer(file.read(4), "<u2").sum()
        begin = file.seek(member.header_offset + 30 + int(between))
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, in_columns, dtype = header(file)
        if dtype.hasobject or in_columns or not shape:
            return stored[name]
        if file.tell() - begin + int(np.prod(shape, dtype=object)) * dtype.itemsize != member.file_size:
            raise ValueError(f"the header of {name} promises another size than it has")
        return of_file(path, file.tell(), shape, dtype)
