"""Convolutions of any stride, dilation, groups and layout, as convolutions of stride 1 by `conv2d`."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pfl_jax.fast.convolution import conv2d
from pfl_jax.fast.forms import Padding


def conv_general(
    x: jax.Array,
    kernel: jax.Array,
    strides: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    groups: int = 1,
    precision: str | None = None,
) -> jax.Array:
    """Two-dimensional convolution.

    Args:
      x: images [B, H, W, Cin].
      kernel: [kh, kw, Cin / groups, Cout].
      strides: steps between results, along both axes.
      padding: rows and columns of zeros around the images; negative numbers crop.
      dilation: steps between the elements of the kernel, along both axes.
      groups: g; the first Cin / g channels give the first Cout / g results, and so on.
      precision: see `conv2d`.

    Returns:
      [B, H', W', Cout].
    """
    if groups > 1 and kernel.shape[2] == 1:
        return _by_channel(x, kernel, strides, padding, dilation)
    if groups > 1:
        x = jnp.moveaxis(x.reshape(*x.shape[:3], groups, -1), 3, 0)
        kernel = jnp.moveaxis(kernel.reshape(*kernel.shape[:3], groups, -1), 3, 0)
        y = jax.vmap(lambda x, kernel: conv_general(x, kernel, strides, padding, dilation, 1, precision))(x, kernel)
        return jnp.moveaxis(y, 0, 3).reshape(*y.shape[1:4], -1)
    outputs = _outputs(x, kernel, strides, padding, dilation)
    if max(strides) > 1:
        # With stride 1, the dilated kernel has zeros between its elements.
        spread = [(0, 0, step - 1) for step in dilation]
        kernel = jax.lax.pad(kernel, jnp.zeros((), kernel.dtype), (*spread, (0, 0, 0), (0, 0, 0)))
        return conv2d(*_as_one_pixel(x, kernel, strides, padding, outputs), precision=precision)
    if max(dilation) > 1:
        images = _as_several_images(x, kernel, padding, dilation, outputs)
        return _as_one_image(conv2d(images, kernel, precision=precision), x.shape[0], dilation, outputs)
    return conv2d(x, kernel, padding, precision=precision)


def _outputs(
    x: jax.Array, kernel: jax.Array, strides: Sequence[int], padding: Padding, dilation: Sequence[int]
) -> list[int]:
    """Numbers of rows and columns of the result."""
    return [
        (x.shape[1 + axis] + sum(padding[axis]) - (kernel.shape[axis] - 1) * dilation[axis] - 1) // strides[axis] + 1
        for axis in (0, 1)
    ]


def _resized(x: jax.Array, starts: Sequence[int], sizes: Sequence[int]) -> jax.Array:
    """Images with `starts` rows and columns of zeros above and left, padded with zeros or cropped to `sizes`."""
    sides = [(start, size - old - start, 0) for start, size, old in zip(starts, sizes, x.shape[1:3], strict=True)]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *sides, (0, 0, 0)))


def _as_one_pixel(
    x: jax.Array, kernel: jax.Array, strides: Sequence[int], padding: Padding, outputs: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Image and kernel of the same convolution with stride 1: a block of pixels, of the strides' size, is one pixel.

    The kernel is filled with zeros to whole blocks; a kernel smaller than a block uses only a part of the block.
    """
    batch, channels = x.shape[0], x.shape[3]
    taps = [-(-kernel.shape[axis] // strides[axis]) for axis in (0, 1)]
    blocks = [number + tap - 1 for number, tap in zip(outputs, taps, strict=True)]
    rows, columns = (min(kernel.shape[axis], strides[axis]) for axis in (0, 1))
    x = _resized(x, [start for start, _ in padding], [n * step for n, step in zip(blocks, strides, strict=True)])
    x = x.reshape(batch, blocks[0], strides[0], blocks[1], strides[1], channels)[:, :, :rows, :, :columns]
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, *blocks, -1)
    missing = [(0, taps[0] * rows - kernel.shape[0], 0), (0, taps[1] * columns - kernel.shape[1], 0)]
    kernel = jax.lax.pad(kernel, jnp.zeros((), kernel.dtype), (*missing, (0, 0, 0), (0, 0, 0)))
    kernel = kernel.reshape(taps[0], rows, taps[1], columns, channels, -1)
    return x, kernel.transpose(0, 2, 1, 3, 4, 5).reshape(*taps, rows * columns * channels, -1)


def _as_several_images(
    x: jax.Array, kernel: jax.Array, padding: Padding, dilation: Sequence[int], outputs: Sequence[int]
) -> jax.Array:
    """Images made of every dilation[0]-th row and dilation[1]-th column, [B dilation[0] dilation[1], H', W', C]."""
    sizes = [-(-n // step) + taps - 1 for n, step, taps in zip(outputs, dilation, kernel.shape, strict=False)]
    x = _resized(x, [start for start, _ in padding], [n * step for n, step in zip(sizes, dilation, strict=True)])
    x = x.reshape(x.shape[0], sizes[0], dilation[0], sizes[1], dilation[1], -1).transpose(0, 2, 4, 1, 3, 5)
    return x.reshape(-1, *sizes, x.shape[5])


def _as_one_image(y: jax.Array, batch: int, dilation: Sequence[int], outputs: Sequence[int]) -> jax.Array:
    """Results of `_as_several_images` in the order of the pixels."""
    _, rows, columns, features = y.shape
    y = y.reshape(batch, *dilation, rows, columns, features).transpose(0, 3, 1, 4, 2, 5)
    return y.reshape(batch, rows * dilation[0], columns * dilation[1], features)[:, : outputs[0], : outputs[1]]


def _by_channel(
    x: jax.Array, kernel: jax.Array, strides: Sequence[int], padding: Padding, dilation: Sequence[int]
) -> jax.Array:
    """Depthwise convolution as a sum of products with shifted images, one for each element of the kernel."""
    height, width, _, features = kernel.shape
    outputs = _outputs(x, kernel, strides, padding, dilation)
    x = _resized(x, [start for start, _ in padding], [x.shape[1 + i] + sum(padding[i]) for i in (0, 1)])
    x = jnp.repeat(x, features // x.shape[3], axis=3)
    starts = [[i * step for i in range(size)] for size, step in zip((height, width), dilation, strict=True)]
    shifted = [
        jax.lax.slice(
            x,
            (0, row, column, 0),
            (x.shape[0], row + (outputs[0] - 1) * strides[0] + 1, column + (outputs[1] - 1) * strides[1] + 1, features),
            (1, *strides, 1),
        )
        for row in starts[0]
        for column in starts[1]
    ]
    weights = kernel.reshape(math.prod(kernel.shape[:3]), features)
    return sum((part * weights[i] for i, part in enumerate(shifted[1:], start=1)), shifted[0] * weights[0])
