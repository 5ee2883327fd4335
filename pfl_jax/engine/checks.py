"""Checks of a run's arguments, on the host, before anything is compiled."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pfl_jax.base import Cohort, Method, PyTree, State
from pfl_jax.data.federated import FederatedData, client_data, select_run
from pfl_jax.engine.build import Engine, build
from pfl_jax.engine.cohort import RoundSettings, Settings
from pfl_jax.engine.independent_rows import check_rows
from pfl_jax.engine.store import Federation
from pfl_jax.errors import NO_FEATURES, InvalidInput, describe_value, first_difference, first_line, last_frame
from pfl_jax.messages import join, split
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.tree import gather
from pfl_jax.schedules import MethodSchedule, Mixed, at_round, mixture
from pfl_jax.validation import check_values

GENERATOR = "threefry2x32"
"""Required generator of every key. Under vmap, other generators' numbers depend on the other clients of a chunk."""


def check_run(
    method: Method | MethodSchedule,
    data: Federation,
    settings: Settings,
    mesh: Mesh | None,
    state: State | None,
    state_on: str,
    folder: str | Path | None,
    newcomers: Federation | None,
) -> None:
    """Raise InvalidInput unless the arguments of `pfl_jax.engine.simulate.run` fit together."""
    if state_on == "disk" and data.mesh is not None and data.mesh.is_multi_process:
        raise InvalidInput("state_on disk is for one process: with several, each keeps its own clients' on the host")
    if folder is not None and state_on != "disk":
        raise InvalidInput(f"state_folder is for state_on disk, not for {state_on}")
    if folder is not None and not Path(folder).is_dir():
        raise InvalidInput(f"the folder {folder} for the clients' states does not exist")
    if (mixed := mixture(method)) is not None:
        _check_networks(mixed, data, state_on, newcomers)
    _check_method(method, data, settings)
    if state is not None:
        check_state(method, data, settings, state)


def _check_method(method: Method | MethodSchedule, data: Federation, settings: Settings) -> None:
    """Raise InvalidInput if a method cannot be run on this data with these settings."""
    takes_turns = at_round(method, 0).hand_over is not None
    for name in ("timetable", "eval_clients") if takes_turns else ():
        if getattr(settings, name) is not None:
            raise InvalidInput(
                f"{name} cannot be given: clients of this method take turns, so each needs the one before it"
            )
    # Test examples may not decide when a run ends.
    if settings.patience is not None and data.validation_count is None:
        raise InvalidInput(
            "patience needs validation examples: data.partition.with_validation(parts, 0.1) sets some apart"
        )
    size = settings.usual_size(data.num_clients)
    for name, number, of in (
        ("drop_rate", size - settings.arrivals(size), size),
        ("attackers", round(settings.attackers * data.num_clients), data.num_clients),
        ("straggler_fraction", round(settings.straggler_fraction * data.num_clients), data.num_clients),
    ):
        if (share := getattr(settings, name)) and not number:
            raise InvalidInput(f"{name} {share} of {of} clients is nobody: give a larger share")
    mixed = mixture(method)
    for one in [at_round(method, 0)] if mixed is None else mixed.methods:
        check_rows(one, data)


def _check_networks(mixed: Mixed, data: Federation, state_on: str, newcomers: Federation | None) -> None:
    """Raise InvalidInput unless clients of the mixed networks can be trained by one method on this data."""
    number, one_process = data.num_clients, data.mesh is None or not data.mesh.is_multi_process
    if state_on == "disk" or not one_process:
        raise InvalidInput("several networks are for one process, with state_on device or host")
    if mixed.network is not None:
        if len(mixed.network) != number:
            raise InvalidInput(f"network has {len(mixed.network)} entries, and this federation has {number} clients")
        if newcomers is not None:
            raise InvalidInput("newcomers are dealt a network in turn: leave out network, which is for other clients")
    clients = [mixed.members(index, number) for index in range(len(mixed.methods))]
    if empty := [index for index, own in enumerate(clients) if not len(own)]:
        raise InvalidInput(f"no client has network {empty[0]} of {len(clients)}: leave it out")
    sizes = np.zeros(number, int)
    for method, own in zip(mixed.methods, clients, strict=True):
        sizes[own] = 0 if method.work is None else method.work.model.num_features
    first, *others = [_exchange(method, data) for method in mixed.methods]
    for own, other in zip(clients[1:], others, strict=True):
        different = first_difference(_kinds(other), _kinds(first))
        if different is None:
            continue
        if len(set(sizes)) > 1:
            usual = int(np.argmax(np.bincount(sizes)))
            strange = int(np.flatnonzero(sizes != usual)[0])
            raise InvalidInput(
                f"client {strange}'s network gives {sizes[strange]} features, the others {usual}: "
                f"features={usual} (--features {usual}) adds a dense layer"
            )
        path, found, wanted = different
        raise InvalidInput(
            f"this method needs equal parameters: client {own[0]}'s network sends {found} as {path or 'its message'}, "
            f"client {clients[0][0]}'s {wanted}: take one for several networks, such as fedproto_g"
        )


