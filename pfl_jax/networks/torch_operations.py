"""The operations of PyTorch's graphs, in JAX, by the names that `torch.export` gives them.

The functions take the arguments of the operations in their order. Types are names such as "float32".

Images and series whose channels are PyTorch's second axis are kept with channels last, as `Image`, from one operation
of `SPATIAL` to the next, since that is faster; all other functions but the elementwise ones get them as PyTorch has
them.
"""

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfl_jax.errors import InvalidInput


class Image(NamedTuple):
    """Array [B, C, ...] of PyTorch, with its channels last.

    Attributes:
      last: [B, ..., C].
    """

    last: jax.Array


def channels_first(x: Any) -> Any:
    """An `Image` as PyTorch has it; anything else as it is."""
    return jnp.moveaxis(x.last, -1, 1) if isinstance(x, Image) else x


def channels_last(x: Any, ndim: int = 0) -> Any:
    """Array of an `Image`, or an array of PyTorch with its channels last.

    Args:
      x: [B, C, ...]; numbers stay as they are.
      ndim: axes of the result; the missing ones are the first of x.
    """
    if isinstance(x, Image) or not hasattr(x, "ndim") or not x.ndim:
        return x.last if isinstance(x, Image) else x
    x = x.reshape((1,) * (ndim - x.ndim) + x.shape)
    return jnp.moveaxis(x, 1, -1) if x.ndim > 1 else x


def apply(name: str, args: Sequence[Any], kwargs: dict[str, Any], key: jax.Array | None = None) -> Any:
    """Result of an operation.

    Args:
      name: of the operation.
      args, kwargs: its arguments: arrays, images, numbers, names of types, and lists of these.
      key: of random numbers, in training; None for none.
    """
    if name in SPATIAL:
        return Image(SPATIAL[name](channels_last(args[0]), *map(channels_first, args[1:]), **kwargs))
    dims = [one.last.ndim for one in args if isinstance(one, Image)]
    if name in ELEMENTWISE and dims and all(getattr(one, "ndim", 0) <= dims[0] for one in args):
        return Image(ELEMENTWISE[name](*(channels_last(one, dims[0]) for one in args), **kwargs))
    if name == "dropout" and dims:
        return Image(RANDOM[name](key, args[0].last, *args[1:]))
    args, kwargs = jax.tree.map(channels_first, (list(args), kwargs), is_leaf=lambda one: isinstance(one, Image | None))
    if name in RANDOM:
        return RANDOM[name](key, *args, **kwargs)
    return (ELEMENTWISE.get(name) or OTHERS[name])(*args, **kwargs)


def drop(key: jax.Array | None, x: jax.Array, rate: float, shared: int = 0) -> jax.Array:
    """Dropout.

    Args:
      key: None where there must not be any.
      x: any shape.
      rate: share of the values that become 0.
      shared: number of last axes whose values are dropped together.
    """
    if rate == 0:
        return x
    kept = bernoulli(key, jnp.zeros(x.shape[: x.ndim - shared] + (1,) * shared, x.dtype), 1 - rate)
    return x * kept / (1 - rate) if rate < 1 else x * 0


def bernoulli(key: jax.Array | None, like: jax.Array, probability: float = 0.5, **_: Any) -> jax.Array:
    """Random zeros and ones in the shape of an array."""
    if key is None:
        raise InvalidInput(
            "the module draws random numbers where it is deployed too: let it do so in training alone, as "
            "functional.dropout(x, p, training=self.training) does"
        )
    return jax.random.bernoulli(key, probability, like.shape).astype(like.dtype)


# --- helpers


def _each(value: Any, dimensions: int) -> list[int]:
    """A number for each dimension."""
    value = [value] if isinstance(value, int) else list(value)
    return value * dimensions if len(value) == 1 else value


def _cast(x: Any, dtype: Any = None) -> jax.Array:
    """Array of a type; of its own type for anything that is no type."""
    return jnp.asarray(x) if not isinstance(dtype, str) else jnp.asarray(x).astype(dtype)


def _affine(x: jax.Array, scale: Any, bias: Any) -> jax.Array:
    return (x if scale is None else x * scale) + (0 if bias is None else bias)


def _normalized(x: jax.Array, axes: Sequence[int], epsilon: float) -> jax.Array:
    """Mean 0 and variance 1 over some axes."""
    centered = x - x.mean(axes, keepdims=True)
    return centered * lax.rsqrt(jnp.square(centered).mean(axes, keepdims=True) + epsilon)


