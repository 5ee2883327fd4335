"""Small networks over series of numbers [B, T, C]; steps with only zeros are padding.

Series of different lengths are padded with steps of zeros, like tokens with 0. With the task "regression", the K
outputs are a forecast of K numbers.
"""

from collections.abc import Sequence
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfl_jax.base import Model
from pfl_jax.errors import InvalidInput
from pfl_jax.networks.layers import Dense, assemble, last_state, torch_uniform


def _is_real(x: jax.Array) -> jax.Array:
    """Mask of the steps of series [B, T, C] that are not padding: bool [B, T]."""
    return jnp.any(x != 0, axis=-1)


class SeriesConvolutions(nn.Module):
    """Convolutions over time with pooling, then dense layers, all with ReLU: series [B, T, C] -> features [B, d].

    Attributes:
      channels: channels of each convolution, over `size` steps without padding; pooling over pairs of steps follows it.
      size: steps of a kernel.
      hidden: widths of the dense layers; the last is d.
    """

    channels: Sequence[int]
    size: int
    hidden: Sequence[int]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        for index, width in enumerate(self.channels, start=1):
            init = torch_uniform(self.size * x.shape[-1])
            layer = nn.Conv(width, (self.size,), padding="VALID", kernel_init=init, bias_init=init, name=f"conv{index}")
            x = nn.max_pool(nn.relu(layer(x)), (2,), strides=(2,))
        x = x.reshape(x.shape[0], -1)
        for index, width in enumerate(self.hidden, start=1):
            x = nn.relu(Dense(width, name=f"fc{index}")(x))
        return x


class LastStateOfSeries(nn.Module):
    """State of a gated recurrent unit after the last real step: series [B, T, C] -> features [B, width]."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        return last_state(self.width, x, _is_real(x))


class SeriesTransformer(nn.Module):
    """Encoder with normalization before its parts: series [B, T, C] -> mean state of the real steps [B, width].

    Attributes:
      width: width of the states.
      heads: number of attention heads.
      layers: number of blocks of attention and two dense layers of four times the width.
    """

    width: int
    heads: int
    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        real = _is_real(x)
        positions = self.param("positions", nn.initializers.normal(0.02), (x.shape[1], self.width))
        states = Dense(self.width, name="embedding")(x) + positions
        for index in range(1, self.layers + 1):
            inputs = nn.LayerNorm(name=f"norm_attention{index}")(states)
            attention = nn.MultiHeadDotProductAttention(self.heads, name=f"attention{index}")
            # In a series of only zeros all steps see each other: no row of the softmax is empty.
            seen = real | ~jnp.any(real, axis=1, keepdims=True)
            states = states + attention(inputs, inputs, mask=seen[:, None, None, :])
            inputs = nn.LayerNorm(name=f"norm_dense{index}")(states)
            inner = nn.gelu(Dense(4 * self.width, name=f"fc{index}_in")(inputs))
            states = states + Dense(self.width, name=f"fc{index}_out")(inner)
        states = nn.LayerNorm(name="norm")(states)
        total = jnp.sum(jnp.where(real[..., None], states, 0.0), axis=1)
        return cast(jax.Array, total / jnp.maximum(jnp.sum(real, axis=1, keepdims=True), 1))


def _check(input_shape: Sequence[int], name: str, fewest: int = 1) -> None:
    if len(input_shape) != 2:
        raise InvalidInput(f"{name} needs series (steps, channels), not shape {tuple(input_shape)}")
    if input_shape[0] < fewest:
        raise InvalidInput(f"series of {input_shape[0]} steps are too short for {name}, which needs {fewest}")


def series_cnn(input_shape: Sequence[int], num_classes: int) -> Model:
    """Convolutions with 32 and 64 channels over 9 steps, each with pooling, then 1024 and 512 units, ReLU.

    2,253,958 parameters for series of 128 steps, 9 channels and six classes.

    Args:
      input_shape: (steps, channels) of a series; at least 28 steps.
      num_classes: K, or the number of forecast values.

    Raises:
      InvalidInput: the inputs are not series, or too short.

    Reference:
      The layers of HARCNN in PFLlib (github.com/TsingZ0/PFLlib, commit d832e76), for UCI-HAR.
    """
    _check(input_shape, "series_cnn", 28)
    return assemble(SeriesConvolutions((32, 64), 9, (1024, 512)), 512, input_shape, num_classes)


def series_gru(input_shape: Sequence[int], num_classes: int, width: int = 64) -> Model:
    """Gated recurrent unit over the steps; the features are its last state.

    14,662 parameters for 9 channels and six classes.

    Args:
      input_shape: (steps, channels) of a series.
      num_classes: K, or the number of forecast values.
      width: width of the state, d.

    Raises:
      InvalidInput: the inputs are not series.

    Reference:
      Cho et al. Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine Translation. EMNLP
      2014, Section 2.3.
    """
    _check(input_shape, "series_gru")
    return assemble(LastStateOfSeries(width), width, input_shape, num_classes)


def series_transformer(
    input_shape: Sequence[int], num_classes: int, width: int = 64, heads: int = 4, layers: int = 2
) -> Model:
    """Two blocks of a transformer's encoder over the steps; the features are the mean of the real steps' states.

    109,318 parameters for series of 128 steps, 9 channels and six classes.

    Args:
      input_shape: (steps, channels) of a series.
      num_classes: K, or the number of forecast values.
      width: width of the states, d.
      heads: number of attention heads, a divisor of the width.
      layers: number of blocks.

    Raises:
      InvalidInput: the inputs are not series, or the heads do not divide the width.

    Reference:
      Vaswani et al. Attention Is All You Need. NeurIPS 2017, with normalization before each part (Xiong et al. On Layer
      Normalization in the Transformer Architecture. ICML 2020).
    """
    _check(input_shape, "series_transformer")
    if heads < 1 or width % heads:
        raise InvalidInput(f"heads must divide the width {width}, which {heads} does not")
    return assemble(SeriesTransformer(width, heads, layers), width, input_shape, num_classes)
