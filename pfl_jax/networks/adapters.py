"""Adapters: a few trained parameters beside layers whose own parameters stay frozen.

A model with adapters has them as its backbone, and its classifier as its head, so that every method runs on it. The
frozen parameters are `Model.frozen`: the engine holds one copy for all clients of a device, and under vmap a frozen
layer is one product over clients times examples. Nothing merges an adapter into a layer's kernel, which would copy the
kernel for each client.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfl_jax.base import Backbone, Model, PRNGKey, PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.frozen import Frozen
from pfl_jax.networks import layers


class Site(NamedTuple):
    """Layer that gets an adapter.

    Attributes:
      path: of the layer in its module.
      inputs: sizes [..., inputs] of what is contracted: of a dense layer its inputs, of a convolution its kernel
        without the outputs, of an embedding its rows.
      outputs: sizes of the outputs.
    """

    path: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Adapter(NamedTuple):
    """What is added to the output of a layer.

    Attributes:
      init: (key, Site) -> parameters, with which the layer's output is what it was.
      apply: (parameters, layer, Site, inputs, outputs) -> new outputs of the layer.
    """

    init: Callable[[PRNGKey, Site], PyTree]
    apply: Callable[[PyTree, nn.Module, Site, jax.Array, jax.Array], jax.Array]


def lora(
    model: Model,
    input_shape: Sequence[int],
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: str = "query|value",
    input_dtype: Any = jnp.float32,
    frozen_dtype: Any = jnp.float32,
) -> Model:
    r"""Model whose backbone is low-rank adapters: y = W x + (alpha / rank) B (A x), with W frozen.

    A is uniform in (-1/sqrt(n), 1/sqrt(n)) for n inputs, B is zero: at first the model is the frozen one. Dense layers,
    attention projections (`DenseGeneral`), convolutions (A has the kernel, B is 1 x 1) and embeddings can have one.

    Args:
      model: of flax.linen layers, such as `pfl_jax.networks.pretrained.bert` or `from_flax` gives; its initial
        backbone is frozen, its running statistics too. Its head stays the head, and is trained.
      input_shape: shape of one input.
      rank: r, columns of A and rows of B.
      alpha: scale of the adapters, times rank.
      targets: regular expression that is searched for in the paths of layers, such as "encoder/layer_5/query".
      input_dtype: int32 for tokens.
      frozen_dtype: of the frozen parameters, float32 or bfloat16.

    Returns:
      The model; its backbone has {"lora_a": [inputs, r], "lora_b": [r, outputs]} at the path of each layer.

    Raises:
      InvalidInput: targets is no regular expression, or no layer that can have an adapter matches it; rank is below 1.

    Example:
      >>> import jax
      >>> from pfl_jax import models
      >>> from pfl_jax.networks import adapters
      >>> model = adapters.lora(models.mlp((64,), 10), (64,), rank=2, targets="fc2")
      >>> jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(model.init, jax.random.key(0))["backbone"])
      {'fc2': {'lora_a': (64, 2), 'lora_b': (2, 32)}}

    Reference:
      Hu et al. LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022, Equation 3.
    """
    if rank < 1:
        raise InvalidInput(f"rank must be at least 1, not {rank}")

    def init(key, site):
        inputs, outputs = math.prod(site.inputs), math.prod(site.outputs)
        bound = 1 / math.sqrt(inputs)
        return {
            "lora_a": jax.random.uniform(key, (inputs, rank), minval=-bound, maxval=bound),
            "lora_b": jnp.zeros((rank, outputs)),
        }

    def apply(adapter, layer, site, x, y):
        low = _contract(layer, site, x, adapter["lora_a"])
        return y + (alpha / rank) * (low @ adapter["lora_b"]).reshape(y.shape)

    return adapted(
        model, input_shape, Adapter(init, apply), targets, input_dtype=input_dtype, frozen_dtype=frozen_dtype
    )


def adapted(
    model: Model,
    input_shape: Sequence[int],
    adapter: Adapter,
    targets: str,
    *,
    input_dtype: Any = jnp.float32,
    frozen_dtype: Any = jnp.float32,
) -> Model:
    """Model whose backbone is the adapters of some layers; the model's own backbone is frozen.

    Args:
      adapter: what each layer gets.
      model, input_shape, targets, input_dtype, frozen_dtype: see `lora`.

    Raises:
      InvalidInput: see `lora`.
    """
    try:
        pattern = re.compile(targets)
    except re.error as error:
        raise InvalidInput(f"targets {targets!r} is no regular expression: {error}") from None
    backbone = jax.jit(lambda key: model.init(key)["backbone"])(jax.random.key(0))
    every = _sites(model, backbone, jax.ShapeDtypeStruct((2, *input_shape), input_dtype))
    sites = {path: site for path, site in every.items() if pattern.search("/".join(path))}
    if not sites:
        names = ", ".join("/".join(path) for path in every) or "none"
        raise InvalidInput(f"targets {targets!r} matches no layer that can have an adapter; there are {names}")
    frozen = Frozen(jax.tree.map(lambda leaf: leaf.astype(frozen_dtype), backbone))

    def init(key):
        head_key, key = jax.random.split(key)
        keys = jax.random.split(key, len(sites))
        nested = _nested({path: adapter.init(keys[i], sites[path]) for i, path in enumerate(sites)})
        return {"backbone": nested, "head": model.init(head_key)["head"]}

    def batch_features(backbone, x, mask=None, key=None):
        del mask  # Statistics of batch normalization are frozen.
        with nn.intercept_methods(_adapting(adapter, sites, backbone)):
            base = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), frozen.read())
            if model.batch_features is None:
                return model.features(base, x), {}
            return cast(Any, model.batch_features)(base, x, None, key)[0], {}

    return model._replace(
        init=init,
        features=lambda backbone, x: batch_features(backbone, x)[0],
        batch_features=batch_features,
        frozen=frozen,
    )


def _adapting(adapter: Adapter, sites: dict[tuple[str, ...], Site], backbone: Backbone) -> Any:
    """Interceptor of Flax calls that applies the adapters in `backbone` to their layers."""

    def intercept(call, args, kwargs, context):
        output = call(*args, **kwargs)
        site = sites.get(context.module.path)
        if site is None or context.method_name != _method(context.module):
            return output
        own = backbone
        for name in site.path:
            own = own[name]
        return adapter.apply(own, context.module, site, args[0], output)

    return intercept


def _method(layer: nn.Module) -> str | None:
    """Method of a layer whose result gets the adapter; None for layers that cannot have one."""
    if isinstance(layer, layers.Dense):
        return "multiply"
    if isinstance(layer, layers.ConvBlock):
        return "convolve"
    return "__call__" if isinstance(layer, nn.Dense | nn.DenseGeneral | nn.Conv | nn.Embed) else None


def _sites(model: Model, backbone: Backbone, inputs: jax.ShapeDtypeStruct) -> dict[tuple[str, ...], Site]:
    """All layers of a backbone that can have an adapter, by path."""
    found: dict[tuple[str, ...], Site] = {}

    def record(call, args, kwargs, context):
        layer = context.module
        if context.method_name == _method(layer) and layer.path:
            kernel = layer.get_variable("params", "embedding" if isinstance(layer, nn.Embed) else "kernel")
            # The head has no parameters here.
            if kernel is not None:
                outputs = len(layer.features) if isinstance(layer.features, tuple) else 1
                found[layer.path] = Site(layer.path, kernel.shape[:-outputs], kernel.shape[-outputs:])
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        # A new function: JAX remembers the trace of one that it has seen, and would call no layer.
        jax.eval_shape(lambda *args: model.features(*args), backbone, inputs)
    return found


def _contract(layer: nn.Module, site: Site, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A layer's operation with `kernel` [inputs, r] in the place of its own kernel, with r outputs."""
    if isinstance(layer, nn.Embed):
        return kernel[x]
    if isinstance(layer, layers.ConvBlock):
        return layers.conv2d(x, kernel.reshape(*site.inputs, -1), layer.padding)
    if isinstance(layer, nn.Conv):
        like = layer.clone(parent=None, name=None, features=kernel.shape[-1], use_bias=False)
        return cast(jax.Array, like.apply({"params": {"kernel": kernel.reshape(*site.inputs, -1)}}, x))
    return x.reshape(*x.shape[: x.ndim - len(site.inputs)], -1) @ kernel


def _nested(leaves: dict[tuple[str, ...], PyTree]) -> dict[str, Any]:
    """Nested dictionaries of values by path."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        inner = tree
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    return tree
