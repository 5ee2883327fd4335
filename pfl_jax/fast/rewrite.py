"""Functions whose convolutions and pooling are computed in a way that is fast for federated simulation.

A function's operations are read off its jaxpr, so it may come from flax.linen, flax.nnx, equinox, haiku or plain
`jax.lax`. Everything else in the jaxpr stays unchanged.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.extend import core

from pfl_jax.fast.conv_general import conv_general
from pfl_jax.fast.forms import Padding
from pfl_jax.fast.order import pool_first
from pfl_jax.fast.pooling import LARGEST, max_pool, sum_pool

Record = TypeVar("Record")

INSIDE = {"jit", "closed_call", "remat2", "scan", "while", "cond"}
"""Operations whose inner programs are rewritten too. Inner programs of other operations, such as functions with their
own derivatives (`jax.custom_jvp`, `jax.custom_vjp`), are left alone."""


@dataclass(frozen=True)
class Fast:
    """Function with fast convolutions and pooling.

    Attributes:
      function: any function of pytrees of arrays that can be traced.
    """

    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        """The same as `function`, up to rounding."""
        # A new function in each call: JAX keeps the trace of a known function, with all values that it read elsewhere.
        program, shape = jax.make_jaxpr(lambda *args: self.function(*args), return_shape=True)(*args)
        results = core.jaxpr_as_fun(_fast_program(program))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), results)


def fast(function: Callable[..., Any]) -> Fast:
    """The same function with fast convolutions and pooling.

    Args:
      function: pure function of pytrees of arrays that can be traced.

    Example:
      >>> import flax.linen as nn
      >>> import jax.numpy as jnp
      >>> from pfl_jax.fast.rewrite import fast
      >>> print(fast(lambda x: nn.max_pool(x, (2, 2), (2, 2)))(jnp.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0])
      [[ 5.  7.]
       [13. 15.]]
    """
    return function if isinstance(function, Fast) else Fast(function)


def with_fast(*names: str) -> Callable[[type[Record]], type[Record]]:
    """Decorator of a `NamedTuple`: whenever an instance is made, the functions in some of its fields become fast.

    Args:
      names: names of the fields; a field that is None stays None.
    """

    def decorate(cls: Any) -> Any:
        plain_new, plain_make = cls.__new__, cls._make

        def make(cls, values):
            fields = dict(zip(cls._fields, values, strict=True))
            return plain_make((fields | {name: fields[name] and fast(fields[name]) for name in names}).values())

        @functools.wraps(plain_new)
        def new(cls, *args, **fields):
            return make(cls, plain_new(cls, *args, **fields))

        # `_replace` calls `_make`.
        cls._make, cls.__new__ = classmethod(make), new
        return cls

    return decorate


def _fast_program(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    jaxpr = _rewritten(program.jaxpr)
    return program if jaxpr is program.jaxpr else core.ClosedJaxpr(jaxpr, program.consts)


def _rewritten(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Jaxpr with the same inputs and outputs and fast convolutions and pooling; unchanged if it has none."""
    ordered = pool_first(jaxpr)
    equations = [_rewritten_equation(equation) for equation in ordered.eqns]
    changed = any(new is not old for new, old in zip(equations, ordered.eqns, strict=True))
    return ordered.replace(eqns=equations) if changed else ordered


def _rewritten_equation(equation: core.JaxprEqn) -> core.JaxprEqn:
    name, parameters = equation.primitive.name, equation.params
    if name in INSIDE:
        inner = {key: _rewritten_parameter(value) for key, value in parameters.items()}
        changed = any(inner[key] is not value for key, value in parameters.items())
        return equation.replace(params=inner) if changed else equation
    if name not in REPLACEMENTS:
        return equation
    call = _call(name, tuple(sorted(parameters.items())), tuple(variable.aval for variable in equation.invars))
    return equation if call is None else equation.replace(primitive=call.primitive, params=call.params)


