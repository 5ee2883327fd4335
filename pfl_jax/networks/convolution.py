"""Convolution that stays fast when every client has its own kernel.

`jax.lax.conv_general_dilated` is slow exactly where federated simulation needs it: XLA's CPU backend runs its
gradients, which are convolutions with unusual dimension orders, on a slow path inside loops, and vmap over clients
turns all of them into grouped convolutions. Here a convolution C and its adjoints, D in the picture and K in the
kernel, are three bilinear maps,

    <g, C(x, w)> = <D(g, w), x> = <K(x, g), w>,

so that the derivatives of each are the other two, to any order of reverse mode. A `Form` is one way to compute them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp

from pfl_jax.errors import InvalidInput

Bilinear: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""One of the three maps."""

_LAYOUT = ("NHWC", "HWIO", "NHWC")

# XLA's CPU convolution reaches the speed of its matrix product only from this many channels of input on (a vector
# register holds 16 floats), and from twice as many channels of output on.
_CHANNELS = 16


class Form(NamedTuple):
    """Implementation of a convolution of stride one and its adjoints.

    Attributes:
      convolve: (padding, x [B, H, W, Cin], kernel [kh, kw, Cin, Cout]) -> y [B, H', W', Cout], the map C.
      picture_gradient: (padding, g like y, kernel) -> like x, the map D.
      kernel_gradient: (padding, x, g like y) -> like kernel, the map K.
    """

    convolve: Callable[[int, jax.Array, jax.Array], jax.Array]
    picture_gradient: Callable[[int, jax.Array, jax.Array], jax.Array]
    kernel_gradient: Callable[[int, jax.Array, jax.Array], jax.Array]


def _correlate(x: jax.Array, kernel: jax.Array, rows: int = 0, columns: int = 0) -> jax.Array:
    """Plain convolution, x padded by this many rows and columns on each side (cropped where negative)."""
    sides = ((rows, rows), (columns, columns))
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), sides, dimension_numbers=_LAYOUT)


# --- as JAX does it


