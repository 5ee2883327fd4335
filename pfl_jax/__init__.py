"""Personalized federated learning as pure functions over pytrees.

>>> import jax
>>> import pfl_jax
>>> from pfl_jax import data, methods, models
>>> dataset = data.load("digits")
>>> parts = data.partition.grouped(dataset.train_y, dataset.test_y, num_clients=5, s=20, train_size=60, test_size=30)
>>> federation = data.federate(dataset, parts)
>>> model = models.mlp(dataset.input_shape, dataset.num_classes)
>>> method = methods.fedper(model, lr=0.1, batch_size=10)
>>> for result in pfl_jax.run(method, federation, pfl_jax.Settings(rounds=2), jax.random.key(0)):
...     accuracy = result.received.accuracy  # each client's, after aggregation
...     print(result.round, accuracy.shape, accuracy.mean() > 0.6)
1 (5,) True
2 (5,) True

What is here under a name of its own is what most programs use:

- `METHODS`, all methods by name; a factory of its own each in `pfl_jax.methods`.
- `Method`, `Model`, `ClientData`, `Cohort`, `LocalResult` and `State`: the types that a method is written in.
- `run`, `Settings`, `RoundResult`, `Scores`, `client_mesh`: a federation, round by round, on one device or several.
- `InvalidInput` for input that cannot be used, and `Diverged`, a kind of it, for a run that became NaN or infinite.

Everything else is in a module: `pfl_jax.sweep` trains many runs as one program (`pfl_jax.sweep.run`), `pfl_jax.data`
has data sets and partitions, `pfl_jax.models` the networks; methods are made of `pfl_jax.training`, `pfl_jax.losses`,
`pfl_jax.aggregation`, `pfl_jax.statistics`, `pfl_jax.simplex`, `pfl_jax.fisher`, `pfl_jax.ensembles`,
`pfl_jax.subsets` and `pfl_jax.trees`. Names are loaded when they are first used: importing this package alone imports
nothing else.

`docs/tutorial.ipynb` goes through all of it; read `pfl_jax.base` before you write a method.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pfl_jax import (
        aggregation,
        base,
        checkpoint,
        communication,
        convolution,
        data,
        ensembles,
        errors,
        evaluation,
        fingerprint,
        fisher,
        losses,
        methods,
        models,
        pooling,
        precision,
        scheduling,
        simplex,
        simulate,
        statistics,
        subsets,
        sweep,
        training,
        trees,
    )
    from pfl_jax.base import ClientData, Cohort, LocalResult, Mean, Method, Model, Scores, State
    from pfl_jax.errors import Diverged, InvalidInput
    from pfl_jax.methods import METHODS
    from pfl_jax.simulate import RoundResult, Settings, client_mesh, run

__version__ = "0.1.0"
"""Of this package."""

__all__ = [
    "METHODS",
    "ClientData",
    "Cohort",
    "Diverged",
    "InvalidInput",
    "LocalResult",
    "Mean",
    "Method",
    "Model",
    "RoundResult",
    "Scores",
    "Settings",
    "State",
    "__version__",
    "aggregation",
    "base",
    "checkpoint",
    "client_mesh",
    "communication",
    "convolution",
    "data",
    "ensembles",
    "errors",
    "evaluation",
    "fingerprint",
    "fisher",
    "losses",
    "methods",
    "models",
    "pooling",
    "precision",
    "run",
    "scheduling",
    "simplex",
    "simulate",
    "statistics",
    "subsets",
    "sweep",
    "training",
    "trees",
]

# Where the names live that are no modules.
_HOME = {
    **dict.fromkeys(("ClientData", "Cohort", "LocalResult", "Mean", "Method", "Model", "Scores", "State"), "base"),
    **dict.fromkeys(("RoundResult", "Settings", "client_mesh", "run"), "simulate"),
    **dict.fromkeys(("Diverged", "InvalidInput"), "errors"),
    "METHODS": "methods",
}


def __getattr__(name: str) -> Any:
    """Loads a name of `__all__` when it is first used: JAX and flax alone take seconds."""
    if name not in __all__:
        raise AttributeError(f"module 'pfl_jax' has no attribute '{name}'")
    module = importlib.import_module(f"pfl_jax.{_HOME.get(name, name)}")
    value = getattr(module, name) if name in _HOME else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