def _rewritten_parameter(value: Any) -> Any:
    """Parameter of an operation, with programs inside it rewritten; unchanged if there are none."""
    if isinstance(value, core.ClosedJaxpr):
        return _fast_program(value)
    if isinstance(value, core.Jaxpr):
        return _rewritten(value)
    if isinstance(value, tuple):
        new = tuple(map(_rewritten_parameter, value))
        return new if any(a is not b for a, b in zip(new, value, strict=True)) else value
    return value


@functools.lru_cache(maxsize=1024)
def _call(name: str, parameters: tuple[tuple[str, Any], ...], inputs: tuple[Any, ...]) -> core.JaxprEqn | None:
    """Compiled call that replaces an operation, shared by equal operations; None if the operation has to stay."""
    replacement = REPLACEMENTS[name](dict(parameters), *inputs)
    if replacement is None:
        return None
    function = jax.jit(replacement)
    (equation,) = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in inputs)).eqns
    return equation


def _convolution(parameters: dict[str, Any], x: Any, kernel: Any) -> Callable[..., jax.Array] | None:
    """Replacement of `conv_general_dilated` with one or two dimensions."""
    layout, dimensions = parameters["dimension_numbers"], x.ndim - 2
    precision = parameters["precision"]
    kept = (
        dimensions not in (1, 2)
        or not x.dtype == kernel.dtype == (parameters["preferred_element_type"] or x.dtype)
        or not jnp.issubdtype(x.dtype, jnp.floating)
        or {*parameters["lhs_dilation"], parameters["batch_group_count"]} != {1}
        or 0 in (*x.shape, *kernel.shape)
        or not (precision is None or precision[0] == precision[1])
    )
    if kept:
        return None
    (batch, channels, *sides), (outputs, inputs, *kernel_sides) = layout.lhs_spec, layout.rhs_spec
    result_batch, result_channels, *result_sides = layout.out_spec
    order = [0] * x.ndim
    for position, axis in enumerate((result_batch, *result_sides, result_channels)):
        order[axis] = position
    # One dimension is treated as the second of two.
    first = 2 - dimensions
    ones, none = (1,) * first, ((0, 0),) * first
    name = None if precision is None else precision[0].name.lower()

    def function(x, kernel):
        x, kernel = x.transpose(batch, *sides, channels), kernel.transpose(*kernel_sides, inputs, outputs)
        y = conv_general(
            x.reshape(x.shape[0], *ones, *x.shape[1:]),
            kernel.reshape(*ones, *kernel.shape),
            (*ones, *parameters["window_strides"]),
            cast(Padding, (*none, *parameters["padding"])),
            (*ones, *parameters["rhs_dilation"]),
            parameters["feature_group_count"],
            name,
        )
        return y.reshape(y.shape[0], *y.shape[1 + first :]).transpose(order)

    return function


def _pooling(pool: Callable[..., jax.Array]) -> Callable[..., Callable[..., jax.Array] | None]:
    """Replacement of a `reduce_window` with disjoint windows."""

    def replacement(parameters: dict[str, Any], x: Any) -> Callable[..., jax.Array] | None:
        window = tuple(parameters["window_dimensions"])
        kept = (
            window != tuple(parameters["window_strides"])
            or any(map(any, parameters["padding"]))
            or {*parameters["base_dilation"], *parameters["window_dilation"]} != {1}
            or not jnp.issubdtype(x.dtype, jnp.floating)
            or (pool is max_pool and functools.reduce(int.__mul__, window) > LARGEST)
        )
        return None if kept else functools.partial(pool, window=window)

    return replacement


REPLACEMENTS: dict[str, Callable[..., Callable[..., jax.Array] | None]] = {
    "conv_general_dilated": _convolution,
    "reduce_window_max": _pooling(max_pool),
    "reduce_window_sum": _pooling(sum_pool),
}
"""Name of an operation -> (its parameters, its inputs' shapes) -> function that computes the same; None to keep it."""
