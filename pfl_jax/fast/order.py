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
    """Jaxpr in which max pooling comes before the biases and activations whose results only the pooling reads.

    The outputs are the same, up to the rounding of activations other than ReLU and leaky ReLU. Where the sum with the
    bias rounds two elements of a window to the same value, the gradient goes to the larger instead of the first.

    Args:
      jaxpr: the program of a function.
    """
    equations: list[Any] = list(jaxpr.eqns)
    for number, pool in enumerate(jaxpr.eqns):
        if pool.primitive.name != "reduce_window_max":
            continue
        if any(map(any, pool.params["padding"])) or {*pool.params["base_dilation"]} != {1}:
            continue
        made_by = {equation.outvars[0]: place for place, equation in enumerate(jaxpr.eqns[:number])}
        uses = [one for equation in jaxpr.eqns for one in equation.invars] + list(jaxpr.outvars)
        x, steps = pool.invars[0], []
        while x in made_by and sum(one is x for one in uses) == 1:
            equation = jaxpr.eqns[made_by[x]]
            step = _added(equation, pool) or _activation(equation)
            if step is None:
                break
            equations[made_by[x]] = None
            # The first step is found last.
            steps.insert(0, step)
            x = step[1]
        if steps:
            call = _call(pool, x, steps)
            inputs = [x, *(one for *_, others in steps for one in others)]
            equations[number] = pool.replace(primitive=call.primitive, params=call.params, invars=inputs)
    return jaxpr.replace(eqns=[one for one in equations if one is not None]) if None in equations else jaxpr


Step = tuple[Callable[..., jax.Array], Any, list[Any]]
"""A function, the input in a jaxpr that is pooled instead of the result, and the function's other inputs."""


def _added(equation: Any, pool: Any) -> Step | None:
    """Addition of something that is the same for all elements of a window."""
    if equation.primitive.name != "add":
        return None
    whole, sides = equation.outvars[0].aval.shape, pool.params["window_dimensions"]
    pooled = [side > 1 or step > 1 for side, step in zip(sides, pool.params["window_strides"], strict=True)]
    for x, other in (equation.invars, equation.invars[::-1]):
        shape = other.aval.shape or (1,) * len(whole)
        same = all(size == 1 for size, changes in zip(shape, pooled, strict=True) if changes)
        if same and x.aval.shape == whole:
            return jnp.add, x, [other]
    return None


def _activation(equation: Any) -> Step | None:
    """One of the ACTIVATIONS."""
    x, *others = equation.invars
    if others or len(equation.outvars) != 1 or not jnp.issubdtype(x.aval.dtype, jnp.floating):
        return None
    function = _texts(x.aval.shape, x.aval.dtype).get(str(equation))
    return None if function is None else (function, x, [])


@functools.lru_cache(maxsize=256)
def _texts(shape: tuple[int, ...], dtype: Any) -> dict[str, Callable[..., jax.Array]]:
    """The one operation of each activation, for arrays of a shape, as text -> the activation."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    return {str(jax.make_jaxpr(function)(x).eqns[0]): function for function in ACTIVATIONS}


def _call(pool: core.JaxprEqn, x: Any, steps: list[Step]) -> core.JaxprEqn:
    """Compiled call of pooling and the steps after it."""

    def function(x, others):
        x = pool.primitive.bind(x, **pool.params)
        for (step, *_), more in zip(steps, others, strict=True):
            x = step(x, *more)
        return x

    inputs = jax.tree.map(
        lambda one: jax.ShapeDtypeStruct(one.aval.shape, one.aval.dtype), (x, [one[2] for one in steps])
    )
    (equation,) = jax.make_jaxpr(jax.jit(function))(*inputs).eqns
    return equation
