"""Each operation of PyTorch's graphs against PyTorch itself: values and gradients, for many shapes and options."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pfl_jax import InvalidInput
from pfl_jax.networks import torch_operations as operations
from pfl_jax.networks.torch_graph import TYPES

torch = pytest.importorskip("torch")


class Draw:
    """What a case is made of: choices of hypothesis, and numbers of a generator."""

    def __init__(self, data):
        self.pick = lambda *options: data.draw(st.sampled_from(options))
        self.numbers = np.random.default_rng(data.draw(st.integers(0, 99)))

    def array(self, *shape):
        return self.numbers.normal(size=shape).astype("float32")

    def positive(self, *shape):
        return self.numbers.uniform(0.1, 2, shape).astype("float32")

    def integers(self, high, *shape):
        return self.numbers.integers(0, high, shape).astype("int32")

    def bools(self, *shape):
        return self.numbers.random(shape) < 0.5

    def shape(self):
        return self.pick((3,), (2, 3), (2, 3, 4), (2, 3, 4, 5))

    def other(self):
        """A shape, and another one that is broadcast with it, or a number."""
        return self.pick(((2, 3, 4, 5), (3, 1, 1)), ((2, 3), (2, 3)), ((2, 3, 4), (2, 1, 4)), ((3,), (2, 3)))

    def sizes(self, dimensions, least=4):
        return tuple(self.pick(*range(least, least + 5)) for _ in range(dimensions))


def unary(draw, positive=False):
    return [(draw.positive if positive else draw.array)(*draw.shape())]


def binary(draw, positive=False):
    first, second = draw.other()
    make = draw.positive if positive else draw.array
    return [make(*first), draw.pick(make(*second), 1.5)]


def of_bools(draw):
    first, second = draw.other()
    return [draw.bools(*first), draw.bools(*second)]


def convolution(draw, dimensions, transposed=False):
    groups = draw.pick(1, 2)
    stride, pad, spread = (
        draw.pick([n], [n] * dimensions) for n in (draw.pick(1, 2), draw.pick(0, 1), draw.pick(1, 2))
    )
    kernel = draw.array(*((4, 3) if transposed else (6, 4 // groups)), *[draw.pick(1, 3)] * dimensions)
    x, bias = draw.array(2, 4, *draw.sizes(dimensions, 6)), draw.array(3 * groups if transposed else 6)
    if transposed:
        return [x, kernel, draw.pick(bias, None), stride, pad, [draw.pick(0, 1) if 2 in stride else 0], groups, [1]]
    pad = draw.pick(pad, "same") if {*stride} == {1} else pad
    return [x, kernel, draw.pick(bias, None), stride, pad, spread, groups]


def pooling(draw, dimensions, largest):
    side, stride = draw.pick(2, 3), draw.pick(1, 2, 3)
    x = draw.array(2, 3, *draw.sizes(dimensions))
    pad, ceil = [draw.pick(0, 1)], draw.pick(False, True)
    sides = [side] * dimensions
    if largest:
        return [x, sides, draw.pick([], [stride]), pad, [draw.pick(1, 2)] if side == 2 else [1], ceil]
    divisor = [draw.pick(None, 3)] if dimensions > 1 else []
    return [x, sides, draw.pick([], [stride] * dimensions), pad, ceil, draw.pick(True, False), *divisor]


def adaptive(draw, dimensions):
    return [draw.array(2, 3, *draw.sizes(dimensions)), [draw.pick(1, 2, 3) for _ in range(dimensions)]]


def resized(draw, dimensions, linear):
    sides = draw.sizes(dimensions)
    by_scale = draw.pick(True, False)
    sizes, scales = (None, [draw.pick(2.0, 1.5, 0.7)] * dimensions) if by_scale else (draw.sizes(dimensions, 3), None)
    corners = [draw.pick(True, False)] if linear else []
    return [draw.array(2, 3, *sides), sizes and list(sizes), *corners, scales]


def reduction(draw, dtype=False, several=True):
    x = draw.array(2, 3, 4)
    axes = draw.pick([1], [-1, 0], [0, 1, 2]) if several else draw.pick(1, -1)
    return draw.pick([x, axes], [x, axes, True])


def extreme(draw):
    x = draw.array(2, 3, 4)
    return draw.pick([x], [x, 1], [x, -1, True], [x, draw.array(3, 4)])


def spread(draw):
    x = draw.array(2, 3, 4)
    return draw.pick([x], [x, True], [x, [1], False, True], ([x, [0, 2]], {"correction": draw.pick(0, 1)}))


def recurrent(draw, gates, states=1, projected=False):
    layers, both, biases, first = (
        draw.pick(1, 2),
        draw.pick(False, True),
        draw.pick(True, False),
        draw.pick(True, False),
    )
    width, out, ways = 4, 3 if projected else 4, 2 if both else 1
    params = []
    for layer in range(layers):
        for _ in range(ways):
            params += [draw.array(gates * width, 5 if layer == 0 else out * ways), draw.array(gates * width, out)]
            params += [draw.array(gates * width) for _ in range(2 * biases)]
            params += [draw.array(out, width)] if projected else []
    hidden = [draw.array(layers * ways, 2, size) for size in (out, width)[:states]]
    x = draw.array(*((2, 3) if first else (3, 2)), 5)
    return [x, hidden if states > 1 else hidden[0], params, biases, layers, 0.0, False, both, first]


def attention(draw):
    q, k, v = draw.array(2, 4, 3, 8), draw.array(2, 4, 3, 8), draw.array(2, 4, 3, 5)
    mask = draw.pick(None, draw.bools(2, 1, 3, 3) | np.eye(3, dtype=bool), draw.array(3, 3))
    if draw.pick(True, False):
        return [q, k[:, :2], v[:, :2], mask], {"enable_gqa": True}
    causal = mask is None and draw.pick(True, False)
    return [q, k, v, mask, 0.0, causal], draw.pick({}, {"scale": 0.3})


CASES = {
    **dict.fromkeys(
        (
            *("abs", "ceil", "cos", "exp", "expm1", "floor", "isfinite", "isinf", "isnan", "round", "sign", "sin"),
            *("square", "tan", "tanh", "trunc", "relu", "relu6", "sigmoid", "silu", "mish", "log_sigmoid", "selu"),
            *("neg", "atan", "erf", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "elu", "gelu", "softplus"),
            *("zeros_like", "ones_like", "detach", "contiguous", "clone", "alias"),
            "zero",
        ),
        unary,
    ),
    **dict.fromkeys(("log", "log1p", "log2", "sqrt", "rsqrt", "reciprocal"), functools.partial(unary, positive=True)),
    **dict.fromkeys(("mul", "add", "sub", "rsub", "div", "true_divide", "eq", "ne", "lt", "le", "gt", "ge"), binary),
    **dict.fromkeys(("fmod", "remainder", "pow"), functools.partial(binary, positive=True)),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor"), of_bools),
    **dict.fromkeys(("__and__", "__or__"), of_bools),
    **{f"conv{n}d": functools.partial(convolution, dimensions=n) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": functools.partial(convolution, dimensions=n, transposed=True) for n in (1, 2, 3)},
    **{f"max_pool{n}d": functools.partial(pooling, dimensions=n, largest=True) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": functools.partial(pooling, dimensions=n, largest=False) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": functools.partial(adaptive, dimensions=n) for n in (1, 2)},
    **{f"upsample_nearest{n}d": functools.partial(resized, dimensions=n, linear=False) for n in (1, 2)},
    "upsample_linear1d": functools.partial(resized, dimensions=1, linear=True),
    "upsample_bilinear2d": functools.partial(resized, dimensions=2, linear=True),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "logsumexp"), reduction),
    **dict.fromkeys(("prod", "any", "all"), functools.partial(reduction, several=False)),
    **dict.fromkeys(("max", "min"), extreme),
    **dict.fromkeys(("var", "std"), spread),
    # Of constants.
    "lift_fresh": lambda d: [d.integers(5, 2, 3)],
    "lift_fresh_copy": lambda d: [d.integers(5, 2, 3)],
    "floor_divide": lambda d: [d.integers(9, 2, 3), d.pick(2, 1 + d.integers(4, 3))],
    "maximum": lambda d: [d.array(2, 3), d.array(3)],
    "minimum": lambda d: [d.array(2, 3), d.array(3)],
    "logical_not": lambda d: [d.bools(2, 3)],
    "bitwise_not": lambda d: [d.bools(2, 3)],
    "clamp": lambda d: [d.array(2, 3), *d.pick((-0.5,), (-0.5, 0.5), (None, 0.3))],
    "clamp_min": lambda d: [d.array(2, 3), 0.2],
    "clamp_max": lambda d: [d.array(2, 3), 0.2],
    "where": lambda d: [d.bools(2, 3), d.array(2, 3), d.array(3)],
    "masked_fill": lambda d: [d.array(2, 3), d.bools(2, 3), d.pick(-1e9, float("-inf"))],
    "fill": lambda d: [d.array(2, 3), 2.5],
    "copy": lambda d: [d.array(2, 3), d.array(3)],
    "full_like": lambda d: [d.array(2, 3), 2],
    "empty_like": None,
    "to": lambda d: [d.array(2, 3), d.pick("float32", "int32", "bool")],
    "_to_copy": lambda d: ([d.array(2, 3)], {"dtype": d.pick("float32", "int32")}),
    "type_as": lambda d: [d.array(2, 3), d.integers(3, 2)],
    "view_as": lambda d: [d.array(2, 3), d.array(2, 3)],
    "identity": None,
    "group_norm": lambda d: [d.array(2, 6, *d.sizes(d.pick(0, 1, 2))), d.pick(1, 2, 6), d.array(6), d.array(6), 1e-5],
    "instance_norm": lambda d: [
        *(d.array(2, 3, 4, 5), *d.pick((None, None), (d.array(3), d.array(3))), None, None, True, 0.1, 1e-5, False)
    ],
    "layer_norm": lambda d: [d.array(2, 3, 4), *d.pick(([4], d.array(4), d.array(4)), ([3, 4], d.array(3, 4)))],
    "rms_norm": lambda d: [d.array(2, 3, 4), [4], d.pick(None, d.array(4)), d.pick(None, 1e-3)],
    "linear": lambda d: [d.array(*d.pick((2, 3), (2, 5, 3))), d.array(4, 3), d.pick(None, d.array(4))],
    "addmm": lambda d: ([d.array(4), d.array(2, 3), d.array(3, 4)], d.pick({}, {"beta": 2.0, "alpha": 0.5})),
    "baddbmm": lambda d: ([d.array(2, 3, 4), d.array(2, 3, 5), d.array(2, 5, 4)], d.pick({}, {"beta": 0.0})),
    "matmul": lambda d: [d.array(2, 3, 4), d.array(*d.pick((4, 5), (2, 4, 5), (4,)))],
    "mm": lambda d: [d.array(2, 3), d.array(3, 4)],
    "bmm": lambda d: [d.array(2, 3, 4), d.array(2, 4, 5)],
    "outer": lambda d: [d.array(3), d.array(4)],
    "einsum": lambda d: ["bij,bjk->bik", [d.array(2, 3, 4), d.array(2, 4, 5)]],
    "embedding": lambda d: [d.array(5, 3), d.integers(5, 2, 4), d.pick(-1, 0, 2)],
    "_weight_norm": lambda d: [d.array(3, 4), *d.pick((d.positive(3, 1), 0), (d.positive(1, 4), 1))],
    "softmax": lambda d: [d.array(2, 3, 4), d.pick(1, -1)],
    "_softmax": lambda d: [d.array(2, 3, 4), 1, False],
    "log_softmax": lambda d: [d.array(2, 3, 4), d.pick(1, -1)],
    "glu": lambda d: [d.array(2, 4, 6), d.pick(1, -1)],
    "prelu": lambda d: [d.array(2, 3, 4), d.pick(d.array(1), d.array(3))],
    "cumsum": lambda d: [d.array(2, 3), d.pick(0, -1)],
    "argmax": lambda d: [d.array(2, 3), *d.pick((), (1,), (-1, True))],
    "argmin": lambda d: [d.array(2, 3), *d.pick((), (1,), (-1, True))],
    "linalg_vector_norm": lambda d: [d.array(2, 3, 4), d.pick(1, 2, 3), *d.pick((), ([1],), ([-1], True))],
    "topk": lambda d: [d.array(2, 5), 3, d.pick(-1, 1)],
    "flatten": lambda d: [d.array(2, 3, 4, 5), *d.pick((), (1,), (1, 2), (-2, -1))],
    "view": lambda d: [d.array(2, 6, 4), d.pick([2, -1], [4, 3, 4])],
    "reshape": lambda d: [d.array(2, 6, 4), d.pick([2, -1], [4, 3, 4])],
    "_unsafe_view": lambda d: [d.array(2, 6, 4), [2, 24]],
    "unflatten": lambda d: [d.array(2, 6, 4), d.pick(1, -2), d.pick([2, 3], [3, -1])],
    "transpose": lambda d: [d.array(2, 3, 4), 1, d.pick(2, -1, 0)],
    "swapaxes": lambda d: [d.array(2, 3, 4), 1, 2],
    "permute": lambda d: [d.array(2, 3, 4), d.pick([0, 2, 1], [2, 0, 1])],
    "t": lambda d: [d.array(2, 3)],
    "numpy_T": lambda d: [d.array(2, 3)],
    "movedim": lambda d: [d.array(2, 3, 4), 1, -1],
    "unsqueeze": lambda d: [d.array(2, 3), d.pick(0, 1, -1)],
    "squeeze": lambda d: [d.array(2, 1, 3, 1), *d.pick((), (1,), (-1,), (0,), ([1, 3],))],
    "expand": lambda d: [d.array(2, 1, 3), d.pick([2, 4, 3], [-1, 4, -1], [5, 2, 1, 3])],
    "expand_as": lambda d: [d.array(2, 1), d.array(2, 4)],
    "cat": lambda d: [[d.array(2, 3), d.array(2, 3)], d.pick(0, 1, -1)],
    "concat": lambda d: [[d.array(2, 3), d.array(2, 3)], d.pick(0, 1, -1)],
    "stack": lambda d: [[d.array(2, 3), d.array(2, 3)], d.pick(0, 1, -1)],
    "unbind": lambda d: [d.array(2, 3), d.pick(0, 1)],
    "split": lambda d: [d.array(2, 5), d.pick(2, 5), 1],
    "split_with_sizes": lambda d: [d.array(2, 5), [2, 3], 1],
    "chunk": lambda d: [d.array(2, 5), d.pick(2, 3), 1],
    "select": lambda d: [d.array(2, 3, 4), d.pick(1, -1), d.pick(0, -1)],
    "slice": lambda d: [d.array(2, 6), 1, *d.pick((1, 4), (0, 2**63 - 1), (-3, 2**63 - 1), (0, -1, 2))],
    "index": lambda d: [d.array(2, 5, 3), d.pick([None, d.integers(5, 4)], [d.integers(2, 3), d.integers(5, 3)])],
    "index_select": lambda d: [d.array(2, 5), 1, d.integers(5, 3)],
    "gather": lambda d: [d.array(2, 5), 1, d.integers(5, 2, 3)],
    "repeat": lambda d: [d.array(2, 3), d.pick([2, 1], [3, 1, 2])],
    "roll": lambda d: [d.array(2, 3), *d.pick(([1],), ([1], [1]), ([1, -1], [0, 1]))],
    "flip": lambda d: [d.array(2, 3), d.pick([0], [0, 1])],
    "tril": lambda d: [d.array(3, 4), d.pick(0, 1, -1)],
    "triu": lambda d: [d.array(3, 4), d.pick(0, 1, -1)],
    "pad": lambda d: [d.array(2, 3, 5, 5), [1, 2, 0, 1], *d.pick((), ("constant", 0.5), ("reflect",), ("replicate",))],
    "constant_pad_nd": lambda d: [d.array(2, 5), [1, -1], 0.5],
    "pixel_shuffle": lambda d: [d.array(2, 8, 3, 4), 2],
    "arange": lambda d: [*d.pick((5,), (2, 7), (1, 8, 2))],
    "zeros": lambda d: ([[2, 3]], {"dtype": d.pick("float32", "bool")}),
    "ones": lambda d: [[2, 3]],
    "empty": None,
    "full": lambda d: [[2, 3], d.pick(2.5, 1, True)],
    "new_zeros": lambda d: [d.array(2), [2, 3]],
    "new_ones": lambda d: [d.array(2), [2, 3]],
    "new_empty": None,
    "new_full": lambda d: [d.array(2), [2, 3], 2.5],
    "scalar_tensor": lambda d: [2.5],
    "sym_size": lambda d: [d.array(2, 3), d.pick(0, -1)],
    "dropout": lambda d: [d.array(2, 3), 0.5, False],
    "feature_dropout": lambda d: [d.array(2, 3, 4, 5), 0.5, False],
    "bernoulli": None,
    "scaled_dot_product_attention": attention,
    "lstm": lambda d: recurrent(d, 4, 2, d.pick(True, False)),
    "gru": lambda d: recurrent(d, 3),
    "rnn_tanh": lambda d: recurrent(d, 1),
    "rnn_relu": lambda d: recurrent(d, 1),
    "batch_norm": None,
}
"""Name of an operation -> Draw -> its arguments; None for those that have other tests, or arbitrary values."""

VECTOR = ("upsample_nearest1d", "upsample_nearest2d", "upsample_linear1d", "upsample_bilinear2d")


def to_torch(value):
    if isinstance(value, np.ndarray):
        return torch.tensor(value.astype("int64") if value.dtype == np.int32 else value)
    if isinstance(value, list):
        return [to_torch(one) for one in value]
    return getattr(torch, value) if isinstance(value, str) and value in TYPES else value


def run_torch(name, args, kwargs):
    if name == "sym_size":
        return args[0].shape[args[1]]
    if name == "copy":
        return args[0].clone().copy_(args[1])
    operation = getattr(torch.ops.aten, name)
    return (operation.vec if name in VECTOR else operation)(*args, **kwargs)


def is_float(array):
    return jnp.issubdtype(array.dtype, jnp.floating)


def weights(like):
    """Numbers by which outputs count in the loss."""
    return np.random.default_rng(0).normal(size=tuple(like.shape)).astype("float32")


def leaves(result):
    return [one for one in jax.tree.leaves(result, is_leaf=lambda one: one is None) if one is not None]


def test_every_operation_has_a_case():
    assert CASES.keys() == operations.NAMES


@pytest.mark.parametrize("name", sorted(name for name, make in CASES.items() if make))
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_an_operation(name, data):
    drawn = CASES[name](Draw(data))
    assert_same(name, *(drawn if isinstance(drawn, tuple) else (drawn, {})))


def assert_same(name, args, kwargs):
    """Values and their types, and gradients, are PyTorch's."""
    flat, structure = jax.tree.flatten(args, is_leaf=lambda one: one is None)
    places = [i for i, one in enumerate(flat) if isinstance(one, np.ndarray) and one.dtype == np.float32]

    def compute(arrays):
        filled = [arrays[places.index(i)] if i in places else one for i, one in enumerate(flat)]
        result = operations.apply(name, jax.tree.unflatten(structure, filled), kwargs)
        found = jax.tree.map(operations.channels_first, result, is_leaf=lambda one: isinstance(one, operations.Image))
        found = [jnp.asarray(one) for one in leaves(found)]
        return sum(jnp.vdot(weights(one), one) for one in found if is_float(one)), found

    tensors = [to_torch(one) for one in flat]
    for i in places:
        tensors[i].requires_grad_()
    wanted = run_torch(name, jax.tree.unflatten(structure, tensors), {k: to_torch(v) for k, v in kwargs.items()})
    wanted = [torch.as_tensor(one) for one in leaves(list(wanted) if isinstance(wanted, tuple | list) else wanted)]
    # One program for each example.
    program = jax.jit(lambda arrays: (compute(arrays)[1], jax.grad(lambda a: 0.0 + compute(a)[0])(arrays)))
    found, gradients = program([jnp.asarray(flat[i]) for i in places])
    assert len(found) == len(wanted)
    for one, like in zip(found, wanted, strict=True):
        assert one.shape == tuple(like.shape)
        assert one.dtype == TYPES[str(like.dtype).removeprefix("torch.")]
        np.testing.assert_allclose(one, like.detach().numpy(), rtol=1e-4, atol=2e-5)
    if losses := [(one * torch.tensor(weights(one))).sum() for one in wanted if one.requires_grad]:
        sum(losses).backward()
    for i, gradient in zip(places, gradients, strict=True):
        like = tensors[i].grad
        np.testing.assert_allclose(gradient, 0 if like is None else like.numpy(), rtol=1e-3, atol=1e-4)


