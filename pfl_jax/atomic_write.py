"""Atomic file writes: a file is complete or absent, even after a full disk, a signal, an error or a kill."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from pfl_jax.errors import CannotWrite

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers that mean a full disk."""


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically; on failure raise CannotWrite and keep the previous file.

    Bytes of a file's name that are not valid UTF-8 become question marks.
    """
    write_binary(path, lambda file: file.write(text.encode(errors="replace")))


def write_binary(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a binary file atomically: write a temporary file in the same folder, then rename it.

    Args:
      path: path of the file, in an existing folder; an existing file is replaced by the rename, or kept on failure.
      write: function that writes the content to the open file.

    Raises:
      CannotWrite: the file cannot be written, or a folder, device or FIFO is there.
    """
    # Always the same name, so that the next write replaces the file that a killed process left.
    temporary = path.with_name(f".{path.name}.partial")
    with _writing(path):
        if path.exists() and not path.is_file():
            # A rename would replace a device by a file.
            raise OSError(errno.EEXIST, "It is not a regular file")
        try:
            with temporary.open("wb") as file:
                write(file)
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Create a folder and its parents unless they exist; raise CannotWrite on failure."""
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)


def append_line(path: Path, line: str) -> None:
    """Append a line to a text file; raise CannotWrite on failure. Readers leave out an incomplete last line."""
    with _writing(path), path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Context in which errors of writing a file or folder become CannotWrite."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: OSError) -> CannotWrite:
    """Error for a file or folder that cannot be written, with advice."""
    advice = "make room" if error.errno in DISK_FULL else "give a folder that can be written"
    return CannotWrite(f"cannot write {path}: {error.strerror or error}; {advice}")