# --- convolution and pooling, channels last


def _convolution(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    n = weight.ndim - 2
    pads = padding.upper() if isinstance(padding, str) else [(pad, pad) for pad in _each(padding, n)]
    y = lax.conv_general_dilated(
        x,
        weight.transpose(*range(2, n + 2), 1, 0),
        _each(stride, n),
        pads,
        rhs_dilation=_each(dilation, n),
        dimension_numbers=_layout(n),
        feature_group_count=groups,
    )
    return _affine(y, None, bias)


def _transposed_convolution(x, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1):
    n = weight.ndim - 2
    inputs, outputs, *sides = weight.shape
    # [in, out / groups, ...] -> [..., in / groups, out], the groups beside each other, mirrored.
    kernel = weight.reshape(groups, inputs // groups, outputs, *sides)
    kernel = jnp.flip(kernel.transpose(*range(3, n + 3), 1, 0, 2), range(n))
    kernel = kernel.reshape(*sides, inputs // groups, groups * outputs)
    more = zip(sides, _each(dilation, n), _each(padding, n), _each(output_padding, n), strict=True)
    pads = [(step * (side - 1) - pad, step * (side - 1) - pad + out) for side, step, pad, out in more]
    y = lax.conv_general_dilated(
        x,
        kernel,
        (1,) * n,
        pads,
        lhs_dilation=_each(stride, n),
        rhs_dilation=_each(dilation, n),
        dimension_numbers=_layout(n),
        feature_group_count=groups,
    )
    return _affine(y, None, bias)


def _layout(dimensions: int) -> tuple[str, str, str]:
    sides = "DHW"[3 - dimensions :]
    return f"N{sides}C", f"{sides}IO", f"N{sides}C"


class _Window(NamedTuple):
    """Windows of pooling along one axis: number, length, distance, padding before and after, steps inside."""

    number: int
    side: int
    stride: int
    before: int
    after: int
    dilation: int


def _windows(x, kernel, stride, padding, ceil, dilation=1) -> list[_Window]:
    n = x.ndim - 2
    kernel = _each(kernel, n)
    options = (kernel, _each(stride, n) if stride else kernel, _each(padding, n), _each(dilation, n))
    found = []
    for size, side, step, pad, spread in zip(x.shape[1:-1], *options, strict=True):
        reach = spread * (side - 1) + 1
        count = (size + 2 * pad - reach + (step - 1 if ceil else 0)) // step + 1
        # A window that begins behind the image and its first padding is none.
        count -= bool(ceil) and (count - 1) * step >= size + pad
        found.append(_Window(count, side, step, pad, (count - 1) * step + reach - size - pad, spread))
    return found


def _reduced(x, initial, reduce, windows: list[_Window]):
    # Left over at the end is nothing: reduce_window leaves out windows that do not fit.
    pads = [(0, 0), *((one.before, max(one.after, 0)) for one in windows), (0, 0)]
    sides, steps, spread = ([1, *(getattr(one, kind) for one in windows), 1] for kind in ("side", "stride", "dilation"))
    return lax.reduce_window(x, initial, reduce, sides, steps, pads, window_dilation=spread)


def _max_pool(x, kernel, stride=(), padding=0, dilation=1, ceil=False):
    return _reduced(x, -jnp.inf, lax.max, _windows(x, kernel, stride, padding, ceil, dilation))


def _average_pool(x, kernel, stride=(), padding=0, ceil=False, count_padding=True, divisor=None):
    windows = _windows(x, kernel, stride, padding, ceil)
    total = _reduced(x, 0.0, lax.add, windows)
    if divisor:
        return total / divisor
    counts = np.ones((1,) * x.ndim)
    for axis, (one, size) in enumerate(zip(windows, x.shape[1:-1], strict=True), start=1):
        start = np.arange(one.number) * one.stride - one.before
        low, high = (-one.before, size + one.before) if count_padding else (0, size)
        lengths = np.minimum(start + one.side, high) - np.maximum(start, low)
        counts = counts * lengths.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    return total / (counts.flat[0] if (counts == counts.flat[0]).all() else counts.astype(np.float32))


def _adaptive_average_pool(x, sizes):
    sizes = [size or old for size, old in zip(_each(sizes, x.ndim - 2), x.shape[1:-1], strict=True)]
    if all(old % size == 0 for size, old in zip(sizes, x.shape[1:-1], strict=True)):
        return _average_pool(x, [old // size for size, old in zip(sizes, x.shape[1:-1], strict=True)])
    for axis, size in enumerate(sizes, start=1):
        old = x.shape[axis]
        bounds = [(i * old // size, -(-(i + 1) * old // size)) for i in range(size)]
        x = jnp.concatenate([lax.slice_in_dim(x, *one, axis=axis).mean(axis, keepdims=True) for one in bounds], axis)
    return x


def _group_norm(x, groups, scale=None, bias=None, epsilon=1e-5, *_):
    split = x.reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    return _affine(_normalized(split, (1, 3), epsilon).reshape(x.shape), scale, bias)


def _instance_norm(x, scale, bias, mean, variance, use_input_stats, momentum, epsilon, *_):
    if mean is not None:
        raise InvalidInput("InstanceNorm with running statistics is not supported: make it without them")
    return _affine(_normalized(x, tuple(range(1, x.ndim - 1)), epsilon), scale, bias)


def _resized(weights: Callable[..., np.ndarray]) -> Callable[..., Any]:
    """Interpolation by a matrix for each axis; weights: (old size, new size, scale or None, corners) -> [new, old]."""

    def resize(x, sizes, *options):
        corners, scales = options if len(options) == 2 else (False, *options)
        for axis in range(1, x.ndim - 1):
            old, scale = x.shape[axis], scales and scales[axis - 1]
            new = sizes[axis - 1] if sizes else math.floor(old * scale)
            matrix = jnp.asarray(weights(old, new, scale, corners), x.dtype)
            x = jnp.moveaxis(jnp.tensordot(x, matrix, (axis, 1)), -1, axis)
        return x

    return resize


def _nearest(old, new, scale, _):
    places = np.floor(np.arange(new) * (np.float32(1 / scale) if scale else np.float32(old / new)))
    return np.eye(old)[np.minimum(places.astype(int), old - 1)]


def _linear_interpolation(old, new, scale, corners):
    if corners:
        places = np.arange(new) * ((old - 1) / (new - 1) if new > 1 else 0)
    else:
        places = np.maximum((np.arange(new) + 0.5) * (1 / scale if scale else old / new) - 0.5, 0)
    low = np.minimum(places.astype(int), old - 1)
    rest = (places - low)[:, None]
    return (1 - rest) * np.eye(old)[low] + rest * np.eye(old)[np.minimum(low + 1, old - 1)]


SPATIAL: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution),
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), _max_pool),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), _average_pool),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d"), _adaptive_average_pool),
    **dict.fromkeys(("upsample_nearest1d", "upsample_nearest2d"), _resized(_nearest)),
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d"), _resized(_linear_interpolation)),
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
}
"""Functions whose first argument and result have channels last."""


# --- elementwise


def _with_alpha(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y, *, alpha=1: function(x, y if alpha == 1 else alpha * y)


def _divided(x, y, *, rounding_mode=None):
    if rounding_mode is None:
        return jnp.true_divide(x, y)
    return jnp.floor_divide(x, y) if rounding_mode == "floor" else jnp.trunc(jnp.true_divide(x, y)).astype(x.dtype)


def _clip(x, low=None, high=None):
    x = x if low is None else jnp.maximum(x, low)
    return x if high is None else jnp.minimum(x, high)


def _gelu(x, *, approximate="none"):
    return jax.nn.gelu(x, approximate=approximate == "tanh")


def _softplus(x, beta=1, threshold=20):
    return jnp.where(x * beta > threshold, x, jax.nn.softplus(jnp.minimum(x * beta, threshold)) / beta)


def _elu(x, alpha=1.0, scale=1.0, input_scale=1.0):
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(input_scale * jnp.minimum(x, 0)))


def _to(x, *args, dtype=None, **_):
    found = (str(one.dtype) if hasattr(one, "dtype") else one for one in args)
    return _cast(x, dtype or next((one for one in found if isinstance(one, str)), None))


def _like(value: float) -> Callable[..., Any]:
    return lambda x, *, dtype=None, **_: jnp.full_like(x, value, dtype)


def _same(x, *_, **__):
    return x


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(jnp, name)
        for name in (
            *("abs", "ceil", "cos", "exp", "expm1", "floor", "isfinite", "isinf", "isnan", "log", "log1p", "log2"),
            *("logical_and", "logical_not", "logical_or", "logical_xor", "maximum", "minimum", "reciprocal", "round"),
            *("sign", "sin", "sqrt", "square", "tan", "tanh", "trunc", "fmod", "remainder", "bitwise_not"),
            *("bitwise_and", "bitwise_or", "bitwise_xor"),
        )
    },
    **{name: getattr(jax.nn, name) for name in ("relu", "relu6", "sigmoid", "silu", "mish", "log_sigmoid", "selu")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "mul", "neg", "pow")},
    **{f"__{name}__": getattr(operator, f"{name}_") for name in ("and", "or")},
    "atan": jnp.arctan,
    "erf": jax.scipy.special.erf,
    "rsqrt": lax.rsqrt,
    "hardswish": jax.nn.hard_swish,
    "hardsigmoid": jax.nn.hard_sigmoid,
    "hardtanh": lambda x, low=-1, high=1: _clip(x, low, high),
    "leaky_relu": lambda x, slope=0.01: jax.nn.leaky_relu(x, slope),
    "elu": _elu,
    "gelu": _gelu,
    "softplus": _softplus,
    "softsign": jax.nn.soft_sign,
    "add": _with_alpha(operator.add),
    "sub": _with_alpha(operator.sub),
    "rsub": _with_alpha(lambda x, y: y - x),
    "div": _divided,
    "true_divide": _divided,
    "floor_divide": jnp.floor_divide,
    "clamp": _clip,
    "clamp_min": _clip,
    "clamp_max": lambda x, high: jnp.minimum(x, high),
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
    **dict.fromkeys(("contiguous", "clone", "alias", "lift_fresh_copy", "lift_fresh", "identity", "view_as"), _same),
}
"""Functions that compute each entry by itself, whatever the order of the axes."""


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
    return x[tuple(slice(None) if one is None else one for one in indices)]


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


