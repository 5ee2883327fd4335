"""Adapters: a few trained parameters beside layers whose own parameters stay frozen.

A model with adapters has them as its backbone, and its classifier as its head, so that every method runs on it. The
frozen parameters are `Model.frozen`: the engine holds one copy for all clients of a device, and under vmap a frozen
layer is one product over clients times examples. No adapter is ever merged into a layer's kernel, which would copy the
kernel for each client.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfl_jax.base import Backbone, Model, PRNGKey, PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.frozen import Frozen
from pfl_jax.networks import adapted_layers, module_checks
from pfl_jax.networks.split import pattern_of


class Site(NamedTuple):
    """Layer that gets an adapter.

    Attributes:
      path: path of the layer in its module.
      inputs: sizes [..., inputs] of the contracted axes: inputs of a dense layer, kernel of a convolution without the
        outputs, rows of an embedding.
      outputs: sizes of the outputs.
    """

    path: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Adapter(NamedTuple):
    """Change to the output of a layer.

    Attributes:
      init: (key, Site) -> dictionary of trained parameters.
      apply: (parameters, layer, Site, inputs, outputs) -> new outputs of the layer.
      fixed: Site -> dictionary of frozen parameters, which `apply` gets beside the trained ones.
    """

    init: Callable[[PRNGKey, Site], dict[str, jax.Array]]
    apply: Callable[[PyTree, nn.Module, Site, jax.Array, jax.Array], jax.Array]
    fixed: Callable[[Site], dict[str, jax.Array]] = lambda site: {}


def lora(
    model: Model,
    input_shape: Sequence[int],
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: str = "query|value",
    frozen_a: PRNGKey | None = None,
    input_dtype: Any = jnp.float32,
    frozen_dtype: Any = jnp.float32,
) -> Model:
    r"""Model whose backbone is low-rank adapters: y = W x + (alpha / rank) B (A x), with W frozen.

    A is uniform in (-1/sqrt(n), 1/sqrt(n)) for n inputs, B is zero: at first the model is the frozen one. Dense layers,
    attention projections (`DenseGeneral`), convolutions (A has the kernel, B is 1 x 1) and embeddings can be adapted.

    Args:
      model: model of flax.linen or flax.nnx layers, such as from `pfl_jax.networks.pretrained.bert` or `from_flax`. Its
        initial backbone is frozen, with its running statistics. Its head stays the head, and is trained.
      input_shape: shape of one input.
      rank: r, columns of A and rows of B.
      alpha: scale of the adapters, times rank.
      targets: regular expression that is searched for in the paths of layers, such as "encoder/layer_5/query".
      frozen_a: random key for matrices A that stay as drawn, so that clients train only B (FFA-LoRA). Then the mean of
        the clients' adapters is exactly the mean of their merged kernels. None trains both.
      input_dtype: int32 for tokens.
      frozen_dtype: type of the frozen parameters, float32 or bfloat16.

    Returns:
      The model; its backbone has {"lora_a": [inputs, r], "lora_b": [r, outputs]} at the path of each layer. A third
      entry, "residual" [inputs, outputs], is added to A B if a method puts one there.

    Raises:
      InvalidInput: targets is not a regular expression, or matches no layer that can have an adapter; rank is below 1.

    Example:
      >>> import jax
      >>> from pfl_jax import models
      >>> from pfl_jax.networks import adapters
      >>> model = adapters.lora(models.mlp((64,), 10), (64,), rank=2, targets="fc2")
      >>> jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(model.init, jax.random.key(0))["backbone"])
      {'fc2': {'lora_a': (64, 2), 'lora_b': (2, 32)}}

    Reference:
      Hu et al. LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022, Equation 3. Sun, Li, Li, Ding. Improving
      LoRA in Privacy-Preserving Federated Learning. ICLR 2024, Section 3 (FFA-LoRA).
    """
    if rank < 1:
        raise InvalidInput(f"rank must be at least 1, not {rank}")

    def draw(key, site):
        return {"lora_a": _uniform(key, math.prod(site.inputs), rank)}

    def init(key, site):
        trained = {} if frozen_a is not None else draw(key, site)
        return trained | {"lora_b": jnp.zeros((rank, math.prod(site.outputs)))}

    def apply(adapter, layer, site, x, y):
        update = adapted_layers.contract(layer, site.inputs, x, adapter["lora_a"]) @ adapter["lora_b"]
        if "residual" in adapter:
            update += adapted_layers.contract(layer, site.inputs, x, adapter["residual"])
        return y + (alpha / rank) * update.reshape(y.shape)

    def fixed(site):
        return {} if frozen_a is None else draw(jax.random.fold_in(frozen_a, _number(site.path)), site)

    adapter = Adapter(init, apply, fixed)
    return adapted(model, input_shape, adapter, targets, input_dtype=input_dtype, frozen_dtype=frozen_dtype)


def bottleneck(
    model: Model,
    input_shape: Sequence[int],
    *,
    size: int = 16,
    targets: str = "attention_output|output",
    input_dtype: Any = jnp.float32,
    frozen_dtype: Any = jnp.float32,
) -> Model:
    """Model whose backbone is small perceptrons after layers: y + gelu(y D) U for the outputs y of a frozen layer.

    D is uniform like A in `lora`, U is zero. Pooling and activation come after the adapters.

    Args:
      size: width of the hidden layer, columns of D and rows of U.
      model, input_shape, targets, input_dtype, frozen_dtype: see `lora`.

    Raises:
      InvalidInput: see `lora`; size is below 1.

    Reference:
      Houlsby et al. Parameter-Efficient Transfer Learning for NLP. ICML 2019, Section 2.1, without biases.
    """
    if size < 1:
        raise InvalidInput(f"size must be at least 1, not {size}")

    def init(key, site):
        width = site.outputs[-1]
        return {"down": _uniform(key, width, size), "up": jnp.zeros((size, width))}

    def apply(adapter, layer, site, x, y):
        return y + nn.gelu(y @ adapter["down"]) @ adapter["up"]

    kinds = {"input_dtype": input_dtype, "frozen_dtype": frozen_dtype}
    return adapted(model, input_shape, Adapter(init, apply), targets, **kinds)


def prompts(
    model: Model,
    input_shape: Sequence[int],
    *,
    tokens: int = 8,
    after: str = "embeddings",
    input_dtype: Any = jnp.int32,
    frozen_dtype: Any = jnp.float32,
) -> Model:
    """Model whose backbone is the states of some tokens, which are put before the states of every example.

    These states are drawn from a normal distribution with deviation 0.02.

    Args:
      tokens: number of these tokens, p.
      after: path, or end of a path, of the part of the network whose outputs [B, T, d] become [B, p + T, d]; a regular
        expression.
      model, input_shape, input_dtype, frozen_dtype: see `lora`. The following parts must take any number of tokens, as
        the encoder of `pfl_jax.networks.pretrained.bert` does.

    Raises:
      InvalidInput: there is no such part; tokens is below 1.

    Reference:
      Lester, Al-Rfou, Constant. The Power of Scale for Parameter-Efficient Prompt Tuning. EMNLP 2021, Section 2.
    """
    if tokens < 1:
        raise InvalidInput(f"tokens must be at least 1, not {tokens}")

    def init(key, site):
        return {"tokens": 0.02 * jax.random.normal(key, (tokens, *site.outputs))}

    def apply(adapter, layer, site, x, y):
        before = jnp.broadcast_to(adapter["tokens"], (len(y), *adapter["tokens"].shape))
        return jnp.concatenate([before.astype(y.dtype), y], axis=1)

    targets, kinds = f"(^|/)({after})$", {"input_dtype": input_dtype, "frozen_dtype": frozen_dtype}
    return adapted(model, input_shape, Adapter(init, apply), targets, called=adapted_layers.called_part, **kinds)


def linear_probe(
    model: Model, input_shape: Sequence[int], *, input_dtype: Any = jnp.float32, frozen_dtype: Any = jnp.float32
) -> Model:
    """Model without any adapter: its backbone is empty and frozen; only its head is trained.

    Args:
      model, input_shape, input_dtype, frozen_dtype: see `lora`.
    """
    none = Adapter(lambda key, site: {}, lambda adapter, layer, site, x, y: y)
    return adapted(model, input_shape, none, None, input_dtype=input_dtype, frozen_dtype=frozen_dtype)


def adapted(
    model: Model,
    input_shape: Sequence[int],
    adapter: Adapter,
    targets: str | None,
    *,
    input_dtype: Any = jnp.float32,
    frozen_dtype: Any = jnp.float32,
    called: Callable[[Any], str | None] = adapted_layers.called_layer,
) -> Model:
    """Model whose backbone is the adapters of some layers; the model's own backbone is frozen.

    Args:
      adapter: adapter of each layer.
      called: layer, or any part of the network -> name of the method whose outputs get the adapter; None for a layer
        that cannot have one. By default layers with a kernel.
      model, input_shape, targets, input_dtype, frozen_dtype: see `lora`; targets None: no layer gets an adapter.

    Raises:
      InvalidInput: see `lora`.
    """
    pattern = None if targets is None else pattern_of("targets", targets)
    backbone = jax.jit(lambda key: model.init(key)["backbone"])(jax.random.key(0))
    every = _sites(model, backbone, jax.ShapeDtypeStruct((2, *input_shape), input_dtype), called)
    sites = {path: site for path, site in every.items() if pattern and pattern.search("/".join(path))}
    if pattern and not sites:
        names = ", ".join("/".join(path) for path in every) or "none"
        raise InvalidInput(f"targets {targets!r} matches no layer that can have an adapter; there are {names}")
    fixed = _nested({path: adapter.fixed(site) for path, site in sites.items()})
    base = jax.tree.map(lambda leaf: leaf.astype(frozen_dtype), backbone)
    frozen = Frozen({"base": base, "adapters": fixed})

    def init(key):
        head_key, key = jax.random.split(key)
        keys = jax.random.split(key, max(1, len(sites)))
        nested = _nested({path: adapter.init(keys[i], sites[path]) for i, path in enumerate(sites)})
        return {"backbone": nested, "head": model.init(head_key)["head"]}

    def batch_features(backbone, x, mask=None, key=None):
        del mask  # Statistics of batch normalization are frozen.
        values = frozen.read()

        def with_adapter(call, layer, path, args):
            output, site = call(*args), sites.get(path)
            if site is None:
                return output
            own, constant = backbone, values["adapters"]
            for name in path:
                own, constant = own[name], constant[name]
            return adapter.apply(constant | own, layer, site, args[0], output)

        with adapted_layers.intercepted(called, with_adapter):
            base = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), values["base"])
            if model.batch_features is None:
                return model.features(base, x), {}
            return cast(Any, model.batch_features)(base, x, None, key)[0], {}

    return model._replace(
        init=init,
        features=lambda backbone, x: batch_features(backbone, x)[0],
        batch_features=batch_features,
        frozen=frozen,
    )


def _uniform(key: PRNGKey, inputs: int, outputs: int) -> jax.Array:
    """Matrix [inputs, outputs], uniform in (-1/sqrt(inputs), 1/sqrt(inputs))."""
    bound = 1 / math.sqrt(inputs)
    return jax.random.uniform(key, (inputs, outputs), minval=-bound, maxval=bound)


def _number(path: tuple[str, ...]) -> int:
    """Number for the key of a layer, whichever other layers have adapters."""
    return zlib.crc32("/".join(path).encode())


def _sites(
    model: Model, backbone: Backbone, inputs: jax.ShapeDtypeStruct, called: Callable[[Any], str | None]
) -> dict[tuple[str, ...], Site]:
    """All layers of a backbone that can have an adapter, or all its parts, by path."""
    found: dict[tuple[str, ...], Site] = {}

    def record(call, layer, path, args):
        output, kernel = call(*args), adapted_layers.kernel_of(layer)
        # Here the head has no parameters.
        if kernel is not None and path:
            features = layer.features if isinstance(layer, nn.Module) else getattr(layer, "out_features", 1)
            outputs = len(features) if isinstance(features, tuple) else 1
            found[path] = Site(path, kernel.shape[:-outputs], kernel.shape[-outputs:])
        elif path and adapted_layers.kind_of(layer) is None and hasattr(output, "shape"):
            found[path] = Site(path, (), output.shape[-1:])
        return output

    with adapted_layers.intercepted(called, record), module_checks.applied(inputs):
        # A new function each time: JAX remembers the trace of a known function, and would not call the layers again.
        jax.eval_shape(lambda *args: model.features(*args), backbone, inputs)
    return found


def _nested(leaves: dict[tuple[str, ...], PyTree]) -> dict[str, Any]:
    """Nested dictionaries of values by path."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        inner = tree
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    return tree
