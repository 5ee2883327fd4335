"""float64 computations inside float32 programs."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pfl_jax.base import PyTree


def in_float64(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Run a function of arrays in JAX's 64-bit mode, also under jit, vmap or scan.

    `with jax.enable_x64(True)` alone does not survive every nesting: vmap rewrites what was already traced (a jitted
    function, the body of a scan) after the context is left, and every explicit float64 in it becomes a float32. Here
    the function is opaque to vmap, which gets its batched form traced in 64-bit mode as well.

    Args:
      function: arrays -> pytree of arrays. It widens its arguments itself and returns nothing wider than float32,
        unless its caller works in 64-bit mode too. Keep the result and call it again: what it compiles is kept with it.

    Returns:
      A function of the same positional arguments. It has no derivative.
    """
    compiled = jax.jit(function)
    batched = functools.cache(lambda: in_float64(jax.vmap(function)))

    @jax.custom_batching.custom_vmap
    def call(*arguments):
        with jax.enable_x64(True):
            return compiled(*arguments)

    @call.def_vmap
    def _(axis_size, is_batched, *arguments):
        arguments = jax.tree.map(
            lambda leaf, has_axis: leaf if has_axis else jnp.broadcast_to(leaf, (axis_size, *jnp.shape(leaf))),
            arguments,
            tuple(is_batched),
        )
        outputs = batched()(*arguments)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return call