# --- reductions


def _reduction(function: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(x, axes=None, keep=False, *, dtype=None):
        axes = axes if isinstance(axes, int) else tuple(axes or ()) or None
        return function(_cast(x, dtype), axis=axes, keepdims=keep)

    return reduce


def _spread(root: bool) -> Callable[..., Any]:
    """Variance, or its root."""

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
    """Of all entries, of an axis with positions, or of two arrays."""

    def extreme(x, axis=None, keep=False):
        if axis is None:
            return function(x)
        if not isinstance(axis, int):
            return both(x, axis)
        return function(x, axis, keepdims=keep), position(x, axis, keepdims=keep)

    return extreme


def _norm(x, order=2, axes=None, keep=False, *, dtype=None):
    axes = axes if isinstance(axes, int) else tuple(axes or ()) or None
    if order == 2:
        return jnp.sqrt(jnp.sum(jnp.square(x), axes, keepdims=keep))
    return jnp.sum(jnp.abs(x) ** order, axes, keepdims=keep) ** (1 / order)


def _top(x, count, axis=-1, *_):
    values, places = lax.top_k(jnp.moveaxis(x, axis, -1), count)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(places, -1, axis)


# --- layers


def _linear(x, weight, bias=None):
    return _affine(x @ weight.T, None, bias)


def _weight_norm(direction, length, axis=0):
    others = tuple(i for i in range(direction.ndim) if i != axis)
    return direction * (length / jnp.sqrt(jnp.sum(jnp.square(direction), others, keepdims=True)))


def _embedding(weight, index, padding=-1, *_):
    rows = weight[index]
    # The row of padding has no gradient.
    return rows if padding < 0 else jnp.where((index == padding)[..., None], lax.stop_gradient(rows), rows)


def _layer_norm(x, shape, scale=None, bias=None, epsilon=1e-5, *_):
    return _affine(_normalized(x, tuple(range(-len(shape), 0)), epsilon), scale, bias)


def _rms_norm(x, shape, scale=None, epsilon=None):
    squares = jnp.square(x).mean(tuple(range(-len(shape), 0)), keepdims=True)
    return _affine(x * lax.rsqrt(squares + (np.finfo(np.float32).eps if epsilon is None else epsilon)), scale, None)


def _softmax(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, axis, dtype=None, *_: function(_cast(x, dtype), axis)


def _attention(key, q, k, v, mask=None, dropout=0.0, causal=False, *, scale=None, enable_gqa=False):
    if enable_gqa:
        k, v = (jnp.repeat(one, q.shape[-3] // one.shape[-3], -3) for one in (k, v))
    scores = q @ jnp.swapaxes(k, -1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask
    return drop(key, jax.nn.softmax(scores, -1), dropout) @ v


def _recurrent(cell: Callable[..., Any]) -> Callable[..., Any]:
    """Layers of a recurrent network; cell: (states, from the input, from the last output) -> states."""

    def layers(key, x, hidden, params, biases, depth, dropout, train, both_ways, batch_first=False):
        hidden = list(hidden) if isinstance(hidden, list | tuple) else [hidden]
        x, ways, ends = jnp.swapaxes(x, 0, 1) if batch_first else x, 2 if both_ways else 1, []
        each = len(params) // (depth * ways)
        for layer in range(depth):
            outputs = []
            for way in range(ways):
                number = layer * ways + way
                own = list(params[number * each :][:each])
                projection = own.pop() if each in (3, 5) else None
                of_input, of_output = own[2:] if biases else (0.0, 0.0)

                def step(states, inputs, weight=own[1], bias=of_output, projection=projection):
                    states = cell(states, inputs, states[0] @ weight.T + bias)
                    states = states if projection is None else (states[0] @ projection.T, *states[1:])
                    return states, states[0]

                start = tuple(one[number] for one in hidden)
                end, output = lax.scan(step, start, x @ own[0].T + of_input, reverse=bool(way))
                ends.append(end)
                outputs.append(output)
            x = jnp.concatenate(outputs, -1)
            if train and layer < depth - 1:
                x = drop(None if key is None else jax.random.fold_in(key, layer), x, dropout)
        return jnp.swapaxes(x, 0, 1) if batch_first else x, *map(jnp.stack, zip(*ends, strict=True))

    return layers


def _lstm_cell(states, own, back):
    i, f, g, o = jnp.split(own + back, 4, -1)
    memory = jax.nn.sigmoid(f) * states[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(memory), memory


def _gru_cell(states, own, back):
    (r, z, n), (r_back, z_back, n_back) = jnp.split(own, 3, -1), jnp.split(back, 3, -1)
    z, n = jax.nn.sigmoid(z + z_back), jnp.tanh(n + jax.nn.sigmoid(r + r_back) * n_back)
    return ((1 - z) * n + z * states[0],)


OTHERS: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "addmm": lambda x, a, b, *, beta=1, alpha=1: beta * x + alpha * (a @ b),
    "baddbmm": lambda x, a, b, *, beta=1, alpha=1: beta * x + alpha * (a @ b),
    **dict.fromkeys(("matmul", "mm", "bmm"), jnp.matmul),
    "einsum": lambda text, operands, **_: jnp.einsum(text, *operands),
    "outer": jnp.outer,
    "embedding": _embedding,
    "_weight_norm": _weight_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "softmax": _softmax(jax.nn.softmax),
    "_softmax": _softmax(jax.nn.softmax),
    "log_softmax": _softmax(jax.nn.log_softmax),
    "glu": lambda x, axis=-1: jax.nn.glu(x, axis),
    "prelu": lambda x, slope: jnp.where(x > 0, x, x * slope.reshape(-1, *(1,) * max(x.ndim - 2, 0))),
    "cumsum": lambda x, axis, *, dtype=None: jnp.cumsum(_cast(x, dtype), axis),
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
    "flatten": _flatten,
    **dict.fromkeys(("view", "reshape", "_unsafe_view"), lambda x, sizes: x.reshape(sizes)),
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
    "index_select": lambda x, axis, index: jnp.take(x, index, axis),
    "gather": lambda x, axis, index, **_: jnp.take_along_axis(x, index, axis),
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
    "scalar_tensor": lambda value, *, dtype=None, **_: _cast(value, dtype or "float32"),
    "sym_size": lambda x, axis: x.shape[axis],
}
"""All other functions."""

RANDOM: dict[str, Callable[..., Any]] = {
    "dropout": lambda key, x, rate, train: drop(key, x, rate if train else 0.0),
    "feature_dropout": lambda key, x, rate, train: drop(key, x, rate if train else 0.0, x.ndim - 2),
    "bernoulli": bernoulli,
    "scaled_dot_product_attention": _attention,
    "lstm": _recurrent(_lstm_cell),
    "gru": _recurrent(_gru_cell),
    "rnn_tanh": _recurrent(lambda _, own, back: (jnp.tanh(own + back),)),
    "rnn_relu": _recurrent(lambda _, own, back: (jax.nn.relu(own + back),)),
}
"""Functions of a key, or None, before their arguments."""

NAMES = SPATIAL.keys() | ELEMENTWISE.keys() | OTHERS.keys() | RANDOM.keys() | {"batch_norm"}
"""Names of all operations. That of batch normalization is in `torch_graph`: it has new running statistics."""
