"""A method under test on the tiny problem, and the programs that are compiled for it."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

import jax
import jax.numpy as jnp

from pfl_jax.base import Method, Model, State
from pfl_jax.data.federated import FederatedData
from pfl_jax.engine import simulate
from pfl_jax.engine.build import Engine
from pfl_jax.engine.simulate import Settings
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import make_method
from pfl_jax.methods.factories import annotations, arguments, default_training, hyper_parameters
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.tasks import CLASSIFICATION, Task
from pfl_jax.testing.problems import HYPER_PARAMETERS, tiny_model, uneven_federation
from pfl_jax.validation import parts


class Subject:
    """Method under test on the tiny problem, with the programs compiled for it so far.

    Args:
      factory: factory of the method, as in `pfl_jax.METHODS`.
      task: task of the problem, one of `pfl_jax.tasks.TASKS`.
      model: model for the problem's inputs [2, 3, 1] and three classes; None for a perceptron.
      **values: hyper-parameters in place of the problem's own and the factory's defaults.
    """

    def __init__(
        self,
        factory: Callable[..., Method],
        *,
        task: Task = CLASSIFICATION,
        model: Model | None = None,
        **values: Any,
    ):
        self.given: dict[str, Any] = dict(values)
        recipe = {field.name: values.pop(field.name) for field in fields(LocalTraining) if field.name in values}
        # In two steps, so that given local_steps replace the problem's epochs.
        self.training: LocalTraining = default_training(factory).replace(**HYPER_PARAMETERS).replace(**recipe)
        self.factory, self.task, self.values = factory, task, values
        self.model: Model = tiny_model(task) if model is None else model
        self.traces: int = 0
        self._engines: dict[tuple[int, bool], Engine] = {}

    def build(self, **changes: Any) -> Method:
        """The method, with these changes of its hyper-parameters."""
        return make_method(self.factory, self.model, self.training, **self.values | changes)

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """All hyper-parameters of the method, see `pfl_jax.methods.factories.hyper_parameters`."""
        recipe = {field.name: getattr(self.training, field.name) for field in fields(LocalTraining)}
        return hyper_parameters(self.factory) | recipe | self.values

    def others(self) -> dict[str, "Subject"]:
        """The method with another value of one choice (`Literal`) or switch of its factory, by "NAME=VALUE".

        Values that the factory refuses for this task are left out.
        """
        found, kinds = {}, annotations(self.factory)
        for name, argument in arguments(self.factory).items():
            usual = self.values.get(name, argument.default)
            for value in [one for part in parts(kinds[name]) for one in _values(part) if one != usual]:
                other = Subject(self.factory, task=self.task, model=self.model, **self.given | {name: value})
                with contextlib.suppress(InvalidInput):
                    other.build()
                    found[f"{name}={value}"] = other
        return found

    def compiled(self, chunk: int = 1, *, shared: bool = False) -> Engine:
        """Compiled engine; it counts in `traces` how often a round is traced.

        Args:
          chunk: clients under one vmap.
          shared: whether all devices share the clients.
        """
        if (chunk, shared) not in self._engines:
            mesh = simulate.client_mesh() if shared else None
            method = self.build()

            def counted(*arguments):
                self.traces += 1
                return method.aggregate(*arguments)

            settings = Settings(rounds=1, chunk=chunk)
            # Donated, as in commands of experiments/: this fails if an array is in a state twice.
            engine = simulate.build(method._replace(aggregate=counted), settings, mesh).jit(mesh, donate=True)
            self._engines[chunk, shared] = engine
        return self._engines[chunk, shared]

    def data(self, *, pad: int = 0) -> FederatedData:
        """The uneven federation with y for the task.

        Args:
          pad: extra padding of every index table.
        """
        return uneven_federation(pad=pad, task=self.task).with_frozen(self.model.frozen)

    @property
    def loss(self) -> str:
        """Name of a score that no rounding can move far: the task's first one that is not a share."""
        return next(one.name for one in self.task.scores if not one.higher_is_better)

    @functools.cached_property
    def start(self) -> State:
        """State before the first round."""
        return self.compiled().init(self.data(), jax.random.key(0))

    @functools.cached_property
    def reference(self) -> State:
        """State after three rounds, one client after another."""
        return play(self.compiled(), self.data(), state=self.start)


def _values(kind: Any) -> tuple[Any, ...]:
    """All values of a type that has only a few; none for other types."""
    return (True, False) if kind is bool else get_args(kind) if get_origin(kind) is Literal else ()


_copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def play(
    engine: Engine,
    data: FederatedData,
    seed: int = 0,
    rounds: int = 3,
    size: int = 3,
    state: State | None = None,
) -> State:
    """State after some rounds of three of the four clients.

    Args:
      engine: compiled engine.
      data: the federation.
      seed: seed of the run.
      rounds: number of rounds.
      size: size of the cohort.
      state: state to continue from; it is not changed.
    """
    state = engine.init(data, jax.random.key(seed)) if state is None else _copy(state)
    for _ in range(rounds):
        state, _ = engine.round(data, state, size)
    return state
