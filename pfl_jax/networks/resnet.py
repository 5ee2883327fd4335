"""Residual networks for small images, with group normalization or with batch normalization."""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfl_jax.base import Model
from pfl_jax.errors import InvalidInput
from pfl_jax.networks.layers import assemble

_he = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


def _convolution(features: int, size: int = 3, *, halve: bool = False, name: str) -> nn.Conv:
    """Convolution without a bias, 3x3 padded by one or 1x1, of stride one or two; He's initialization (fan out)."""
    strides, padding = 2 if halve else 1, size // 2
    return nn.Conv(features, (size, size), strides, padding, use_bias=False, kernel_init=_he, name=name)


def _normalization(groups: int | None, name: str) -> nn.Module:
    """Group normalization; if `groups` is None, batch normalization with PyTorch's momentum and epsilon."""
    return nn.BatchNorm(momentum=0.9, name=name) if groups is None else nn.GroupNorm(groups, name=name)


class Block(nn.Module):
    """Two convolutions with normalization, added to their input; a 1x1 convolution of the input if shapes differ.

    Attributes:
      features: output channels.
      groups: number of groups in each group normalization; None for batch normalization.
      halve: whether the first convolution has stride two.
    """

    features: int
    groups: int | None
    halve: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = _normalization(self.groups, "norm1")(_convolution(self.features, halve=self.halve, name="conv1")(x))
        y = _normalization(self.groups, "norm2")(_convolution(self.features, name="conv2")(nn.relu(y)))
        if self.halve or x.shape[-1] != self.features:
            x = _convolution(self.features, 1, halve=self.halve, name="shortcut")(x)
            x = _normalization(self.groups, "shortcut_norm")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Convolution, stages of blocks, mean over all pixels, for inputs [B, H, W, C] -> features [B, widths[-1]].

    Attributes:
      widths: channels of each stage; all but the first begin with stride two.
      blocks: number of blocks in each stage.
      groups: number of groups in each group normalization; None for batch normalization.
    """

    widths: Sequence[int]
    blocks: int
    groups: int | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(_normalization(self.groups, "norm")(_convolution(self.widths[0], name="conv")(x)))
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                halve = stage > 0 and block == 0
                x = Block(width, self.groups, halve, name=f"stage{stage + 1}_block{block + 1}")(x)
        return jnp.mean(x, axis=(1, 2))


SMALL, LARGE = ((16, 32, 64), 1), ((64, 128, 256, 512), 2)
"""Widths of the stages and blocks in a stage of ResNet-8 and ResNet-18."""


def _resnet(
    widths: Sequence[int], blocks: int, groups: int | None, input_shape: Sequence[int], num_classes: int
) -> Model:
    if len(input_shape) != 3:
        raise InvalidInput(f"a resnet needs images (height, width, channels), not shape {tuple(input_shape)}")
    if groups is not None and (groups < 1 or any(width % groups for width in widths)):
        raise InvalidInput(f"{groups} groups do not divide the channels {', '.join(map(str, widths))} of the resnet")
    return assemble(ResNet(tuple(widths), blocks, groups), widths[-1], input_shape, num_classes)


def resnet8(input_shape: Sequence[int], num_classes: int, groups: int = 8) -> Model:
    """ResNet-8 for images of CIFAR's size: three stages with one block each, of 16, 32 and 64 channels.

    78,042 parameters for 32x32x3 and ten classes.

    Args:
      input_shape: (height, width, channels) of the images.
      num_classes: K.
      groups: number of groups in each group normalization.

    Raises:
      InvalidInput: the inputs are not images, or the groups do not divide the channels.

    Reference:
      He, Zhang, Ren, Sun. Deep Residual Learning for Image Recognition. CVPR 2016, Section 4.2 with n = 1; shortcuts
      that change shapes are 1x1 convolutions, and group normalization (Wu, He. ECCV 2018) replaces batch normalization,
      which `resnet8_bn` has.
    """
    return _resnet(*SMALL, groups, input_shape, num_classes)


def resnet18(input_shape: Sequence[int], num_classes: int, groups: int = 8) -> Model:
    """ResNet-18 for images of CIFAR's size: the first convolution is 3x3 with stride one, without pooling before it.

    Four stages with two blocks each, of 64, 128, 256 and 512 channels. 11,173,962 parameters for 32x32x3, ten classes.

    Args:
      input_shape: (height, width, channels) of the images.
      num_classes: K.
      groups: number of groups in each group normalization.

    Raises:
      InvalidInput: the inputs are not images, or the groups do not divide the channels.

    Reference:
      He, Zhang, Ren, Sun. Deep Residual Learning for Image Recognition. CVPR 2016, Table 1, with the changes that
      `resnet8` names.
    """
    return _resnet(*LARGE, groups, input_shape, num_classes)


def resnet8_bn(input_shape: Sequence[int], num_classes: int) -> Model:
    """ResNet-8 with batch normalization, see `resnet8` and `pfl_jax.networks.batch_norm`.

    78,714 parameters for 32x32x3 and ten classes, of which 672 are running statistics.

    Args:
      input_shape: (height, width, channels) of the images.
      num_classes: K.

    Raises:
      InvalidInput: the inputs are not images.
    """
    return _resnet(*SMALL, None, input_shape, num_classes)


def resnet18_bn(input_shape: Sequence[int], num_classes: int) -> Model:
    """ResNet-18 with batch normalization, see `resnet18` and `pfl_jax.networks.batch_norm`.

    11,183,562 parameters for 32x32x3 and ten classes, of which 9,600 are running statistics.

    Args:
      input_shape: (height, width, channels) of the images.
      num_classes: K.

    Raises:
      InvalidInput: the inputs are not images.
    """
    return _resnet(*LARGE, None, input_shape, num_classes)