def _lax_convolve(padding: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _correlate(x, kernel, padding, padding)


def _lax_picture_gradient(padding: int, g: jax.Array, kernel: jax.Array) -> jax.Array:
    height, width = kernel.shape[:2]
    turned = jnp.flip(kernel, (0, 1)).transpose(0, 1, 3, 2)
    return _correlate(g, turned, height - 1 - padding, width - 1 - padding)


def _lax_kernel_gradient(padding: int, x: jax.Array, g: jax.Array) -> jax.Array:
    """K as a convolution whose batch are the input channels and whose channels are the batch."""
    sides = ((padding, padding), (padding, padding))
    return jax.lax.conv_general_dilated(x, g, (1, 1), sides, dimension_numbers=("CHWN", "IHWO", "HWNC"))


# --- one matrix product over all windows


def _windows(padding: int, x: jax.Array, height: int, width: int) -> jax.Array:
    """All height x width windows of x [B, H, W, C] as [B, H', W', height * width * C]."""
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    rows, columns = x.shape[1] - height + 1, x.shape[2] - width + 1
    shifted = [x[:, i : i + rows, j : j + columns] for i in range(height) for j in range(width)]
    return jnp.concatenate(shifted, axis=-1)


def _matmul_convolve(padding: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _windows(padding, x, *kernel.shape[:2]) @ kernel.reshape(-1, kernel.shape[3])


def _matmul_picture_gradient(padding: int, g: jax.Array, kernel: jax.Array) -> jax.Array:
    height, width, channels, features = kernel.shape
    parts = (g @ kernel.reshape(-1, features).T).reshape(*g.shape[:3], height, width, channels)
    rows = [_overlap([parts[:, :, :, i, j] for j in range(width)], 2, padding) for i in range(height)]
    return _overlap(rows, 1, padding)


def _matmul_kernel_gradient(padding: int, x: jax.Array, g: jax.Array) -> jax.Array:
    height, width = (x.shape[axis] + 2 * padding - g.shape[axis] + 1 for axis in (1, 2))
    windows = _windows(padding, x, height, width)
    return jnp.einsum("bijk,bijo->ko", windows, g).reshape(height, width, x.shape[3], g.shape[3])


def _overlap(parts: Sequence[jax.Array], axis: int, padding: int) -> jax.Array:
    """Sum of parts [B, H, W, C], each shifted by one more along an axis, without the padded ends."""
    zero = jnp.zeros((), parts[0].dtype)

    def shifted(place, part):
        sides = [(0, 0, 0)] * 4
        sides[axis] = (place - padding, len(parts) - 1 - place - padding, 0)
        return jax.lax.pad(part, zero, sides)

    return functools.reduce(jnp.add, (shifted(place, part) for place, part in enumerate(parts)))


# --- convolutions that XLA's CPU backend runs at the speed of matrix products


def _direct_convolve(padding: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    if kernel.shape[2] < _CHANNELS:
        return _convolve_in_pairs(padding, x, kernel)
    return _correlate(x, kernel, padding, padding)


def _convolve_in_pairs(padding: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolution of neighboring columns packed as one column with twice the channels.

    That is a reshape of the picture, and a kernel [kh, (kw + 1) / 2, 2 Cin, 2 Cout] that holds the old one twice, one
    column apart. It costs 1 + 1 / kw times the operations and runs up to four times as fast on few channels.
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


def _direct_picture_gradient(padding: int, g: jax.Array, kernel: jax.Array) -> jax.Array:
    """D as the convolution of g with the kernel rotated by 180 degrees.

    Where the picture is wider than g, part of that is products with zeros, and few channels make it slow: there the
    convolution runs down the columns only, for every column of the kernel at once, and its results are added up
    across.
    """
    height, width, channels, features = kernel.shape
    turned = jnp.flip(kernel, 0).transpose(0, 3, 1, 2)
    rows, columns = height - 1 - padding, width - 1 - padding
    picture_width = g.shape[2] + width - 1 - 2 * padding
    if channels >= 2 * _CHANNELS and picture_width <= g.shape[2]:
        return _correlate(g, jnp.flip(turned, 2).transpose(0, 2, 1, 3), rows, columns)
    parts = _correlate(g, turned.reshape(height, 1, features, width * channels), rows)
    parts = parts.reshape(*parts.shape[:3], width, channels)
    return _overlap([parts[:, :, :, j] for j in range(width)], 2, padding)


def _direct_kernel_gradient(padding: int, x: jax.Array, g: jax.Array) -> jax.Array:
    """K as a convolution whose batch are the input channels and whose channels are the batch."""
    # Without the barriers XLA folds the transpositions into the convolution, and that is its slow path.
    x, g = jax.lax.optimization_barrier((x.transpose(3, 1, 2, 0), g.transpose(1, 2, 0, 3)))
    return _correlate(x, g, padding, padding).transpose(1, 2, 0, 3)


FORMS: dict[str, Form] = {
    "direct": Form(_direct_convolve, _direct_picture_gradient, _direct_kernel_gradient),
    "matmul": Form(_matmul_convolve, _matmul_picture_gradient, _matmul_kernel_gradient),
    "lax": Form(_lax_convolve, _lax_picture_gradient, _lax_kernel_gradient),
}
"""The forms of `conv2d` by name."""

# "direct" as measured on the CPU (docs/performance.md). The default is for accelerators, where vmap would make the
# others grouped convolutions; it has not been measured there.
_AUTO = {"cpu": "direct", "default": "matmul"}


def _one_by_one(fn: Bilinear, *, keeps_batch: bool) -> Bilinear:
    """Map fn in a loop under vmap: with one kernel per client every other way is slow.

    Args:
      fn: one of a Form's maps.
      keeps_batch: whether the leading axis of its first argument is its result's: with one kernel for all, the clients
        are then one larger batch.
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
    """One of a Form's maps; "auto" is resolved for the platform when the program is lowered."""

    def of(form: str) -> Bilinear:
        fn = functools.partial(getattr(FORMS[form], name), padding)
        return _one_by_one(fn, keeps_batch=name != "kernel_gradient") if form == "direct" else fn

    if form != "auto":
        return of(form)(a, b)
    return jax.lax.platform_dependent(a, b, **{platform: of(form) for platform, form in _AUTO.items()})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _convolve(form: str, padding: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _compute(form, "convolve", padding, x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _picture_gradient(form: str, padding: int, g: jax.Array, kernel: jax.Array) -> jax.Array:
    return _compute(form, "picture_gradient", padding, g, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kernel_gradient(form: str, padding: int, x: jax.Array, g: jax.Array) -> jax.Array:
    return _compute(form, "kernel_gradient", padding, x, g)


def _define_gradients(fn, first, second) -> None:
    """Define the adjoints of a bilinear map fn(a, b): first(t, a, b) in a and second(t, a, b) in b."""

    def forward(form, padding, a, b):
        return fn(form, padding, a, b), (a, b)

    def backward(form, padding, operands, t):
        return first(form, padding, t, *operands), second(form, padding, t, *operands)

    fn.defvjp(forward, backward)


_define_gradients(
    _convolve,
    lambda form, padding, t, x, kernel: _picture_gradient(form, padding, t, kernel),
    lambda form, padding, t, x, kernel: _kernel_gradient(form, padding, x, t),
)
_define_gradients(
    _picture_gradient,
    lambda form, padding, t, g, kernel: _convolve(form, padding, t, kernel),
    lambda form, padding, t, g, kernel: _kernel_gradient(form, padding, t, g),
)
_define_gradients(
    _kernel_gradient,
    lambda form, padding, t, x, g: _picture_gradient(form, padding, g, t),
    lambda form, padding, t, x, g: _convolve(form, padding, x, t),
)


def conv2d(x: jax.Array, kernel: jax.Array, padding: int = 0, *, form: str = "auto") -> jax.Array:
    """Two-dimensional convolution of stride one.

        y[b, i, j, o] = sum_{u, v, c} x[b, i + u - padding, j + v - padding, c] kernel[u, v, c, o]

    Gradients of any order are those of `jax.lax.conv_general_dilated` up to rounding, in reverse mode; forward mode
    (jax.jvp) is not supported. A gradient that nobody uses, such as a first layer's in its picture, is not computed
    under jit.

    Args:
      x: pictures [B, H, W, Cin]; outside them they are zero.
      kernel: [kh, kw, Cin, Cout].
      padding: rows and columns of zeros added on each side.
      form: how it is computed. "direct": ordinary convolutions arranged for XLA's CPU backend, one client after
        another under vmap. "matmul": one matrix product over all windows, a batched one under vmap. "lax": as JAX
        does it, a grouped convolution under vmap. "auto": the fastest measured on the platform it runs on.

    Returns:
      [B, H + 2 padding - kh + 1, W + 2 padding - kw + 1, Cout].

    Raises:
      InvalidInput: if the kernel is larger than the padded picture, or the form is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.networks import convolution
      >>> kernel = jnp.array([[1.0, 1.0], [1.0, 1.0]])[:, :, None, None]
      >>> picture = jnp.arange(9.0).reshape(1, 3, 3, 1)
      >>> print(convolution.conv2d(picture, kernel)[0, :, :, 0])
      [[ 8. 12.]
       [20. 24.]]
    """
    chex.assert_rank([x, kernel], 4)
    chex.assert_equal(x.shape[3], kernel.shape[2])
    if form != "auto" and form not in FORMS:
        raise InvalidInput(f"there is no convolution form {form!r}: choose auto, {', '.join(FORMS)}")
    if any(size + 2 * padding < window for size, window in zip(x.shape[1:3], kernel.shape[:2], strict=True)):
        raise InvalidInput(
            f"a {kernel.shape[0]}x{kernel.shape[1]} kernel does not fit a {x.shape[1]}x{x.shape[2]} picture padded by "
            f"{padding}: use larger pictures or a smaller model"
        )
    return _convolve(form, padding, x, kernel)
