"""Reductions of PyTorch in JAX: sums, extremes, norms and the largest entries, over some axes."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pfl_jax.networks.torch_layers import cast


def _axes(axes: Any) -> Any:
    """Axes of a reduction; None for all of them."""
    return axes if isinstance(axes, int) else tuple(axes or ()) or None


def _summed(x: Any, dtype: str | None) -> jax.Array:
    """Array of the type of its sum: small integers would overflow, and PyTorch adds them as 64 bits."""
    return cast(x, dtype or ("int32" if x.dtype.kind in "biu" and x.dtype.itemsize < 4 else None))


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, axes=None, keep=False: function(x, axis=_axes(axes), keepdims=keep)


def _total(function: Callable[..., Any]) -> Callable[..., Any]:
    def total(x, axes=None, keep=False, *, dtype=None):
        x = _summed(x, dtype)
        return function(x, axis=_axes(axes), keepdims=keep, dtype=x.dtype)

    return total


def absolute(x: Any) -> jax.Array:
    """Absolute values, whose gradient at zero is zero, as in PyTorch."""
    return jnp.where(x == 0, 0, jnp.abs(x))


def _power(x: jax.Array, exponent: float) -> jax.Array:
    """x ** exponent of numbers that are not negative; the gradient at zero is zero, as in PyTorch; NaN stays NaN."""
    positive = jnp.where(x == 0, 1, x)
    powers = jnp.sqrt(positive) if exponent == 0.5 else positive**exponent
    return jnp.where(x == 0, math.inf if exponent < 0 else 0, powers)


def _spread(root: bool) -> Callable[..., Any]:
    """Variance, or its square root."""

    def spread(x, axes=None, unbiased=True, keep=False, *, correction=1, keepdim=False):
        if isinstance(axes, bool):
            axes, unbiased = None, axes
        ddof = 0 if not unbiased or correction is None else correction
        found = jnp.var(x, axis=_axes(axes), ddof=ddof, keepdims=keep or keepdim)
        return _power(found, 0.5) if root else found

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
        # Of several equal entries, only the found one has a gradient.
        places = position(x, axis, keepdims=True)
        found = jnp.take_along_axis(x, places, axis), places
        return found if keep else tuple(jnp.squeeze(one, axis) for one in found)

    return extreme


def _norm(x, order=2, axes=None, keep=False, *, dtype=None):
    if math.isinf(order):
        return (jnp.max if order > 0 else jnp.min)(absolute(x), _axes(axes), keepdims=keep)
    if order == 0:
        return jnp.sum(x != 0, _axes(axes), keepdims=keep).astype(x.dtype)
    # Above order 1, powers of zero have the gradient zero anyway.
    powers = jnp.square(x) if order == 2 else jnp.abs(x) ** order if order > 1 else _power(jnp.abs(x), order)
    return _power(jnp.sum(powers, _axes(axes), keepdims=keep), 1 / order)


def _top(x, count, axis=-1, largest=True, *_):
    x = jnp.moveaxis(x, axis, -1)
    # The complement of an integer reverses the order, also without a sign.
    order = x if largest else -x if jnp.issubdtype(x.dtype, jnp.floating) else jnp.bitwise_not(x)
    _, places = lax.top_k(order, count)
    return jnp.moveaxis(jnp.take_along_axis(x, places, -1), -1, axis), jnp.moveaxis(places, -1, axis)


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "cumsum": lambda x, axis, *, dtype=None: jnp.cumsum(_summed(x, dtype), axis),
    "mean": _total(jnp.mean),
    "sum": _total(jnp.sum),
    "prod": _total(jnp.prod),
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
