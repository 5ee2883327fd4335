"""Reading of .npz files that may be damaged; pickles in them are never read."""

import contextlib
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BAD_NPZ = (OSError, EOFError, ValueError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error)
"""Errors of reading an .npz file that is damaged, has a pickle, or lacks an array."""


@contextlib.contextmanager
def open_npz(path: str | Path) -> Iterator[np.lib.npyio.NpzFile]:
    """Context with the arrays of the .npz file at `path`; opening it and reading them raises one of BAD_NPZ."""
    # np.load would not close a file that it opened itself if the archive is damaged.
    with open(path, "rb") as file:
        stored = np.load(file, allow_pickle=False)
        if not isinstance(stored, np.lib.npyio.NpzFile):
            raise ValueError("it is a single array: np.savez writes an archive")
        with stored:
            yield stored
