"""Layers with PyTorch's initialization, since the papers ran PyTorch; and a `Model` from a backbone."""

import functools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfl_jax.base import Model
from pfl_jax.errors import InvalidInput
from pfl_jax.networks.convolution import conv2d
from pfl_jax.networks.passes import apply_backbone, init_backbone
from pfl_jax.networks.pooling import max_pool

Activation = Callable[[jax.Array], jax.Array]
"""Elementwise activation function."""

leaky_relu: Activation = functools.partial(nn.leaky_relu, negative_slope=0.01)


def torch_uniform(fan_in: int) -> nn.initializers.Initializer:
    """PyTorch's default initialization of weights and biases: uniform in (-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    bound = 1.0 / math.sqrt(fan_in)

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        # The same numbers for any shape, but a program of one axis is compiled in half the time.
        return jax.random.uniform(key, (math.prod(shape),), dtype, -bound, bound).reshape(shape)

    return init


NNX_INTERCEPTOR: ContextVar[Callable[..., Any] | None] = ContextVar("interceptor of nnx modules", default=None)
"""What models of flax.nnx modules call in the place of each part: (call, part, path, inputs) -> outputs. Flax itself
intercepts the methods of flax.linen modules alone."""


class Layer(nn.Module):
    """Layer in which each parameter is used in one method that interceptors can observe.

    With `flax.linen.intercept_methods` an interceptor gets every call of `multiply`, `convolve` and `add_bias`, with
    the input and the parameter as arguments; `pfl_jax.primitives.fisher` computes per-example gradient norms from them.
    """

    def multiply(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Product of x [B, d] and kernel [d, features]."""
        return x @ kernel

    def convolve(self, x: jax.Array, kernel: jax.Array, padding: int) -> jax.Array:
        """Convolution of x [B, H, W, Cin] with kernel [kh, kw, Cin, features]; padding as in `conv2d`."""
        return conv2d(x, kernel, padding)

    def add_bias(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        """Sum of x [B, ..., features] and bias [features]."""
        return x + bias


class Dense(Layer):
    """Affine layer x W + b for inputs [B, d], with PyTorch's default initialization."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = torch_uniform(x.shape[-1])
        kernel = self.param("kernel", init, (x.shape[-1], self.features))
        bias = self.param("bias", init, (self.features,))
        return self.add_bias(self.multiply(x, kernel), bias)


class ConvBlock(Layer):
    """Convolution, 2 x 2 max-pooling, bias, activation, for inputs [B, H, W, Cin].

    Attributes:
      features: output channels.
      size: side length of the square kernel.
      padding: rows and columns of zeros added on each side of the image.
      activation: must be non-decreasing, because pooling comes before it.
    """

    features: int
    size: int
    padding: int
    activation: Activation

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.size, self.size, x.shape[-1], self.features)
        init = torch_uniform(math.prod(shape[:3]))
        kernel = self.param("kernel", init, shape)
        bias = self.param("bias", init, (self.features,))
        return self.activation(self.add_bias(max_pool(self.before_pooling(x, kernel)), bias))

    def before_pooling(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Convolution of x with kernel. Adapters add to it here: interceptors of `convolve` would replace them."""
        return self.convolve(x, kernel, self.padding)


def assemble(
    backbone: nn.Module, num_features: int, input_shape: Sequence[int], num_classes: int, input_dtype: Any = jnp.float32
) -> Model:
    """Model of a backbone under a dense head.

    Args:
      backbone: module inputs [B, ...] -> features [B, d], with no variables besides its parameters and the statistics
        of batch normalization.
      num_features: d.
      input_shape: shape of one input.
      num_classes: K, or the number of outputs of another task.
      input_dtype: int32 for tokens.

    Raises:
      InvalidInput: there are no classes.
    """
    if num_classes < 1:
        raise InvalidInput(f"a classifier needs at least one class, not {num_classes}")
    head = Dense(num_classes)

    def init(key):
        backbone_key, head_key = jax.random.split(key)
        return {
            "backbone": init_backbone(backbone, backbone_key, jnp.zeros((1, *input_shape), input_dtype)),
            "head": head.init(head_key, jnp.zeros((1, num_features)))["params"],
        }

    return Model(
        init=init,
        features=lambda params, x: apply_backbone(backbone, params, x)[0],
        classify=lambda params, features: cast(jax.Array, head.apply({"params": params}, features)),
        num_features=num_features,
        num_classes=num_classes,
        batch_features=functools.partial(apply_backbone, backbone),
    )
