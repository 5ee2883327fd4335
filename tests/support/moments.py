"""Moments at which a process changes files, and SIGKILL at one of them."""

import builtins
import collections
import io
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import NamedTuple


class Kill(NamedTuple):
    """When a process is killed: at the given occurrence of a moment, or without one so many seconds after the start."""

    moment: str = ""
    number: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return self.moment or "at any time"


class Moments:
    """Counts in `found` the moments at which this process changes files below a folder, and kills it at one of them."""

    def __init__(self, folder: Path, kill: Kill | None):
        self.found: collections.Counter[str] = collections.Counter()
        self._folder, self._kill, self._lock = str(folder), kill, threading.Lock()

    def __call__(self, moment: str) -> None:
        with self._lock:
            self.found[moment] += 1
            if self._kill and (moment, self.found[moment]) == self._kill[:2]:
                os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """Name the moments of all functions by which this program changes files."""
        for name in ("rename", "replace"):
            self._around(os, name, "the rename of", 1)
        self._around(os, "mkdir", "making", 0)
        self._around(os, "unlink", "the removal of", 0)
        self._around(shutil, "rmtree", "the removal of", 0)
        pwrite, usual = os.pwrite, io.open

        def halves(descriptor, content, start):
            if not self._is_mine(os.readlink(f"/proc/self/fd/{descriptor}")):
                return pwrite(descriptor, content, start)
            half = len(content) // 2
            pwrite(descriptor, content[:half], start)
            self("half of a client's state is written")
            return half + pwrite(descriptor, content[half:], start + half)

        def opened(path, mode="r", *args, **options):
            file = usual(path, mode, *args, **options)
            is_read = mode.startswith("r") or not self._is_mine(path)
            return file if is_read else HalfWritten(file, what_is(Path(path)), self)

        os.pwrite = halves
        # Path.open has the one, etils, and so JAX, the other.
        io.open = builtins.open = opened

    def _around(self, owner, name, words, place):
        usual = getattr(owner, name)

        def watched(*args, **options):
            if not self._is_mine(args[place]):
                return usual(*args, **options)
            what = f"{words} {what_is(Path(args[place]))}"
            self(f"before {what}")
            result = usual(*args, **options)
            self(f"after {what}")
            return result

        setattr(owner, name, watched)

    def _is_mine(self, path) -> bool:
        return isinstance(path, str | Path) and os.path.abspath(path).startswith(self._folder)


class HalfWritten:
    """An open file of which every write has a moment after its first half."""

    def __init__(self, file, what, moments):
        self._file, self._moment, self._moments = file, f"half of {what} is written", moments

    def write(self, content):
        """Write in two halves."""
        half = len(content) // 2
        self._file.write(content[:half])
        self._file.flush()
        self._moments(self._moment)
        return half + self._file.write(content[half:])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)


def what_is(path: Path) -> str:
    """Kind of a file in words."""
    # Without the dot and the process of a file that is not renamed yet.
    name = path.name.lstrip(".").removesuffix(f".{os.getpid()}")
    if "cache" in path.parts:
        return "a compiled program"
    if "checkpoints" in path.parts:
        return "a checkpoint"
    if path.suffix in (".png", ".svg"):
        return "a picture"
    if name in ("config.json", "metrics.jsonl", "summary.json", "runs.json"):
        return name
    return "a table" if path.suffix in (".json", ".md", ".csv") else "a folder"
