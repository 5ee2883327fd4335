"""Orbax's manager of the checkpoints that one process writes, with arrays in NumPy's format.

Orbax's own handlers write arrays of NumPy in the first process alone, and arrays of JAX only together with all others.
An .npz file can be written by any process, has a CRC-32 of each array, and fails with an error of the system.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from pfl_jax.safe_read import open_npz

FILE = "arrays.npz"
"""Name of the file with the arrays."""


class NpzHandler(ocp.CheckpointHandler):
    """Handler of arrays by name."""

    def save(self, directory: Any, args: "NpzSave") -> None:
        """Write the arrays into a folder; OSError on failure."""
        with (Path(directory) / FILE).open("wb") as file:
            np.savez(file, allow_pickle=False, **args.arrays)

    def restore(self, directory: Any, args: Any = None) -> dict[str, np.ndarray]:
        """Arrays in a folder; an error if one is not as it was written."""
        with open_npz(Path(directory) / FILE) as stored:
            return {name: stored[name] for name in stored.files}


@ocp.args.register_with_handler(NpzHandler, for_save=True)
@dataclass
class NpzSave(ocp.args.CheckpointArgs):
    """Arrays to write.

    Attributes:
      arrays: by name.
    """

    arrays: dict[str, np.ndarray]


@ocp.args.register_with_handler(NpzHandler, for_restore=True)
@dataclass
class NpzRestore(ocp.args.CheckpointArgs):
    """All arrays, as they were written."""


def manager(folder: Path, keep: int, *, write: bool = True) -> ocp.CheckpointManager:
    """Manager of the checkpoints in a folder, for this process alone.

    Args:
      folder: of the checkpoints; it is there.
      keep: number of checkpoints to keep.
      write: False only reads.
    """
    # All errors are raised; its threads may log them after that.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        create=False,
        cleanup_tmp_directories=write,
        read_only=not write,
        enable_async_checkpointing=False,
        # It does not read the descriptions of other rounds, which may be damaged.
        lightweight_initialize=True,
        multiprocessing_options=alone,
    )
    # By default only the first process would write the record.
    handlers = {"state": NpzHandler(), "record": ocp.JsonCheckpointHandler(multiprocessing_options=alone)}
    return ocp.CheckpointManager(folder, options=options, item_handlers=handlers)


def save(folder: Path, keep: int, number: int, arrays: dict[str, np.ndarray], record: dict[str, Any]) -> int:
    """Write a checkpoint, and remove those that are too many; returns the number of checkpoints in the folder."""
    with manager(folder, keep) as opened:
        items = ocp.args.Composite(state=NpzSave(arrays), record=ocp.args.JsonSave(record))
        opened.save(number, args=items, force=True)
        return len(opened.all_steps())


def restore(folder: Path, number: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and record of a checkpoint; any error if it is damaged."""
    with manager(folder, 1, write=False) as opened:
        found = opened.restore(number, args=ocp.args.Composite(state=NpzRestore(), record=ocp.args.JsonRestore()))
        return found.state, found.record
