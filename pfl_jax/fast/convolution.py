"""Convolution that is fast even if every client has its own kernel.

`jax.lax.conv_general_dilated` is slow in federated simulation: XLA's CPU backend uses a slow path for its gradients
inside loops, because they are convolutions with unusual dimension orders, and vmap over clients turns all of them into
grouped convolutions. Here a convolution C and its adjoints, D with respect to the image and K with respect to the
kernel, are three bilinear maps,

    <g, C(x, w)> = <D(g, w), x> = <K(x, g), w>,

so the derivatives of each map are the other two, forward and reverse, of any order. Each map is its own JAX primitive,
computed by one of several implementations, its `Form`.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pfl_jax.backends import BACKENDS
from pfl_jax.errors import InvalidInput
from pfl_jax.fast.forms import FORMS, Padding

# The operands of the maps have a leading axis of clients: of size G, or 1 if it is shared by all clients.


def _by_client(name: str, form: str, padding: Padding, precision: str | None, a: jax.Array, b: jax.Array) -> jax.Array:
    """A map for all clients: [G, ...] from operands [G, ...] or [1, ...]."""
    fn = functools.partial(getattr(FORMS[form], name), padding)
    with contextlib.nullcontext() if precision is None else jax.default_matmul_precision(precision):
        if len(a) == len(b) == 1:
            return fn(a[0], b[0])[None]
        if form != "direct":
            axes = [0 if len(operand) > 1 else None for operand in (a, b)]
            a, b = (operand if len(operand) > 1 else operand[0] for operand in (a, b))
            return jax.vmap(fn, axes)(a, b)
        if len(b) == 1 and name != "kernel_gradient":
            # Clients that share a kernel form one larger batch.
            y = fn(a.reshape(-1, *a.shape[2:]), b[0])
            return y.reshape(len(a), -1, *y.shape[1:])
        # A loop is the fastest way with one kernel per client.
        number = max(len(a), len(b))
        return jax.lax.map(lambda i: fn(a[i if len(a) > 1 else 0], b[i if len(b) > 1 else 0]), jnp.arange(number))


def _operation(name: str, shape: Callable[[Padding, Any, Any], tuple[int, ...]]) -> Primitive:
    """One of a Form's maps; shape: (padding, shapes of both operands without clients) -> shape of the result."""
    operation = Primitive(f"pfl_jax_{name}")

    @functools.cache
    def compiled(**parameters):
        return jax.jit(functools.partial(operation.bind, **parameters))

    def result(a, b, *, padding, **_):
        return a.update(shape=(max(a.shape[0], b.shape[0]), *shape(padding, a.shape[1:], b.shape[1:])))

    def lowered(platform):
        def fn(a, b, *, padding, form, precision):
            return _by_client(
                name, BACKENDS[platform].convolution if form == "auto" else form, padding, precision, a, b
            )

        return mlir.lower_fun(fn, multiple_results=False)

    def batched(operands, axes, **parameters):
        size = next(a.shape[axis] for a, axis in zip(operands, axes, strict=True) if axis is not None)
        operands = [a if axis is None else jnp.moveaxis(a, axis, 0) for a, axis in zip(operands, axes, strict=True)]
        inner = max(a.shape[0 if axis is None else 1] for a, axis in zip(operands, axes, strict=True))

        def merged(a, axis):
            if axis is None and len(a) == 1:
                return a
            own = a.shape[0 if axis is None else 1 :][1:]
            return jnp.broadcast_to(a, (size, inner, *own)).reshape(size * inner, *own)

        y = operation.bind(*map(merged, operands, axes), **parameters)
        return y.reshape(size, inner, *y.shape[1:]), 0

    operation.def_impl(lambda a, b, **parameters: compiled(**parameters)(a, b))
    operation.def_abstract_eval(result)
    batching.primitive_batchers[operation] = batched
    mlir.register_lowering(operation, lowered("default"))
    mlir.register_lowering(operation, lowered("cpu"), platform="cpu")
    return operation


