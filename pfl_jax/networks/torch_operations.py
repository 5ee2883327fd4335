"""The operations of PyTorch's graphs, in JAX, by their names in `torch.export`.

The functions take the arguments of the operations in the same order. Types are names such as "float32".

In PyTorch the channels of images and series are the second axis. From one operation of `SPATIAL` to the next they are
kept last, as `Image`, which is faster. All other functions, except the elementwise ones, get arrays in PyTorch's order
of axes.
"""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pfl_jax.errors import InvalidInput
from pfl_jax.networks.torch_layers import LAYERS, RANDOM, cast, rows
from pfl_jax.networks.torch_reductions import REDUCTIONS, absolute
from pfl_jax.networks.torch_spatial import SPATIAL


class Image(NamedTuple):
    """Array [B, C, ...] of PyTorch, with its channels last.

    Attributes:
      last: [B, ..., C].
    """

    last: jax.Array


def channels_first(x: Any) -> Any:
    """An `Image` in PyTorch's order of axes; anything else unchanged."""
    return jnp.moveaxis(x.last, -1, 1) if isinstance(x, Image) else x


def channels_last(x: Any, ndim: int = 0) -> Any:
    """Array of an `Image`, or an array in PyTorch's order of axes, with its channels last.

    Args:
      x: [B, C, ...]; numbers stay unchanged.
      ndim: number of axes of the result; missing ones are added before those of x.
    """
    if isinstance(x, Image) or not hasattr(x, "ndim") or not x.ndim:
        return x.last if isinstance(x, Image) else x
    x = x.reshape((1,) * (ndim - x.ndim) + x.shape)
    return jnp.moveaxis(x, 1, -1) if x.ndim > 1 else x


def apply(name: str, args: Sequence[Any], kwargs: dict[str, Any], key: jax.Array | None = None) -> Any:
    """Result of an operation.

    Args:
      name: name of the operation.
      args, kwargs: its arguments: arrays, images, numbers, names of types, and lists of these.
      key: key of random numbers in training; None for no random numbers.
    """
    if name in SPATIAL:
        x = channels_last(args[0])
        if name[-1] == "d" and x.ndim != (axes := int(name[-2]) + 2):
            raise InvalidInput(f"{name} takes rows with channels, {axes} axes, not {x.ndim}: give x.unsqueeze(1)")
        return Image(SPATIAL[name](x, *map(channels_first, args[1:]), **kwargs))
    dims = [one.last.ndim for one in args if isinstance(one, Image)]
    if name in ELEMENTWISE and dims and all(getattr(one, "ndim", 0) <= dims[0] for one in args):
        return Image(ELEMENTWISE[name](*(channels_last(one, dims[0]) for one in args), **kwargs))
    if name == "dropout" and dims:
        return Image(RANDOM[name](key, args[0].last, *args[1:]))
    args, kwargs = jax.tree.map(channels_first, (list(args), kwargs), is_leaf=lambda one: isinstance(one, Image | None))
    if name in RANDOM:
        return RANDOM[name](key, *args, **kwargs)
    return (ELEMENTWISE.get(name) or OTHERS[name])(*args, **kwargs)


# --- elementwise


def _with_alpha(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y, alpha=1: function(x, y if alpha == 1 else alpha * y)


def _divided(x, y, *, rounding_mode=None):
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    if rounding_mode == "trunc" and not jnp.issubdtype(jnp.result_type(x, y), jnp.integer):
        return jnp.trunc(jnp.true_divide(x, y))
    # Without the remainder, the quotient of two integers is exact.
    return jnp.floor_divide(x if rounding_mode == "floor" else x - jnp.fmod(x, y), y)


def _clip(x, low=None, high=None):
    # At a bound the gradient is that of x.
    x = x if low is None else jnp.where(x == low, x, jnp.maximum(x, low))
    return x if high is None else jnp.where(x == high, x, jnp.minimum(x, high))


def _gelu(x, *, approximate="none"):
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def _softplus(x, beta=1, threshold=20):
    return jnp.where(x * beta > threshold, x, jax.nn.softplus(jnp.minimum(x * beta, threshold)) / beta)


def _elu(x, alpha=1.0, scale=1.0, input_scale=1.0):
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(input_scale * jnp.where(x > 0, 0, x)))


