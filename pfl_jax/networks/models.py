"""Networks of the papers and other networks, by name, as `Model(init, features, classify)` of pure functions.

ResNets are in `pfl_jax.networks.resnet`, networks for tokens in `pfl_jax.networks.text`, for series of numbers in
`pfl_jax.networks.series`; `pfl_jax.networks.from_flax` makes models from other Flax modules. The features, which are
the input of the head, are the activations of the last hidden layer. Convolution blocks pool before they add the bias
and apply the activation: the result is the same because the activations are monotone, and only a quarter of the
elements are processed.
"""

from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfl_jax.base import Model
from pfl_jax.errors import InvalidInput
from pfl_jax.networks.layers import Activation, ConvBlock, Dense, assemble, leaky_relu
from pfl_jax.networks.resnet import resnet8, resnet8_bn, resnet18, resnet18_bn
from pfl_jax.networks.series import series_cnn, series_gru, series_transformer
from pfl_jax.networks.text import bag_of_words, char_lstm, text_gru, text_mean


class Backbone(nn.Module):
    """Convolution blocks, then hidden dense layers: inputs [B, ...] -> features [B, d]; integers count as numbers.

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
            # Sums of squares of integer inputs, as in Fisher traces, would overflow.
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
    return assemble(backbone, backbone.hidden[-1], input_shape, num_classes)


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
      Appendix B.1. Details missing in the paper follow the released code (features are taken after the activation).
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


def lenet5(input_shape: Sequence[int], num_classes: int) -> Model:
    """LeNet-5 as it is trained today: 6 and 16 filters (5x5) with max-pooling, 120 and 84 units, ReLU.

    61,706 parameters for images of 28x28x1 and ten classes, which are padded to 32x32; 62,006 for 32x32x3.

    Args:
      input_shape: (height, width, channels) of the images.
      num_classes: K.

    Raises:
      InvalidInput: if the images are too small.

    Reference:
      LeCun, Bottou, Bengio, Haffner. Gradient-Based Learning Applied to Document Recognition. Proceedings of the IEEE
      1998, Section II.B; without its connection table, its trainable pooling and its Euclidean output units.
    """
    blocks = ((6, 5, 2 if len(input_shape) == 3 and min(input_shape[:2]) < 32 else 0), (16, 5, 0))
    _check_size(input_shape, blocks, "lenet5")
    return _model(Backbone(blocks, (120, 84), nn.relu), input_shape, num_classes)


def leaf_cnn(input_shape: Sequence[int], num_classes: int) -> Model:
    """Network of LEAF for FEMNIST: convolutions with 32 and 64 channels (5x5, padding 2), pooling, 2048 units, ReLU.

    6,603,710 parameters for images of 28x28x1 and 62 classes.

    Args:
      input_shape: (height, width, channels) of the images.
      num_classes: K.

    Raises:
      InvalidInput: if the images are too small.

    Reference:
      Caldas et al. LEAF: A Benchmark for Federated Settings. 2018, and its code.
    """
    blocks = ((32, 5, 2), (64, 5, 2))
    _check_size(input_shape, blocks, "leaf_cnn")
    return _model(Backbone(blocks, (2048,), nn.relu), input_shape, num_classes)


MODELS: dict[str, Callable[[Sequence[int], int], Model]] = {
    "fedpac_cnn": fedpac_cnn,
    "fedavg_cnn": fedavg_cnn,
    "mlp": mlp,
    "lenet5": lenet5,
    "leaf_cnn": leaf_cnn,
    "resnet8": resnet8,
    "resnet18": resnet18,
    "resnet8_bn": resnet8_bn,
    "resnet18_bn": resnet18_bn,
    "series_cnn": series_cnn,
    "series_gru": series_gru,
    "series_transformer": series_transformer,
    "text_mean": text_mean,
    "text_gru": text_gru,
    "char_lstm": char_lstm,
    "bag_of_words": bag_of_words,
}
"""name -> factory(input_shape, num_classes) -> Model"""

HETEROGENEOUS: dict[str, tuple[str, ...]] = {
    "mixed_images": ("fedavg_cnn", "lenet5", "resnet8", "resnet18"),
    "mixed_series": ("series_cnn", "series_gru", "series_transformer"),
    "mixed_texts": ("text_mean", "text_gru"),
}
"""Families of networks for `pfl_jax.mixed`: name -> names in MODELS.

Small versions of HtFLlib's: FedAvg's CNN, GoogLeNet, MobileNetV2 and ResNet-18 (HtFE-img-4), variants of HARCNN
(HtFE-sen-3), fastText and recurrent networks (HtFE-txt-2 to 6)."""


def is_convolutional(model: Model) -> bool:
    """Whether a model has convolutions, which need another schedule on a CPU: see `pfl_jax.engine.chunking`.

    The parameters decide: the kernel of a two-dimensional convolution is usually the array with four axes.

    Args:
      model: any model.
    """
    return any(leaf.ndim == 4 for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