def random(*shape):
    return np.random.default_rng(1).normal(size=shape).astype("float32")


BYTES, INTEGERS = np.full((2, 5), 100, "uint8"), np.array([2**30 + 1, -(2**30) - 1, 300, -7], "int32")
TIES = np.array([[0, 0, 0], [1, 1, 0], [1, -1, 2], [-1, -1, -1]], "float32")
EMPTY = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]], bool)
HIDDEN = np.where(EMPTY, 0, -np.inf).astype("float32")


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("rsub", [random(2, 3), random(3)], {"alpha": 2}),
        ("view_as", [random(2, 6), random(3, 4)], {}),
        ("topk", [random(2, 5), 3, -1, False], {}),
        ("topk", [np.arange(10, dtype="uint8").reshape(2, 5), 3, -1, False], {}),
        *(("linalg_vector_norm", [random(2, 3, 4), order, [1]], {}) for order in (np.inf, -np.inf, 0)),
        ("gather", [random(3, 5, 2), 1, np.array([[[4], [0]], [[2], [1]]], "int32")], {}),
        ("upsample_nearest1d", [random(1, 2, 14), [20], None], {}),
        ("upsample_nearest2d", [random(1, 2, 28, 14), [40, 20], None], {}),
        ("max_pool2d", [random(2, 3, 9, 8), [3, 2], [2, 1], [1, 0], [2, 3], True], {}),
        ("rsub", [random(2, 3), 2, 3], {}),
        *((name, [BYTES, 1], {}) for name in ("cumsum", "sum", "amax")),
        *(("sum", [x], {"dtype": kind}) for x, kind in ((BYTES, "float32"), (BYTES, "uint8"), (INTEGERS, "int8"))),
        ("prod", [BYTES[:, :3], 1], {}),
        *(("div", [INTEGERS, y], {"rounding_mode": mode}) for y in (3, 0.7, -INTEGERS) for mode in ("trunc", "floor")),
        ("addmm", [np.full(4, np.nan, "float32"), random(2, 3), random(3, 4)], {"beta": 0}),
        # Gradients at zero, and of equal entries.
        *((name, [TIES], {}) for name in ("abs", "leaky_relu", "elu", "hardtanh")),
        *((name, [TIES, 1], {}) for name in ("clamp_min", "clamp_max")),
        ("clamp", [TIES, -1, 1], {}),
        *((name, [TIES, axis], {}) for name in ("max", "min") for axis in (0, 1)),
        *(("std", [TIES, axes], {}) for axes in ([1], [0, 1])),
        *(("linalg_vector_norm", [TIES, order, [1]], {}) for order in (*(1, 2, 3, 1.5, 0.5, -1, -2), np.inf, -np.inf)),
        *(("scaled_dot_product_attention", [*random(3, 2, 3, 4), mask], {}) for mask in (EMPTY, HIDDEN)),
    ],
)
def test_options_of_operations(name, args, kwargs):
    assert_same(name, args, kwargs)