def _to(x, *args, dtype=None, **_):
    found = (str(one.dtype) if hasattr(one, "dtype") else one for one in args)
    return cast(x, dtype or next((one for one in found if isinstance(one, str)), None))


def _like(value: float) -> Callable[..., Any]:
    return lambda x, *, dtype=None, **_: jnp.full_like(x, value, dtype)


def _same(x, *_, **__):
    return x


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(jnp, name)
        for name in (
            *("ceil", "cos", "exp", "expm1", "floor", "isfinite", "isinf", "isnan", "log", "log1p", "log2"),
            *("logical_and", "logical_not", "logical_or", "logical_xor", "maximum", "minimum", "reciprocal", "round"),
            *("sign", "sin", "sqrt", "square", "tan", "tanh", "trunc", "fmod", "remainder", "bitwise_not"),
            *("bitwise_and", "bitwise_or", "bitwise_xor"),
        )
    },
    **{name: getattr(jax.nn, name) for name in ("relu", "relu6", "sigmoid", "silu", "mish", "log_sigmoid", "selu")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "mul", "neg", "pow")},
    **{f"__{name}__": getattr(operator, f"{name}_") for name in ("and", "or")},
    "abs": absolute,
    "atan": jnp.arctan,
    "erf": jax.scipy.special.erf,
    "rsqrt": lax.rsqrt,
    "hardswish": jax.nn.hard_swish,
    "hardsigmoid": jax.nn.hard_sigmoid,
    # At a bound the gradient is zero.
    "hardtanh": lambda x, low=-1, high=1: jnp.where(x <= low, low, jnp.where(x >= high, high, x)),
    "leaky_relu": lambda x, slope=0.01: jnp.where(x > 0, x, x * slope),
    "elu": _elu,
    "gelu": _gelu,
    "softplus": _softplus,
    "add": _with_alpha(operator.add),
    "sub": _with_alpha(operator.sub),
    "rsub": lambda x, y, alpha=1: y - (x if alpha == 1 else alpha * x),
    "div": _divided,
    "true_divide": _divided,
    "floor_divide": jnp.floor_divide,
    "clamp": _clip,
    "clamp_min": _clip,
    "clamp_max": lambda x, high: _clip(x, None, high),
    "where": jnp.where,
    "masked_fill": lambda x, mask, value: jnp.where(mask, jnp.asarray(value, x.dtype), x),
    "fill": lambda x, value: jnp.full_like(x, value),
    "zero": jnp.zeros_like,
    "copy": lambda x, new, _=False: jnp.broadcast_to(new, x.shape).astype(x.dtype),
    "zeros_like": _like(0),
    "ones_like": _like(1),
    "empty_like": _like(0),
    "full_like": lambda x, value, *, dtype=None, **_: jnp.full_like(x, value, dtype),
    "to": _to,
    "_to_copy": _to,
    "type_as": _to,
    "detach": lax.stop_gradient,
    **dict.fromkeys(("contiguous", "clone", "alias", "lift_fresh_copy", "lift_fresh", "identity"), _same),
}
"""Functions that compute each entry separately, whatever the order of the axes."""


# --- shapes


def _flatten(x, start=0, end=-1):
    start, end = start % max(x.ndim, 1), end % max(x.ndim, 1)
    return x.reshape(*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :])


def _expand(x, sizes, *_, **__):
    sizes = [x.shape[i - len(sizes) + x.ndim] if size == -1 else size for i, size in enumerate(sizes)]
    return jnp.broadcast_to(x, sizes)


def _squeeze(x, axes=None):
    axes = range(x.ndim) if axes is None else [axes] if isinstance(axes, int) else axes
    return jnp.squeeze(x, tuple(axis for axis in axes if x.shape[axis] == 1))


def _slice(x, axis=0, start=None, end=None, step=1):
    return x[(slice(None),) * (axis % x.ndim) + (slice(start, end, step),)]


def _index(x, indices):
    # Beyond an axis as `rows`, but here negative numbers count from the end in PyTorch too.
    return jnp.asarray(x).at[tuple(slice(None) if one is None else one for one in indices)].get(mode="fill")


def _split(x, size, axis=0):
    bounds = range(size, x.shape[axis], size) if isinstance(size, int) else itertools.accumulate(size[:-1])
    return jnp.split(x, list(bounds), axis)


