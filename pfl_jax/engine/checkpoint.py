"""Checkpoints on disk; restoring skips damaged ones.

A checkpoint has a `State`, and a record that is stored as JSON. Arrays are stored unchanged, so that a resumed run
equals the uninterrupted one bit for bit on the same machine and versions. Nothing in a checkpoint is executed or
unpickled.

Each process of a run writes its own part, with the rows of its own clients; the first one also writes everything else.
A part is the file `PROCESS-of-PROCESSES/ROUND.npz`, which is complete or absent, and has a CRC-32 of each array. A
checkpoint exists when all of its parts do. Processes that resume a run read all parts, however many there are, and take
the rows of their own clients.
"""

import collections
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.atomic_write import cannot_write, make_folder, write_binary
from pfl_jax.base import PyTree, State
from pfl_jax.errors import InvalidInput, describe_value, first_difference, one_line
from pfl_jax.primitives.tree import gather
from pfl_jax.safe_read import mapped, open_npz

FOLDER = "checkpoints"
"""Name of the checkpoint folder inside a run's folder."""

_STATE, _CLIENTS, _ABOUT = "state.", "clients", "about"
"""Prefix of the names of the state's leaves in a part, and the names of a part's client numbers and record."""

_OF_CLIENTS = f"{_STATE}clients"


class Checkpoint(NamedTuple):
    """Content of a checkpoint.

    Attributes:
      state: state for `simulate.run(state=...)`, with the clients' leaves and scores as NumPy arrays; see `newest` for
        leaves that stay in the file.
      record: the record, as read from JSON.
    """

    state: State
    record: dict[str, Any]


