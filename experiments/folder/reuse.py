"""Runs that are made once: what a folder holds of a run, and how it goes on there."""

import dataclasses
from pathlib import Path
from typing import Literal

from experiments.folder.load import read_config
from experiments.folder.run_folder import CONFIG, KEPT, METRICS, SUMMARY, RunFolder, lock_run
from experiments.folder.version import ComparedCode, by_other_code
from experiments.spec.identity import difference
from experiments.spec.spec import Spec
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints
from pfl_jax.errors import InvalidInput

State = Literal["absent", "unfinished", "finished", "of other code"]


def inspect(spec: Spec, folder: str | Path, compared: ComparedCode = "sources") -> State:
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
    if by_other_code(config, compared):
        return "of other code"
    is_kept = any(Checkpoints(folder / name).rounds() for name in (FOLDER, KEPT))
    if is_finished and spec.keep_state == "always" and not is_kept:
        raise InvalidInput(f"{folder} holds the run, which kept no state: --keep-state always needs another --out")
    return "finished" if is_finished else "unfinished"


def continued(spec: Spec) -> Spec:
    """A run that is absent or unfinished in its folder, `out`: it goes on from its checkpoints, or begins anew."""
    folder = Path(str(spec.out))
    if Checkpoints(folder / FOLDER).rounds():
        return dataclasses.replace(spec, resume=str(folder))
    if (folder / METRICS).exists():
        try:
            with lock_run(folder):
                RunFolder(folder).clear()
        except OSError as error:
            raise InvalidInput(f"cannot clear {folder}: {error.strerror or error}") from None
    return spec
