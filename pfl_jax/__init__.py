"""Personalized federated learning as pure functions over pytrees.

>>> import jax
>>> import pfl_jax
>>> from pfl_jax import data, methods, models
>>> dataset = data.load("digits")
>>> parts = data.partition.grouped(dataset, num_clients=5, s=20, train_size=60, test_size=30)
>>> federation = data.federate(dataset, parts)
>>> model = models.mlp(dataset.input_shape, dataset.num_classes)
>>> method = methods.fedper(model, pfl_jax.LocalTraining(lr=0.1, batch_size=10))
>>> for result in pfl_jax.run(method, federation, pfl_jax.Settings(rounds=2), jax.random.key(0)):
...     accuracy = result.received["accuracy"]  # each client's, after aggregation
...     print(result.round, accuracy.shape, accuracy.mean() > 0.6)
1 (5,) True
2 (5,) True

Names that most programs use:

- `METHODS`: all methods by name; each is a factory in `pfl_jax.methods`. `LocalTraining`: the recipe of local training
  that each factory takes. `make_method` builds a method from its name and one flat set of hyper-parameters.
- `Method`, `Model`, `ClientData`, `Cohort`, `LocalResult`, `Mean` and `State`: the types that methods use.
- `run`, `Settings`, `RoundResult`, `Scores`, `client_mesh`: run a federation round by round, on one or more devices.
- `InvalidInput`: error for invalid input. Its subclass `Diverged`: error for a run with NaN or infinite values.

- `mixed`: a method for clients that have different networks (docs/networks.md).
- `frame`: results as a pandas table. `mean_scores`: means of a round's scores, for experiment trackers. `files`: states
  and clients' models in files (docs/keep.md).

All other names are in modules. `pfl_jax.engine` runs single runs (`pfl_jax.simulate`) and many runs as one program
(`pfl_jax.sweep`); `pfl_jax.data` has data sets and partitions, `pfl_jax.networks` the networks (`pfl_jax.models`).
Methods are built from `pfl_jax.primitives`, such as `pfl_jax.primitives.head_weights` (docs/primitives.md lists all of
them). `pfl_jax.tasks` has tasks besides classification (docs/tasks.md). `pfl_jax.testing` checks your own methods in
your own tests; `pfl_jax.networks.from_flax` makes a `Model` from your own Flax module. Names are loaded on first use,
so importing this package imports nothing else.

`docs/tutorial.ipynb` is an introduction. Read `pfl_jax.base` before you write a method.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pfl_jax import base, data, engine, errors, files, methods, networks, primitives, tasks, testing
    from pfl_jax.base import ClientData, Cohort, LocalResult, Mean, Method, Model, Scores, State
    from pfl_jax.engine import simulate, sweep
    from pfl_jax.engine.build import Engine, build
    from pfl_jax.engine.simulate import RoundResult, Settings, client_mesh, run
    from pfl_jax.errors import Diverged, InvalidInput
    from pfl_jax.frames import frame, mean_scores
    from pfl_jax.methods import METHODS, make_method
    from pfl_jax.networks import models
    from pfl_jax.networks.mixed import mixed
    from pfl_jax.primitives.local_training import LocalTraining


__version__ = "0.1.0"
"""Version of this package."""

__all__ = [
    "METHODS",
    "ClientData",
    "Cohort",
    "Diverged",
    "Engine",
    "InvalidInput",
    "LocalResult",
    "LocalTraining",
    "Mean",
    "Method",
    "Model",
    "RoundResult",
    "Scores",
    "Settings",
    "State",
    "__version__",
    "base",
    "build",
    "client_mesh",
    "data",
    "engine",
    "errors",
    "files",
    "frame",
    "make_method",
    "mean_scores",
    "methods",
    "mixed",
    "models",
    "networks",
    "primitives",
    "run",
    "simulate",
    "sweep",
    "tasks",
    "testing",
]

# Module of each name that is not itself a module.
_HOME = {
    **dict.fromkeys(("ClientData", "Cohort", "LocalResult", "Mean", "Method", "Model", "Scores", "State"), "base"),
    **dict.fromkeys(("RoundResult", "Settings", "client_mesh", "run"), "engine.simulate"),
    **dict.fromkeys(("Diverged", "InvalidInput"), "errors"),
    **dict.fromkeys(("METHODS", "make_method"), "methods"),
    **dict.fromkeys(("Engine", "build"), "engine.build"),
    "LocalTraining": "primitives.local_training",
    "frame": "frames",
    "mean_scores": "frames",
    "mixed": "networks.mixed",
}

# Modules that fewer programs use; loaded on first use too.
_FURTHER = ("compare", "deploy", "privacy", "wrappers")

# Modules of subpackages that are also names of this package.
_MODULES = {"models": "networks.models", "simulate": "engine.simulate", "sweep": "engine.sweep"}


def __getattr__(name: str) -> Any:
    """Load a name of `__all__` on first use, because importing JAX and Flax takes seconds."""
    if name not in __all__ and name not in _FURTHER:
        raise AttributeError(f"module 'pfl_jax' has no attribute '{name}'")
    module = importlib.import_module(f"pfl_jax.{_HOME.get(name) or _MODULES.get(name, name)}")
    value = getattr(module, name) if name in _HOME else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
