"""Finished runs, loaded from their folders: data, method, and the final state with every client's model."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from experiments.config.options import Options
from experiments.execution import build
from experiments.execution.experiment import Experiment
from experiments.execution.resume import check_data, request_of
from experiments.results.load import check_digests, read_config, read_summary
from experiments.results.run_folder import CONFIG, STATE, SUMMARY
from pfl_jax.base import ClientData, Method, MethodSchedule, Model, Params, Personal, State, at_round
from pfl_jax.data.federated import FederatedData, Split, client_data
from pfl_jax.data.sources import Dataset
from pfl_jax.engine import attacks, final_state
from pfl_jax.errors import InvalidInput

MOST_BYTES = 2**28
"""Size up to which --keep-state auto keeps a state."""


def keep_state(folder: Path, options: Options, state: State, notify: Callable[[str], None]) -> None:
    """Write the final state of a run into its folder, unless it is large or the options say never.

    Args:
      folder: folder of the run.
      options: options of the run.
      state: final state with the rows of all clients.
      notify: receives a message if the state is too large.

    Raises:
      CannotWrite: it cannot be written.
    """
    if is_kept(options, final_state.byte_count(state), notify):
        final_state.save(folder / STATE, state)


def is_kept(options: Options, size: int, notify: Callable[[str], None]) -> bool:
    """Whether a final state of `size` bytes is kept; `options` and `notify` as in `keep_state`."""
    if options.keep_state == "auto" and size > MOST_BYTES:
        notify(f"The final state has {size / 2**20:,.0f} MiB and is not kept: --keep-state always would keep it.")
    return options.keep_state == "always" or (options.keep_state == "auto" and size <= MOST_BYTES)


@dataclass(frozen=True)
class LoadedRun:
    """A finished run: its data, method and final state, for a notebook.

    Attributes:
      folder: its folder.
      config: content of config.json.
      summary: content of summary.json.
      dataset: the examples.
      data: the federation of the clients that took part.
      model: model that they trained.
      method: method with the run's hyper-parameters; a schedule if they changed with the round.
      state: state after the last round; `pfl_jax.run` continues from it.
      settings: settings of the simulation.
    """

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
        """Examples of a client in the form of its model's inputs, without padding.

        Args:
          client: its number, from 0.
          split: "train" or "test".
        """
        self._check_client(client)
        padded = client_data(self.data, client, split)
        real = np.asarray(padded.mask)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[real], padded)

    def personal(self, client: int) -> Personal:
        """Model that a client would deploy, as in the last evaluation, after fine-tuning if the method has it.

        Args:
          client: its number, from 0.
        """
        self._check_client(client)
        settings = self.settings
        attackers = attacks.draw(
            *(self.state.key, self.data.num_clients, settings.attack, settings.attackers, settings.attack_scale),
            self.data.num_labels,
        )
        train = attacks.training_data(self.data, client, attackers)
        return final_state.deployed(self.method, self.state, client, train)

    def predict(self, client: int, inputs: Any) -> jax.Array:
        """Logits or log-probabilities [B, K] of a client's model.

        Args:
          client: its number, from 0.
          inputs: [B, ...] as in `client_data`, normalized.
        """
        return at_round(self.method, max(int(self.state.round) - 1, 0)).predict(self.personal(client), inputs)

    def params(self, client: int) -> Params:
        """Parameters of a client's model, backbone and head.

        Args:
          client: its number, from 0.

        Raises:
          InvalidInput: the method's clients deploy something else than one set of parameters.
        """
        found, wanted = self.personal(client), jax.eval_shape(self.model.init, jax.random.key(0))
        same = jax.tree.structure(found) == jax.tree.structure(wanted) and all(
            one.shape == other.shape for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
        )
        if not same:
            name = self.summary["method"]
            raise InvalidInput(
                f"a client of {name} deploys more than one set of the model's parameters, which cannot be exported: "
                "use load_run and its predict"
            )
        return found

    def _check_client(self, client: int) -> None:
        if not 0 <= client < self.data.num_clients:
            raise InvalidInput(f"there is no client {client}: the run has clients 0 to {self.data.num_clients - 1}")


def load_run(folder: str | Path) -> LoadedRun:
    """Load a finished run from its folder: the data is loaded and divided again, the state is read.

    Args:
      folder: of the run.

    Raises:
      InvalidInput: the run is not finished or kept no state, a file cannot be read, or its data, or the text of its own
        method or model, is no longer the same.

    Example:
      run = load_run("runs/digits-fedper-seed0-001")
      run.predict(3, run.client_data(3).x).argmax(1)
    """
    folder = Path(folder).expanduser()
    if not (folder / CONFIG).is_file():
        raise InvalidInput(f"{folder}: there is no run in it")
    if not (folder / SUMMARY).is_file():
        raise InvalidInput(f"{folder}: the run is not finished: --resume {folder} goes on with it")
    if not (folder / STATE).is_file():
        raise InvalidInput(f"{folder}: the run kept no {STATE}: make it again with --keep-state always")
    config, summary = read_config(folder), read_summary(folder)
    check_digests(folder, summary, [STATE])
    experiment = _experiment(config, folder)
    data, options = experiment.data, experiment.request.options
    # Only the processes of --distributed place clients on devices.
    assert isinstance(data, FederatedData)
    return LoadedRun(
        folder=folder,
        config=config,
        summary=summary,
        dataset=experiment.dataset,
        data=data,
        model=build.model_of(options, experiment.dataset),
        method=experiment.method,
        state=final_state.load(folder / STATE, experiment.state_shapes()),
        settings=experiment.settings,
    )


def _experiment(config: dict[str, Any], folder: Path) -> Experiment:
    """Parts of a stored run, built again in this process alone."""
    alone = {"distributed": False, "coordinator": None, "num_processes": None, "process_id": None, "devices": "auto"}
    options = config.get("options")
    here = config | {"options": options | alone} if isinstance(options, dict) else config
    experiment = build.build_experiment(request_of(here, folder, ""), Console(quiet=True))
    check_data(folder, experiment.dataset.description)
    return experiment
