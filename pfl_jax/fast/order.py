"""Max pooling before bias and activation: the same function, whose additions and activations see fewer elements."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

ACTIVATIONS = (jax.nn.relu, jax.nn.leaky_relu, jax.nn.relu6, jax.nn.elu, jax.nn.sigmoid, jnp.tanh)
"""Non-decreasing functions, with which the maximum may change places."""


def pool_first(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Jaxpr in which max pooling comes before the biases and activations whose results it alone reads.

    The outputs are the same, up to the rounding of activations other than ReLU and leaky ReLU. Where the sum with the
    bias rounds two elements of a window to the same value, the gradient goes to the larger instead of the first.

    Args:
      jaxpr: the program of a function.
    """
    equations: list[Any] = list(jaxpr.eqns)
    for number, pool in enumerate(jaxpr.eqns):
        if pool.primitive.name != "reduce_window_max" or any(map(any, pool.params["padding"])):
            continue
        made_by = {equation.outvars[0]: place for place, equation in enumerate(jaxpr.eqns[:number])}
        uses = [one for equation in jaxpr.eqns for one in equation.invars] + list(jaxpr.outvars)
        x, steps, others = pool.invars[0], [], []
        while x in made_by and sum(one is x for one in uses) == 1:
            equation = jaxpr.eqns[made_by[x]]
            found = _added(equation, pool.params["window_dimensions"]) or _activation(equation)
            if found is None:
                break
            equations[made_by[x]] = None
            function, inputs = found
            steps.append((function, len(inputs) - 1))
            x, others = inputs[0], inputs[1:] + others
        if steps:
            inputs = [x, *others]
            # The first of the steps was found last.
            call = _call(
                functools.partial(pool.primitive.bind, **pool.params), steps[::-1], [one.aval for one in inputs]
            )
            equations[number] = pool.replace(primitive=call.primitive, params=call.params, invars=inputs)
    return jaxpr.replace(eqns=[one for one in equations if one is not None]) if None in equations else jaxpr


Step = tuple[Callable[..., jax.Array], list[Any]]
"""A function, and its inputs in a jaxpr, the first of which is pooled."""


def _added(equation: Any, window: tuple[int, ...]) -> Step | None:
    """Addition of something that is the same for all elements of a window."""
    if equation.primitive.name != "add":
        return None
    whole = equation.outvars[0].aval.shape
    for x, other in (equation.invars, equation.invars[::-1]):
        shape = other.aval.shape or (1,) * len(whole)
        same = all(size == 1 for size, side in zip(shape, window, strict=True) if side > 1)
        if same and x.aval.shape == whole:
            return jnp.add, [x, other]
    return None


def _activation(equation: Any) -> Step | None:
    """One of the ACTIVATIONS."""
    x, *others = equation.invars
    if others or len(equation.outvars) != 1 or not jnp.issubdtype(x.aval.dtype, jnp.floating):
        return None
    function = _texts(x.aval.shape, x.aval.dtype).get(str(equation))
    return None if function is None else (function, [x])


@functools.lru_cache(maxsize=256)
def _texts(shape: tuple[int, ...], dtype: Any) -> dict[str, Callable[..., jax.Array]]:
    """The one operation of each activation, for arrays of a shape, as text -> the activation."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    return {str(jax.make_jaxpr(function)(x).eqns[0]): function for function in ACTIVATIONS}


def _call(pool: Callable[..., jax.Array], steps: list[tuple[Callable[..., jax.Array], int]], inputs: Any) -> Any:
    """Compiled call of pooling and the steps after it."""

    def function(x, *others):
        x, left = pool(x), list(others)
        for step, count in steps:
            x = step(x, *(left.pop(0) for _ in range(count)))
        return x

    (equation,) = jax.make_jaxpr(jax.jit(function))(
        *(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in inputs)
    ).eqns
    return equation
