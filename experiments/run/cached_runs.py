"""Cached runs: each has its own folder, and is run once unless it is interrupted."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from experiments.folder.load import read_config, read_summary
from experiments.folder.run_folder import CONFIG, METRICS, SUMMARY, RunFolder, lock_run
from experiments.folder.version import Trust, by_other_code
from experiments.identity import difference
from experiments.options import RESULT_NEUTRAL
from experiments.spec import Spec
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints
from pfl_jax.errors import InvalidInput

State = Literal["absent", "unfinished", "finished", "of other code"]


def run_cell(spec: Spec, folder: str | Path, console: Console, trust: Trust = "sources") -> dict[str, Any]:
    """Do a run unless its folder already holds it, finished; return the content of summary.json.

    Raises:
      InvalidInput: the folder holds something else or cannot be written, or the run is refused.
      KeyboardInterrupt: after SIGINT; the next call resumes from the cell's last checkpoint, if it has one.
    """
    folder = Path(folder)
    state = inspect(spec, folder, trust)
    if state == "of other code":
        raise InvalidInput(f"{folder} holds the run, made by other code: give --out another folder")
    if state == "finished":
        return read_summary(folder)
    spec = dataclasses.replace(spec, out=str(folder), given=spec.given | {"out"})
    if state == "unfinished" and Checkpoints(folder / FOLDER).rounds():
        # `inspect` has compared everything else.
        given = spec.given & RESULT_NEUTRAL - {"out"} | {"resume"}
        spec = dataclasses.replace(spec, resume=str(folder), accept_other_code=True, given=given)
    elif state == "unfinished":
        remove_unfinished(folder)
    # Imported now, so that errors, --help and what is finished do not wait for it.
    import jax

    from experiments.run import run

    try:
        run.run(spec, console)
    finally:
        # The next cell has other functions; nothing of this one's programs is used again but from the disk.
        jax.clear_caches()
    return read_summary(folder)


def inspect(spec: Spec, folder: str | Path, trust: Trust = "sources") -> State:
    """Content of a folder with respect to a run; InvalidInput if it holds another run, or cannot be read."""
    folder = Path(folder)
    is_finished = (folder / SUMMARY).exists()
    if not (folder / CONFIG).exists() and not is_finished:
        return "unfinished" if (folder / METRICS).exists() else "absent"
    config = read_config(folder)
    try:
        differs = difference(spec, config, finished=is_finished)
    except KeyError as error:
        raise InvalidInput(f"{folder / CONFIG} has no {error}: give --out another folder") from None
    if differs:
        raise InvalidInput(f"{folder} holds another run ({differs}), which is never overwritten: give --out another")
    if by_other_code(config, trust):
        return "of other code"
    return "finished" if is_finished else "unfinished"


def remove_unfinished(folder: Path) -> None:
    """Remove the files of an interrupted run, and nothing else; a missing folder is no error."""
    if not folder.exists():
        return
    try:
        with lock_run(folder):
            RunFolder(folder).clear()
    except OSError as error:
        raise InvalidInput(f"cannot clear {folder}: {error.strerror or error}") from None
