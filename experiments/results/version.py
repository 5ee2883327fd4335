"""Version of the sources behind a result: a digest of the package, and the commit that has it."""

import functools
import hashlib
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import pfl_jax

PACKAGE = Path(pfl_jax.__file__).parent


@functools.cache
def own_version() -> str:
    """Digest of this package's source files, which stands for its version because it runs from a checkout."""
    paths = PACKAGE.rglob("*.py")
    return _digest((PurePosixPath(path.relative_to(PACKAGE).as_posix()), path.read_bytes()) for path in paths)


@functools.cache
def commit_of(version: str) -> str | None:
    """Commit in which the package has this `own_version`.

    It is searched from the checkout's present commit backwards, so that results of an earlier version can still be
    attributed.

    Args:
      version: a digest.

    Returns:
      The commit's hash; None where no commit has these sources (uncommitted changes), or there is no git.
    """
    folder = PACKAGE.name
    try:
        for commit in _git("rev-list", "HEAD", "--", folder).decode().split():
            if _digest(_files(commit, folder)) == version:
                return commit
    except (OSError, subprocess.CalledProcessError):
        return None
    return None


def _digest(files: Iterable[tuple[PurePosixPath, bytes]]) -> str:
    """Digest of names relative to the package, and contents."""
    digest = hashlib.sha256()
    for path, content in sorted(files):
        digest.update(f"{path} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def _files(commit: str, folder: str) -> Iterator[tuple[PurePosixPath, bytes]]:
    for line in _git("ls-tree", "-r", "-z", commit, "--", folder).decode().split("\0"):
        about, _, name = line.partition("\t")
        if name.endswith(".py"):
            yield PurePosixPath(name).relative_to(folder), _blob(about.split()[2])


@functools.cache
def _blob(name: str) -> bytes:
    return _git("cat-file", "blob", name)


def _git(*words: str) -> bytes:
    done = subprocess.run(["git", "-C", PACKAGE.parent, *words], check=True, capture_output=True)
    return done.stdout
