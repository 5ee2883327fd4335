"""Cache of help texts on the disk: without it, a command imports JAX to make its help, which takes a second.

This module imports only modules that Python has loaded already. A text is cached for a command line, a width of the
terminal, and a version of the sources; a change of any of these makes the text anew.
"""

import contextlib
import hashlib
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

SOURCES = [Path(__file__).parent, Path(__file__).parents[1] / "pfl_jax"]
"""Folders of the code that makes help texts."""


def show() -> bool:
    """Print the cached help for this process's command; return whether there was one."""
    path = _path(sys.orig_argv)
    if path is None or not path.is_file():
        return False
    # End silently, as other programs do, if the reader of the output (such as `head`) exits first.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(path.read_text(encoding="utf-8"), end="", flush=True)
    return True


def keep(text: str) -> None:
    """Cache the help of this process's command, unless it depends on files."""
    path = _path(sys.orig_argv)
    # A full disk must not stop the command.
    with contextlib.suppress(OSError):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Replace the file as a whole: other processes may write it too.
            partial = path.with_name(f"{path.name}.{os.getpid()}")
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)


def _path(words: Sequence[str], sources: Sequence[Path] = SOURCES) -> Path | None:
    """Cache file of a command line's help; None if it asks for no help, or if the help depends on files."""
    module, *words = words[words.index("-m") + 1 :] if "-m" in words else [""]
    plain = all(re.fullmatch(r"-{0,2}[\w-]*(=[\w-]*)?", word) for word in words)
    reads_files = any(word.startswith(("--config", "--resume")) for word in words)
    if module.partition(".")[0] != "experiments" or not {"-h", "--help"} & {*words} or not plain or reads_files:
        return None
    whole = hashlib.sha256(repr([module, words, sys.version, shutil.get_terminal_size().columns]).encode())
    for path in sorted(path for folder in sources for path in folder.rglob("*.py")):
        stat = path.stat()
        whole.update(f"{path} {stat.st_size} {stat.st_mtime_ns}\n".encode(errors="replace"))
    root = Path(os.environ.get("PFL_JAX_CACHE") or os.path.expanduser("~/.cache/pfl_jax"))
    return root / "help" / f"{whole.hexdigest()[:32]}.txt"
