"""States on disk, written by orbax: a checkpoint is there whole or not at all, and the newest good one is found again.

A checkpoint is a `State`, further arrays by name, and a record for JSON. Arrays are stored as they are, so that a run
that goes on from one is, on the same machine and versions, the uninterrupted run bit for bit.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import State
from pfl_jax.errors import InvalidInput
from pfl_jax.reporting import write_whole

FOLDER = "checkpoints"
"""Name of the folder in that of a run."""

MANIFEST = "files.json"
"""In a checkpoint's folder, written last: the digests of its other files. Without it the checkpoint is not whole."""


class Checkpoint(NamedTuple):
    """What was saved.

    Attributes:
      state: clients' leaves and accuracies as NumPy arrays, for `simulate.run(state=...)`.
      arrays: the further ones.
      record: as JSON has it.
    """

    state: State
    arrays: dict[str, np.ndarray]
    record: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, in a folder of their own, by the number of rounds done.

    Args:
      folder: made when the first one is written.
      keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, keep: int = 2):
        self.folder = folder.absolute()
        self._keep = keep

    def save(self, state: State, arrays: dict[str, np.ndarray], record: dict[str, Any]) -> None:
        """Writes a checkpoint; an older one goes only after it is whole.

        Args:
          state: after a round; of one run, or of several with a leading axis as in `pfl_jax.sweep`.
          arrays, record: what else belongs to it.

        Raises:
          InvalidInput: it cannot be written; those before it stay.
        """
        # Importing takes seconds: only runs that write or read checkpoints wait for it.
        import orbax.checkpoint as ocp

        stored = {f"state-{index:04d}": leaf for index, leaf in enumerate(_leaves(state))}
        stored |= {f"further-{name}": np.asarray(value) for name, value in arrays.items()}
        # Tensorstore has no arrays without entries.
        shapes = {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in stored.items()}
        stored = {name: leaf for name, leaf in stored.items() if leaf.size}
        number = int(np.ravel(state.round)[0])
        try:
            with self._manager() as manager:
                manager.save(
                    number,
                    args=ocp.args.Composite(
                        arrays=ocp.args.StandardSave(stored),
                        record=ocp.args.JsonSave({"shapes": shapes, "record": record}),
                    ),
                    force=True,
                )
            place = self.folder / str(number)
            write_whole(place / MANIFEST, json.dumps(_digests(place)))
        except (OSError, ValueError, RuntimeError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise InvalidInput(
                f"cannot write a checkpoint into {self.folder}: {reason}; make room, then continue with --resume"
            ) from None

    def rounds(self) -> list[int]:
        """Of the checkpoints that are there, in order."""
        if not self.folder.is_dir():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdecimal())

    def newest(self, like: State) -> Checkpoint | None:
        """The newest checkpoint that can be read; None if there is none.

        Args:
          like: a state of the same run, or its shapes.

        Raises:
          InvalidInput: all checkpoints are damaged, or the newest good one is of another kind of run.
        """
        reasons = []
        for number in reversed(self.rounds()):
            try:
                stored, record = self._read(number)
            except Exception as error:
                reasons.append(f"round {number}: {next(iter(str(error).splitlines()), type(error).__name__)}")
                continue
            return self._build(number, stored, record, like)
        if reasons:
            raise InvalidInput(f"no checkpoint in {self.folder} can be read ({'; '.join(reasons)})")
        return None

    def clear(self) -> None:
        """Removes all checkpoints."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _manager(self) -> Any:
        import orbax.checkpoint as ocp

        # One process alone writes, and each reads for itself: orbax would wait for the others.
        index = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(primary_host=index, active_processes={index})
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._keep,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
            create=jax.process_count() == 1,
            multiprocessing_options=ocp.options.MultiprocessingOptions() if jax.process_count() == 1 else alone,
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        return ocp.CheckpointManager(self.folder, options=options)

    def _read(self, number: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        place = self.folder / str(number)
        # Before orbax reads them: not every kind of damage is an error there, and some leave threads behind.
        if json.loads((place / MANIFEST).read_text()) != _digests(place):
            raise ValueError("its files are not those that were written")
        import orbax.checkpoint as ocp

        with self._manager() as manager:
            record = manager.restore(number, args=ocp.args.Composite(record=ocp.args.JsonRestore())).record
            like = {name: np.empty(shape, dtype) for name, (shape, dtype) in record["shapes"].items() if 0 not in shape}
            found = manager.restore(number, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(like))).arrays
        empty = {name: np.empty(*of) for name, of in record["shapes"].items() if name not in found}
        return {**{name: np.asarray(leaf) for name, leaf in found.items()}, **empty}, record["record"]

    def _build(self, number: int, stored: dict[str, np.ndarray], record: dict[str, Any], like: State) -> Checkpoint:
        names = sorted(name for name in stored if name.startswith("state-"))
        wanted = jax.tree.leaves(jax.eval_shape(lambda state: _plain(state), like))
        kinds = [(stored[name].shape, str(stored[name].dtype)) for name in names]
        if kinds != [(leaf.shape, str(leaf.dtype)) for leaf in wanted]:
            raise InvalidInput(
                f"the checkpoint of round {number} in {self.folder} is of another run: its arrays are not this one's"
            )
        plain = jax.tree.unflatten(jax.tree.structure(_plain_structure(like)), [stored[name] for name in names])
        state = plain._replace(
            server=jax.tree.map(jnp.asarray, plain.server),
            key=jax.random.wrap_key_data(jnp.asarray(plain.key)),
            round=jnp.asarray(plain.round),
        )
        arrays = {name.removeprefix("further-"): leaf for name, leaf in stored.items() if name.startswith("further-")}
        return Checkpoint(state, arrays, record)


def _digests(place: Path) -> dict[str, str]:
    """Of all files below a folder, but the list of them."""
    files = sorted(path for path in place.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _plain(state: State) -> State:
    """The state with its key's data in the place of the key."""
    return state._replace(key=jax.random.key_data(state.key))


def _plain_structure(state: State) -> State:
    return state._replace(key=0)


def _leaves(state: State) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(_plain(state))]
