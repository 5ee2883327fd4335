"""Digests that show whether the files of a run are as they were written; they are no protection against intent."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pfl_jax.errors import InvalidInput

LENGTH = 16
"""Hexadecimal digits of a digest."""

DIGESTS = "digests"
"""Entry of the summary: name of a run's file -> its digest."""


def digest(content: bytes) -> str:
    """Digest of a file's content."""
    return hashlib.sha256(content).hexdigest()[:LENGTH]


def digest_of_file(path: Path) -> str:
    """Digest of a file's content; InvalidInput if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:LENGTH]
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None


def digest_of_content(summary: dict[str, Any]) -> str:
    """Digest of a summary as JSON has it, without its digests."""
    return digest(json.dumps({k: v for k, v in summary.items() if k != DIGESTS}, sort_keys=True).encode())


def cut_log(log: Path, size: int, expected: str | None = None, *, cut: bool = True) -> None:
    """Remove the lines of a run's metrics log after a checkpoint.

    Args:
      log: the metrics.
      size: their bytes at the checkpoint.
      expected: digest of these bytes; None without a checkpoint.
      cut: False only looks.

    Raises:
      InvalidInput: the log is shorter than at the checkpoint, or is not as it was then.
    """
    if not log.is_file() or log.stat().st_size < size:
        raise InvalidInput(f"{log} is shorter than at the last checkpoint: start the run anew, in another folder")
    if expected is not None and digest(log.read_bytes()[:size]) != expected:
        raise InvalidInput(f"{log} is not as it was at the last checkpoint: start the run anew, in another folder")
    if cut:
        with log.open("r+b") as file:
            file.truncate(size)
