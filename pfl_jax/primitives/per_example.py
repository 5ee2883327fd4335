"""Squared norms and weighted sums of per-example gradients, without individual gradients.

For a parameter that enters through a matrix product, a convolution or an addition, the squared norms of its per-example
gradients follow from the layer's input and the gradient at its output:

    dense         ||a_b||^2 ||delta_b||^2              a: input [B, d],  delta: gradient at the output
    convolution   || sum_p a_bp delta_bp^T ||_F^2      a_bp: window of the image that output pixel p sees
    bias          || sum_p delta_bp ||^2
    scale         || sum_p a_bp * delta_bp ||^2        of a normalization

One backward pass over a mini-batch therefore gives the norms of all its examples. The operations are found in the jaxpr
of a loss, so its network may be of any library. Each operation gets a tap: an identity whose backward pass passes the
gradient through and adds the layer's squared norms to the gradient with respect to a probe, a vector of zeros [B] that
all taps share. The gradient of the summed losses with respect to the probe is then the vector of squared norms. A
second kind of tap gives the weighted sum of the per-example gradients: its backward pass computes the parameter's
gradient from delta_b times the weight of example b, and passes delta_b on.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from pfl_jax.base import ClientData, KeylessLoss, PyTree
from pfl_jax.fast.convolution import CONVOLVE

FEW = 3
"""Number of rows with which a loss is examined, besides the number with which it is computed."""

MOVED = ("reshape", "transpose", "squeeze", "broadcast_in_dim", "pad")
"""Operations of JAX that only move or repeat the entries of a parameter."""

ELEMENTWISE = ("add", "sub", "mul")
"""Operations of JAX that use a parameter in the same way for each row."""


class Operation(NamedTuple):
    """Operation on the rows of a mini-batch that is linear in a parameter, or affine.

    Attributes:
      leaf: number of the parameter among the leaves.
      x: input [B, ...].
      parameter: the leaf.
      apply: (x, parameter) -> output [B, ...] for another input and parameter.
      apply_to_row: the same for an input of one row.
      is_product: whether it is the product of vectors [B, d] with the matrix, in any order of its entries.
    """

    leaf: int
    x: jax.Array
    parameter: jax.Array
    apply: Callable[[jax.Array, jax.Array], jax.Array]
    apply_to_row: Callable[[jax.Array, jax.Array], jax.Array]
    is_product: bool

    def norms(self, x: jax.Array, gradient: jax.Array) -> jax.Array:
        """Squared norms [B] of the parameter's gradients, from the gradients at the output [B, ...]."""
        if self.is_product:
            return jnp.sum(jnp.square(x), axis=1) * jnp.sum(jnp.square(gradient), axis=1)

        def squared_norm(x, gradient):
            _, pull = jax.vjp(lambda parameter: self.apply_to_row(x[None], parameter), self.parameter)
            return jnp.sum(jnp.square(pull(gradient[None])[0]))

        return jax.vmap(squared_norm)(x, gradient)


class _Moved(NamedTuple):
    """Leaf whose entries were moved.

    Attributes:
      leaf: number of the leaf.
      moves: equations of the moves, in order.
    """

    leaf: int
    moves: tuple[Any, ...] = ()

    def of(self, parameter: jax.Array, **last: Any) -> jax.Array:
        """Another parameter after the same moves; `last` replaces parameters of the last one."""
        for move in self.moves:
            changed = move.params | (last if move is self.moves[-1] else {})
            parameter = move.primitive.bind(parameter, *(one.val for one in move.invars[1:]), **changed)
        return parameter


