"""Reading of files that may be anything: no FIFO or device blocks it, and no claim in a header takes memory.

Every failure is an OSError, so that callers say in their own words which file it is.
"""

import contextlib
import errno
import io
import os
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

LARGE = 2**30
"""Bytes from which on an array's compression is looked at."""

MOST_COMPRESSED = 100
"""Bytes of a large array for one in the archive; deflate turns a thousand zeros into one byte."""


def open_file(path: str | Path) -> io.BufferedReader:
    """Open a regular file for reading; OSError for a folder, FIFO, device or socket, none of which is waited for."""
    file = _opened(path, os.O_RDONLY, "rb")
    assert isinstance(file, io.BufferedReader)
    return file


def open_to_append(path: str | Path) -> BinaryIO:
    """Open a regular file for appending, created if it does not exist; OSError as `open_file`."""
    return _opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, "ab")


def _opened(path: str | Path, flags: int, mode: str) -> BinaryIO:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
        raise OSError(number, "Is a directory" if stat.S_ISDIR(kind) else "It is no regular file", str(path))
    return os.fdopen(descriptor, mode)  # pyright: ignore[reportReturnType]


def read_file(path: str | Path) -> bytes:
    """Content of a regular file; OSError as `open_file`."""
    with open_file(path) as file:
        return file.read()


@contextlib.contextmanager
def open_npz(path: str | Path) -> Iterator[Any]:
    """Context with the arrays of an .npz file, or the one array of an .npy file, as `np.load` has them.

    Args:
      path: of the file.

    Raises:
      OSError: it is no regular file, claims more than it has, or unpacks to a large multiple of its size.
      ValueError: it holds a pickle, which is never read; the errors of `np.load` and of zipfile otherwise.
    """
    # np.load would not close a file that it opened itself if the archive is damaged.
    with open_file(path) as file:
        if file.read(2) == b"PK":
            _check_npz(file)
        file.seek(0)
        with np.load(file, allow_pickle=False) as stored:
            yield stored


def _check_npz(file: BinaryIO) -> None:
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if member.file_size > LARGE and member.file_size > MOST_COMPRESSED * member.compress_size:
                raise OSError(errno.EFBIG, f"{member.filename} would take {member.file_size / 2**30:,.0f} GiB")
            if member.filename.endswith(".npy"):
                with archive.open(member) as content:
                    _check_array(member.filename, content, member.file_size)


def read_npz_array(path: str | Path, name: str) -> np.ndarray:
    """One array of an .npz file; errors as `open_npz`."""
    with open_npz(path) as stored:
        return stored[name]


def npy_header(content: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether columns are stored one after another, and type of an array, from the beginning of an .npy file."""
    version = np.lib.format.read_magic(content)  # pyright: ignore[reportArgumentType]
    read = {(1, 0): np.lib.format.read_array_header_1_0}.get(version, np.lib.format.read_array_header_2_0)
    return read(content)  # pyright: ignore[reportArgumentType]


def _check_array(name: str, content: IO[bytes], size: int) -> None:
    shape, _, dtype = npy_header(content)
    claimed, there = dtype.itemsize, size - content.tell()
    for length in shape:
        claimed *= length
    # Objects are a pickle, which is refused where it would be read.
    if not dtype.hasobject and claimed != there:
        raise OSError(errno.EINVAL, f"the header of {name} promises {claimed} bytes, it has {there}")


class Bounded(io.RawIOBase):
    """Stream that refuses to be read beyond a limit, for archives that unpack to more than their data set has.

    Args:
      stream: to read from, from its beginning.
      limit: largest position.
    """

    def __init__(self, stream: IO[bytes], limit: int):
        self._stream, self._limit = stream, limit

    def read(self, size: int = -1, /) -> bytes:
        """Bytes of the stream; OSError if they end beyond the limit."""
        if size < 0 or self._stream.tell() + size > self._limit:
            raise OSError(errno.EFBIG, f"it unpacks to more than {self._limit / 2**20:,.0f} MiB")
        return self._stream.read(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to a position; OSError beyond the limit."""
        if whence != 0 or offset > self._limit:
            raise OSError(errno.EFBIG, f"it unpacks to more than {self._limit / 2**20:,.0f} MiB")
        return self._stream.seek(offset)

    def tell(self) -> int:
        """Position in the stream."""
        return self._stream.tell()
