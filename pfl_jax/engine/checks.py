"""Checks of a run's arguments, on the host, before anything is compiled."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from pfl_jax.base import Method, MethodSchedule, PyTree, State, at_round
from pfl_jax.data.federated import FederatedData, client_data, select_run
from pfl_jax.engine.build import Engine, build
from pfl_jax.engine.cohort import RoundSettings, Settings
from pfl_jax.engine.mapping import AXIS
from pfl_jax.engine.store import Federation
from pfl_jax.errors import InvalidInput, first_line, word
from pfl_jax.hyper_parameters import check, choice, whole
from pfl_jax.primitives.local_training import LocalTraining

GENERATOR = "threefry2x32"
"""Generator of random numbers of every key. The numbers of others depend under vmap on the other clients of a chunk."""


def expect(name: str, value: Any, fits: bool, wanted: str) -> None:
    """Raise InvalidInput "NAME must be WANTED, not VALUE" unless `fits`."""
    if not fits:
        raise InvalidInput(f"{name} must be {wanted}, not {word(value)}")


def check_run(
    method: Any,
    data: Any,
    settings: Any,
    key: Any,
    *,
    state: Any,
    mesh: Any,
    newcomers: Any,
    state_on: Any,
    state_folder: Any,
    on_nan: Any,
) -> None:
    """Raise InvalidInput unless the arguments of `pfl_jax.engine.simulate.run` are of their types and fit together."""
    wanted = "a Method, such as methods.fedavg(model), or a function from the round to one"
    expect("method", method, isinstance(method, Method) or callable(method), wanted)
    for name, federation in {"data": data, "newcomers": newcomers}.items():
        is_none = name == "newcomers" and federation is None
        expect(name, federation, is_none or isinstance(federation, Federation), "a federation, of data.federate")
    expect("settings", settings, isinstance(settings, Settings), "Settings, such as Settings(rounds=10)")
    check_key(key)
    check_mesh(mesh)
    choice("state_on", state_on, ("device", "host", "disk"))
    if state_on == "disk" and data.mesh is not None and data.mesh.is_multi_process:
        raise InvalidInput("state_on disk is for one process: with several, each keeps its own clients' on the host")
    if state_folder is not None and state_on != "disk":
        raise InvalidInput(f"state_folder is for state_on disk, not for {state_on}")
    if state_folder is not None and not Path(state_folder).is_dir():
        raise InvalidInput(f"the folder {state_folder} for the clients' states is not there")
    choice("on_nan", on_nan, ("stop", "skip-client"))
    if state is not None:
        check_state(cast(Method | MethodSchedule, method), data, settings, state)


def check_engine(
    engine: Any, method: Any, settings: Settings, mesh: Mesh | None, state_on: str, *, donate: bool
) -> None:
    """Raise InvalidInput unless an engine was built with the arguments of `pfl_jax.engine.simulate.run`."""
    expect("engine", engine, isinstance(engine, Engine), "an Engine, of pfl_jax.build(method, settings).jit()")
    if state_on != "device" or donate:
        raise InvalidInput("state_on and donate are for a run without an engine: give them, or a store, to build")
    for name, one, other in (("method", method, engine.method), ("mesh", mesh, engine.mesh)):
        if one is not other and one != other:
            raise InvalidInput(f"engine was built with another {name}")
    for field in dataclasses.fields(RoundSettings):
        one, other = getattr(settings, field.name), getattr(engine.settings, field.name)
        # Results do not depend on chunks, which `run` chooses by the clients' sizes.
        if field.name != "chunk" and one != other:
            raise InvalidInput(f"engine was built with {field.name} {other}, and settings has {one}")


def check_sweep(
    make_method: Any,
    data: Any,
    settings: Any,
    keys: Any,
    values: Mapping[str, jax.Array],
    *,
    states: Any,
    chunk: Any,
    mesh: Any,
) -> None:
    """Raise InvalidInput unless the arguments of `pfl_jax.engine.sweep.run` are of their types and fit together."""
    expect("make_method", make_method, callable(make_method), "a function of hyper-parameters to a Method")
    is_federation = isinstance(data, FederatedData)
    expect("data", data, is_federation, "a federation, of data.federate or data.federate_runs")
    expect("settings", settings, isinstance(settings, Settings), "Settings, such as Settings(rounds=10)")
    check_key(keys, "keys", axes=1)
    if chunk not in (None, "auto"):
        whole("chunk", chunk)
    check_mesh(mesh)
    shapes = {name: value.shape for name, value in values.items()}
    if data.train_count.ndim == 2:
        shapes["data"] = data.train_count.shape[:1]
    for name, shape in shapes.items():
        if shape != keys.shape:
            raise InvalidInput(
                f"every run needs one key and one value: keys has shape {keys.shape}, but {name} {shape}"
            )
    kinds = get_type_hints(LocalTraining, include_extras=True)
    for name, value in values.items():
        for one in np.asarray(value).tolist():
            check({name: one}, kinds)
    if states is None:
        return
    expect("states", states, isinstance(states, State), "a State of all runs, such as a result's .state")
    rows, number, devices = int(np.size(states.round)), len(keys), 1 if mesh is None else mesh.size
    # The states of a result have rows that pad the devices' shares.
    if rows not in (number, -(-number // devices) * devices):
        raise InvalidInput(f"states has {rows} runs, and keys {number}")
    completed = np.unique(np.asarray(states.round)).tolist()
    if len(completed) > 1:
        raise InvalidInput(
            f"states has runs of {completed[0]} and of {completed[-1]} completed rounds: continue them separately"
        )
    first = jax.tree.map(lambda leaf: leaf[0], states)
    method = make_method(**{name: value[0] for name, value in values.items()})
    check_state(cast(Method | MethodSchedule, method), _first(data), settings, first)


def check_mesh(mesh: Any) -> None:
    """Raise InvalidInput unless this is a mesh as `pfl_jax.engine.mapping.client_mesh` makes it, or None."""
    is_ours = isinstance(mesh, Mesh) and (mesh.axis_names, mesh.axis_types) == ((AXIS,), (AxisType.Auto,))
    found = str(mesh) if isinstance(mesh, Mesh) else mesh
    expect("mesh", found, mesh is None or is_ours, f"of the one axis {AXIS} (Auto), as client_mesh() makes it")


def check_key(key: Any, name: str = "key", *, axes: int = 0) -> None:
    """Raise InvalidInput unless this is a key of GENERATOR, typed or raw, or with axes=1 keys [R]."""
    kind = getattr(key, "dtype", None)
    is_typed = kind is not None and jnp.issubdtype(kind, jax.dtypes.prng_key)
    # The last axis of raw keys is that of their words.
    fits = (is_typed or kind == np.uint32) and key.ndim == axes + (not is_typed) and key.size > 0
    wanted = "keys [R], such as jax.random.split(jax.random.key(0), 3)" if axes else "a key, such as jax.random.key(0)"
    expect(name, key, fits, wanted)
    found = str(jax.random.key_impl(key)) if is_typed else GENERATOR if key.shape[-1] == 2 else "another one"
    if found != GENERATOR:
        raise InvalidInput(
            f"{name} must be of JAX's generator {GENERATOR}, not of {found}, whose numbers depend on chunks: use "
            f'jax.random.key(0, impl="{GENERATOR}")'
        )


def typed_keys(keys: Any) -> Any:
    """Keys [R] of raw `keys`, uint32 [R, 2], which `pfl_jax.engine.simulate.run` takes too; all else as it is."""
    is_raw = getattr(keys, "dtype", None) == np.uint32 and keys.ndim == 2 and keys.shape[1] == 2
    return jax.random.wrap_key_data(jnp.asarray(keys), impl=GENERATOR) if is_raw else keys


@contextlib.contextmanager
def explained(
    make: Callable[..., Method | MethodSchedule], values: Mapping[str, Any], data: Federation
) -> Iterator[None]:
    """Context whose errors become an InvalidInput if the reason is that the model does not take the inputs.

    Only after an error is the model traced, so that a run that fits has no costs.

    Args:
      make: function of hyper-parameters, which may be traced, to the method or a schedule of it.
      values: its hyper-parameters.
      data: the federation; with a leading axis of runs on its tables, the first run counts.
    """
    try:
        yield
    except (InvalidInput, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        one, method = _first(data), at_round(make(**values), 0)
        if method.work is None:
            # It does not name its model, which could be asked alone.
            inputs, reason = list(one.x.shape[1:]), f"{type(error).__name__}: {first_line(error)}"
            raise InvalidInput(f"the method fails on this federation's inputs {inputs} ({reason})") from error
        if method.task.kind == "classes" and not one.num_classes:
            raise InvalidInput(
                "the method's model is for classification, and this federation's targets are no classes: give it "
                "another task, such as model._replace(task=tasks.REGRESSION)"
            ) from error
        reason = _misfit(method, one)
        if reason is None:
            raise
        raise InvalidInput(
            f"the method's model does not take this federation's inputs {list(one.x.shape[1:])} "
            f"({type(reason).__name__}: {first_line(reason)}): build it for dataset.input_shape and "
            "dataset.num_classes"
        ) from error


def _misfit(method: Method, data: FederatedData) -> Exception | None:
    """Error of a method's model for a client's inputs; None if there is none, or the method does not name its model."""
    if method.work is None:
        return None
    model, x = method.work.model, jax.eval_shape(lambda data: client_data(data, 0, "test").x, data)
    try:
        jax.eval_shape(lambda x: model.apply(model.init(jax.random.key(0)), x), x)
    except Exception as error:
        return error
    return None


def _first(data: Federation) -> FederatedData:
    """Shapes of the federation of one device, or of one run."""
    if data.train_count.ndim == 2:
        data = jax.eval_shape(lambda data: select_run(data, 0), data)
    return jax.eval_shape(lambda data: data.on_device(), data)


def check_state(method: Method | MethodSchedule, data: Federation, settings: Settings, state: Any) -> None:
    """Raise InvalidInput unless a run of a method can continue from a state.

    A state that only fits, such as FedAvg's for FedProx, is taken for the start that it is.
    """
    expect("state", state, isinstance(state, State), "a State, such as a result's .state")
    check_key(state.key, "the state's key")
    clients, completed = state.trained.shape[0], int(state.round)
    if clients != data.num_clients:
        raise InvalidInput(f"state has {clients} clients, and this federation has {data.num_clients}")
    if completed > settings.rounds:
        raise InvalidInput(f"state has completed {completed} rounds, and settings.rounds is {settings.rounds}")
    like = jax.eval_shape(build(method, settings).init, data, state.key)
    # A process may have only its own clients' rows.
    for part, axes in (("trained", 1), ("server", 0), ("clients", 1)):
        found, wanted = (_kinds(getattr(one, part), axes) for one in (state, like))
        if found != wanted:
            wrong = next(path for path in [*wanted, *found] if found.get(path) != wanted.get(path))
            raise InvalidInput(
                f"state is of another method, model or federation: its {part}{wrong} is "
                f"{found.get(wrong, 'nothing')}, and here {wanted.get(wrong, 'nothing')}"
            )


def _kinds(tree: PyTree, axes: int) -> dict[str, str]:
    """Type and shape of each leaf by path, without leading axes, and the type of the tree itself."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path): f"{leaf.dtype} {list(leaf.shape[axes:])}" for path, leaf in leaves}
    return {"": type(tree).__name__} | named
