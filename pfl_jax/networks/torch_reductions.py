"""Reductions of PyTorch in JAX: sums, extremes, norms and the largest entries, over some axes."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pfl_jax.networks.torch_layers import cast


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(x, axes=None, keep=False, *, dtype=None):
        axes = axes if isinstance(axes, int) else tuple(axes or ()) or None
        return function(cast(x, dtype), axis=axes, keepdims=keep)

    return reduce


def _spread(root: bool) -> Callable[..., Any]:
    """Variance, or its square root."""

    def spread(x, axes=None, unbiased=True, keep=False, *, correction=1, keepdim=False):
        if isinstance(axes, bool):
            axes, unbiased = None, axes
        axes = axes if isinstance(axes, int) else tuple(axes or ()) or None
        ddof = 0 if not unbiased or correction is None else correction
        found = jnp.var(x, axis=axes, ddof=ddof, keepdims=keep or keepdim)
        return jnp.sqrt(found) if root else found

    return spread


def _extreme(
    function: Callable[..., Any], position: Callable[..., Any], both: Callable[..., Any]
) -> Callable[..., Any]:
    """Extreme of all entries, of an axis with positions, or of two arrays."""

    def extreme(x, axis=None, keep=False):
        if axis is None:
            return function(x)
        if not isinstance(axis, int):
            return both(x, axis)
        return function(x, axis, keepdims=keep), position(x, axis, keepdims=keep)

    return extreme


def _norm(x, order=2, axes=None, keep=False, *, dtype=None):
    axes = axes if isinstance(axes, int) else tuple(axes or ()) or None
    if math.isinf(order):
        return (jnp.max if order > 0 else jnp.min)(jnp.abs(x), axes, keepdims=keep)
    if order == 0:
        return jnp.sum(x != 0, axes, keepdims=keep).astype(x.dtype)
    if order == 2:
        squares = jnp.sum(jnp.square(x), axes, keepdims=keep)
        # The gradient at zero is zero, as in PyTorch; NaN stays NaN.
        return jnp.where(squares == 0, 0, jnp.sqrt(jnp.where(squares == 0, 1, squares)))
    return jnp.sum(jnp.abs(x) ** order, axes, keepdims=keep) ** (1 / order)


def _top(x, count, axis=-1, largest=True, *_):
    x = jnp.moveaxis(x, axis, -1)
    # The complement of an integer reverses the order, also without a sign.
    order = x if largest else -x if jnp.issubdtype(x.dtype, jnp.floating) else jnp.bitwise_not(x)
    _, places = lax.top_k(order, count)
    return jnp.moveaxis(jnp.take_along_axis(x, places, -1), -1, axis), jnp.moveaxis(places, -1, axis)


def _cumulated(x, axis, *, dtype=None):
    x = cast(x, dtype)
    # Small integers would overflow; PyTorch adds them as 64 bits.
    small = jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < 4
    return jnp.cumsum(x.astype(jnp.int32) if small else x, axis)


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "cumsum": _cumulated,
    "mean": _reduction(jnp.mean),
    "sum": _reduction(jnp.sum),
    "prod": _reduction(jnp.prod),
    "amax": _reduction(jnp.max),
    "amin": _reduction(jnp.min),
    "any": _reduction(jnp.any),
    "all": _reduction(jnp.all),
    "logsumexp": _reduction(jax.scipy.special.logsumexp),
    "var": _spread(False),
    "std": _spread(True),
    "max": _extreme(jnp.max, jnp.argmax, jnp.maximum),
    "min": _extreme(jnp.min, jnp.argmin, jnp.minimum),
    "argmax": lambda x, axis=None, keep=False: jnp.argmax(x, axis, keepdims=keep),
    "argmin": lambda x, axis=None, keep=False: jnp.argmin(x, axis, keepdims=keep),
    "linalg_vector_norm": _norm,
    "topk": _top,
}
"""Functions of an array and axes."""
