"""States of federations and models of clients as safetensors files; reading one never executes or unpickles anything.

docs/keep.md uses the models in flax, in PyTorch, and in a server process.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors
import safetensors.flax

from pfl_jax.atomic_write import write_binary
from pfl_jax.base import Method, Params, Personal, PyTree, State
from pfl_jax.data.federated import FederatedData
from pfl_jax.data.preparation import Preparation
from pfl_jax.engine.body import chain_of
from pfl_jax.engine.checkpoint import leaves_by_path, plain, state_of
from pfl_jax.engine.cohort import RoundSettings
from pfl_jax.engine.rounds import RoundProgram
from pfl_jax.errors import InvalidInput, one_line
from pfl_jax.schedules import MethodSchedule, at_round

_NAMES: dict[str, Any] = {"simple": True, "separator": "."}
"""Options of `jax.tree_util.keystr` for paths such as "server.head.kernel"."""


class SavedModel(NamedTuple):
    """One client's model from a file.

    Attributes:
      params: {"backbone": ..., "head": ...}, nested dictionaries of arrays; see `pfl_jax.networks.to_flax`.
      mean, std: float32 [C], of uint8 pixels divided by 255; None for inputs that are not rescaled.
      class_names: names of the classes 0 to K - 1; () if the names are the numbers.
      about: all other texts of the file.
      preparation: turns rows of the table into the inputs that the model was trained on; None for data of another kind.
    """

    params: Params
    mean: np.ndarray | None
    std: np.ndarray | None
    class_names: tuple[str, ...]
    about: dict[str, str]
    preparation: Preparation | None = None

    def inputs(self, x: Any) -> np.ndarray:
        """Inputs of the model [B, ...] from examples in the form of the data: x = (pixel / 255 - mean) / std, or x.

        Rows of a table (a mapping or a data frame) are prepared as in training; arrays must be prepared already.

        Raises:
          InvalidInput: x is neither numbers nor rows that the preparation takes.
        """
        if isinstance(x, Mapping) or hasattr(x, "columns"):
            if self.preparation is None:
                raise InvalidInput("this model was not trained on a table: give arrays")
            x = self.preparation(x)
        x = np.asarray(x)
        if x.dtype.kind in "OSUMm":
            raise InvalidInput(
                f"inputs are arrays of numbers, or rows of a table by column, not {x.dtype} {list(x.shape)}"
            )
        if self.mean is None or self.std is None:
            return x
        return (x.astype(np.float32) / 255 - self.mean) / self.std


def client_params(
    method: Method | MethodSchedule,
    data: FederatedData,
    state: State,
    client: int,
    settings: RoundSettings | None = None,
) -> Params:
    """Parameters of the model that a client would deploy now, after fine-tuning if the method has it.

    Args:
      method, data: method and data of the run.
      settings: settings of the run, if it had attackers (they deploy the models they trained) or clients took turns.
      state: a state of the run, such as `RoundResult.state`.
      client: number of the client, from 0.

    Raises:
      InvalidInput: there is no such client, or the method's clients deploy something other than one set of the model's
        parameters: then use `Method.predict`.

    Example:
      >>> import jax
      >>> from pfl_jax import LocalTraining, Settings, data, files, methods, models, run
      >>> dataset = data.load("digits")
      >>> federation = data.federate(dataset, data.partition.iid(dataset, num_clients=4, train_size=20, test_size=10))
      >>> method = methods.fedper(models.mlp(dataset.input_shape, dataset.num_classes), LocalTraining(lr=0.1))
      >>> *_, last = run(method, federation, Settings(rounds=1), jax.random.key(0))
      >>> params = files.client_params(method, federation, last.state, client=3)
      >>> sorted(params)
      ['backbone', 'head']
    """
    if not 0 <= client < data.num_clients:
        raise InvalidInput(f"there is no client {client}: the federation has clients 0 to {data.num_clients - 1}")
    settings = settings or RoundSettings()
    network, server, chain = chain_of(method, settings, state, data.num_clients, client)
    personal = jax.jit(RoundProgram(method, settings, network=network).personal)
    own = personal(data, server, state.key, state.round, chain)
    return as_params(own, at_round(method, 0, network or 0))


def as_params(personal: Personal, method: Method) -> Params:
    """Personal model of a client, checked to be one set of parameters of the method's model.

    Args:
      personal: result of `Method.personalize`.
      method: the method.

    Raises:
      InvalidInput: it is something else.
    """
    wanted = None if method.work is None else jax.eval_shape(method.work.model.init, jax.random.key(0))
    is_one = isinstance(personal, dict) and set(personal) == {"backbone", "head"}
    if not is_one or (wanted is not None and jax.tree.map(np.shape, personal) != jax.tree.map(np.shape, wanted)):
        raise InvalidInput(
            "a client of this method deploys more than one set of the model's parameters, which cannot be exported: "
            "use its predict"
        )
    return personal


def save_model(path: str | Path, params: Params, dataset: Any = None, **about: str) -> None:
    """Write one client's model, with everything needed to use it.

    Args:
      path: the file; an existing one is replaced.
      params: result of `client_params`; a parameter's name is its path, "backbone.conv1.kernel".
      dataset: the `pfl_jax.data.Dataset` of the run, for its normalization, preparation and class names, or None.
      **about: further texts, such as the method.

    Raises:
      CannotWrite: the file cannot be written.
    """
    for name in ("mean", "std"):
        if (value := getattr(dataset, name, None)) is not None:
            about[name] = " ".join(map(str, value))
    if (preparation := getattr(dataset, "preparation", None)) is not None:
        # Read by `SavedModel.inputs`.
        about["preparation"] = preparation.to_json()
    if names := getattr(dataset, "class_names", ()):
        about["class_names"] = json.dumps(names)
    _write(path, params, about)


def load_model(path: str | Path) -> SavedModel:
    """Read the model from a file that `save_model` has written.

    Args:
      path: the file.

    Raises:
      InvalidInput: the file cannot be read, or `save_model` did not write it.
    """
    arrays, about = _read(path)
    params: dict[str, Any] = {}
    try:
        for name, array in arrays.items():
            *folders, last = name.split(".")
            place = params
            for folder in folders:
                place = place.setdefault(folder, {})
            place[last] = array
        mean, std = (np.array(about.pop(one).split(), np.float32) if one in about else None for one in ("mean", "std"))
        names = tuple(json.loads(about.pop("class_names", "[]")))
        prepared = Preparation.from_json(about.pop("preparation")) if "preparation" in about else None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not a model that save_model wrote: {one_line(error, 100)}") from None
    return SavedModel(params, mean, std, names, about, prepared)


def save_state(path: str | Path, state: State) -> None:
    """Write the state of server and clients after a round, such as `RoundResult.state`.

    Args:
      path: the file; an existing one is replaced.
      state: state of one run, or of several with a leading axis.

    Raises:
      CannotWrite: the file cannot be written.
    """
    _write(path, plain(state), {})


def load_state(path: str | Path, like: State) -> State:
    """Read the state from a file that `save_state` has written, for `pfl_jax.run(state=...)`.

    Args:
      path: the file.
      like: a state of the same run, or its shapes: `jax.eval_shape(engine.init, federation, jax.random.key(0))`.

    Raises:
      InvalidInput: the file cannot be read, or has the state of another method or federation.
    """
    arrays, _ = _read(path)
    return state_of(arrays, like, str(path), **_NAMES)


def _write(path: str | Path, tree: PyTree, about: Mapping[str, str]) -> None:
    arrays = {name: jax.numpy.asarray(np.asarray(leaf)) for name, leaf in leaves_by_path(tree, **_NAMES).items()}
    content = safetensors.flax.save(arrays, dict(about))
    write_binary(Path(path).expanduser(), lambda file: file.write(content))


def _read(path: str | Path) -> tuple[dict[str, jax.Array], dict[str, str]]:
    """Arrays of a file by name, and its texts."""
    path = Path(path).expanduser()
    try:
        with safetensors.safe_open(path, "np") as file:
            about = dict(file.metadata() or {})
        return safetensors.flax.load_file(path), about
    except (OSError, safetensors.SafetensorError) as error:
        raise InvalidInput(f"{path} cannot be read as safetensors: {one_line(error, 100)}") from None