def _exchange(method: Method, data: Federation) -> PyTree:
    """Shapes of a client's message; InvalidInput if the server needs client states besides the messages."""

    def messages(data):
        key = jax.random.key(0)
        state = build(method, RoundSettings()).init(data, key)
        result = method.local(key, state.server, gather(state.clients, 0), client_data(data.on_device(), 0, "train"))
        row, sums = split(result.message, jnp.ones((), bool))
        # Three messages with the states of two clients, as if two of three clients had this network.
        rows = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), row)
        cohort = Cohort(jnp.arange(3), jnp.ones(3, jnp.int32), jnp.ones(3, bool), data.num_clients)
        before = gather(state.clients, jnp.arange(2))
        try:
            _, after, _ = method.aggregate(key, state.server, before, join(rows, sums), cohort)
        except (TypeError, ValueError):
            after = None
        if _kinds(before) != _kinds(after):
            raise InvalidInput("this method is for one network: its server needs the states of all clients of a round")
        return result.message

    with explain_misfit(lambda: method, {}, data):
        return jax.eval_shape(messages, data.with_frozen(method.frozen))


def check_engine(
    engine: Engine, method: Any, settings: Settings, mesh: Mesh | None, state_on: str, *, donate: bool
) -> None:
    """Raise InvalidInput unless an engine was built with the arguments of `pfl_jax.engine.simulate.run`."""
    if state_on != "device" or donate:
        raise InvalidInput("state_on and donate are for a run without an engine: give them, or a store, to build")
    for name, given, other in (("method", method, engine.method), ("mesh", mesh, engine.mesh)):
        if given is not other and given != other:
            raise InvalidInput(f"engine was built with another {name}")
    for field in dataclasses.fields(RoundSettings):
        given, other = getattr(settings, field.name), getattr(engine.settings, field.name)
        # Results do not depend on chunks, which `run` chooses by the sizes of the clients.
        if field.name != "chunk" and given != other:
            raise InvalidInput(f"engine was built with {field.name} {other}, and settings has {given}")


