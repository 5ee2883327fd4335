"""Reading of .npz files that may be damaged; pickles in them are never read."""

import contextlib
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BAD_NPZ = (OSError, EOFError, ValueError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error)
"""Errors of reading an .npz file that is damaged, contains a pickle, or lacks an array."""


@contextlib.contextmanager
def open_npz(path: str | Path) -> Iterator[np.lib.npyio.NpzFile]:
    """Context with the arrays of the .npz file at `path`; opening and reading raise errors of the types in BAD_NPZ."""
    # np.load would not close a file that it opened itself if the archive is damaged.
    with open(path, "rb") as file:
        stored = np.load(file, allow_pickle=False)
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array: np.savez writes an archive")
        with stored:
            yield stored


def mapped(path: str | Path, name: str) -> np.ndarray:
    """An array of the .npz file at `path`: memory-mapped if it is stored as `np.savez` does, otherwise in memory.

    Errors are of the types in BAD_NPZ.
    """
    with open_npz(path) as stored, open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        member = archive.getinfo(f"{name}.npy")
        if member.compress_type != zipfile.ZIP_STORED:
            return stored[name]
        # A header of 30 bytes ends with the sizes of the name and of further fields, which stand before the content.
        file.seek(member.header_offset + 26)
        file.seek(member.header_offset + 30 + int(np.frombuffer(file.read(4), "<u2").sum()))
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, in_columns, dtype = header(file)
        if dtype.hasobject or in_columns or not np.prod(shape):
            return stored[name]
        return np.memmap(path, dtype, "r", file.tell(), shape)
