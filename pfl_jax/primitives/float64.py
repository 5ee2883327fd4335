"""float64 computations inside float32 programs."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import export

from pfl_jax.base import PyTree


def in_float64(function: Callable[..., PyTree], *, one_by_one: bool = False) -> Callable[..., PyTree]:
    """Run a function of arrays in JAX's 64-bit mode, also under jit, vmap, scan and grad.

    `with jax.enable_x64(True)` around a part of a float32 program is not enough. JAX expands some operations (argmin,
    top_k, derivative rules) only when it lowers the program, and vmap rewrites code that was already traced: both
    happen after the context has ended, where 64-bit mode is off. Here the function enters the program as a whole:
    `jax.export` traces and lowers it in 64-bit mode, and the float32 program calls the result. Its batched version
    under vmap and its derivative enter in the same way. The function may therefore use all of JAX.

    Args:
      function: arrays -> pytree of float arrays. It must cast its arguments to float64 itself, and its results to
        float32 unless its caller works in 64-bit mode too.
      one_by_one: whether vmap calls it for one row after another. Batched factorizations wait for threads on a CPU, and
        two devices that run them at the same time can use up all threads and wait forever.

    Returns:
      A function of the same positional arguments, with reverse-mode derivatives. It keeps its compiled programs, as
      jax.jit does.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives.float64 import in_float64
      >>> @in_float64
      ... def difference(x, y):
      ...     return jnp.float32(jnp.float64(x) + 1e-12 - jnp.float64(y))
      >>> print(difference(jnp.float32(1), jnp.float32(1)) > 0)
      True
    """
    batched = jax.vmap(function)
    if one_by_one:
        batched = lambda *arguments: jax.lax.map(lambda row: function(*row), arguments)  # noqa: E731

    def derivative(arguments, cotangents):
        _, pull_back = jax.vjp(function, *arguments)
        # None stands for the derivative with respect to integers.
        return jax.tree.map(lambda leaf: None if leaf.dtype == jax.dtypes.float0 else leaf, pull_back(cotangents))

    @jax.custom_batching.custom_vmap
    def call(*arguments):
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), arguments)

        def lowered(platform):
            with jax.enable_x64(True):
                return export.export(jax.jit(function), platforms=[platform])(*shapes).call

        # An array may lie on the CPU of a machine with an accelerator. One function for both would bring the CPU's
        # factorizations into the accelerator's program.
        branches = {platform: lowered(platform) for platform in {"cpu", export.default_export_platform()}}
        return jax.lax.platform_dependent(*arguments, **branches)

    @call.def_vmap
    def _(axis_size, is_batched, *arguments):
        arguments = jax.tree.map(
            lambda leaf, has_axis: leaf if has_axis else jnp.broadcast_to(leaf, (axis_size, *jnp.shape(leaf))),
            arguments,
            tuple(is_batched),
        )
        outputs = in_float64(batched, one_by_one=one_by_one)(*arguments)
        return outputs, jax.tree.map(lambda _: True, outputs)

    differentiable = jax.custom_vjp(call)
    differentiable.defvjp(
        lambda *arguments: (call(*arguments), arguments),
        lambda arguments, cotangents: in_float64(derivative, one_by_one=one_by_one)(arguments, cotangents),
    )
    compiled = jax.jit(differentiable)

    # A plain function, so that objects that hold it can be pickled by its name.
    @functools.wraps(function)
    def in_place(*arguments):
        return compiled(*arguments)

    return in_place