def check_sweep(
    make_method: Callable[..., Method | MethodSchedule],
    data: FederatedData,
    settings: Settings,
    keys: jax.Array,
    values: Mapping[str, jax.Array],
    states: State | None,
    mesh: Mesh | None,
) -> None:
    """Raise InvalidInput unless the arguments of `pfl_jax.engine.sweep.run` fit together."""
    shapes = {name: value.shape for name, value in values.items()}
    if data.train_count.ndim == 2:
        shapes["data"] = data.train_count.shape[:1]
    for name, shape in shapes.items():
        if shape != keys.shape:
            raise InvalidInput(f"a run has one key and one value: keys has shape {keys.shape}, but {name} {shape}")
    for name, value in values.items():
        for number in np.asarray(value).tolist():
            check_values({name: number}, get_type_hints(LocalTraining, include_extras=True))
    method = make_method(**{name: value[0] for name, value in values.items()})
    if (mixed := mixture(method)) is not None:
        _check_networks(mixed, _first(data), "device", None)
    _check_method(method, data, settings)
    if states is None:
        return
    rows, number, devices = int(np.size(states.round)), len(keys), 1 if mesh is None else mesh.size
    # The states in a result also have rows that pad the devices' shares.
    if rows not in (number, -(-number // devices) * devices):
        raise InvalidInput(f"states has {rows} runs, and keys {number}")
    first, last = int(np.min(states.round)), int(np.max(states.round))
    if first != last:
        raise InvalidInput(f"states has runs of {first} and of {last} completed rounds: continue them separately")
    check_state(method, _first(data), settings, jax.tree.map(lambda leaf: leaf[0], states))


def typed_key(key: Any, name: str = "key", *, axes: int = 0) -> jax.Array:
    """Typed key, or with axes=1 keys [R], from typed or raw ones; InvalidInput unless they are of GENERATOR."""
    is_raw = getattr(key, "dtype", None) == np.uint32
    if is_raw and key.shape[-1:] == (2,):
        key = jax.random.wrap_key_data(jnp.asarray(key), impl=GENERATOR)
    is_key = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_key or key.ndim != axes or not key.size:
        wanted = "keys [R], such as jax.random.split(key, R)" if axes else "a key, such as jax.random.key(0)"
        raw = f": a raw {GENERATOR} key is uint32 [2]" if is_raw else ""
        raise InvalidInput(f"{name} must be {wanted}, not {describe_value(key)}{raw}")
    if (found := str(jax.random.key_impl(key))) != GENERATOR:
        raise InvalidInput(
            f"{name} must be of JAX's generator {GENERATOR}, not of {found}, whose numbers depend on chunks: use "
            f'jax.random.key(0, impl="{GENERATOR}")'
        )
    # Versions of JAX that no longer know the setting always have it on.
    if not getattr(jax.config, "jax_threefry_partitionable", True):
        raise InvalidInput(
            "jax_threefry_partitionable is off, so that random numbers depend on chunks and padding: "
            'jax.config.update("jax_threefry_partitionable", True)'
        )
    return key


@contextlib.contextmanager
def explain_misfit(
    make: Callable[..., Method | MethodSchedule], values: Mapping[str, Any], data: Federation
) -> Iterator[None]:
    """Context whose errors become an InvalidInput if the cause is a model that does not take the inputs.

    The model is traced only after an error, so a run that fits pays nothing. `make` gives the method, or a schedule of
    it, with these values of hyper-parameters. If the data is of several runs, the first one is used.
    """
    try:
        yield
    except (InvalidInput, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:
        if values and isinstance(error, jax.errors.JAXTypeError):
            raise InvalidInput(
                f"one of {', '.join(values)} changes shapes, so its values cannot share a program: fix it in the "
                f"function, and start a sweep for each value ({first_line(error)})"
            ) from error
        one, method = _first(data), at_round(make(**values), 0)
        if method.work is None:
            # The method's model is unknown, so that it cannot be traced alone.
            inputs, reason = list(one.x.shape[1:]), f"{type(error).__name__}: {first_line(error)}"
            codes = [getattr(inspect.unwrap(part), "__code__", None) for part in method if callable(part)]
            if frame := last_frame(error, {code.co_filename for code in codes if code}):
                reason = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}: {reason}"
            raise InvalidInput(f"the method fails on this federation's inputs {inputs} ({reason})") from error
        if method.task.kind == "classes" and not one.num_classes:
            raise InvalidInput(
                "the method's model is for classification, and this federation's targets are not classes: give it "
                "another task, such as model._replace(task=tasks.REGRESSION)"
            ) from error
        model, x = method.work.model, jax.eval_shape(lambda data: client_data(data, 0, "test").x, one)
        try:
            jax.eval_shape(lambda x: model.apply(model.init(jax.random.key(0)), x), x)
        except Exception as reason:
            raise InvalidInput(
                f"the method's model does not take this federation's inputs {list(one.x.shape[1:])} "
                f"({type(reason).__name__}: {first_line(reason)}): build it for dataset.input_shape and "
                "dataset.num_classes"
            ) from error
        if not model.num_features:
            raise InvalidInput(NO_FEATURES) from error
        raise


def _first(data: Federation) -> FederatedData:
    """Shapes of the federation of one device, or of one run."""
    if data.train_count.ndim == 2:
        data = jax.eval_shape(lambda data: select_run(data, 0), data)
    return jax.eval_shape(lambda data: data.on_device(), data)


def check_state(method: Method | MethodSchedule, data: Federation, settings: Settings, state: State) -> None:
    """Raise InvalidInput unless a run of a method can continue from a state.

    A state that happens to fit, such as FedAvg's for FedProx, is accepted as a start.
    """
    typed_key(state.key, "the state's key")
    clients, completed = state.trained.shape[0], int(state.round)
    if clients != data.num_clients:
        raise InvalidInput(f"state has {clients} clients, and this federation has {data.num_clients}")
    if completed > settings.rounds:
        raise InvalidInput(f"state has completed {completed} rounds, and settings.rounds is {settings.rounds}")
    like = jax.eval_shape(build(method, settings).init, data.with_frozen(at_round(method, 0).frozen), state.key)
    # A process may have only its own clients' rows.
    for part, axes in (("trained", 1), ("server", 0), ("clients", 1)):
        if different := first_difference(*(_kinds(getattr(one, part), axes) for one in (state, like))):
            path, found, wanted = different
            raise InvalidInput(
                f"state is of another method, model or federation: its {part}{path} is {found}, and here {wanted}"
            )


def _kinds(tree: PyTree, axes: int = 0) -> dict[str, str]:
    """Type and shape of each leaf by path, without leading axes, and the type of the tree itself."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path): f"{leaf.dtype} {list(leaf.shape[axes:])}" for path, leaf in leaves}
    return {"": type(tree).__name__} | named
