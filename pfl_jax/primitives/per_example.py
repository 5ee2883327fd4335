"""Squared norms and weighted sums of per-example gradients, without individual gradients.

For a parameter that enters through a matrix product, a convolution or an addition, the squared norms of its per-example
gradients follow from the layer's input and the gradient at its output:

    dense         ||a_b||^2 ||delta_b||^2              a: input [B, d],  delta: gradient at the output
    convolution   || sum_p a_bp delta_bp^T ||_F^2      a_bp: window of the image that output pixel p sees
    bias          || sum_p delta_bp ||^2

One backward pass over a mini-batch therefore gives the norms of all its examples. Each such operation of a model gets a
tap: an identity whose backward pass passes the gradient through and adds the layer's squared norms to the gradient with
respect to a probe, a vector of zeros [B] that all taps share. The gradient of the summed losses with respect to the
probe is then the vector of squared norms. A second kind of tap gives the weighted sum of the per-example gradients: its
backward pass computes the parameter's gradient from delta_b times the weight of example b, and passes delta_b on.
"""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import Literal, get_opaque_trace_state

from pfl_jax.base import ClientData, KeylessLoss, PyTree
from pfl_jax.networks.convolution import conv2d
from pfl_jax.networks.layers import Layer

FEW = 3
"""Rows of a mini-batch on which a loss is examined, beside the number with which it is computed."""


def _norms_of_multiply(x, gradient, kernel):
    return jnp.sum(jnp.square(x), axis=1) * jnp.sum(jnp.square(gradient), axis=1)


def _norms_of_convolve(x, gradient, kernel, padding):
    def squared_norm(x, gradient):
        (kernel_gradient,) = jax.vjp(lambda kernel: conv2d(x[None], kernel, padding), kernel)[1](gradient[None])
        return jnp.sum(jnp.square(kernel_gradient))

    return jax.vmap(squared_norm)(x, gradient)


def _norms_of_add_bias(x, gradient, bias):
    per_example = jnp.sum(gradient, axis=tuple(range(1, gradient.ndim - 1)))
    return jnp.sum(jnp.square(per_example), axis=-1)


NORMS: dict[str, Callable[..., jax.Array]] = {
    "multiply": _norms_of_multiply,
    "convolve": _norms_of_convolve,
    "add_bias": _norms_of_add_bias,
}
"""Method of `Layer` by name -> function (input, gradient at the output, parameter, ...) -> squared norms [B]."""

OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "multiply": lambda x, kernel: x @ kernel,
    "convolve": conv2d,
    "add_bias": lambda x, bias: x + bias,
}
"""Method of `Layer` by name -> the same as a function."""


class Operation(NamedTuple):
    """Operation of a layer on the rows of a mini-batch.

    Attributes:
      name: key of NORMS.
      x: input [B, ...].
      parameter: what it is multiplied with, or added.
      options: further arguments.
    """

    name: str
    x: jax.Array
    parameter: jax.Array
    options: tuple[Any, ...]

    def __call__(self, x: jax.Array, parameter: jax.Array) -> jax.Array:
        """Output of the operation for another input and parameter."""
        return OPERATIONS[self.name](x, parameter, *self.options)

    def norms(self, x: jax.Array, gradient: jax.Array) -> jax.Array:
        """Squared norms [B] of the parameter's gradients, from those at the output [B, ...]."""
        return NORMS[self.name](x, gradient, self.parameter, *self.options)


def replace_operations(rows: int, replacement: Callable[[int, Operation], jax.Array]) -> AbstractContextManager[None]:
    """Context in which layers compute operations on `rows` rows by a function.

    Layers inside of another transformation (jit, remat, scan) are left alone: what they compute is kept for later
    calls.

    Args:
      rows: examples of the mini-batch.
      replacement: (number of the operation in the order of the calls, operation) -> its output.
    """
    numbers, trace = itertools.count(), get_opaque_trace_state(convention="flax")

    def intercept(call, args, kwargs, context):
        if not isinstance(context.module, Layer) or context.method_name not in NORMS:
            return call(*args, **kwargs)
        if get_opaque_trace_state(convention="flax") != trace:
            return call(*args, **kwargs)
        x, parameter, *options = args
        if x.shape[0] != rows or (context.method_name == "multiply" and x.ndim != 2):
            return call(*args, **kwargs)
        return replacement(next(numbers), Operation(context.method_name, x, parameter, tuple(options)))

    return nn.intercept_methods(intercept)


