"""Opening of files that may be anything: what is no regular file is refused, and not waited for.

Every failure to open is an OSError, so that callers say in their own words which file it is.
"""

import contextlib
import errno
import io
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

BAD_NPZ = (OSError, EOFError, ValueError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error)
"""Errors of reading an .npz file that is damaged, has a pickle, or lacks an array."""


def open_file(path: str | Path) -> io.BufferedReader:
    """Open a regular file for reading; OSError for a folder, FIFO, device or socket."""
    _check_regular(path)
    return open(path, "rb")


def open_to_append(path: str | Path) -> BinaryIO:
    """Open a regular file for appending, created if it does not exist; OSError as `open_file`."""
    if os.path.exists(path):
        _check_regular(path)
    return open(path, "ab")


def _check_regular(path: str | Path) -> None:
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "It is no regular file", str(path))


def read_file(path: str | Path) -> bytes:
    """Content of a regular file; OSError as `open_file`."""
    with open_file(path) as file:
        return file.read()


@contextlib.contextmanager
def open_npz(path: str | Path) -> Iterator[np.lib.npyio.NpzFile]:
    """Context with the arrays of an .npz file; pickles in it are never read.

    Args:
      path: of the file.

    Raises:
      One of `BAD_NPZ`, also while the arrays are read.
    """
    # np.load would not close a file that it opened itself if the archive is damaged.
    with open_file(path) as file:
        stored = np.load(file, allow_pickle=False)
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array: np.savez writes an archive")
        with stored:
            yield stored
