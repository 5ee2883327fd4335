"""Layers with PyTorch's initialization, since the papers used PyTorch; and a `Model` from a backbone."""

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
from pfl_jax.networks.passes import apply_backbone, init_backbone

Activation = Callable[[jax.Array], jax.Array]
"""Elementwise activation function."""

leaky_relu: Activation = functools.partial(nn.leaky_relu, negative_slope=0.01)


def torch_uniform(fan_in: int) -> nn.initializers.Initializer:
    """PyTorch's default initialization of weights and biases: uniform in (-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    bound = 1.0 / math.sqrt(fan_in)

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        # The same numbers in any shape, but a program with one axis is compiled in half the time.
        return jax.random.uniform(key, (math.prod(shape),), dtype, -bound, bound).reshape(shape)

    return init


NNX_INTERCEPTOR: ContextVar[Callable[..., Any] | None] = ContextVar("interceptor of nnx modules", default=None)
"""Function that models of flax.nnx modules call in place of each part: (call, part, path, inputs) -> outputs. Flax
itself intercepts only the methods of flax.linen modules."""


class Dense(nn.Module):
    """Affine layer x W + b for inputs [B, d], with PyTorch's default initialization."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = torch_uniform(x.shape[-1])
        kernel = self.param("kernel", init, (x.shape[-1], self.features))
        return x @ kernel + self.param("bias", init, (self.features,))


class ConvBlock(nn.Module):
    """Convolution, 2 x 2 max-pooling, bias, activation, for inputs [B, H, W, Cin].

    Attributes:
      features: output channels.
      size: side length of the square kernel.
      padding: rows and columns of zeros added on each side of the image.
      activation: activation, non-decreasing because pooling comes before it.
    """

    features: int
    size: int
    padding: int
    activation: Activation

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = torch_uniform(self.size**2 * x.shape[-1])
        sides = (self.size, self.size)
        convolution = nn.Conv(self.features, sides, padding=self.padding, use_bias=False, kernel_init=init)
        # The kernel is beside the bias.
        nn.share_scope(self, convolution)
        y = nn.max_pool(convolution(x), (2, 2), strides=(2, 2))
        return self.activation(y + self.param("bias", init, (self.features,)))


def last_state(width: int, x: jax.Array, real: jax.Array) -> jax.Array:
    """Last state [B, width] of a gated recurrent unit over the steps of x [B, T, C]; inside a compact module.

    Args:
      width: width of the state.
      x: the inputs [B, T, C].
      real: bool [B, T]; steps that are False, before, between or after the real ones, leave the state unchanged.
    """

    def step(cell, state, inputs):
        values, real = inputs
        return jnp.where(real[:, None], cell(state, values)[0], state), None

    over = nn.scan(step, variable_broadcast="params", split_rngs={"params": False}, in_axes=1)
    state, _ = over(nn.GRUCell(width, name="gru"), jnp.zeros((x.shape[0], width), x.dtype), (x, real))
    return state


def assemble(
    backbone: nn.Module, num_features: int, input_shape: Sequence[int], num_classes: int, input_dtype: Any = jnp.float32
) -> Model:
    """Model of a backbone under a dense head.

    Args:
      backbone: module inputs [B, ...] -> features [B, d], without variables other than its parameters and the
        statistics of batch normalization.
      num_features: d.
      input_shape: shape of one input.
      num_classes: K, or the number of outputs of another task.
      input_dtype: int32 for tokens.

    Raises:
      InvalidInput: there are no classes.
    """
    if num_classes < 1:
        raise InvalidInput(
            f"a model needs at least one output, not {num_classes}: the number of classes, or of the values of another "
            "task (data whose targets are not classes has 0 classes)"
        )
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