class Uses(NamedTuple):
    """Where a loss uses its parameters.

    Attributes:
      leaves: for each operation of a layer, in the order of the calls, the number of the leaf that is its parameter;
        None for another array.
      elsewhere: whether a leaf is used outside of these operations too.
    """

    leaves: list[int | None]
    elsewhere: bool

    @property
    def once(self) -> bool:
        """Whether no leaf is the parameter of two operations."""
        own = [leaf for leaf in self.leaves if leaf is not None]
        return len(set(own)) == len(own)


def uses_of_parameters(loss: KeylessLoss, params: PyTree, batch: ClientData, rows: int) -> Uses:
    """Where a loss uses its parameters, read off its jaxpr for so many rows.

    Args:
      loss: (params, ClientData) -> scalar.
      params: any pytree of arrays.
      batch: a mini-batch, of which only shapes and types count.
      rows: examples of the mini-batch to examine.

    Returns:
      The uses; layers inside of another transformation count as elsewhere.
    """

    def observed(params: PyTree, batch: ClientData) -> tuple[jax.Array, list[jax.Array]]:
        parameters = []

        def replacement(_: int, operation: Operation) -> jax.Array:
            parameters.append(operation.parameter)
            # The loss then depends on the parameter only where other code uses it.
            return operation(operation.x, jnp.zeros_like(operation.parameter))

        with replace_operations(rows, replacement):
            return loss(params, batch), parameters

    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), batch)
    jaxpr = jax.make_jaxpr(observed)(params, shapes).jaxpr
    leaves = {variable: number for number, variable in enumerate(jaxpr.invars[: len(jax.tree.leaves(params))])}

    def numbers(variables: list[Any]) -> list[int | None]:
        return [None if isinstance(variable, Literal) else leaves.get(variable) for variable in variables]

    result, *parameters = jaxpr.outvars
    others = [result, *(variable for equation in jaxpr.eqns for variable in equation.invars)]
    return Uses(numbers(parameters), any(number is not None for number in numbers(others)))


def add_norms(
    norms: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, y: jax.Array, probe: jax.Array
) -> jax.Array:
    """Identity on y; the backward pass adds norms(x, gradient at y) [B] to the gradient of probe [B]."""

    @jax.custom_vjp
    def tap(x, y, probe):
        return y

    tap.defvjp(lambda x, y, probe: (y, x), lambda x, gradient: (None, gradient, norms(x, gradient)))
    return tap(jax.lax.stop_gradient(x), y, probe)


def weigh_gradient(
    operation: Callable[[jax.Array, jax.Array], jax.Array],
    weights: jax.Array,
    x: jax.Array,
    y: jax.Array,
    parameter: jax.Array,
) -> jax.Array:
    """Identity on y = operation(x, parameter'); the backward pass adds the weighted gradient to that of `parameter`.

    Args:
      operation: (x, parameter) -> y, linear or affine in the parameter.
      weights: [B], of the examples' gradients.
      x, y: input and output of the operation [B, ...].
      parameter: of the shape of parameter', whose own gradient is not affected.
    """

    @jax.custom_vjp
    def tap(x, y, parameter):
        return y

    def forward(x, y, parameter):
        return y, (x, parameter)

    def backward(kept, gradient):
        x, parameter = kept
        weighted = gradient * weights.reshape(-1, *[1] * (gradient.ndim - 1))
        (total,) = jax.vjp(lambda parameter: operation(x, parameter), parameter)[1](weighted)
        return None, gradient, total

    tap.defvjp(forward, backward)
    return tap(jax.lax.stop_gradient(x), y, parameter)
