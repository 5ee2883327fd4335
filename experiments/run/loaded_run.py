"""Finished runs, loaded from their folders: data, method, and the final state with every client's model."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from experiments.folder.load import read_config, read_summary
from experiments.folder.run_folder import CONFIG, KEPT, SUMMARY
from experiments.run import build
from experiments.run.models import models_of
from experiments.run.records import check_identity
from experiments.run.resume import check_data, spec_of
from experiments.spec.options import PROCESSES
from pfl_jax.base import ClientData, Method, Model, Params, Personal, State
from pfl_jax.data.federated import FederatedData, Split, client_data
from pfl_jax.data.sources import Dataset
from pfl_jax.engine.body import chain_of
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints
from pfl_jax.engine.rounds import RoundProgram
from pfl_jax.errors import InvalidInput
from pfl_jax.files import as_params
from pfl_jax.schedules import MethodSchedule, at_round, mixture


@dataclass(frozen=True)
class LoadedRun:
    """A finished run for a notebook: data, model, method (or a schedule of methods) and final state."""

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    dataset: Dataset
    data: FederatedData
    model: Model
    method: Method | MethodSchedule
    state: State
    settings: Any

    def client_data(self, client: int, split: Split = "test") -> ClientData:
        """Examples of a client (numbered from 0) as inputs of its model, without padding."""
        self._check_client(client)
        padded = client_data(self.data, client, split)
        real = np.asarray(padded.mask)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[real], padded)

    def personal(self, client: int) -> Personal:
        """Model that a client would deploy, as in the last evaluation, after the method's fine-tuning, if any."""
        self._check_client(client)
        network, server, chain = chain_of(self.method, self.settings, self.state, self.data.num_clients, client)
        return self._personalize(network, self.data, server, self.state.key, self.state.round, chain)

    @functools.cached_property
    def _personalize(self) -> Callable[..., Personal]:
        """Compiled function that gives a client's deployed model from the position of its network, and its state."""

        def personal(network: int | None, *state: Any) -> Personal:
            return RoundProgram(self.method, self.settings, network=network).personal(*state)

        return jax.jit(personal, static_argnums=0)

    def _method(self, client: int, index: int) -> Method:
        """Method of a client in a round."""
        mixed = mixture(self.method)
        return at_round(self.method, index, 0 if mixed is None else mixed.networks(self.data.num_clients)[client])

    def predict(self, client: int, inputs: Any) -> jax.Array:
        """Logits or log-probabilities [B, K] of a client's model for inputs [B, ...] as in `client_data`."""
        return self._method(client, max(int(self.state.round) - 1, 0)).predict(self.personal(client), inputs)

    def params(self, client: int) -> Params:
        """Parameters of a client's model, backbone and head; InvalidInput if the method's clients deploy something
        else."""
        return as_params(self.personal(client), self._method(client, 0))

    def _check_client(self, client: int) -> None:
        if not 0 <= client < self.data.num_clients:
            raise InvalidInput(f"there is no client {client}: the run has clients 0 to {self.data.num_clients - 1}")


def load_run(
    folder: str | Path, *, method: str | None = None, model: str | None = None, loss: str | None = None
) -> LoadedRun:
    """Load a finished run from its folder: the data is loaded and divided again, the state is read.

    Args:
      folder: folder of the run.
      method, model, loss: FILE.py:NAME, for your own files in the run. A file that only the folder names is not
        executed, since it could do anything that you can.

    Raises:
      InvalidInput: the run is not finished or kept no state, a file cannot be read, an own file is not named, or the
        data or the text of an own file has changed.

    Example:
      run = load_run("runs/digits-fedper-seed0-001")
      run.predict(3, run.client_data(3).x).argmax(1)
    """
    folder = Path(folder).expanduser()
    if not (folder / CONFIG).is_file():
        raise InvalidInput(f"{folder}: the folder has no run")
    if not (folder / SUMMARY).is_file():
        raise InvalidInput(f"{folder}: the run is not finished: --resume {folder} continues it")
    config, summary = read_config(folder), read_summary(folder)
    kept, last = summary.get("kept_round"), summary.get("kept_round", summary.get("rounds_done"))
    checkpoints = Checkpoints(folder / (FOLDER if kept is None else KEPT))
    if last not in checkpoints.rounds():
        raise InvalidInput(f"{folder}: the run kept no state: make it again in a new folder, with --keep-state always")
    named = {kind: name for kind, name in (("method", method), ("model", model), ("loss", loss)) if name is not None}
    # Load in this process alone, even if several processes began the run.
    alone = dict.fromkeys(PROCESSES) | {"distributed": False, "devices": "auto"}
    spec = spec_of(config | {"options": config.get("options", {}) | alone}, folder, "", named=named)
    experiment = build.build_experiment(spec, Console(quiet=True))
    check_data(folder, experiment.dataset.description)

    found = checkpoints.newest(
        experiment.state_shapes(),
        lambda record: check_identity(record, experiment, checkpoints.folder, lambda _: None),
        by_rows=experiment.state_place() == "disk",
    )
    if found is None or int(found.state.round) != last:
        raise InvalidInput(f"{folder}: the checkpoint of round {last} cannot be read: make the run again")
    data, spec = experiment.data_in(int(found.state.round)), experiment.spec
    # Only the processes of --distributed place clients on devices.
    assert isinstance(data, FederatedData)
    return LoadedRun(
        folder=folder,
        config=config,
        summary=summary,
        dataset=experiment.dataset,
        data=data,
        model=models_of(spec, experiment.dataset)[0],
        method=experiment.method,
        state=found.state,
        settings=experiment.settings,
    )
