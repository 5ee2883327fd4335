"""Check that the examples of a batch do not influence each other in a user's model, before anything is compiled."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Method, Model, PyTree
from pfl_jax.engine.placement import PlacedData
from pfl_jax.engine.remembered import REMEMBERED, ByIdentity
from pfl_jax.engine.store import Federation
from pfl_jax.errors import InvalidInput


def check_rows(method: Method, data: Federation) -> None:
    """Raise InvalidInput if an example changes the model's result for another example.

    Mini-batches are filled with padding, and clients deploy their models for single examples. So a layer that reads the
    whole batch, such as the batch normalization of equinox or haiku, would silently give wrong results. In training
    only the examples of the mask may influence each other. Models from `pfl_jax.networks` are trusted; a method whose
    model is unknown (`Method.work`) is not checked.

    Args:
      method: method of the run.
      data: the federation, or those of several runs.
    """
    if method.work is None or _is_ours(method.work.model):
        return
    pool, axes = (data.own, 2) if isinstance(data, PlacedData) else (data, 1)
    is_real = pool.x.dtype.kind == "f" or any(one is not None for one in (pool.mean, pool.rotation, pool.noise))
    if not _are_independent(
        ByIdentity(method.work.model), pool.x.shape[axes:], np.float32 if is_real else pool.x.dtype
    ):
        raise InvalidInput(
            "in the method's model the examples of a batch influence each other, and padding them, as by a batch "
            "normalization of equinox or haiku: normalize each example, or take a BatchNorm of flax or PyTorch by "
            "from_flax or from_torch"
        )


@functools.lru_cache(maxsize=REMEMBERED)
def _are_independent(of: ByIdentity, shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether each row of a model's results depends on its own example alone; True if the model fails.

    Remembered, so that another run of the method compiles nothing.
    """
    # Tokens 0 and 1 are in every vocabulary.
    drawn = np.random.default_rng(0).normal(size=(2, *shape))
    numbers = drawn if np.dtype(dtype).kind == "f" else np.stack([np.zeros(shape), np.ones(shape)])
    batches = [jnp.asarray(numbers[rows, ...], dtype) for rows in ([0, 1], [0, 0])]
    try:
        found = [jax.tree.leaves(_computed(of.value, batch)) for batch in batches]
    except Exception:  # It fails in the first round too, which says why.
        return True
    return all(map(_same_first, *found))


def _computed(model: Model, batch: jax.Array) -> PyTree:
    """Results of a model for a batch of two examples, only the first of them real in training; leaves [rows, ...]."""
    params = jax.jit(model.init)(jax.random.key(0))
    features = jax.jit(model.features)(params["backbone"], batch)
    logits = jax.jit(model.classify)(params["head"], features)
    if model.batch_features is None:
        return features, logits
    mask = jnp.array([True, False])
    trained, statistics = jax.jit(model.batch_features)(params["backbone"], batch, mask, jax.random.key(1))
    return features, logits, trained, jax.tree.map(lambda leaf: leaf[None], statistics)


def _same_first(one: jax.Array, other: jax.Array) -> bool:
    """Whether two arrays have the same first row, up to rounding."""
    mine, its = np.asarray(one[0], float), np.asarray(other[0], float)
    return np.allclose(mine, its, rtol=1e-4, atol=1e-4 * np.max(np.abs(mine), initial=0), equal_nan=True)


def _is_ours(model: Model) -> bool:
    """Whether the functions of a model are the library's own code, and do not wrap a model with other code."""

    def is_ours(function):
        # A method of a class has no cells.
        inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        ours = getattr(function, "__module__", "").startswith("pfl_jax.")
        return ours and all(_is_ours(one) for one in inner if isinstance(one, Model))

    functions: list[Any] = [model.features, model.classify]
    return all(is_ours(one.function) for one in functions)