class Checkpoints:
    """Checkpoints of one run in one folder, numbered by completed rounds.

    Args:
      folder: folder of the checkpoints, created when the first one is written.
      keep: number of checkpoints to keep, the newest ones; several processes keep at least two.
      process, processes: index of this process, and number of processes that write.
    """

    def __init__(self, folder: Path, keep: int = 2, process: int = 0, processes: int = 1):
        self.folder: Path = folder.absolute()
        # When a process is killed while another one writes, only the previous checkpoint is complete.
        self._keep = keep if processes == 1 else max(keep, 2)
        self._process, self._processes = process, processes

    def save(self, state: State, record: dict[str, Any], clients: np.ndarray | None = None) -> None:
        """Write this process's part of a checkpoint; then remove older ones. Parts of later rounds are removed before.

        Args:
          state: state after a round, of one run or of several with a leading axis (`pfl_jax.engine.sweep`).
          record: additional data that JSON can store.
          clients: this process's own clients, ascending; the state has their rows, or the rows of all. None for all.

        Raises:
          CannotWrite: the part cannot be written; checkpoints of earlier rounds are kept.
        """
        number, own = int(np.ravel(state.round)[0]), (self._process, self._processes)
        content = self._content(state, clients)
        listed = [[name, list(leaf.shape), str(leaf.dtype)] for name, leaf in content.items()]
        about = json.dumps({"arrays": listed, "record": record}).encode()
        path = self._path(number, *own)
        make_folder(path.parent)
        # Damaged, or from an earlier run that got further.
        self._remove(self._path(*part) for part in self._parts() if part[0] > number and part[1] == self._process)
        write_binary(
            path,
            lambda file: np.savez(file, allow_pickle=False, **content, **{_ABOUT: np.frombuffer(about, np.uint8)}),
        )
        written = sorted(part for part in self._parts() if part[1:] == own)
        self._remove(self._path(*part) for part in written[: -self._keep])
        if len(written) >= self._keep and self._process == 0:
            self._remove(part for part in self.folder.glob("*-of-*") if not part.name.endswith(f"-of-{own[1]}"))

    def rounds(self) -> list[int]:
        """Rounds of the stored checkpoints, ascending."""
        return [number for number, _ in self._stored()]

    def newest(
        self,
        like: State,
        check: Callable[[dict[str, Any]], None] | None = None,
        clients: np.ndarray | None = None,
        *,
        by_rows: bool = False,
        until: int | None = None,
    ) -> Checkpoint | None:
        """Newest readable checkpoint; None if there are no checkpoints.

        Args:
          like: a state of the same run, or its shapes.
          check: function that is called with the record first, and raises InvalidInput if it belongs to another run.
          clients: clients whose rows are wanted, ascending; None for all.
          by_rows: whether the clients' states stay in the file, memory-mapped; for runs that keep states on disk.
          until: last round that is wanted; None for any.

        Raises:
          InvalidInput: all checkpoints are damaged, or the newest intact one is from another run.
        """
        reasons = []
        stored = [part for part in self._stored() if until is None or part[0] <= until]
        for number, processes in reversed(stored):
            try:
                parts = [self._read((number, index, processes), clients, by_rows=by_rows) for index in range(processes)]
            except Exception as error:
                reasons.append(f"round {number}: {one_line(error)}")
                continue
            arrays, record = _joined([arrays for arrays, _ in parts]), parts[0][1]
            if check is not None:
                check(record)
            if clients is not None:
                like = like._replace(clients=jax.eval_shape(gather, like.clients, clients))
            leaves = {name.removeprefix(_STATE): leaf for name, leaf in arrays.items() if name.startswith(_STATE)}
            return Checkpoint(state_of(leaves, like, f"the checkpoint of round {number} in {self.folder}"), record)
        if reasons:
            raise InvalidInput(f"no checkpoint in {self.folder} can be read ({'; '.join(reasons)}): start the run anew")
        return None

    def _stored(self) -> list[tuple[int, int]]:
        """Complete checkpoints: round and number of parts, ascending."""
        parts = collections.Counter((number, processes) for number, _, processes in self._parts())
        return sorted(found for found, count in parts.items() if count == found[1])

    def _parts(self) -> list[tuple[int, int, int]]:
        """Round, process and number of processes of each part."""
        paths = (path.relative_to(self.folder).as_posix() for path in self.folder.glob("*-of-*/*.npz"))
        names = [re.fullmatch(r"(\d+)-of-(\d+)/(\d+)\.npz", path) for path in paths]
        return [(int(name[3]), int(name[1]), int(name[2])) for name in names if name]

    def _path(self, number: int, process: int, processes: int) -> Path:
        return self.folder / f"{process}-of-{processes}" / f"{number}.npz"

    def _remove(self, paths: Iterable[Path]) -> None:
        try:
            for path in list(paths):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            raise cannot_write(self.folder, error) from None

    def _content(self, state: State, clients: np.ndarray | None) -> dict[str, Any]:
        """Arrays of this process's part by name."""
        content: dict[str, Any] = {}
        state = state._replace(clients=jax.tree.map(np.asarray, state.clients))
        for name, leaf in leaves_by_path(plain(state)).items():
            if name.startswith("clients") and clients is not None and len(leaf) != len(clients):
                leaf = np.asarray(leaf)[clients]
            content[f"{_STATE}{name}"] = leaf
        if self._process:
            content = {name: leaf for name, leaf in content.items() if name.startswith(_OF_CLIENTS)}
        if clients is not None:
            content[_CLIENTS] = np.asarray(clients)
        return content

    def _read(
        self, part: tuple[int, int, int], clients: np.ndarray | None, *, by_rows: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arrays of a part with the rows of some clients, and its record."""
        path = self._path(*part)
        with open_npz(path) as stored:
            # Rows that are read later are compared with their CRC-32 now.
            if by_rows and stored.zip is not None and (damaged := stored.zip.testzip()):
                raise ValueError(f"{damaged} is damaged")
            about = json.loads(stored[_ABOUT].tobytes())
            arrays: dict[str, Any] = {}
            for name, _, dtype in about["arrays"]:
                leaf = mapped(path, name) if by_rows and name.startswith(_OF_CLIENTS) else stored[name]
                # NumPy's format stores only the size of JAX's own types.
                arrays[name] = leaf.view(dtype)
        names = [name for name in arrays if name.startswith(_OF_CLIENTS)]
        if clients is not None:
            there = arrays.get(_CLIENTS, np.arange(len(arrays[names[0]]) if names else 0))
            wanted = np.flatnonzero(np.isin(there, clients))
            arrays |= {name: arrays[name][wanted] for name in names} | {_CLIENTS: there[wanted]}
        return arrays, about["record"]


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Arrays of all parts, with the clients' rows in the order of their numbers."""
    arrays = dict(parts[0])
    if _CLIENTS in arrays:
        order = np.argsort(np.concatenate([part[_CLIENTS] for part in parts]))
        for name in arrays:
            if name.startswith(_OF_CLIENTS):
                arrays[name] = np.concatenate([part[name] for part in parts])[order]
    return arrays


def plain(state: State) -> State:
    """The `state` with the key's raw data in place of the typed key."""
    return state._replace(key=jax.random.key_data(state.key))


def leaves_by_path(tree: PyTree, **names: Any) -> dict[str, Any]:
    """Leaves of a `tree` by path, such as "server['head']"; `names` are options of `jax.tree_util.keystr`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, **names).lstrip("."): leaf for path, leaf in leaves}


def tree_of(leaves: Mapping[str, Any], like: PyTree, what: str, **names: Any) -> Any:
    """Tree from its leaves by path, see `leaves_by_path`; InvalidInput unless shapes and types equal another tree's.

    Args:
      leaves: arrays by path.
      like: a tree of such arrays, or of their shapes and types.
      what: description of the source of the leaves, for the error.
      **names: options of `jax.tree_util.keystr`.
    """
    wanted = leaves_by_path(like, **names)
    kinds = [{path: describe_value(leaf) for path, leaf in each.items()} for each in (leaves, wanted)]
    if different := first_difference(*kinds):
        path, found, right = different
        raise InvalidInput(f"{what} is of another run: its {path} is {found}, and here {right}")
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[path] for path in wanted])


def state_of(leaves: Mapping[str, Any], like: State, what: str, **names: Any) -> State:
    """State from its leaves by path; the clients' leaves are kept as given.

    Args:
      leaves: leaves of a `plain` state.
      like: a state of the same run, or its shapes; not a `plain` one.
      what: description of the source of the leaves, for the error.
      **names: options of `jax.tree_util.keystr`.
    """
    state = tree_of(leaves, jax.eval_shape(plain, like), what, **names)
    return state._replace(
        server=jax.tree.map(jnp.asarray, state.server),
        key=jax.random.wrap_key_data(jnp.asarray(state.key)),
        round=jnp.asarray(state.round),
    )
