"""Networks of the papers, as `Model(init, features, classify)` of pure functions.

The features, which are the input of the head, are the activations of the last hidden layer. Convolution blocks pool
before they add the bias and apply the activation: the result is the same because the activations are monotone, and
only a quarter of the elements are processed. Weights and biases are initialized as in PyTorch, which the papers used.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfl_jax.base import Model, PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.networks.convolution import conv2d
from pfl_jax.networks.pooling import max_pool

Activation = Callable[[jax.Array], jax.Array]
"""Elementwise activation function."""

leaky_relu: Activation = functools.partial(nn.leaky_relu, negative_slope=0.01)


def torch_uniform(fan_in: int) -> nn.initializers.Initializer:
    """PyTorch's default initialization of weights and biases: uniform in (-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    bound = 1.0 / math.sqrt(fan_in)

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


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
        return self.activation(self.add_bias(max_pool(self.convolve(x, kernel, self.padding)), bias))


class Backbone(nn.Module):
    """Convolution blocks, then hidden dense layers, for inputs [B, ...] -> features [B, d]; integers as numbers.

    Attributes:
      blocks: (features, size, padding) of each convolution block.
      hidden: widths of the dense layers; the last is d.
      activation: activation after every layer, including the last.
    """

    blocks: Sequence[tuple[int, int, int]]
    hidden: Sequence[int]
    activation: Activation

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.integer):
            # Sums of squares, as Fisher traces take of inputs, would overflow.
            x = x.astype(jnp.float32)
        for index, (features, size, padding) in enumerate(self.blocks, start=1):
            x = ConvBlock(features, size, padding, self.activation, name=f"conv{index}")(x)
        x = x.reshape(x.shape[0], -1)
        for index, width in enumerate(self.hidden, start=1):
            x = self.activation(Dense(width, name=f"fc{index}")(x))
        return x


def _check_size(input_shape: Sequence[int], blocks: Sequence[tuple[int, int, int]], name: str) -> None:
    """Raise InvalidInput unless images of this shape are large enough for all blocks."""
    if len(input_shape) != 3:
        raise InvalidInput(f"{name} needs images (height, width, channels), not shape {tuple(input_shape)}")
    sides = input_shape[:2]
    for _, size, padding in blocks:
        sides = [(side + 2 * padding - size + 1) // 2 for side in sides]
        if min(sides) < 1:
            raise InvalidInput(
                f"images of {input_shape[0]}x{input_shape[1]} are too small for {name}: "
                "use larger ones or the model mlp"
            )


def _model(backbone: Backbone, input_shape: Sequence[int], num_classes: int) -> Model:
    if num_classes < 1:
        raise InvalidInput(f"a classifier needs at least one class, not {num_classes}")
    head = Dense(num_classes)
    num_features = backbone.hidden[-1]

    def init(key):
        backbone_key, head_key = jax.random.split(key)
        return {
            "backbone": backbone.init(backbone_key, jnp.zeros((1, *input_shape)))["params"],
            "head": head.init(head_key, jnp.zeros((1, num_features)))["params"],
        }

    def apply(module: nn.Module, params: PyTree, x: jax.Array) -> jax.Array:
        return cast(jax.Array, module.apply({"params": params}, x))

    return Model(
        init=init,
        features=functools.partial(apply, backbone),
        classify=functools.partial(apply, head),
        num_features=num_features,
        num_classes=num_classes,
    )


def fedpac_cnn(input_shape: Sequence[int], num_classes: int) -> Model:
    """Networks of FedPAC: leaky ReLU (slope 0.01) after every layer, 128 features.

    Gray images: convolutions with 16 (5x5) and 32 (5x5, padding 1) channels, each with pooling, then 128 units. Color
    images: a third convolution with 64 channels (3x3, padding 1).

    Args:
      input_shape: (height, width, channels) of the images.
      num_classes: K.

    Raises:
      InvalidInput: if the images are too small.

    Reference:
      Xu, Tong, Huang. Personalized Federated Learning with Feature Alignment and Classifier Collaboration. ICLR 2023,
      Appendix B.1. What the paper leaves open follows the released code (features are taken after the activation).
    """
    blocks = [(16, 5, 0), (32, 5, 1)]
    if len(input_shape) == 3 and input_shape[2] > 1:
        blocks.append((64, 3, 1))
    _check_size(input_shape, blocks, "fedpac_cnn")
    return _model(Backbone(tuple(blocks), (128,), leaky_relu), input_shape, num_classes)


def fedavg_cnn(input_shape: Sequence[int], num_classes: int) -> Model:
    """Network of FedAS's experiments: convolutions with 32 and 64 channels (5x5) and pooling, 512 units, ReLU.

    Args:
      input_shape: (height, width, channels) of the images.
      num_classes: K.

    Raises:
      InvalidInput: if the images are too small.

    Reference:
      McMahan, Moore, Ramage, Hampson, Aguera y Arcas. Communication-Efficient Learning of Deep Networks from
      Decentralized Data. AISTATS 2017, Section 3; without padding, as in FedAS (Yang, Huang, Ye. CVPR 2024).
    """
    blocks = ((32, 5, 0), (64, 5, 0))
    _check_size(input_shape, blocks, "fedavg_cnn")
    return _model(Backbone(blocks, (512,), nn.relu), input_shape, num_classes)


def mlp(input_shape: Sequence[int], num_classes: int, hidden: Sequence[int] = (64, 32)) -> Model:
    """Multilayer perceptron with ReLU, for small images such as the 8x8 digits.

    Args:
      input_shape: shape of one input, which is flattened.
      num_classes: K.
      hidden: widths of the hidden layers, at least one; the last width is d.

    Example:
      >>> import jax
      >>> from pfl_jax import models
      >>> model = models.mlp((8, 8, 1), num_classes=10, hidden=(16,))
      >>> jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(model.init, jax.random.key(0)))
      {'backbone': {'fc1': {'bias': (16,), 'kernel': (64, 16)}}, 'head': {'bias': (10,), 'kernel': (16, 10)}}
    """
    if not hidden:
        raise InvalidInput("an mlp needs at least one hidden layer, because the last one gives the features")
    return _model(Backbone((), tuple(hidden), nn.relu), input_shape, num_classes)


MODELS: dict[str, Callable[[Sequence[int], int], Model]] = {
    "fedpac_cnn": fedpac_cnn,
    "fedavg_cnn": fedavg_cnn,
    "mlp": mlp,
}
"""name -> factory(input_shape, num_classes) -> Model"""

CONVOLUTIONAL = frozenset({"fedpac_cnn", "fedavg_cnn"})
"""Names of networks with convolutions, which `pfl_jax.engine.chunking.choose_chunk` treats differently on a CPU."""