def _convolved(padding, x, kernel):
    sides = (x[axis] + sum(padding[axis - 1]) - kernel[axis - 1] + 1 for axis in (1, 2))
    return x[0], *sides, kernel[3]


def _image(padding, g, kernel):
    sides = (g[axis] - sum(padding[axis - 1]) + kernel[axis - 1] - 1 for axis in (1, 2))
    return g[0], *sides, kernel[2]


def _kernel(padding, x, g):
    return *(x[axis] + sum(padding[axis - 1]) - g[axis] + 1 for axis in (1, 2)), x[3], g[3]


CONVOLVE = _operation("convolve", _convolved)
INPUT_GRADIENT = _operation("input_gradient", _image)
KERNEL_GRADIENT = _operation("kernel_gradient", _kernel)


def _define_gradients(operation: Primitive, first: Callable[..., Any], second: Callable[..., Any]) -> None:
    """Define the adjoints of a map of a and b: first(t, b) with respect to a, second(t, a) with respect to b."""

    def for_all(gradient, operand):
        # The gradient of an operand shared by all clients is the sum of the clients' gradients.
        return jnp.sum(gradient, 0, keepdims=True) if operand.aval.shape[0] < len(gradient) else gradient

    def of_first(t, a, b, **parameters):
        return for_all(first(t, b, **parameters), a)

    def of_second(t, a, b, **parameters):
        return for_all(second(t, a, **parameters), b)

    ad.defbilinear(operation, of_first, of_second)


_define_gradients(CONVOLVE, INPUT_GRADIENT.bind, lambda t, x, **parameters: KERNEL_GRADIENT.bind(x, t, **parameters))
_define_gradients(INPUT_GRADIENT, CONVOLVE.bind, lambda t, g, **parameters: KERNEL_GRADIENT.bind(t, g, **parameters))
_define_gradients(
    KERNEL_GRADIENT,
    lambda t, g, **parameters: INPUT_GRADIENT.bind(g, t, **parameters),
    lambda t, x, **parameters: CONVOLVE.bind(x, t, **parameters),
)


def conv2d(
    x: jax.Array,
    kernel: jax.Array,
    padding: int | Padding = 0,
    *,
    form: str = "auto",
    precision: str | None = None,
) -> jax.Array:
    """Two-dimensional convolution with stride 1.

        y[b, i, j, o] = sum_{u, v, c} x[b, i + u - padding, j + v - padding, c] kernel[u, v, c, o]

    Derivatives of any order, forward and reverse, equal those of `jax.lax.conv_general_dilated` up to rounding. Only
    derivatives that are used are computed; the first layer's derivative with respect to the image is not.

    Args:
      x: images [B, H, W, Cin], padded with zeros.
      kernel: [kh, kw, Cin, Cout].
      padding: rows and columns of zeros added on each side, or ((above, below), (left, right)).
      form: implementation. "direct": convolutions arranged for XLA's CPU backend, one client after another under
        vmap. "matmul": one matrix product over all windows, batched under vmap. "lax": JAX's own convolution, grouped
        under vmap. "auto": the choice of `pfl_jax.backends`, "direct" on CPUs and "matmul" elsewhere.
      precision: precision of the products, as in `jax.default_matmul_precision`; None for JAX's default.

    Returns:
      [B, H + 2 padding - kh + 1, W + 2 padding - kw + 1, Cout].

    Raises:
      InvalidInput: if the kernel is larger than the padded image, or the form is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.fast import convolution
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
    if isinstance(padding, int):
        padding = ((padding, padding), (padding, padding))
    room = [size + sum(sides) for size, sides in zip(x.shape[1:3], padding, strict=True)]
    if any(size < window for size, window in zip(room, kernel.shape[:2], strict=True)):
        raise InvalidInput(
            f"a {kernel.shape[0]}x{kernel.shape[1]} kernel does not fit an image that is padded to "
            f"{room[0]}x{room[1]}: use larger images or a smaller model"
        )
    return CONVOLVE.bind(x[None], kernel[None], padding=padding, form=form, precision=precision)[0]
