"""Check that the examples of a batch do not influence each other in a user's model, before anything is compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Method, Model, PyTree
from pfl_jax.data.federated import FederatedData, client_data
from pfl_jax.errors import InvalidInput


def check_rows(method: Method, data: FederatedData) -> None:
    """Raise InvalidInput if an example changes the model's result for another example.

    Mini-batches are filled with padding, and clients deploy their models for single examples. So a layer that reads the
    whole batch, such as the batch normalization of equinox or haiku, would silently give wrong results. In training
    only the examples of the mask may influence each other. Models from `pfl_jax.networks` are trusted; a method whose
    model is unknown (`Method.work`) is not checked.

    Args:
      method: method of the run.
      data: the federation, or its shapes.
    """
    if method.work is None or _is_ours(method.work.model):
        return
    model, x = method.work.model, jax.eval_shape(lambda data: client_data(data, 0, "train").x, data)
    rng, shape = np.random.default_rng(0), x.shape[1:]
    # Tokens 0 and 1 are in every vocabulary.
    numbers = rng.normal(size=(2, *shape)) if x.dtype.kind == "f" else np.stack([np.zeros(shape), np.ones(shape)])
    batches = [jnp.asarray(numbers[rows, ...], x.dtype) for rows in ([0, 1], [0, 0])]
    try:
        found = [jax.tree.leaves(_computed(model, batch)) for batch in batches]
    except Exception:  # It fails in the first round too, which says why.
        return
    if not all(map(_same_first, *found)):
        raise InvalidInput(
            "in the method's model the examples of a batch influence each other, and padding them, as by a batch "
            "normalization of equinox or haiku: normalize each example, or take a BatchNorm of flax or PyTorch by "
            "from_flax or from_torch"
        )


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
