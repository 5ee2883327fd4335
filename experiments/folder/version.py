"""Code behind a result: digests of the sources, and the version of the method."""

import functools
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias

import pfl_jax
from experiments.folder.run_folder import CONFIG
from pfl_jax.methods import METHODS
from pfl_jax.methods.factories import version_of

PACKAGE = Path(pfl_jax.__file__).parent

EXPERIMENTS = Path(__file__).parents[1]
BUILDING = ("cli", "run", "spec", "commands/batch.py", "sweep.py")
"""Folders and files of `experiments` that define, build and train runs; all others read runs."""

ComparedCode: TypeAlias = Literal["sources", "version"]
"""Code that counts as today's: the same sources, or any code with the same version of the method."""

RESUMED_BY = "resumed_by"
"""Entry of config.json: other code that trained later rounds of a run, see `versions_behind`."""


@functools.cache
def own_version() -> str:
    """Digest of the library's source files, which is its version, since it runs from a checkout."""
    return digest_of_sources(_sources(PACKAGE, PACKAGE))


@functools.cache
def building_version() -> str:
    """Digest of the source files of `experiments` that build and train runs."""
    return digest_of_sources(one for name in BUILDING for one in _sources(EXPERIMENTS / name, EXPERIMENTS))


def source_versions() -> dict[str, str]:
    """Digests of all sources on which results depend, by their names in config.json."""
    return {"pfl_jax": own_version(), "experiments": building_version()}


def method_version(method: str) -> int | None:
    """Version of a method's results, see `pfl_jax.methods.factories.method_factory`; None for a user's own method."""
    return version_of(METHODS[method]) if method in METHODS else None


def code_version(method: str) -> dict[str, Any]:
    """Today's code for a method, for comparison with the code behind a run."""
    return source_versions() | {"method_version": method_version(method)}


def versions_behind(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Versions of the code that made a run with this config.json, each as in `code_version`, in order of time."""
    began = {name: config.get("versions", {}).get(name) for name in source_versions()}
    return [began | {"method_version": config.get("method_version")}, *config.get(RESUMED_BY, [])]


def by_other_code(config: Mapping[str, Any], compared: ComparedCode) -> bool:
    """Whether code that does not count as today's made any rounds of a run; unknown code does not count as today's."""
    own = code_version(config["options"]["method"])
    # A user's own method has no number; its text is compared with the options of the run.
    by_number = compared == "version" and own["method_version"] is not None
    names = ("method_version",) if by_number else tuple(source_versions())
    return any(code.get(name) != own[name] for code in versions_behind(config) for name in names)


def commit_behind(folder: str | Path) -> str:
    """Commit whose library made the run in a folder, ", of commit 1a2b3c4"; "" if no commit has these sources."""
    config = json.loads((Path(folder) / CONFIG).read_text())
    commit = commit_of(str(config.get("versions", {}).get(PACKAGE.name)), newest=100)
    return f", of commit {commit[:7]}" if commit else ""


def note_on_code(config: Mapping[str, Any]) -> str:
    """Note on a run that was resumed under other code of this project; "" for any other run."""
    return f"its last rounds are of other code than its first rounds, see {RESUMED_BY}" if RESUMED_BY in config else ""


@functools.cache
def commit_of(version: str, newest: int = 100_000) -> str | None:
    """Newest commit in which the library has this `own_version`, among the `newest` commits that changed the library.

    None if no commit has these sources (uncommitted changes), or git is missing.
    """
    folder = PACKAGE.name
    try:
        for commit in _git("rev-list", f"--max-count={newest}", "HEAD", "--", folder).decode().split():
            if digest_of_sources(_files(commit, folder)) == version:
                return commit
    except (OSError, subprocess.CalledProcessError):
        return None
    return None


def _files(commit: str, folder: str) -> Iterator[tuple[PurePosixPath, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit, "--", folder))) as archive:
        for member in archive:
            if member.name.endswith(".py") and (file := archive.extractfile(member)) is not None:
                yield PurePosixPath(member.name).relative_to(folder), file.read()


def _git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", PACKAGE.parent, *words], check=True, capture_output=True).stdout


def _sources(folder: Path, root: Path) -> Iterator[tuple[PurePosixPath, bytes]]:
    for path in [folder] if folder.suffix else folder.rglob("*.py"):
        yield PurePosixPath(path.relative_to(root).as_posix()), path.read_bytes()


def digest_of_sources(files: Iterable[tuple[PurePosixPath, bytes]]) -> str:
    """Digest of names relative to the package, and contents."""
    digest = hashlib.sha256()
    for path, content in sorted(files):
        digest.update(f"{path} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]
