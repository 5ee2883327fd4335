"""Corrupted images, five of the kinds of CIFAR-10-C (Hendrycks, Dietterich 2019)."""

from typing import Annotated, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from scipy.ndimage import gaussian_filter

from pfl_jax.data.federated import FederatedData
from pfl_jax.errors import InvalidInput
from pfl_jax.validation import Range, check_arguments

Corruption: TypeAlias = Literal["noise", "blur", "contrast", "brightness", "pixelate"]
"""Kind of a corruption."""

STRENGTHS: dict[str, tuple[float, ...]] = {
    "noise": (0.04, 0.06, 0.08, 0.09, 0.10),
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),
}
"""CIFAR-10-C's values for the severities 1 to 5: deviation of the noise, and of the blur in pixels; factor of the
contrast; number added to pixels in [0, 1]; remaining share of the pixels of a row or column."""


@check_arguments
def corrupted(
    data: FederatedData, kind: Corruption, severity: Annotated[int, Range(1, 5)] = 3, seed: int = 0
) -> FederatedData:
    """Federation whose images are corrupted, those for training too.

    Args:
      data: a federation with images [H, W, C] of uint8.
      kind: noise on each pixel; a Gaussian blur; less contrast, about the mean of each image and channel; more
        brightness; fewer pixels.
      severity: from 1 to 5.
      seed: seed of the noise.

    Raises:
      InvalidInput: the inputs are not such images; the kind or the severity is unknown.

    Example:
      >>> import numpy as np
      >>> from pfl_jax import data
      >>> from pfl_jax.data.corruption import corrupted
      >>> dataset = data.load("digits")
      >>> federation = data.federate(dataset, data.partition.iid(dataset, num_clients=2))
      >>> [int(corrupted(federation, "contrast", severity).x.max()) < int(federation.x.max()) for severity in (1, 5)]
      [True, True]

    Reference:
      Hendrycks, Dietterich. Benchmarking Neural Network Robustness to Common Corruptions and Perturbations. ICLR 2019,
      Section 3.

    Deviations:
      Brightness is added to all channels, not to the value of the color. Pixels are lost by linear interpolation, not
      by a mean over boxes.
    """
    if data.x.ndim != 4 or data.x.dtype != jnp.uint8:
        raise InvalidInput(f"corruption is for images [H, W, C] of uint8, not for {data.x.dtype} {data.x.shape[1:]}")
    x, strength = np.asarray(data.x, np.float32) / 255, STRENGTHS[kind][severity - 1]
    if kind == "noise":
        x = x + strength * np.random.default_rng(seed).normal(size=x.shape)
    elif kind == "blur":
        x = gaussian_filter(x, (0, strength, strength, 0))
    elif kind == "contrast":
        mean = x.mean(axis=(1, 2), keepdims=True)
        x = mean + strength * (x - mean)
    elif kind == "brightness":
        x = x + strength
    else:
        fewer = [max(1, int(strength * size)) for size in x.shape[1:3]]
        x = jax.image.resize(jax.image.resize(x, (len(x), *fewer, x.shape[-1]), "linear"), x.shape, "nearest")
    return data._replace(x=jnp.asarray((np.clip(x, 0, 1) * 255).round(), jnp.uint8))
