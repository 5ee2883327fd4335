"""Check that a model computes each example's result from that example alone."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Method, Model
from pfl_jax.data.federated import FederatedData
from pfl_jax.engine.remembered import ByIdentity, remembered
from pfl_jax.engine.store import Federation
from pfl_jax.errors import InvalidInput


def check_rows(method: Method, data: Federation) -> None:
    """Raise InvalidInput if an example changes the model's result for another example.

    Mini-batches are filled with padding, and clients deploy their models for single examples. So a layer that reads the
    whole batch, such as the batch normalization of equinox or haiku, would silently give wrong results. In training
    only the examples of the mask may influence each other. The library's own models are trusted; a method whose model
    is unknown (`Method.work`) is not checked.
    """
    model = None if method.work is None else method.work.model
    models = [one for one in (model, model and model.shared) if one is not None and not _is_ours(one)]
    pool, axes = (data, 1) if isinstance(data, FederatedData) else (data.own, 2)
    is_real = pool.x.dtype.kind == "f" or any(one is not None for one in (pool.mean, pool.rotation, pool.noise))
    dtype = np.float32 if is_real else pool.x.dtype
    if not all(_are_independent(ByIdentity(one), pool.x.shape[axes:], dtype) for one in models):
        raise InvalidInput(
            "in the method's model the examples of a batch influence each other, and padding them, as by a batch "
            "normalization of equinox or haiku: normalize each example, or take a BatchNorm of flax or PyTorch by "
            "from_flax or from_torch"
        )


@remembered
def _are_independent(of: ByIdentity, shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether each row of a model's results depends on its own example alone; True if the model fails."""
    model: Model = of.value
    # Tokens 0 and 1 are in every vocabulary.
    drawn = np.random.default_rng(0).normal(size=(2, *shape))
    numbers = drawn if np.dtype(dtype).kind == "f" else np.stack([np.zeros(shape), np.ones(shape)])

    def row(params, batch, place):
        """Results for one of two examples, the only real one in training."""
        features = model.features(params["backbone"], batch)
        found = jax.tree.map(lambda leaf: leaf[place], (features, model.classify(params["head"], features)))
        if model.batch_features is None:
            return found
        mask = jnp.arange(2) == place
        trained, statistics = model.batch_features(params["backbone"], batch, mask, jax.random.key(1))
        return found, jax.tree.map(lambda leaf: leaf[place], trained), statistics

    try:
        params = jax.jit(model.init)(jax.random.key(0))
        mixed, *alike = (jnp.asarray(numbers[chosen, ...], dtype) for chosen in ([0, 1], [0, 0], [1, 1]))
        compiled, pairs = jax.jit(row), []
        # Each row with another example before or after it, and with its own.
        for place in (0, 1):
            both = (jax.tree.leaves(compiled(params, batch, place)) for batch in (mixed, alike[place]))
            pairs += [[np.asarray(leaf, float) for leaf in pair] for pair in zip(*both, strict=True)]
    except Exception:  # The first round fails too, and says why.
        return True
    # Up to rounding.
    return all(
        np.allclose(one, other, rtol=1e-4, atol=1e-4 * np.max(np.abs(one), initial=0), equal_nan=True)
        for one, other in pairs
    )


def _is_ours(model: Model) -> bool:
    """Whether the functions of a model are the library's own code, and wrap neither functions nor modules of others."""
    left: list[Any] = [model]
    seen = set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Model):
            parts: list[Any] = [one.features, one.classify]
            left += [part.function for part in parts]
        elif callable(one):
            kind = one if isinstance(one, types.FunctionType | type) else type(one)
            if kind.__module__.partition(".")[0] != "pfl_jax":
                return False
            # A method of a class has no cells.
            left += [cell.cell_contents for cell in getattr(one, "__closure__", None) or ()]
    return True