def test_a_norm_of_nan_is_nan():
    found = operations.apply("linalg_vector_norm", [jnp.array([[jnp.nan, 1.0], [0.0, 0.0]]), 2, [1]], {})
    np.testing.assert_array_equal(found, [np.nan, 0])


@pytest.mark.parametrize(("kind", "missing"), [("float32", np.nan), ("int32", np.iinfo("int32").min)])
def test_entries_beyond_a_table(kind, missing):
    """NaN or the least integer; only in plain indexing, -1 is the last entry."""
    table, places = np.arange(8, dtype=kind).reshape(4, 2), jnp.array([3, 4, -1])
    both, plain = jnp.stack([places, places], 1), jnp.array([3, 4, -5])
    for name, args in {
        "embedding": [places],
        "index_select": [0, places],
        "gather": [0, both],
        "index": [[plain]],
    }.items():
        found = operations.apply(name, [table, *args], {})
        np.testing.assert_array_equal(found, [[6, 7], [missing] * 2, [missing] * 2])
    np.testing.assert_array_equal(operations.apply("index", [table, [-plain[:1]]], {}), [[2, 3]])


@pytest.mark.parametrize("name", ["dropout", "feature_dropout"])
def test_dropout(name):
    x = jnp.ones((4, 50, 6, 6)) + jnp.arange(6)
    y = operations.apply(name, [x, 0.3, True], {}, jax.random.key(0))
    kept = np.asarray(y != 0)
    assert 0.6 < kept.mean() < 0.8
    np.testing.assert_allclose(y, np.where(kept, x / 0.7, 0), rtol=1e-6)
    assert (kept == kept[..., :1, :1]).all() == (name == "feature_dropout")
    # The same values for an image with its channels last.
    assert not np.array_equal(y, operations.apply(name, [x, 0.3, True], {}, jax.random.key(1)))


def test_random_numbers_need_a_key():
    with pytest.raises(InvalidInput, match="draws random numbers when deployed too"):
        operations.apply("dropout", [jnp.ones((2, 3)), 0.5, True], {})
    drawn = operations.apply("bernoulli", [jnp.zeros((40, 50)), 0.8], {}, jax.random.key(0))
    assert 0.75 < drawn.mean() < 0.85


def test_elementwise_operations_keep_images_with_channels_last():
    """Whatever the number of axes of the other arrays."""
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype("float32")
    image = operations.Image(jnp.moveaxis(x, 1, -1))
    for other in (x, x[:1], x[0, :, :1, :1], x[0, 0], np.float32(2), 3.0):
        found = operations.apply("add", [image, other], {"alpha": 2})
        assert isinstance(found, operations.Image)
        np.testing.assert_allclose(operations.channels_first(found), x + 2 * other, rtol=1e-6)
    found = operations.apply("add", [image, np.ones((6, 1, 1, 1, 1), "float32")], {})
    assert found.shape == (6, 2, 3, 4, 5)
