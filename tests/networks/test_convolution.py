"""Convolution against float64 NumPy, its gradients against those of lax.conv_general_dilated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import convolve

from pfl_jax.fast import forms
from pfl_jax.fast.convolution import conv2d
from pfl_jax.fast.forms import FORMS
from pfl_jax.fast.pooling import max_pool

# (B, H, W, Cin, kh, kw, Cout, padding): every branch of the direct form, odd and even widths, wide paddings.
SHAPES = [
    (3, 12, 12, 1, 5, 5, 16, 0),
    (2, 9, 8, 3, 5, 5, 4, 1),
    (2, 7, 9, 2, 3, 4, 3, 0),
    (2, 6, 6, 2, 1, 1, 3, 0),
    (2, 8, 8, 16, 5, 5, 8, 1),
    (2, 6, 6, 32, 3, 3, 8, 1),
    (2, 5, 7, 32, 2, 4, 3, 0),
    (1, 4, 5, 32, 3, 2, 2, 4),
    (1, 4, 5, 3, 3, 2, 2, 4),
]


def problem(shape, seed=0, clients=()):
    batch, height, width, channels, kernel_height, kernel_width, features, _ = shape
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(*clients, batch, height, width, channels))
    kernel = rng.normal(size=(*clients, kernel_height, kernel_width, channels, features))
    return jnp.asarray(x, jnp.float32), jnp.asarray(kernel, jnp.float32)


def reference(x, kernel, padding):
    sides = ((padding, padding), (padding, padding))
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), sides, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def assert_close(actual, expected, tolerance=2e-5):
    """Every leaf equal to rounding, relative to its largest element."""

    def check(a, b):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(np.abs(np.asarray(b)).max()))

    jax.tree.map(check, actual, expected)


def scalar(convolve, padding):
    """A loss whose derivatives of every order are non-trivial in x and in the kernel."""
    return lambda x, kernel: jnp.sum(jnp.sin(0.1 * convolve(x, kernel, padding)) ** 2)


@functools.cache
def reference_gradients(shape):
    return jax.jit(jax.grad(scalar(reference, shape[-1]), argnums=(0, 1)))(*problem(shape))


USED = ("direct", "matmul")
"""Forms that some kind of device uses; "lax" is there to be measured beside them."""


@pytest.mark.parametrize(
    ("shape", "form"), [*((shape, form) for shape in SHAPES for form in USED), (SHAPES[0], "auto"), (SHAPES[7], "lax")]
)
def test_convolution_and_gradients(shape, form):
    x, kernel = problem(shape)
    padding = shape[-1]

    def ours(x, kernel, padding):
        return conv2d(x, kernel, padding, form=form)

    assert_close(jax.jit(ours, static_argnums=2)(x, kernel, padding), convolve(x, kernel, padding))
    gradients = jax.jit(jax.grad(scalar(ours, padding), argnums=(0, 1)))(x, kernel)
    assert_close(gradients, reference_gradients(shape))


@pytest.mark.parametrize("bands", [False, True])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[3] < 16], ids=str)
def test_few_channels_in_pairs_and_in_bands(shape, bands, monkeypatch):
    """One of which each version of JAX has."""
    monkeypatch.setattr(forms, "_BANDS", bands)
    x, kernel = problem(shape)
    sides = ((shape[-1],) * 2,) * 2
    assert_close(FORMS["direct"].convolve(sides, x, kernel), reference(x, kernel, shape[-1]))


@pytest.mark.parametrize("form", USED)
def test_gradient_of_gradient(form):
    shape = (2, 8, 8, 3, 3, 3, 4, 1)
    x, kernel = problem(shape)

    def second_order(convolve):
        loss = scalar(convolve, 1)

        def squared_norm(x, kernel):
            return sum(jnp.sum(g**2) for g in jax.grad(loss, argnums=(0, 1))(x, kernel))

        return jax.jit(jax.grad(squared_norm, argnums=(0, 1)))

    actual = second_order(lambda x, kernel, padding: conv2d(x, kernel, padding, form=form))(x, kernel)
    assert_close(actual, second_order(reference)(x, kernel))


@pytest.mark.parametrize("form", USED)
@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_vmap_over_clients(form, axes):
    shape = (2, 8, 8, 16, 5, 5, 4, 1)
    clients = problem(shape, clients=(3,))
    x, kernel = (operand if axis == 0 else operand[0] for operand, axis in zip(clients, axes, strict=True))

    def gradients(convolve):
        one = jax.grad(scalar(convolve, 1), argnums=(0, 1))
        return jax.jit(jax.vmap(one, in_axes=axes))

    actual = gradients(lambda x, kernel, padding: conv2d(x, kernel, padding, form=form))(x, kernel)
    assert_close(actual, gradients(reference)(x, kernel))


@pytest.mark.parametrize("axes", [(0, None), (None, 0)])
def test_gradient_of_a_vmap(axes):
    """Of what all clients share, the sum of their gradients."""
    clients = problem((2, 6, 6, 3, 3, 3, 4, 1), clients=(3,))
    operands = tuple(operand if axis == 0 else operand[0] for operand, axis in zip(clients, axes, strict=True))

    def gradients(convolve):
        total = jax.vmap(scalar(convolve, 1), axes)
        return jax.jit(jax.grad(lambda *operands: jnp.sum(total(*operands)), argnums=(0, 1)))(*operands)

    assert_close(gradients(conv2d), gradients(reference))


def test_first_of_equal_maxima_gets_the_gradient():
    x = jnp.asarray([[0.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]])[None, :, :, None]
    gradient = jax.grad(lambda x: jnp.sum(max_pool(x)))(x)
    np.testing.assert_array_equal(gradient[0, :, :, 0], [[0, 1, 1, 0], [0, 0, 0, 0]])
