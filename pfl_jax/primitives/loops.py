"""Loops whose number of steps is known only when they run, and their derivatives."""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import eval_jaxpr

from pfl_jax.base import PyTree


def differentiated_by(
    loop: Callable[..., PyTree], scan: Callable[..., PyTree], fn: Callable[..., PyTree], *examples: tuple[PyTree, ...]
) -> Callable[..., PyTree]:
    """Function loop(fn, ...) whose derivatives are those of scan(fn, ...), which is equal and takes longer.

    JAX has derivatives in reverse mode (jax.grad) only of loops whose number of steps is static. So the loop runs
    unless a derivative is asked for, and where one is, a scan of the most steps that there can be, in which surplus
    ones change nothing.

    Args:
      loop, scan: functions of `fn` and of further arguments, which close over no traced arrays.
      fn: what they repeat; may close over traced arrays.
      *examples: arguments of `fn`, or their shapes and types, for each set of shapes that it is called with.

    Returns:
      The function of the further arguments.
    """
    # The rule for derivatives needs what `fn` closes over as an argument.
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
