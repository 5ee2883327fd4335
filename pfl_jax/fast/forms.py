"""Implementations of a convolution and its adjoints, see `pfl_jax.fast.convolution`."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

Padding: TypeAlias = tuple[tuple[int, int], tuple[int, int]]
"""Zeros above and below, and left and right of an image."""

_LAYOUT = ("NHWC", "HWIO", "NHWC")

# XLA's CPU convolution is as fast as its matrix product only with at least this many input channels (a vector register
# holds 16 floats) and at least twice as many output channels.
_CHANNELS = 16

# With fewer channels, XLA's convolution of pairs of columns is the fastest in jax 0.10; from 0.11 on, a matrix product
# over bands of columns is (docs/performance.md).
_BANDS = jax.__version_info__ >= (0, 11)
_BAND = 4


class Form(NamedTuple):
    """Implementation of a convolution with stride 1 and its adjoints.

    Attributes:
      convolve: (padding, x [B, H, W, Cin], kernel [kh, kw, Cin, Cout]) -> y [B, H', W', Cout], the map C.
      input_gradient: (padding, g like y, kernel) -> like x, the map D.
      kernel_gradient: (padding, x, g like y) -> like kernel, the map K.
    """

    convolve: Callable[[Padding, jax.Array, jax.Array], jax.Array]
    input_gradient: Callable[[Padding, jax.Array, jax.Array], jax.Array]
    kernel_gradient: Callable[[Padding, jax.Array, jax.Array], jax.Array]


NONE = (0, 0)


def _correlate(x: jax.Array, kernel: jax.Array, padding: Padding = (NONE, NONE)) -> jax.Array:
    """Convolution of x padded with zeros; negative numbers crop."""
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=_LAYOUT)


def _adjoint(padding: Padding, kernel: jax.Array) -> Padding:
    """Padding of the output's gradient in the map D."""
    (above, below), (left, right) = padding
    height, width = kernel.shape[0] - 1, kernel.shape[1] - 1
    return (height - above, height - below), (width - left, width - right)


# --- form "lax": JAX's own convolution


def _lax_convolve(padding: Padding, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _correlate(x, kernel, padding)


def _lax_input_gradient(padding: Padding, g: jax.Array, kernel: jax.Array) -> jax.Array:
    return _correlate(g, jnp.flip(kernel, (0, 1)).transpose(0, 1, 3, 2), _adjoint(padding, kernel))


def _lax_kernel_gradient(padding: Padding, x: jax.Array, g: jax.Array) -> jax.Array:
    """K as a convolution whose batch is the input channels and whose channels are the batch."""
    return jax.lax.conv_general_dilated(x, g, (1, 1), padding, dimension_numbers=("CHWN", "IHWO", "HWNC"))


# --- form "matmul": one matrix product over all windows


def _pad(x: jax.Array, padding: Padding) -> jax.Array:
    """Images [B, H, W, C] with zeros around them; negative numbers crop."""
    return jax.lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *((*sides, 0) for sides in padding), (0, 0, 0)))


def _windows(padding: Padding, x: jax.Array, height: int, width: int) -> jax.Array:
    """All height x width windows of x [B, H, W, C] as [B, H', W', height * width * C]."""
    x = _pad(x, padding)
    rows, columns = x.shape[1] - height + 1, x.shape[2] - width + 1
    shifted = [x[:, i : i + rows, j : j + columns] for i in range(height) for j in range(width)]
    return jnp.concatenate(shifted, axis=-1)


