"""Damaged files: what can stand in the place of a file of a run, and a time limit for whoever reads it."""

import contextlib
import os
import shutil
import signal

NESTED = b"[" * 100_000
"""JSON that is nested more deeply than Python's stack."""


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x15
    path.write_bytes(content)


def _replace(path, make):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    make(path)


DAMAGES = {
    "a byte is another": _flip,
    "cut off": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0garbage"),
    "empty": lambda path: path.write_bytes(b""),
    "nested": lambda path: path.write_bytes(NESTED),
    "a number of a million digits": lambda path: path.write_bytes(b'{"round": ' + b"9" * 1_000_000 + b"}"),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: _replace(path, os.mkdir),
    "a symlink loop": lambda path: _replace(path, lambda path: path.symlink_to(path.name)),
}
"""Name -> function that does it to a file."""


class Late(BaseException):
    """No answer in time; no `except Exception` takes it for a damaged file."""


@contextlib.contextmanager
def limit(seconds):
    """Context that raises Late after so many seconds."""

    def late(*_):
        raise Late(f"no answer after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
