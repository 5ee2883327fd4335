"""Random augmentation of training images, drawn anew for every mini-batch.

`pfl_jax.LocalTraining(augment=...)` applies it to every mini-batch, independently of the method. Statistics, Fisher
traces, embeddings, test examples and precomputed features use the original images.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pfl_jax.base import PRNGKey, PyTree
from pfl_jax.errors import InvalidInput


@dataclass(frozen=True)
class CropAndFlip:
    """Random crop of the image padded with a black border, and horizontal flip with probability 1/2.

    This is the augmentation of FedPAC's released code for CIFAR-10 and CINIC-10, with a border of 4 zero pixels that is
    added before normalization.

    Attributes:
      shape: (H, W, C) of the images; inputs of any other shape are returned unchanged.
      black: value of a zero pixel after normalization, for each channel.
      border: width of the border in pixels.
    """

    shape: tuple[int, int, int]
    black: tuple[float, ...]
    border: int = 4

    @classmethod
    def normalized(
        cls, shape: Sequence[int], mean: Sequence[float] | None, std: Sequence[float] | None
    ) -> "CropAndFlip":
        """Augmentation for images [.., H, W, C] whose pixels in [0, 1] were normalized with this mean and std.

        Without mean and std, black is 0.

        Raises:
          InvalidInput: the inputs are not color images.
        """
        if len(shape) != 3 or shape[-1] != 3:
            raise InvalidInput(f"augmentation is for color images, not for images of shape {tuple(shape)}")
        height, width, channels = shape
        pairs = ((0, 1),) * channels if mean is None or std is None else zip(mean, std, strict=True)
        return cls((height, width, channels), tuple(-m / s for m, s in pairs))

    def __call__(self, key: PRNGKey, x: PyTree) -> PyTree:
        """Augment images [B, H, W, C] independently; inputs of other shapes are returned unchanged."""
        if not isinstance(x, jax.Array) or x.shape[1:] != self.shape:
            return x
        crop_key, flip_key = jax.random.split(key)
        corners = jax.random.randint(crop_key, (x.shape[0], 2), 0, 2 * self.border + 1)
        flipped = jax.random.bernoulli(flip_key, 0.5, (x.shape[0],))
        (height, width, channels), border = self.shape, self.border
        black = jnp.asarray(self.black, x.dtype)
        bordered = jnp.broadcast_to(black, (x.shape[0], height + 2 * border, width + 2 * border, channels))
        bordered = bordered.at[:, border : border + height, border : border + width].set(x)

        def augment(image, corner, flip):
            window = jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), self.shape)
            return jnp.where(flip, window[:, ::-1], window)

        return jax.vmap(augment)(bordered, corners, flipped)
