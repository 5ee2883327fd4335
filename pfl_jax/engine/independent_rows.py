"""Check that a model computes each example's result from that example alone."""

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
    only the examples of the mask may influence each other. Models from `pfl_jax.networks` are trusted; a method whose
    model is unknown (`Method.work`) is not checked.
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

    def rows(params, batch):
        """Results, leaves [rows, ...], for two examples; in training only the first one is real."""
        features = model.features(params["backbone"], batch)
        found = features, model.classify(params["head"], features)
        if model.batch_features is None:
            return found
        mask = jnp.array([True, False])
        trained, statistics = model.batch_features(params["backbone"], batch, mask, jax.random.key(1))
        return found, trained, jax.tree.map(lambda leaf: leaf[None], statistics)

    try:
        params = jax.jit(model.init)(jax.random.key(0))
        batches = [jnp.asarray(numbers[chosen, ...], dtype) for chosen in ([0, 1], [0, 0])]
        pairs = zip(*(jax.tree.leaves(jax.jit(rows)(params, batch)) for batch in batches), strict=True)
    except Exception:  # The first round fails too, and says why.
        return True
    first = [[np.asarray(leaf[0], float) for leaf in pair] for pair in pairs]
    largest = [np.max(np.abs(one), initial=0) for one, _ in first]
    # Up to rounding.
    return all(
        np.allclose(*pair, rtol=1e-4, atol=1e-4 * size, equal_nan=True)
        for pair, size in zip(first, largest, strict=True)
    )


def _is_ours(model: Model) -> bool:
    """Whether the functions of a model are the library's own code, and do not wrap a model with other code."""

    def is_ours(function):
        # A method of a class has no cells.
        inner = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        ours = getattr(function, "__module__", "").startswith("pfl_jax.")
        return ours and all(_is_ours(one) for one in inner if isinstance(one, Model))

    functions: list[Any] = [model.features, model.classify]
    return all(is_ours(one.function) for one in functions)
