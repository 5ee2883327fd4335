"""Operations of PyTorch on images and series, with their channels last: convolution, pooling, normalization."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfl_jax.errors import InvalidInput


def _each(value: Any, dimensions: int) -> list[int]:
    """One number for each dimension."""
    value = [value] if isinstance(value, int) else list(value)
    return value * dimensions if len(value) == 1 else value


def affine(x: jax.Array, scale: Any, bias: Any) -> jax.Array:
    return (x if scale is None else x * scale) + (0 if bias is None else bias)


def normalized(x: jax.Array, axes: Sequence[int], epsilon: float) -> jax.Array:
    """Mean 0 and variance 1 over some axes."""
    centered = x - x.mean(axes, keepdims=True)
    return centered * lax.rsqrt(jnp.square(centered).mean(axes, keepdims=True) + epsilon)


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
    return affine(y, None, bias)


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
    return affine(y, None, bias)


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
        # A window that begins beyond the image and its first padding does not count.
        count -= bool(ceil) and (count - 1) * step >= size + pad
        found.append(_Window(count, side, step, pad, (count - 1) * step + reach - size - pad, spread))
    return found


def _reduced(x, initial, reduce, windows: list[_Window]):
    # Nothing is left over at the end: reduce_window leaves out windows that do not fit.
    pads = [(0, 0), *((one.before, max(one.after, 0)) for one in windows), (0, 0)]
    sides, steps = ([1, *(getattr(one, kind) for one in windows), 1] for kind in ("side", "stride"))
    return lax.reduce_window(x, initial, reduce, sides, steps, pads)


def _max_pool(x, kernel, stride=(), padding=0, dilation=1, ceil=False):
    windows = _windows(x, kernel, stride, padding, ceil, dilation)
    if all(one.dilation == 1 for one in windows):
        return _reduced(x, -jnp.inf, lax.max, windows)
    # By slices, since `reduce_window` has no gradient with steps inside.
    for axis, one in enumerate(windows, start=1):
        pads = [(one.before, max(one.after, 0), 0) if i == axis else (0, 0, 0) for i in range(x.ndim)]
        x, reach = lax.pad(x, jnp.asarray(-jnp.inf, x.dtype), pads), (one.number - 1) * one.stride + 1
        starts = [i * one.dilation for i in range(one.side)]
        x = jnp.stack([lax.slice_in_dim(x, start, start + reach, one.stride, axis) for start in starts]).max(0)
    return x


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
    return affine(normalized(split, (1, 3), epsilon).reshape(x.shape), scale, bias)


def _instance_norm(x, scale, bias, mean, variance, use_input_stats, momentum, epsilon, *_):
    if mean is not None:
        raise InvalidInput("InstanceNorm with running statistics is not supported: make it without them")
    return affine(normalized(x, tuple(range(1, x.ndim - 1)), epsilon), scale, bias)


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
    # In 32 bits, as PyTorch computes it: otherwise some places would be rounded to their neighbors.
    step = np.float32(1 / scale) if scale else np.float32(old) / np.float32(new)
    places = np.floor(np.arange(new, dtype=np.float32) * step)
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
