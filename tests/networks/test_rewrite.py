"""Models' convolutions and pooling of any kind, computed another way: the same values and derivatives, nothing else."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pfl_jax import Model
from pfl_jax.fast import order
from pfl_jax.fast.rewrite import fast

LAST = ("NHWC", "HWIO", "NHWC")


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def operations(function, *args):
    """Names of all operations of a function, those inside of others too."""
    return set(re.findall(r" = ([a-z_0-9]+)[\[ ]", str(jax.make_jaxpr(function)(*args))))


def with_derivatives(function, args):
    """Values of a function, gradients of a scalar of them in reverse mode, and its change in forward mode."""

    def scalar(*args):
        return jnp.sum(jnp.sin(function(*args)))

    def everything(*args):
        changes = jax.jvp(function, args, tuple(jnp.cos(arg) for arg in args))[1]
        return function(*args), jax.grad(scalar, argnums=tuple(range(len(args))))(*args), changes

    return jax.jit(everything)(*args)


def assert_same(function, *args, gone=("conv_general_dilated", "reduce_window_max", "reduce_window_sum")):
    for got, wanted in zip(
        *(jax.tree.leaves(with_derivatives(f, args)) for f in (fast(function), function)), strict=True
    ):
        np.testing.assert_allclose(got, wanted, atol=3e-6 * float(jnp.max(jnp.abs(wanted))), rtol=1e-5)
    assert operations(function, *args) & {*gone}
    assert not operations(fast(function), *args) & {*gone}


# (strides, padding, dilation, groups, sides of the kernel)
CONVOLUTIONS = [
    ((1, 1), "SAME", (1, 1), 1, (3, 3)),
    ((1, 1), ((2, 1), (0, 3)), (1, 1), 1, (2, 5)),
    ((1, 1), ((-1, 2), (1, -2)), (1, 1), 1, (3, 3)),
    ((2, 2), "SAME", (1, 1), 1, (3, 3)),
    ((2, 2), ((1, 1), (1, 1)), (1, 1), 1, (3, 3)),
    ((2, 2), "VALID", (1, 1), 1, (1, 1)),
    ((3, 2), "VALID", (1, 1), 1, (2, 5)),
    ((1, 2), "SAME", (1, 1), 1, (7, 7)),
    ((1, 1), "SAME", (2, 2), 1, (3, 3)),
    ((1, 1), "VALID", (2, 3), 1, (2, 3)),
    ((2, 2), "SAME", (2, 1), 1, (3, 3)),
    ((1, 1), "SAME", (1, 1), 4, (3, 3)),
    ((2, 2), "SAME", (2, 1), 4, (3, 2)),
    ((2, 2), "SAME", (1, 1), 2, (3, 3)),
]


@pytest.mark.parametrize(("strides", "padding", "dilation", "groups", "sides"), CONVOLUTIONS, ids=str)
def test_convolutions(strides, padding, dilation, groups, sides):
    def convolve(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, strides, padding, rhs_dilation=dilation, feature_group_count=groups, dimension_numbers=LAST
        )

    assert_same(convolve, drawn(2, 9, 10, 4), drawn(*sides, 4 // groups, 8))


@pytest.mark.parametrize(
    ("layout", "shape", "kernel"),
    [
        (("NCHW", "OIHW", "NCHW"), (2, 4, 9, 10), (6, 4, 3, 2)),
        (("CHWN", "HWIO", "NCHW"), (4, 9, 10, 2), (3, 2, 4, 6)),
        (("NWC", "WIO", "NWC"), (2, 10, 4), (3, 4, 6)),
        (("NCW", "OIW", "NWC"), (2, 4, 10), (6, 4, 3)),
    ],
)
def test_layouts_and_one_dimension(layout, shape, kernel):
    strides = (2,) * (len(shape) - 2)
    assert_same(
        lambda x, kernel: lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=layout),
        drawn(*shape),
        drawn(*kernel),
    )


@pytest.mark.parametrize("window", [(1, 2, 2, 1), (1, 2, 3, 1), (1, 1, 3, 3), (1, 1, 1, 1)])
def test_pooling(window):
    x = drawn(2, 7, 8, 3)
    assert_same(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID"), x)
    assert_same(lambda x: lax.reduce_window(x, 0.0, lax.add, window, window, "VALID"), x)


def convolved(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=LAST)


def pooled(x, window=2, padding="VALID"):
    return nn.max_pool(x, (window, window), strides=(window, window), padding=padding)


def sizes_of(name, function, *args):
    """Numbers of elements that an operation gives, each time it is called."""
    shapes = re.findall(rf":\w+\[([\d,]+)\] = {name}[\[ ]", str(jax.make_jaxpr(function)(*args)))
    return [int(np.prod([int(side) for side in shape.split(",")])) for shape in shapes]


@pytest.mark.parametrize("activation", [lambda x: x, *order.ACTIVATIONS])
def test_pooling_comes_before_bias_and_activation(activation):
    """To the last bit; additions see a quarter of the elements."""

    def network(x, kernel, bias):
        return pooled(activation(convolved(x, kernel) + bias))

    args = drawn(2, 6, 8, 3), drawn(3, 3, 3, 5), drawn(5)
    assert_same(network, *args, gone=("conv_general_dilated", "reduce_window_max"))
    np.testing.assert_array_equal(
        pooled(activation(args[0] + args[2][:3])), fast(lambda x, b: pooled(activation(x + b)))(args[0], args[2][:3])
    )
    assert sizes_of("add", network, *args) == [2 * 6 * 8 * 5]
    assert 2 * 6 * 8 * 5 not in sizes_of("add", fast(network), *args)


STAY = {
    "a function that may decrease": lambda x, bias: pooled(nn.gelu(x + bias)),
    "a slope of one's own": lambda x, bias: pooled(nn.leaky_relu(x + bias, -0.5)),
    "a product": lambda x, bias: pooled(x * bias),
    "a sum with what differs in a window": lambda x, bias: pooled(x + x[:, ::-1] + bias) + 0 * pooled(x + x[:, ::-1]),
    "a result that others read": lambda x, bias: (lambda y: pooled(y) + y.mean())(x + bias),
    "a result of the program": lambda x, bias: (lambda y: (pooled(y), y))(x + bias),
    "padding": lambda x, bias: pooled(nn.relu(x + bias), 3, "SAME"),
}


@pytest.mark.parametrize("what", STAY)
def test_operations_before_a_pooling_that_stay_there(what):
    args = drawn(2, 6, 8, 5), drawn(5)
    before, after = (
        {size for name in ("add", "mul") for size in sizes_of(name, f, *args)} for f in (STAY[what], fast(STAY[what]))
    )
    assert 2 * 6 * 8 * 5 in before & after
    for got, wanted in zip(*(jax.tree.leaves(f(*args)) for f in (fast(STAY[what]), STAY[what])), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_what_is_not_faster_stays():
    x, kernel = drawn(2, 7, 8, 3), drawn(3, 3, 3, 4)

    def same(function, *args):
        assert operations(fast(function), *args) == operations(function, *args)
        np.testing.assert_array_equal(fast(function)(*args), function(*args))

    window = (1, 2, 2, 1)
    same(lambda x: nn.max_pool(x, (3, 3), (2, 2), "SAME"), x)
    # Windows of seven rows that are padded or dilated are not those of six.
    same(lambda x: nn.max_pool(x, (2, 2), (2, 2), "SAME"), x)
    same(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID", None, window), x)
    same(lambda x, kernel: lax.conv(x, kernel, (1, 1), "SAME", ("highest", "default")), drawn(1, 3, 4, 4), kernel)
    same(lambda x: lax.reduce_window(x, 0, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), x.astype(jnp.int32))
    same(lambda x, kernel: lax.conv_transpose(x, kernel, (2, 2), "SAME"), x, kernel)
    same(lambda x, kernel: lax.conv(x, kernel, (1, 1, 1), "SAME"), drawn(1, 2, 4, 4, 4), drawn(3, 2, 2, 2, 2))


def conv(x, kernel):
    return lax.conv(x, kernel, (1, 1), "SAME")


def test_programs_inside_of_others():
    x, kernel = drawn(2, 3, 6, 5), 0.2 * drawn(3, 3, 2, 3)

    def several(x, kernel):
        x = jax.jit(conv)(x, kernel)
        x = jax.checkpoint(conv)(x, kernel)
        x = lax.scan(lambda x, _: (jnp.tanh(conv(x, kernel)), None), x, length=2)[0]
        return lax.cond(jnp.sum(x) > 0, lambda: conv(x, kernel), lambda: 2 * conv(x, -kernel))

    assert_same(several, x, kernel)
    assert {"remat2", "scan", "cond"} <= operations(fast(several), x, kernel)
    # Without a derivative of reverse mode.
    loop = fast(lambda x, kernel: lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: 1 + conv(x, kernel), x))
    np.testing.assert_allclose(loop(x, kernel), loop.function(x, kernel), rtol=1e-5)
    assert "conv_general_dilated" not in operations(loop, x, kernel)


def test_functions_with_derivatives_of_their_own_keep_them():
    @jax.custom_jvp
    def forward(x, kernel):
        return conv(x, kernel)

    @jax.custom_vjp
    def backward(x, kernel):
        return conv(x, kernel)

    forward.defjvp(lambda primals, tangents: (forward(*primals), 7 * forward(tangents[0], primals[1])))
    backward.defvjp(lambda x, kernel: (backward(x, kernel), kernel), lambda kernel, g: (5 * g, kernel))
    x, kernel = drawn(2, 3, 6, 5), drawn(3, 3, 2, 3)

    def both(x, kernel):
        return forward(x, kernel), backward(x, kernel)

    _, pull = jax.vjp(fast(both), x, kernel)
    _, wanted = jax.vjp(both, x, kernel)
    for cotangents in ((x, 0 * x), (0 * x, x)):
        for got, one in zip(pull(cotangents), wanted(cotangents), strict=True):
            np.testing.assert_allclose(got, one, rtol=1e-5, atol=1e-5)


def test_the_precision_that_is_asked_for_is_used():
    x, kernel = drawn(2, 3, 6, 5), drawn(3, 3, 2, 3)

    def highest(x, kernel):
        return lax.conv(x, kernel, (1, 1), "SAME", precision="highest")

    assert "HIGHEST" in jax.jit(fast(highest)).lower(x, kernel).as_text()
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in jax.jit(fast(conv)).lower(x, kernel).as_text()
    assert "HIGHEST" not in jax.jit(fast(conv)).lower(x, kernel).as_text()


def plain_model():
    def init(key):
        keys = jax.random.split(key, 3)
        shapes = ((3, 3, 1, 4), (3, 3, 4, 8), (32, 3))
        first, second, head = (0.1 * jax.random.normal(*one) for one in zip(keys, shapes, strict=True))
        return {"backbone": (first, second), "head": head}

    def features(backbone, x):
        x = jax.nn.relu(lax.conv_general_dilated(x, backbone[0], (2, 2), "SAME", dimension_numbers=LAST))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jax.nn.relu(lax.conv_general_dilated(x, backbone[1], (1, 1), "VALID", dimension_numbers=LAST))
        return x.reshape(len(x), -1)

    return Model(init, features, lambda head, features: features @ head, 32, 3)


def test_under_vmap_on_a_gpu_no_model_has_convolutions_with_groups():
    model = plain_model()
    params = jax.vmap(model.init)(jax.random.split(jax.random.key(0), 5))
    x = jnp.ones((5, 2, 16, 16, 1))

    def gradient(model):
        loss = jax.grad(lambda params, x: jnp.sum(model.apply(params, x) ** 2))
        traced = jax.jit(jax.vmap(loss)).trace(params, x)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert "stablehlo.convolution" not in gradient(model)
    # A model made of another one too.
    assert "stablehlo.convolution" not in gradient(model._replace(features=model.features.function))
    assert model._replace(num_classes=4).features is model.features


@pytest.mark.parametrize("dtype", ["int32", "int8", "bfloat16", "float16", "complex64"])
def test_numbers_of_other_kinds(dtype):
    """Small whole numbers, which every kind holds exactly, in batches under vmap."""
    draw, window, is_float = np.random.default_rng(0), (1, 2, 2, 1), dtype in ("bfloat16", "float16")

    def numbers(*shape):
        found = draw.integers(-1, 2, shape)
        return jnp.asarray(found + 1j * draw.integers(-1, 2, shape) if dtype == "complex64" else found, dtype)

    def summed(x, kernel):
        x = lax.conv_general_dilated(x, kernel, (2, 1), "SAME", dimension_numbers=LAST)
        return lax.reduce_window(x, np.asarray(0, x.dtype), lax.add, window, window, "VALID")

    def largest(x, kernel):
        least = np.asarray(-np.inf if is_float else jnp.iinfo(dtype).min, jnp.dtype(dtype))
        return lax.reduce_window(summed(x, kernel), least, lax.max, window, window, "VALID")

    def everything(wrap):
        # Of equal entries, which one is the largest is not compared.
        clients = jax.vmap(wrap(summed if dtype == "complex64" else largest), (0, None))
        slopes = jax.grad(lambda x, kernel: jnp.sum(jax.vmap(wrap(summed), (0, None))(x, kernel)), (0, 1))
        return jax.jit(lambda *args: (clients(*args), slopes(*args) if is_float else ()))(*given)

    given = numbers(3, 2, 9, 10, 2), numbers(3, 3, 2, 4)
    for got, wanted in zip(*(jax.tree.leaves(everything(wrap)) for wrap in (fast, lambda f: f)), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
