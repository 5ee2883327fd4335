"""Arrays that stay in their file: only the rows that are asked for are read.

A process of many (`pfl_jax.engine.placement`) needs the examples of its own clients alone. `Rows` has the shape and
type of the whole array, and reads some of its rows: by their offset in an uncompressed file, or in one pass over a
compressed one that keeps only them. Files are read and not memory-mapped, since the pages of a mapping count as the
process's memory, and a mapped file that shrinks ends the process without an error.
"""

import contextlib
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np

from pfl_jax.errors import InvalidInput
from pfl_jax.safe_read import npy_header, open_file, read_npz_array

BLOCK = 2**22
"""Bytes that are read at a time where a whole array is gone through."""

Scan: TypeAlias = Callable[[np.ndarray], Iterator[np.ndarray]]
"""Ascending distinct row numbers [B] -> these rows in order, in parts of any length."""

UNREADABLE = (OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile)
"""Errors of damaged or truncated files."""


class Rows:
    """Array [P, ...] whose rows are read when they are asked for.

    Args:
      shape: of the whole array.
      dtype: of its entries.
      scan: reads some rows; its errors are InvalidInput.

    Example:
      >>> import numpy as np
      >>> from pfl_jax.data import rows
      >>> x = rows.of_array(np.arange(8).reshape(4, 2)).astype(np.float32)
      >>> x.shape, x[np.array([3, 0])].tolist()
      ((4, 2), [[6.0, 7.0], [0.0, 1.0]])
    """

    def __init__(self, shape: Sequence[int], dtype: Any, scan: Scan):
        self.shape: tuple[int, ...] = tuple(shape)
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.scan: Scan = scan

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Rows in memory, by a slice, a mask or row numbers in any order; IndexError for rows that do not exist."""
        if isinstance(rows, tuple):
            raise IndexError("one index chooses rows: x[rows][:, 0] in place of x[rows, 0]")
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        numbers = np.asarray(rows)
        if numbers.dtype == bool:
            numbers = np.flatnonzero(numbers)
        numbers = np.where(numbers < 0, numbers + len(self), numbers)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"there are {len(self)} rows, and no row {rows}")
        distinct, place = np.unique(numbers, return_inverse=True)
        found, filled = np.empty((len(distinct), *self.shape[1:]), self.dtype), 0
        for part in self.scan(distinct) if len(distinct) else ():
            found[filled : filled + len(part)] = part
            filled += len(part)
        place = place.reshape(np.shape(numbers))
        return found if np.array_equal(place, np.arange(len(distinct))) else found[place]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole array, for functions that need it in memory."""
        return self[:] if dtype is None else self[:].astype(dtype, copy=False)

    def take(self, numbers: np.ndarray) -> "Rows":
        """Rows of these ascending distinct numbers, still unread."""
        chosen = np.asarray(numbers)
        return Rows((len(chosen), *self.shape[1:]), self.dtype, lambda rows: self.scan(chosen[rows]))

    def map(self, change: Callable[[np.ndarray], np.ndarray], shape: Sequence[int], dtype: Any) -> "Rows":
        """Rows changed as they are read, a part at a time.

        Args:
          change: function from rows [B, ...] to as many rows.
          shape: of one row of the result.
          dtype: of the result.
        """
        return Rows((len(self), *shape), dtype, lambda rows: map(change, self.scan(rows)))

    def astype(self, dtype: Any, copy: bool = True) -> "Rows":
        """Rows of another type; `copy` is there for NumPy's sake."""
        kind = np.dtype(dtype)
        if kind == self.dtype:
            return self

        def convert(part):
            # Floats too large become infinite, which is refused elsewhere.
            with np.errstate(over="ignore"):
                return part.astype(kind)

        return self.map(convert, self.shape[1:], kind)

    def min(self) -> Any:
        """Smallest entry."""
        return np.min([part.min() for _, part in blocks(self)])

    def max(self, initial: Any = None) -> Any:
        """Largest entry, at least `initial`."""
        found = [part.max() for _, part in blocks(self)]
        return np.max(found if initial is None else [*found, initial])


