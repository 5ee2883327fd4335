"""Locks on folders that only one process may write into; a lock ends with its process."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from experiments.folder.run_folder import CONFIG, METRICS
from pfl_jax.atomic_write import cannot_write, make_folder
from pfl_jax.errors import InvalidInput


@contextlib.contextmanager
def lock_run(log: Path) -> Iterator[None]:
    """Lock a run while this process works on it: no other process can write into its folder or remove it.

    Args:
      log: metrics file of the run.

    Raises:
      InvalidInput: another process has the lock, or the file cannot be written.
    """
    with _locked(log, f"another process is at work in {log.parent}: wait for it"):
        yield


@contextlib.contextmanager
def lock_folder(folder: str | Path) -> Iterator[None]:
    """Lock a folder of several runs for this process; the folder is created if it does not exist.

    An interrupted run and a running one have the same files, so only the process with the lock may start it again.

    Raises:
      InvalidInput: another process has the lock, it is the folder of a single run, or it cannot be written.
    """
    folder = Path(folder).expanduser()
    make_folder(folder)
    if any((folder / name).exists() for name in (CONFIG, METRICS)):
        raise InvalidInput(f"{folder} is the folder of a single run: give --out another folder")
    with _locked(
        folder / ".lock", f"another process is at work in {folder}: wait for it, or give --out another folder"
    ):
        yield


@contextlib.contextmanager
def _locked(path: Path, refusal: str) -> Iterator[None]:
    try:
        file = path.open("ab")
    except OSError as error:
        raise cannot_write(path, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The previous process may have removed the file, and then the lock has no effect.
            exists = path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            exists = False
        except OSError as error:
            raise InvalidInput(
                f"cannot lock {path}: {error.strerror or error}; give --out a folder on another file system"
            ) from None
        if not exists:
            raise InvalidInput(refusal)
        yield
