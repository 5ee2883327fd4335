"""Convolution that is fast even if every client has its own kernel.

`jax.lax.conv_general_dilated` is slow in federated simulation: XLA's CPU backend uses a slow path for its gradients
inside loops, because they are convolutions with unusual dimension orders, and vmap over clients turns all of them into
grouped convolutions. Here a convolution C and its adjoints, D with respect to the image and K with respect to the
kernel, are three bilinear maps,

    <g, C(x, w)> = <D(g, w), x> = <K(x, g), w>,

so the derivatives of each map are the other two, for any order of reverse mode. A `Form` is one implementation of them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp

from pfl_jax.backends import BACKENDS
from pfl_jax.errors import InvalidInput

Bilinear: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""One of the three maps."""

_LAYOUT = ("NHWC", "HWIO", "NHWC")

# XLA's CPU convolution is as fast as its matrix product only with at least this many input channels (a vector register
# holds 16 floats) and at least twice as many output channels.
_CHANNELS = 16

# With fewer channels, XLA's convolution of pairs of columns is the fastest in jax 0.10; from 0.11 on a matrix
# product over bands of columns is (docs/performance.md).
_BANDS = jax.__version_info__ >= (0, 11)
_BAND = 4


class Form(NamedTuple):
    """Implementation of a convolution with stride 1 and its adjoints.

    Attributes:
      convolve: (padding, x [B, H, W, Cin], kernel [kh, kw, Cin, Cout]) -> y [B, H', W', Cout], the map C.
      input_gradient: (padding, g like y, kernel) -> like x, the map D.
      kernel_gradient: (padding, x, g like y) -> like kernel, the map K.
    """

    convolve: Callable[[int, jax.Array, jax.Array], jax.Array]
    input_gradient: Callable[[int, jax.Array, jax.Array], jax.Array]
    kernel_gradient: Callable[[int, jax.Array, jax.Array], jax.Array]


def _correlate(x: jax.Array, kernel: jax.Array, rows: int = 0, columns: int = 0) -> jax.Array:
    """Convolution of x padded by `rows` and `columns` on each side, or cropped where they are negative."""
    sides = ((rows, rows), (columns, columns))
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), sides, dimension_numbers=_LAYOUT)


# --- form "lax": JAX's own convolution