def replace_operations(
    loss: KeylessLoss,
    params: PyTree,
    batch: ClientData,
    replacement: Callable[[Operation], jax.Array],
    elsewhere: Callable[[int], None] = lambda leaf: None,
) -> jax.Array:
    """Loss in which the operations on rows that use a leaf of the parameters are computed by a function.

    Operations inside of another transformation than jit (remat, scan, custom derivatives) are left alone.

    Args:
      loss: (params, ClientData) -> scalar.
      params: any pytree of arrays.
      batch: a mini-batch.
      replacement: operation -> its output.
      elsewhere: called with the number of a leaf that anything else uses.

    Returns:
      The scalar.
    """
    # A new function: JAX remembers the trace of a function that it has seen, with the frozen parameters in it.
    program = jax.make_jaxpr(lambda *args: loss(*args))(params, batch)
    leaves, (rows,) = jax.tree.leaves(params), batch.mask.shape
    moved = [_Moved(number) for number in range(len(leaves))]

    def evaluate(jaxpr: Jaxpr, constants: list[Any], inputs: list[Any], origins: list[_Moved | None]):
        values, places = dict(zip(jaxpr.constvars, constants, strict=True)), {}
        values |= dict(zip(jaxpr.invars, inputs, strict=True))
        places |= {variable: one for variable, one in zip(jaxpr.invars, origins, strict=True) if one}
        for equation in jaxpr.eqns:
            inputs = [one.val if isinstance(one, Literal) else values[one] for one in equation.invars]
            origins = [None if isinstance(one, Literal) else places.get(one) for one in equation.invars]
            found = [one for one in origins if one]
            operation = _operation(equation, inputs, origins, leaves, rows) if len(found) == 1 else None
            if found and equation.primitive.name == "jit":
                inner = equation.params["jaxpr"]
                outputs, after = evaluate(inner.jaxpr, inner.consts, inputs, origins)
                places |= {variable: one for variable, one in zip(equation.outvars, after, strict=True) if one}
            elif operation is not None:
                y = replacement(operation)
                outputs = [y[None] if equation.primitive is CONVOLVE else y]
            else:
                outputs = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
                outputs = outputs if equation.primitive.multiple_results else [outputs]
                moves = equation.primitive.name in MOVED and origins[0] and len(found) == 1
                if moves and all(isinstance(one, Literal) for one in equation.invars[1:]):
                    places[equation.outvars[0]] = _Moved(found[0].leaf, (*found[0].moves, equation))
                else:
                    for one in found:
                        elsewhere(one.leaf)
            values |= dict(zip(equation.outvars, outputs, strict=True))
        results = [one.val if isinstance(one, Literal) else values[one] for one in jaxpr.outvars]
        return results, [None if isinstance(one, Literal) else places.get(one) for one in jaxpr.outvars]

    arrays = [*leaves, *jax.tree.leaves(batch)]
    (result,), (origin,) = evaluate(
        program.jaxpr, program.consts, arrays, [*moved, *[None] * (len(arrays) - len(leaves))]
    )
    if origin:
        elsewhere(origin.leaf)
    return result


def _operation(
    equation: JaxprEqn, inputs: list[Any], origins: list[_Moved | None], leaves: list[jax.Array], rows: int
) -> Operation | None:
    """Operation on rows with one leaf, for an equation of a jaxpr; None if the equation is anything else."""
    name, parameters = equation.primitive.name, equation.params
    position = 0 if origins[0] else 1
    if len(inputs) != 2:
        return None
    x, origin = inputs[1 - position], origins[position]
    assert origin is not None
    last: dict[str, Any] = {}
    if equation.primitive is CONVOLVE:
        fits = position == 1 and x.shape[:2] == (1, rows)
        x = x[0] if fits else x
    elif name == "dot_general":
        (contracted, _), batched = parameters["dimension_numbers"]
        fits = position == 1 and x.shape[:1] == (rows,) and 0 not in contracted and batched == ((), ())
    else:
        fits = name in ELEMENTWISE and jnp.shape(x)[:1] == (rows,) and inputs[position].ndim == x.ndim
        if fits and len(inputs[position]) > 1:
            # A parameter that is repeated for each row.
            fits, last = _repeats(origin.moves), {"shape": (1, *inputs[position].shape[1:])}
    if not fits:
        return None

    def apply(x, parameter, **last):
        operand = origin.of(parameter, **last)
        if equation.primitive is CONVOLVE:
            return CONVOLVE.bind(x[None], operand, **parameters)[0]
        return equation.primitive.bind(*((operand, x) if position == 0 else (x, operand)), **parameters)

    is_product = name == "dot_general" and x.ndim == 2 and all(one.primitive.name in MOVED[:3] for one in origin.moves)
    return Operation(
        origin.leaf, x, leaves[origin.leaf], apply, lambda x, parameter: apply(x, parameter, **last), is_product
    )