def _matmul_convolve(padding: Padding, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _windows(padding, x, *kernel.shape[:2]) @ kernel.reshape(-1, kernel.shape[3])


def _matmul_input_gradient(padding: Padding, g: jax.Array, kernel: jax.Array) -> jax.Array:
    height, width, channels, features = kernel.shape
    parts = (g @ kernel.reshape(-1, features).T).reshape(*g.shape[:3], height, width, channels)
    rows = [_overlap([parts[:, :, :, i, j] for j in range(width)], 2, padding[1]) for i in range(height)]
    return _overlap(rows, 1, padding[0])


def _matmul_kernel_gradient(padding: Padding, x: jax.Array, g: jax.Array) -> jax.Array:
    height, width = (x.shape[axis] + sum(padding[axis - 1]) - g.shape[axis] + 1 for axis in (1, 2))
    windows = _windows(padding, x, height, width)
    return jnp.einsum("bijk,bijo->ko", windows, g).reshape(height, width, x.shape[3], g.shape[3])


def _overlap(parts: Sequence[jax.Array], axis: int, padding: tuple[int, int]) -> jax.Array:
    """Sum of parts [B, H, W, C], part i shifted by i along an axis, cropped by the padding at both ends."""
    zero = jnp.zeros((), parts[0].dtype)

    def shifted(shift, part):
        sides = [(0, 0, 0)] * 4
        sides[axis] = (shift - padding[0], len(parts) - 1 - shift - padding[1], 0)
        return jax.lax.pad(part, zero, sides)

    return functools.reduce(jnp.add, (shifted(shift, part) for shift, part in enumerate(parts)))


# --- form "direct": convolutions that XLA's CPU backend runs at the speed of matrix products


def _direct_convolve(padding: Padding, x: jax.Array, kernel: jax.Array) -> jax.Array:
    if kernel.shape[2] < _CHANNELS:
        return (_convolve_in_bands if _BANDS else _convolve_in_pairs)(padding, x, kernel)
    return _correlate(x, kernel, padding)


def _convolve_in_bands(padding: Padding, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolution as one matrix product, in which each row is the window of four columns of results.

    The matrix [kh taps Cin, 4 Cout] has four copies of the kernel, each shifted by one column, and zeros elsewhere.
    With few channels this takes more operations than a product over the single windows, and a third of the copies.
    """
    batch, height, width, channels = x.shape
    window, features = kernel.shape[1], kernel.shape[3]
    (above, below), (left, right) = padding
    columns = width + left + right - window + 1
    bands, blocks = -(-columns // _BAND), -(-(window - 1) // _BAND) + 1
    x = _pad(x, ((above, below), (left, _BAND * (bands + blocks - 1) - width - left)))
    x = x.reshape(batch, height + above + below, bands + blocks - 1, _BAND * channels)
    rows = x.shape[1] - kernel.shape[0] + 1
    parts = [x[:, i : i + rows, j : j + bands] for i in range(kernel.shape[0]) for j in range(blocks)]
    copies = [jnp.pad(kernel, ((0, 0), (j, _BAND * blocks - window - j), (0, 0), (0, 0))) for j in range(_BAND)]
    y = jnp.concatenate(parts, axis=-1) @ jnp.stack(copies, axis=3).reshape(-1, _BAND * features)
    return y.reshape(batch, rows, _BAND * bands, features)[:, :, :columns]


def _convolve_in_pairs(padding: Padding, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolution with pairs of neighboring columns packed into one column with twice the channels.

    The image is reshaped, and the new kernel [kh, (kw + 1) / 2, 2 Cin, 2 Cout] has two copies of the old one, shifted
    by one column. This takes 1 + 1 / kw times the operations and is up to four times as fast with few channels.
    """
    batch, height, width, channels = x.shape
    window, features = kernel.shape[1], kernel.shape[3]
    (above, below), (left, right) = padding
    columns = width + left + right - window + 1
    pairs, taps = -(-columns // 2), (window + 2) // 2
    x = _pad(x, ((above, below), (left, 2 * (pairs + taps - 1) - width - left)))
    x = x.reshape(batch, height + above + below, pairs + taps - 1, 2 * channels)
    shifted = [jnp.pad(kernel, ((0, 0), (j, 2 * taps - window - j), (0, 0), (0, 0))) for j in (0, 1)]
    paired = jnp.stack(shifted, axis=3).reshape(kernel.shape[0], taps, 2 * channels, 2 * features)
    y = _correlate(x, paired)
    return y.reshape(batch, y.shape[1], 2 * pairs, features)[:, :, :columns]


def _direct_input_gradient(padding: Padding, g: jax.Array, kernel: jax.Array) -> jax.Array:
    """D as the convolution of g with the kernel rotated by 180 degrees.

    If the image is wider than g, some of these products are with zeros; and with few channels the convolution is slow.
    In both cases the convolution runs along the columns only, for all columns of the kernel at once, and the results
    are shifted and added along the rows.
    """
    height, width, channels, features = kernel.shape
    turned = jnp.flip(kernel, 0).transpose(0, 3, 1, 2)
    rows, columns = _adjoint(padding, kernel)
    if channels >= 2 * _CHANNELS and sum(columns) <= width - 1:
        return _correlate(g, jnp.flip(turned, 2).transpose(0, 2, 1, 3), (rows, columns))
    parts = _correlate(g, turned.reshape(height, 1, features, width * channels), (rows, NONE))
    parts = parts.reshape(*parts.shape[:3], width, channels)
    return _overlap([parts[:, :, :, j] for j in range(width)], 2, padding[1])


def _direct_kernel_gradient(padding: Padding, x: jax.Array, g: jax.Array) -> jax.Array:
    """K as a convolution whose batch is the input channels and whose channels are the batch.

    With few input channels it is a convolution along examples and rows instead: its channels are the columns of g, its
    batch the image shifted along the columns. Then g, the largest array of a first layer, keeps its order of axes.
    """
    columns = g.shape[2]
    if x.shape[3] < _CHANNELS <= columns:
        x = _pad(x, padding)
        width, channels = x.shape[2] - columns + 1, x.shape[3]
        shifted = jnp.stack([x[:, :, j : j + columns] for j in range(width)]).transpose(0, 4, 1, 2, 3)
        kernel = _correlate(shifted.reshape(width * channels, *x.shape[:2], columns), g)
        return kernel.reshape(width, channels, -1, g.shape[3]).transpose(2, 0, 1, 3)
    # Transposed by hand: with the same order in its dimension numbers, XLA takes its slow path.
    return _correlate(x.transpose(3, 1, 2, 0), g.transpose(1, 2, 0, 3), padding).transpose(1, 2, 0, 3)


FORMS: dict[str, Form] = {
    "direct": Form(_direct_convolve, _direct_input_gradient, _direct_kernel_gradient),
    "matmul": Form(_matmul_convolve, _matmul_input_gradient, _matmul_kernel_gradient),
    "lax": Form(_lax_convolve, _lax_input_gradient, _lax_kernel_gradient),
}
"""The forms of `conv2d` by name."""
