"""Help texts that were shown before, kept on the disk: to make one, a command imports JAX, which takes a second.

This module imports nothing that is not loaded already. A text is kept for these words, this width of the terminal and
these sources: a change of any of them makes it anew.
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
    """Show the help that this process's command asks for, if it is known; whether it is."""
    path = _path(sys.orig_argv)
    if path is None or not path.is_file():
        return False
    # As other programs do where the reader, such as `head`, exits first.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(path.read_text(encoding="utf-8"), end="", flush=True)
    return True


def keep(text: str) -> None:
    """Keep the help of this process's command, if a later one can show it."""
    path = _path(sys.orig_argv)
    # On a full disk it is not kept.
    with contextlib.suppress(OSError):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Whole or not at all, whoever else writes it.
            partial = path.with_name(f"{path.name}.{os.getpid()}")
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)


def _path(words: Sequence[str], sources: Sequence[Path] = SOURCES) -> Path | None:
    """File of the help that a command line asks for; None if it asks for none, or for one that depends on files."""
    module, *words = words[words.index("-m") + 1 :] if "-m" in words else [""]
    plain = all(re.fullmatch(r"-{0,2}[\w-]*(=[\w-]*)?", word) for word in words)
    of_files = any(word.startswith(("--config", "--resume")) for word in words)
    if module.partition(".")[0] != "experiments" or not {"-h", "--help"} & {*words} or not plain or of_files:
        return None
    whole = hashlib.sha256(repr([module, words, sys.version, shutil.get_terminal_size().columns]).encode())
    for path in sorted(path for folder in sources for path in folder.rglob("*.py")):
        stat = path.stat()
        whole.update(f"{path} {stat.st_size} {stat.st_mtime_ns}\n".encode(errors="replace"))
    root = Path(os.environ.get("PFL_JAX_CACHE") or os.path.expanduser("~/.cache/pfl_jax"))
    return root / "help" / f"{whole.hexdigest()[:32]}.txt"
