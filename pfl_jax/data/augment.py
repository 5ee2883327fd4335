"""Random augmentation of training images, drawn anew for every mini-batch.

`pfl_jax.LocalSGD(augment=...)` applies it to every mini-batch; methods do not depend on it. Statistics, Fisher traces,
embeddings and test examples come from the images as they are, and so do heads that are trained on features computed
beforehand.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pfl_jax.base import PRNGKey, PyTree
from pfl_jax.errors import InvalidInput


@dataclass(frozen=True)
class CropAndFlip:
    """Random crop of the image with a black border, mirrored horizontally with probability 1/2.

    The augmentation of FedPAC's released code for CIFAR-10 and CINIC-10, where the border is 4 pixels of zeros before
    the images are normalised.

    Attributes:
      shape: (H, W, C) of the images; inputs of any other shape stay as they are.
      black: per channel, the value of a zero pixel after normalisation.
      border: width in pixels.
    """

    shape: tuple[int, int, int]
    black: tuple[float, ...]
    border: int = 4

    @classmethod
    def normalised(
        cls, shape: Sequence[int], mean: Sequence[float] | None, std: Sequence[float] | None
    ) -> "CropAndFlip":
        """Augmentation of images [.., H, W, C] normalised with this mean and deviation of pixels in [0, 1].

        Without them zeros are black.

        Raises:
          InvalidInput: images without colours, or other inputs.
        """
        if len(shape) != 3 or shape[-1] != 3:
            raise InvalidInput(f"augmentation is for colour images, not for images of shape {tuple(shape)}")
        height, width, channels = shape
        if mean is None or std is None:
            return cls((height, width, channels), (0.0,) * channels)
        return cls((height, width, channels), tuple(-m / s for m, s in zip(mean, std, strict=True)))

    def __call__(self, key: PRNGKey, x: PyTree) -> PyTree:
        """Augment images [B, H, W, C], each with its own draws; other inputs are returned unchanged."""
        if not isinstance(x, jax.Array) or x.shape[1:] != self.shape:
            return x
        crop_key, flip_key = jax.random.split(key)
        corners = jax.random.randint(crop_key, (x.shape[0], 2), 0, 2 * self.border + 1)
        flipped = jax.random.bernoulli(flip_key, 0.5, (x.shape[0],))
        (height, width, channels), border = self.shape, self.border
        black = jnp.asarray(self.black, x.dtype)
        bordered = jnp.broadcast_to(black, (x.shape[0], height + 2 * border, width + 2 * border, channels))
        bordered = bordered.at[:, border : border + height, border : border + width].set(x)

        def one(image, corner, flip):
            window = jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), self.shape)
            return jnp.where(flip, window[:, ::-1], window)

        return jax.vmap(one)(bordered, corners, flipped)