def _repeats(moves: tuple[Any, ...]) -> bool:
    """Whether the last move repeats an array along a new first axis, or one of size 1."""
    if not moves or moves[-1].primitive.name != "broadcast_in_dim":
        return False
    axes, shape = moves[-1].params["broadcast_dimensions"], moves[-1].invars[0].aval.shape
    return 0 not in axes or shape[axes.index(0)] == 1


def have_closed_form(
    loss: KeylessLoss, params: PyTree, batch: ClientData, rows: int, *, free_terms: bool = False
) -> bool:
    """Whether the gradients of single examples follow from operations on rows, in which no leaf is used twice.

    This is read off the loss's program for `rows` and for FEW examples, since an array could have one of these numbers
    of rows by chance. Operations inside of another transformation do not count.

    Args:
      loss: (params, ClientData) -> scalar.
      params: any pytree of arrays.
      batch: a mini-batch; only its shapes and types count.
      rows: number of examples with which gradients are computed.
      free_terms: whether leaves may be used elsewhere too, in terms that depend on no example.
    """
    sizes = [
        jax.tree.map(lambda leaf, count=count: jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype), batch)
        for count in (FEW, rows)
    ]

    def uses(batch: ClientData) -> tuple[list[int], bool]:
        """Leaf of each operation on rows, in the order of the program, and whether a leaf is used elsewhere too."""
        found: list[int] = []
        others: list[int] = []

        def replacement(operation: Operation) -> jax.Array:
            found.append(operation.leaf)
            return operation.apply(operation.x, operation.parameter)

        jax.eval_shape(
            lambda params, batch: replace_operations(loss, params, batch, replacement, others.append), params, batch
        )
        return found, bool(others)

    (leaves, elsewhere), other = map(uses, sizes)
    if (leaves, elsewhere) != other or len(set(leaves)) < len(leaves):
        return False
    return not elsewhere or (free_terms and not any(_depends_on_examples(loss, params, few) for few in sizes))


def free_gradient(loss: KeylessLoss, params: PyTree, batch: ClientData) -> PyTree:
    """Gradient of the parameters' uses outside of operations on rows."""

    def tap(operation: Operation) -> jax.Array:
        return operation.apply(operation.x, jax.lax.stop_gradient(operation.parameter))

    return jax.grad(lambda params: replace_operations(loss, params, batch, tap))(params)


def _depends_on_examples(loss: KeylessLoss, params: PyTree, batch: ClientData) -> bool:
    """Whether `free_gradient` depends on the examples of a mini-batch."""
    jaxpr = jax.make_jaxpr(lambda params, batch: free_gradient(loss, params, batch))(params, batch).jaxpr
    depends = {*jaxpr.invars[len(jax.tree.leaves(params)) :]}

    def any_depends(variables: list[Any]) -> bool:
        return any(variable in depends for variable in variables if not isinstance(variable, Literal))

    for equation in jaxpr.eqns:
        if any_depends(equation.invars):
            depends.update(equation.outvars)
    return any_depends(jaxpr.outvars)


def add_norms(operation: Operation, probe: jax.Array) -> jax.Array:
    """Output of an operation, whose backward pass adds the squared norms [B] to the gradient of probe [B]."""

    @jax.custom_vjp
    def tap(x, y, probe):
        return y

    tap.defvjp(lambda x, y, probe: (y, x), lambda x, gradient: (None, gradient, operation.norms(x, gradient)))
    return tap(jax.lax.stop_gradient(operation.x), operation.apply(operation.x, operation.parameter), probe)


def weigh_gradient(operation: Operation, weights: jax.Array, parameter: jax.Array) -> jax.Array:
    """Output of an operation, whose backward pass adds the weighted gradient to the gradient of another parameter.

    Args:
      operation: operation of the output; the gradient of its own parameter is not affected.
      weights: [B], weights of the examples' gradients.
      parameter: parameter with the shape of the operation's.
    """

    @jax.custom_vjp
    def tap(x, y, parameter):
        return y

    def forward(x, y, parameter):
        return y, (x, parameter)

    def backward(kept, gradient):
        x, parameter = kept
        weighted = gradient * weights.reshape(-1, *[1] * (gradient.ndim - 1))
        (total,) = jax.vjp(lambda parameter: operation.apply(x, parameter), parameter)[1](weighted)
        return None, gradient, total

    tap.defvjp(forward, backward)
    return tap(jax.lax.stop_gradient(operation.x), operation.apply(operation.x, operation.parameter), parameter)