def _pad(x, pads, mode="constant", value=None):
    sides = [(0, 0)] * (x.ndim - len(pads) // 2) + list(zip(pads[-2::-2], pads[::-2], strict=True))
    if mode == "constant":
        return lax.pad(x, jnp.asarray(value or 0, x.dtype), [(*pair, 0) for pair in sides])
    return jnp.pad(x, sides, mode={"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[mode])


def _pixel_shuffle(x, factor):
    y = x.reshape(*x.shape[:-3], -1, factor, factor, *x.shape[-2:])
    y = jnp.moveaxis(y, (-4, -3), (-3, -1))
    return y.reshape(*y.shape[:-4], y.shape[-4] * factor, y.shape[-2] * factor)


def _made(value: float) -> Callable[..., Any]:
    return lambda sizes, *, dtype=None, **_: jnp.full(sizes, value, dtype or "float32")


def _new(value: float) -> Callable[..., Any]:
    return lambda x, sizes, *, dtype=None, **_: jnp.full(sizes, value, dtype or x.dtype)


def _full(sizes, value, *, dtype=None, **_):
    return jnp.full(sizes, value, dtype)


def _gather(x, axis, index, **_):
    # In the other axes x may be longer than the index.
    sizes = [None if one == axis % x.ndim else size for one, size in enumerate(index.shape)]
    return rows(jnp.take_along_axis, x[tuple(map(slice, sizes))], axis, index)


OTHERS: dict[str, Callable[..., Any]] = {
    **LAYERS,
    **REDUCTIONS,
    "flatten": _flatten,
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), lambda x, sizes: x.reshape(sizes)),
    "view_as": lambda x, y: x.reshape(y.shape),
    "unflatten": lambda x, axis, sizes: x.reshape(*x.shape[: axis % x.ndim], *sizes, *x.shape[axis % x.ndim + 1 :]),
    "transpose": jnp.swapaxes,
    "swapaxes": jnp.swapaxes,
    "permute": jnp.transpose,
    "t": jnp.transpose,
    "numpy_T": jnp.transpose,
    "movedim": jnp.moveaxis,
    "unsqueeze": jnp.expand_dims,
    "squeeze": _squeeze,
    "expand": _expand,
    "expand_as": lambda x, y: jnp.broadcast_to(x, y.shape),
    **dict.fromkeys(("cat", "concat"), lambda arrays, axis=0: jnp.concatenate(arrays, axis)),
    "stack": lambda arrays, axis=0: jnp.stack(arrays, axis),
    "unbind": lambda x, axis=0: list(jnp.moveaxis(x, axis, 0)),
    "split": _split,
    "split_with_sizes": _split,
    "chunk": lambda x, count, axis=0: _split(x, -(-x.shape[axis] // count), axis),
    "select": lambda x, axis, place: lax.index_in_dim(x, place, axis, keepdims=False),
    "slice": _slice,
    "index": _index,
    "index_select": lambda x, axis, index: rows(jnp.take, x, axis, index),
    "gather": _gather,
    "repeat": jnp.tile,
    "roll": lambda x, shifts, axes=(): jnp.roll(x, shifts, tuple(axes) or None),
    "flip": jnp.flip,
    "tril": jnp.tril,
    "triu": jnp.triu,
    "pad": _pad,
    "constant_pad_nd": lambda x, pads, value=0: _pad(x, pads, "constant", value),
    "pixel_shuffle": _pixel_shuffle,
    "arange": lambda *bounds, dtype=None, **_: jnp.arange(*bounds, dtype=dtype),
    "zeros": _made(0),
    "ones": _made(1),
    "empty": _made(0),
    "full": _full,
    "new_zeros": _new(0),
    "new_ones": _new(1),
    "new_empty": _new(0),
    "new_full": lambda x, sizes, value, *, dtype=None, **_: jnp.full(sizes, value, dtype or x.dtype),
    "scalar_tensor": lambda value, *, dtype=None, **_: cast(value, dtype or "float32"),
    "sym_size": lambda x, axis: x.shape[axis],
}
"""All other functions."""

NAMES = SPATIAL.keys() | ELEMENTWISE.keys() | OTHERS.keys() | RANDOM.keys() | {"batch_norm"}
"""Names of all operations. Batch normalization is in `torch_graph`, because it returns new running statistics."""
