"""Layers of networks whose outputs adapters change: from flax.linen, flax.nnx and this project."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import flax.linen as nn
import jax

from pfl_jax.networks import layers


@contextlib.contextmanager
def intercepted(called: Callable[[Any], str | None], handle: Callable[..., Any]) -> Iterator[None]:
    """Context in which parts of a network are called by `handle`: (call, part, path, inputs) -> outputs.

    Args:
      called: part -> name of the method; None for a part that is left alone. For flax.nnx modules it is "__call__".
      handle: the function.
    """

    def of_linen(call, args, kwargs, context):
        if context.method_name != called(context.module):
            return call(*args, **kwargs)
        return handle(lambda *args: call(*args, **kwargs), context.module, context.module.path, args)

    def of_nnx(call, part, path, args):
        return handle(call, part, path, args) if called(part) else call(*args)

    token = layers.NNX_INTERCEPTOR.set(of_nnx)
    try:
        with nn.intercept_methods(of_linen):
            yield
    finally:
        layers.NNX_INTERCEPTOR.reset(token)


def kind_of(layer: Any) -> str | None:
    """Kind of a layer with a kernel, of flax.linen, flax.nnx or this project; None for other parts of a network."""
    kinds: dict[type, str] = {
        layers.Dense: "dense",
        nn.Dense: "dense",
        nn.DenseGeneral: "dense",
        nn.Conv: "convolution",
        nn.Embed: "embedding",
    }
    if not isinstance(layer, nn.Module):
        from flax import nnx

        kinds = {nnx.Linear: "dense", nnx.LinearGeneral: "dense", nnx.Conv: "convolution", nnx.Embed: "embedding"}
    return next((kind for one, kind in kinds.items() if isinstance(layer, one)), None)


def called_layer(layer: Any) -> str | None:
    """Method that calls a layer with a kernel; None for other parts."""
    return kind_of(layer) and "__call__"


def called_part(part: Any) -> str:
    """Method that calls any part of a network."""
    return "__call__"


def kernel_of(layer: Any) -> Any:
    """Kernel or embedding of a layer; None without one."""
    name = "embedding" if kind_of(layer) == "embedding" else "kernel"
    return layer.get_variable("params", name) if isinstance(layer, nn.Module) else getattr(layer, name, None)


def contract(layer: Any, inputs: Sequence[int], x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A layer's operation on x with `kernel` [inputs, r] instead of its own kernel, with r outputs.

    Args:
      layer: a layer with a kind, see `kind_of`.
      inputs: sizes of the contracted axes.
      x: input of the layer.
      kernel: the other kernel.
    """
    kind = kind_of(layer)
    if kind == "embedding":
        return kernel[x]
    if kind == "dense":
        return x.reshape(*x.shape[: x.ndim - len(inputs)], -1) @ kernel
    kernel = kernel.reshape(*inputs, -1)
    if not isinstance(layer, nn.Module):
        return _nnx_convolution(layer, x, kernel)
    like = layer.clone(parent=None, name=None, features=kernel.shape[-1], use_bias=False)
    return cast(jax.Array, cast(Any, like).apply({"params": {"kernel": kernel}}, x))


def _nnx_convolution(layer: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolution of a flax.nnx layer with another kernel, without its bias."""
    from flax import nnx

    names = ("kernel_size", "strides", "padding", "input_dilation", "kernel_dilation", "feature_group_count")
    shape = {name: getattr(layer, name) for name in names}
    like = nnx.eval_shape(
        lambda: nnx.Conv(layer.in_features, kernel.shape[-1], use_bias=False, rngs=nnx.Rngs(0), **shape)
    )
    graph, _ = nnx.split(like)
    return nnx.merge(graph, nnx.State({"kernel": nnx.Param(kernel)}))(x)
