"""Loops whose number of steps is known only when they run, and their derivatives."""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import eval_jaxpr

from pfl_jax.base import PyTree


def differentiated_by(
    loop: Callable[..., PyTree], scan: Callable[..., PyTree], fn: Callable[..., PyTree], *examples: tuple[PyTree, ...]
) -> Callable[..., PyTree]:
    """Function loop(fn, ...) with the derivatives of scan(fn, ...), which has equal results and takes longer.

    JAX has derivatives in reverse mode (jax.grad) only of loops with a static number of steps. The loop therefore runs
    unless a derivative is asked for. Then a scan over the largest possible number of steps runs, whose surplus steps
    change nothing.

    Args:
      loop, scan: functions of `fn` and of further arguments, which do not close over traced arrays.
      fn: function that both repeat; may close over traced arrays.
      *examples: arguments of `fn`, or their shapes and types, for each set of shapes that it is called with.

    Returns:
      The function of the further arguments.
    """
    # The rule for derivatives needs the arrays that `fn` closes over as arguments.
    traced = {_shapes(example): jax.make_jaxpr(fn, return_shape=True)(*example) for example in examples}

    def closed(captured: list[list[Any]]) -> Callable[..., PyTree]:
        by_shapes = dict(zip(traced, captured, strict=True))

        def evaluate(*arguments: PyTree) -> PyTree:
            program, result = traced[_shapes(arguments)]
            leaves = eval_jaxpr(program.jaxpr, by_shapes[_shapes(arguments)], *jax.tree.leaves(arguments))
            return jax.tree.unflatten(jax.tree.structure(result), leaves)

        return evaluate

    @jax.custom_jvp
    def run(captured, *arguments):
        return loop(closed(captured), *arguments)

    @run.defjvp
    def _(primals, tangents):
        return jax.jvp(lambda captured, *arguments: scan(closed(captured), *arguments), primals, tangents)

    return lambda *arguments: run([program.consts for program, _ in traced.values()], *arguments)


def _shapes(arguments: tuple[PyTree, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(jax.numpy.shape(leaf) for leaf in jax.tree.leaves(arguments))