def _lax_convolve(padding: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _correlate(x, kernel, padding, padding)


def _lax_input_gradient(padding: int, g: jax.Array, kernel: jax.Array) -> jax.Array:
    height, width = kernel.shape[:2]
    turned = jnp.flip(kernel, (0, 1)).transpose(0, 1, 3, 2)
    return _correlate(g, turned, height - 1 - padding, width - 1 - padding)


def _lax_kernel_gradient(padding: int, x: jax.Array, g: jax.Array) -> jax.Array:
    """K as a convolution whose batch are the input channels and whose channels are the batch."""
    sides = ((padding, padding), (padding, padding))
    return jax.lax.conv_general_dilated(x, g, (1, 1), sides, dimension_numbers=("CHWN", "IHWO", "HWNC"))


# --- form "matmul": one matrix product over all windows


def _windows(padding: int, x: jax.Array, height: int, width: int) -> jax.Array:
    """All height x width windows of x [B, H, W, C] as [B, H', W', height * width * C]."""
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    rows, columns = x.shape[1] - height + 1, x.shape[2] - width + 1
    shifted = [x[:, i : i + rows, j : j + columns] for i in range(height) for j in range(width)]
    return jnp.concatenate(shifted, axis=-1)


def _matmul_convolve(padding: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _windows(padding, x, *kernel.shape[:2]) @ kernel.reshape(-1, kernel.shape[3])


def _matmul_input_gradient(padding: int, g: jax.Array, kernel: jax.Array) -> jax.Array:
    height, width, channels, features = kernel.shape
    parts = (g @ kernel.reshape(-1, features).T).reshape(*g.shape[:3], height, width, channels)
    rows = [_overlap([parts[:, :, :, i, j] for j in range(width)], 2, padding) for i in range(height)]
    return _overlap(rows, 1, padding)


def _matmul_kernel_gradient(padding: int, x: jax.Array, g: jax.Array) -> jax.Array:
    height, width = (x.shape[axis] + 2 * padding - g.shape[axis] + 1 for axis in (1, 2))
    windows = _windows(padding, x, height, width)
    return jnp.einsum("bijk,bijo->ko", windows, g).reshape(height, width, x.shape[3], g.shape[3])


def _overlap(parts: Sequence[jax.Array], axis: int, padding: int) -> jax.Array:
    """Sum of parts [B, H, W, C], part i shifted by i along an axis, cropped by the padding at both ends."""
    zero = jnp.zeros((), parts[0].dtype)

    def shifted(shift, part):
        sides = [(0, 0, 0)] * 4
        sides[axis] = (shift - padding, len(parts) - 1 - shift - padding, 0)
        return jax.lax.pad(part, zero, sides)

    return functools.reduce(jnp.add, (shifted(shift, part) for shift, part in enumerate(parts)))


# --- form "direct": convolutions that XLA's CPU backend runs at the speed of matrix products


def _direct_convolve(padding: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    if kernel.shape[2] < _CHANNELS:
        return (_convolve_in_bands if _BANDS else _convolve_in_pairs)(padding, x, kernel)
    return _correlate(x, kernel, padding, padding)


def _convolve_in_bands(padding: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolution as one matrix product, whose rows are windows of four columns' results at once.

    The matrix [kh taps Cin, 4 Cout] has four copies of the kernel, each shifted by one column, and zeros elsewhere.
    With few channels this takes more operations than a product over the single windows, and a third of the copies.
    """
    batch, height, width, channels = x.shape
    window, features = kernel.shape[1], kernel.shape[3]
    columns = width + 2 * padding - window + 1
    bands, blocks = -(-columns // _BAND), -(-(window - 1) // _BAND) + 1
    right = _BAND * (bands + blocks - 1) - width - padding
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, right), (0, 0)))
    x = x.reshape(batch, height + 2 * padding, bands + blocks - 1, _BAND * channels)
    rows = x.shape[1] - kernel.shape[0] + 1
    parts = [x[:, i : i + rows, j : j + bands] for i in range(kernel.shape[0]) for j in range(blocks)]
    copies = [jnp.pad(kernel, ((0, 0), (j, _BAND * blocks - window - j), (0, 0), (0, 0))) for j in range(_BAND)]
    y = jnp.concatenate(parts, axis=-1) @ jnp.stack(copies, axis=3).reshape(-1, _BAND * features)
    return y.reshape(batch, rows, _BAND * bands, features)[:, :, :columns]


def _convolve_in_pairs(padding: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolution with pairs of neighboring columns packed into one column with twice the channels.

    The image is reshaped, and the new kernel [kh, (kw + 1) / 2, 2 Cin, 2 Cout] has two copies of the old one, shifted
    by one column. This takes 1 + 1 / kw times the operations and is up to four times as fast with few channels.
    """
    batch, height, width, channels = x.shape
    window, features = kernel.shape[1], kernel.shape[3]
    columns = width + 2 * padding - window + 1
    pairs, taps = -(-columns // 2), (window + 2) // 2
    right = 2 * (pairs + taps - 1) - width - padding
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, right), (0, 0)))
    x = x.reshape(batch, height + 2 * padding, pairs + taps - 1, 2 * channels)
    shifted = [jnp.pad(kernel, ((0, 0), (j, 2 * taps - window - j), (0, 0), (0, 0))) for j in (0, 1)]
    paired = jnp.stack(shifted, axis=3).reshape(kernel.shape[0], taps, 2 * channels, 2 * features)
    y = _correlate(x, paired)
    return y.reshape(batch, y.shape[1], 2 * pairs, features)[:, :, :columns]


def _direct_input_gradient(padding: int, g: jax.Array, kernel: jax.Array) -> jax.Array:
    """D as the convolution of g with the kernel rotated by 180 degrees.

    If the image is wider than g, some of these products are with zeros, and with few channels the convolution is slow.
    In both cases the convolution is along the columns only, for all columns of the kernel at once, and the results are
    shifted and added along the rows.
    """
    height, width, channels, features = kernel.shape
    turned = jnp.flip(kernel, 0).transpose(0, 3, 1, 2)
    rows, columns = height - 1 - padding, width - 1 - padding
    input_width = g.shape[2] + width - 1 - 2 * padding
    if channels >= 2 * _CHANNELS and input_width <= g.shape[2]:
        return _correlate(g, jnp.flip(turned, 2).transpose(0, 2, 1, 3), rows, columns)
    parts = _correlate(g, turned.reshape(height, 1, features, width * channels), rows)
    parts = parts.reshape(*parts.shape[:3], width, channels)
    return _overlap([parts[:, :, :, j] for j in range(width)], 2, padding)


def _direct_kernel_gradient(padding: int, x: jax.Array, g: jax.Array) -> jax.Array:
    """K as a convolution whose batch are the input channels and whose channels are the batch."""
    # Transposed by hand: with the same order in its dimension numbers, XLA takes its slow path.
    return _correlate(x.transpose(3, 1, 2, 0), g.transpose(1, 2, 0, 3), padding, padding).transpose(1, 2, 0, 3)


FORMS: dict[str, Form] = {
    "direct": Form(_direct_convolve, _direct_input_gradient, _direct_kernel_gradient),
    "matmul": Form(_matmul_convolve, _matmul_input_gradient, _matmul_kernel_gradient),
    "lax": Form(_lax_convolve, _lax_input_gradient, _lax_kernel_gradient),
}
"""The forms of `conv2d` by name."""


def _one_by_one(fn: Bilinear, *, keeps_batch: bool) -> Bilinear:
    """Function that runs fn in a loop under vmap, which is the fastest way with one kernel per client.

    Args:
      fn: one of a Form's maps.
      keeps_batch: whether the leading axis of fn's first argument is also that of its result. Clients that share one
        kernel are then merged into one larger batch.
    """

    @jax.custom_batching.custom_vmap
    def mapped(a, b):
        return fn(a, b)

    @mapped.def_vmap
    def _(axis_size, in_batched, a, b):
        if all(in_batched):
            return jax.lax.map(lambda pair: mapped(*pair), (a, b)), True
        if in_batched[1]:
            return jax.lax.map(lambda b: mapped(a, b), b), True
        if keeps_batch:
            y = mapped(a.reshape(-1, *a.shape[2:]), b)
            return y.reshape(axis_size, -1, *y.shape[1:]), True
        return jax.lax.map(lambda a: mapped(a, b), a), True

    return mapped


def _compute(form: str, name: str, padding: int, a: jax.Array, b: jax.Array) -> jax.Array:
    """Apply one of a Form's maps; "auto" selects the form of the platform when the program is lowered."""

    def get_map(form: str) -> Bilinear:
        fn = functools.partial(getattr(FORMS[form], name), padding)
        return _one_by_one(fn, keeps_batch=name != "kernel_gradient") if form == "direct" else fn

    if form != "auto":
        return get_map(form)(a, b)
    maps = {platform: get_map(choices.convolution) for platform, choices in BACKENDS.items()}
    return jax.lax.platform_dependent(a, b, **maps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _convolve(form: str, padding: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _compute(form, "convolve", padding, x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _input_gradient(form: str, padding: int, g: jax.Array, kernel: jax.Array) -> jax.Array:
    return _compute(form, "input_gradient", padding, g, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kernel_gradient(form: str, padding: int, x: jax.Array, g: jax.Array) -> jax.Array:
    return _compute(form, "kernel_gradient", padding, x, g)


def _define_gradients(fn, first, second) -> None:
    """Define the adjoints of a bilinear map fn(a, b): first(t, a, b) with respect to a, second(t, a, b) to b."""

    def forward(form, padding, a, b):
        return fn(form, padding, a, b), (a, b)

    def backward(form, padding, operands, t):
        return first(form, padding, t, *operands), second(form, padding, t, *operands)

    fn.defvjp(forward, backward)


_define_gradients(
    _convolve,
    lambda form, padding, t, x, kernel: _input_gradient(form, padding, t, kernel),
    lambda form, padding, t, x, kernel: _kernel_gradient(form, padding, x, t),
)
_define_gradients(
    _input_gradient,
    lambda form, padding, t, g, kernel: _convolve(form, padding, t, kernel),
    lambda form, padding, t, g, kernel: _kernel_gradient(form, padding, t, g),
)
_define_gradients(
    _kernel_gradient,
    lambda form, padding, t, x, g: _input_gradient(form, padding, g, t),
    lambda form, padding, t, x, g: _convolve(form, padding, x, t),
)


def conv2d(x: jax.Array, kernel: jax.Array, padding: int = 0, *, form: str = "auto") -> jax.Array:
    """Two-dimensional convolution with stride 1.

        y[b, i, j, o] = sum_{u, v, c} x[b, i + u - padding, j + v - padding, c] kernel[u, v, c, o]

    Reverse-mode gradients of any order equal those of `jax.lax.conv_general_dilated` up to rounding; forward mode
    (jax.jvp) is not supported. Under jit, unused gradients, such as that of the first layer with respect to the image,
    are not computed.

    Args:
      x: images [B, H, W, Cin], padded with zeros.
      kernel: [kh, kw, Cin, Cout].
      padding: rows and columns of zeros added on each side.
      form: implementation. "direct": convolutions arranged for XLA's CPU backend, one client after another under
        vmap. "matmul": one matrix product over all windows, batched under vmap. "lax": JAX's own convolution, grouped
        under vmap. "auto": that of `pfl_jax.backends`, "direct" on CPUs and "matmul" elsewhere.

    Returns:
      [B, H + 2 padding - kh + 1, W + 2 padding - kw + 1, Cout].

    Raises:
      InvalidInput: if the kernel is larger than the padded image, or the form is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.networks import convolution
      >>> kernel = jnp.array([[1.0, 1.0], [1.0, 1.0]])[:, :, None, None]
      >>> image = jnp.arange(9.0).reshape(1, 3, 3, 1)
      >>> print(convolution.conv2d(image, kernel)[0, :, :, 0])
      [[ 8. 12.]
       [20. 24.]]
    """
    chex.assert_rank([x, kernel], 4)
    chex.assert_equal(x.shape[3], kernel.shape[2])
    if form != "auto" and form not in FORMS:
        raise InvalidInput(f"unknown convolution form {form!r}: choose auto, {', '.join(FORMS)}")
    if any(size + 2 * padding < window for size, window in zip(x.shape[1:3], kernel.shape[:2], strict=True)):
        raise InvalidInput(
            f"a {kernel.shape[0]}x{kernel.shape[1]} kernel does not fit a {x.shape[1]}x{x.shape[2]} image padded by "
            f"{padding}: use larger images or a smaller model"
        )
    return _convolve(form, padding, x, kernel)
