"""Dataset specifications: shape, classes, pixel normalization and download source."""

from typing import Literal, NamedTuple, TypeAlias

import numpy as np

Source: TypeAlias = Literal["auto", "tfds", "files", "embedded"]
"""Sources in which `pfl_jax.data.sources.load` looks for a dataset."""

PixelNormalization: TypeAlias = Literal["fedpac", "fedas"]
"""Papers whose released code defines the pixel normalization."""

Shift: TypeAlias = Literal["none", "labels", "rotation", "noise", "missing"]
"""Difference between groups of clients: none, a permutation of the labels, a rotation of the images, noise on the
inputs, or inputs with some numbers missing."""


class Arrays(NamedTuple):
    """Examples of a dataset, in the format that all sources return: images uint8 [P, H, W, C], labels int32 [P]."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


class DatasetSpec(NamedTuple):
    """Specification of a dataset that `pfl_jax.data.sources.load` can load.

    Attributes:
      name: name of the dataset.
      shape: (H, W, C) of an image.
      num_classes: K.
      mean: mean of pixels in [0, 1], per channel; inputs are (x / 255 - mean) / std.
      std: standard deviation of pixels, per channel.
      fedpac: (mean, std) of FedPAC's released code if they differ from `mean` and `std`; None if they are the same, or
        that code does not use the dataset.
      published: numbers of (training, test) examples of the complete dataset; outputs report missing examples.
      tfds_name: name (and configuration) in tensorflow-datasets; None if it is not available there.
      url: one of the files that tensorflow-datasets downloads; its host must answer.
      folders: possible names of a folder with the dataset's files, inside `data_dir` or a system folder; empty if the
        dataset can only be loaded through tensorflow-datasets.
      transposed: whether the published files store images with rows and columns exchanged.
      in_scikit_learn: whether the dataset is scikit-learn's digits, which are always available.
    """

    name: str
    shape: tuple[int, int, int]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fedpac: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    published: tuple[int, int] | None = None
    tfds_name: str | None = None
    url: str = ""
    folders: tuple[str, ...] = ()
    transposed: bool = False
    in_scikit_learn: bool = False

    def normalized(self, paper: PixelNormalization) -> "DatasetSpec":
        """Specification with the mean and standard deviation of a paper's released code."""
        mean, std = self.fedpac if paper == "fedpac" and self.fedpac is not None else (self.mean, self.std)
        return self._replace(mean=mean, std=std)


# CIFAR: FedAS's released code uses 0.5 for all channels, FedPAC's the mean and deviation of CIFAR-10's training pixels.
# CIFAR-100 is not in FedPAC and uses the values of CIFAR-10. Gray datasets: FedPAC's code, with the values of MNIST.
_CIFAR = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_FEDPAC_CIFAR = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_MNIST = ((0.1307,), (0.3081,))

_ALL = (
    *(
        DatasetSpec(
            f"cifar{classes}",
            (32, 32, 3),
            classes,
            *_CIFAR,
            fedpac=_FEDPAC_CIFAR,
            published=(50_000, 10_000),
            tfds_name=f"cifar{classes}",
            url=f"https://www.cs.toronto.edu/~kriz/cifar-{classes}-binary.tar.gz",
            folders=(f"cifar{classes}", f"cifar-{classes}"),
        )
        for classes in (10, 100)
    ),
    # As in FedPAC's released code: training examples from the folder train, test examples from test (valid is not
    # used), and the mean and deviation of the folder train. FedAS does not use CINIC-10.
    DatasetSpec(
        "cinic10",
        (32, 32, 3),
        10,
        (0.47889522, 0.47227842, 0.43047404),
        (0.24205776, 0.23828046, 0.25874835),
        published=(90_000, 90_000),
        tfds_name="cinic10",
        url="https://datashare.is.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
    ),
    DatasetSpec(
        "fashion_mnist",
        (28, 28, 1),
        10,
        *_MNIST,
        published=(60_000, 10_000),
        tfds_name="fashion_mnist",
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/train-images-idx3-ubyte.gz",
        folders=("fashion-mnist", "fashion_mnist", "FashionMNIST/raw"),
    ),
    DatasetSpec(
        "emnist",
        (28, 28, 1),
        62,
        *_MNIST,
        published=(697_932, 116_323),
        tfds_name="emnist/byclass",
        url="https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        folders=("emnist", "EMNIST/raw"),
        transposed=True,
    ),
    # Mean and deviation of scikit-learn's 1797 digits (4.884 and 6.017 of 16).
    DatasetSpec("digits", (8, 8, 1), 10, (0.305,), (0.376,), in_scikit_learn=True),
)

SPECS: dict[str, DatasetSpec] = {spec.name: spec for spec in _ALL}