def _block_rows(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    return max(1, BLOCK // max(1, int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize))


def blocks(x: np.ndarray | Rows) -> Iterator[tuple[int, np.ndarray]]:
    """Consecutive parts of an array, each with the number of its first row; the same parts for both kinds of arrays."""
    size = _block_rows(x.shape, x.dtype)
    if not isinstance(x, Rows):
        for start in range(0, len(x), size):
            yield start, x[start : start + size]
        return
    start, held = 0, []
    for part in x.scan(np.arange(len(x))):
        held.append(part)
        while (there := sum(map(len, held))) >= size:
            whole = np.concatenate(held)
            yield start, whole[:size]
            start, held = start + size, [whole[size:]] if there > size else []
    if held:
        yield start, np.concatenate(held)


def as_rows(x: Any) -> Any:
    """An array in memory as `Rows`, `Rows` as they are."""
    return x if isinstance(x, Rows) else of_array(x)


def take(x: Any, numbers: np.ndarray) -> Any:
    """Rows of an array by number; unread for `Rows`."""
    return x.take(numbers) if isinstance(x, Rows) else x[numbers]


def concatenate(parts: Sequence[Any]) -> Any:
    """Arrays one after another; `Rows` if one of them is."""
    if not any(isinstance(part, Rows) for part in parts):
        return np.concatenate(parts)
    parts = [as_rows(part) for part in parts]
    starts = np.cumsum([0, *map(len, parts)])

    def scan(rows):
        ends = np.searchsorted(rows, starts)
        for part, first, begin, end in zip(parts, starts[:-1], ends[:-1], ends[1:], strict=True):
            if begin < end:
                yield from part.scan(rows[begin:end] - first)

    return Rows((int(starts[-1]), *parts[0].shape[1:]), parts[0].dtype, scan)


def of_array(x: np.ndarray) -> Rows:
    """An array in memory as `Rows`."""
    size = _block_rows(x.shape, x.dtype)
    return Rows(x.shape, x.dtype, lambda rows: (x[rows[at : at + size]] for at in range(0, len(rows), size)))


def of_file(path: str | Path, offset: int, shape: Sequence[int], dtype: Any) -> Rows:
    """Rows of an uncompressed file; several that follow each other are read at once.

    Args:
      path: of the file.
      offset: byte of the file at which the array begins, in C order.
      shape, dtype: of the array.
    """
    kind, row_shape = np.dtype(dtype), tuple(shape[1:])
    width, size = int(np.prod(row_shape, dtype=np.int64)) * kind.itemsize, _block_rows(shape, kind)

    def scan(rows):
        try:
            with open_file(path) as file:
                for at in range(0, len(rows), size):
                    part = rows[at : at + size]
                    content = np.empty(len(part) * width, np.uint8)
                    _read_runs(file.fileno(), part, memoryview(content.data), offset, width, path)
                    yield content.view(kind).reshape(len(part), *row_shape)
        except OSError as error:
            raise InvalidInput(f"{path} cannot be read: {error}") from error

    return Rows(shape, kind, scan)


def _read_runs(file: int, rows: np.ndarray, buffer: memoryview, offset: int, width: int, path: str | Path) -> None:
    """Fill a buffer with rows of `width` bytes of a file, those that follow each other at once."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    for begin, end in zip([0, *breaks], [*breaks, len(rows)], strict=True):
        part, place = buffer[begin * width : end * width], offset + int(rows[begin]) * width
        while part:
            count = os.preadv(file, [part], place)
            if not count:
                raise InvalidInput(f"{path} is damaged: it ends at byte {place}")
            part, place = part[count:], place + count


def of_stream(
    path: str | Path,
    opened: Callable[[], AbstractContextManager[IO[bytes]]],
    offset: int,
    shape: Sequence[int],
    dtype: Any,
) -> Rows:
    """Rows of a file that can only be read from its beginning, such as a compressed one.

    Args:
      path: of the file, for errors.
      opened: opens the stream; its errors are those of `UNREADABLE`.
      offset: byte of the stream at which the array begins.
      shape, dtype: of the array, with which the stream ends.
    """
    kind, row_shape, count = np.dtype(dtype), tuple(shape[1:]), shape[0]
    width, size = int(np.prod(row_shape, dtype=np.int64)) * kind.itemsize, _block_rows(shape, kind)

    def scan(rows):
        try:
            with opened() as stream:
                _read_exactly(stream, offset, path)
                for start in range(0, count, size):
                    number = min(size, count - start)
                    content = _read_exactly(stream, number * width, path)
                    begin, end = np.searchsorted(rows, [start, start + number])
                    part = np.frombuffer(content, kind).reshape(number, *row_shape)
                    yield part if end - begin == number else part[rows[begin:end] - start]
                # Also for the check of a digest that stands at the end.
                if stream.read(1):
                    raise InvalidInput(f"{path} is damaged: it has more than the {count * width} bytes promised")
        except UNREADABLE as error:
            raise InvalidInput(f"{path} cannot be read, it may be truncated: {error}") from error

    return Rows(shape, kind, scan)


def _read_exactly(stream: IO[bytes], size: int, path: str | Path) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise InvalidInput(f"{path} is damaged: {size - len(content)} bytes are missing at its end")
    return content


def of_npz(path: str | Path, name: str) -> Rows:
    """Rows of an array in an .npz file: by their offset if it is stored uncompressed, as `np.savez` does.

    Args:
      path: of the file.
      name: of the array.

    Raises:
      OSError, ValueError, KeyError, zipfile.BadZipFile: see `pfl_jax.safe_read.open_npz`.
    """
    with open_file(path) as file, zipfile.ZipFile(file) as archive:
        member = archive.getinfo(f"{name}.npy")
        with archive.open(member) as content:
            shape, in_columns, dtype = npy_header(content)
            header = content.tell()
        if dtype.hasobject or in_columns or not shape or 0 in shape:
            return of_array(read_npz_array(path, name))
        # The name and further fields stand between the 30 bytes of a member's own header and its content.
        file.seek(member.header_offset)
        local = file.read(30)
    begin = member.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    if member.compress_type == zipfile.ZIP_STORED:
        return of_file(path, begin + header, shape, dtype)

    @contextlib.contextmanager
    def opened() -> Iterator[IO[bytes]]:
        with open_file(path) as file, zipfile.ZipFile(file) as archive, archive.open(member) as content:
            yield content

    return of_stream(path, opened, header, shape, dtype)
