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
    "rows that are left out": lambda x, bias: nn.max_pool(x + x[:1, :, :1], (1, 2), strides=(2, 2)) + bias,
    "holes": lambda x, bias: lax.reduce_window(
        nn.relu(x + bias), -jnp.inf, lax.max, (1, 1, 1, 1), (1, 1, 1, 1), "VALID", base_dilation=(1, 2, 2, 1)
    ),
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


# Random networks

EXACT = {"int32", "int8"}
TYPES = ("float32", "bfloat16", "float16", "int32", "int8", "complex64")


def random_layer(rng, dtype, channels, sides):
    """A layer x [B, *sides, channels] -> [B, ..., channels'], its parameters' shape or None, and channels'."""
    number = len(sides)

    def of_each(*choices):
        return tuple(int(rng.choice(choices)) for _ in range(number))

    kind = rng.choice(["convolution", "max", "sum"])
    if kind == "max" and dtype == "complex64":
        kind = "sum"
    window = tuple(min(one, side) for one, side in zip(of_each(1, 2, 3), sides, strict=True))
    strides = window if rng.random() < 0.6 else of_each(1, 2)
    padding = str(rng.choice(["SAME", "VALID"]))
    if kind != "convolution":
        start = {"sum": 0, "max": -jnp.inf if "float" in dtype else jnp.iinfo(dtype).min if dtype in EXACT else 0}[kind]
        operation = {"sum": lax.add, "max": lax.max}[kind]

        def pool(x, _):
            return lax.reduce_window(
                x, np.asarray(start, jnp.dtype(dtype)), operation, (1, *window, 1), (1, *strides, 1), padding
            )

        return pool, None, channels
    groups = int(rng.choice([one for one in (1, channels) if channels % one == 0]))
    outputs = groups * int(rng.integers(1, 4))
    dilation = of_each(1, 1, 2) if padding == "SAME" else (1,) * number
    if rng.random() < 0.3:
        padding = tuple((int(rng.integers(0, 3)), int(rng.integers(-1, 3))) for _ in range(number))
        window = (1,) * number if min(sides) < 4 else window
    letters = "HW"[-number:]
    layout = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    strides, base = of_each(1, 1, 2, 3), of_each(1) if isinstance(padding, str) else of_each(1, 1, 1, 2)

    def convolve(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, strides, padding, base, dilation, dimension_numbers=layout, feature_group_count=groups
        )

    return convolve, (*window, channels // groups, outputs), outputs


def random_network(seed):
    """Function of x and a list of parameters, with random operations, and its arguments as float64 or whole numbers."""
    rng = np.random.default_rng(seed)
    dtype, number = TYPES[seed % len(TYPES)], int(rng.integers(1, 3))
    sides, channels = tuple(int(rng.integers(4, 9)) for _ in range(number)), int(rng.integers(1, 4))

    def numbers(shape):
        found = rng.integers(-3, 4, shape).astype(np.float64) if dtype in EXACT else rng.normal(size=shape)
        return found + 1j * rng.normal(size=shape) if dtype == "complex64" else found

    x, layers, kernels = numbers((2, *sides, channels)), [], []
    shape = jax.ShapeDtypeStruct(x.shape, dtype)
    for _ in range(int(rng.integers(1, 4))):
        layer, kernel, channels = random_layer(rng, dtype, channels, shape.shape[1:-1])
        kernel = jax.ShapeDtypeStruct(kernel or (), dtype)
        found = jax.eval_shape(layer, shape, kernel)
        if 0 in found.shape or max(found.shape) > 40:
            break
        shape = found
        layers.append((layer, rng.choice(["plain", "jit", "checkpoint", "cond", "scan"])))
        kernels.append(numbers(kernel.shape) / (1 if dtype in EXACT else 2))

    def network(x, kernels):
        for (layer, around), kernel in zip(layers, kernels, strict=True):
            if around == "jit":
                x = jax.jit(layer)(x, kernel)
            elif around == "checkpoint":
                x = jax.checkpoint(layer)(x, kernel)
            elif around == "cond":
                x = lax.cond(
                    jnp.sum(jnp.abs(kernel)) >= 0, layer, lambda x, kernel, do=layer: 2 * do(x, kernel), x, kernel
                )
            elif around == "scan":
                x = lax.scan(lambda x, kernel, do=layer: (x, do(x, kernel)), x, kernel[None])[1][0]
            else:
                x = layer(x, kernel)
        return x

    return network, dtype, x, kernels


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_random_networks_of_all_kinds_of_numbers(seed):
    network, dtype, *given = random_network(seed)
    exact = dtype in EXACT

    def everything(function):
        def scalar(x, kernels):
            return jnp.sum(jnp.abs(function(x, kernels)) ** 2)

        clients = jax.vmap(function, in_axes=(0, None))
        return jax.jit(
            lambda x, kernels: (
                function(x, kernels),
                clients(jnp.stack([x, -x]), kernels),
                () if exact else jax.grad(scalar, (0, 1), holomorphic=False)(x, kernels),
            )
        )

    typed = jax.tree.map(lambda one: jnp.asarray(one, dtype), given)
    got, plain = (jax.tree.leaves(everything(one)(*typed)) for one in (fast(network), network))
    assert [(one.shape, one.dtype) for one in got] == [(one.shape, one.dtype) for one in plain]
    if exact:
        for one, wanted in zip(got, plain, strict=True):
            np.testing.assert_array_equal(one, wanted)
        return
    # Beside the truth, no worse than JAX's own operations: of few digits, they differ from each other.
    wide = {"complex64": "complex64"}.get(dtype, "float32")
    rounded = jax.tree.map(lambda one: one.astype(wide), typed)
    truth = jax.tree.leaves(everything(network)(*rounded)) if dtype != wide else plain
    for one, other, true in zip(got, plain, truth, strict=True):
        scale = float(jnp.max(jnp.abs(true), initial=0)) + 1e-30
        error, usual = (float(jnp.max(jnp.abs(found.astype(wide) - true), initial=0)) / scale for found in (one, other))
        assert error <= max(2 * usual, {"bfloat16": 0.03, "float16": 0.004}.get(dtype, 3e-5)), (dtype, error, usual)
