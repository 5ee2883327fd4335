"""Data sources: tensorflow-datasets, files in the datasets' own formats, or embedded synthetic images.

Every output records the data source (`Dataset.description`), so that results on synthetic data
cannot be mistaken for results on the real dataset.
"""

import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pfl_jax.data import embedded, idx_and_cifar, tfds
from pfl_jax.data.specs import SPECS, Arrays, DatasetSpec, PixelNormalization, Source
from pfl_jax.data.tfds import Notify
from pfl_jax.errors import InvalidInput, described
from pfl_jax.validation import check_arguments, unknown


class Dataset(NamedTuple):
    """Labeled examples, divided into training and test examples.

    Attributes:
      name: name of the dataset, such as "cifar100".
      source: kind of the data source: "tfds", "files", "embedded digit pairs", "embedded digits" or
        "scikit-learn digits"; of a user's own data "arrays", "npz", "csv", "image folder" or "Hugging Face".
      origin: version or folder of real data, and its size if it is incomplete; digest of a user's own files; "" for
        embedded data.
      is_real: False for synthetic images in place of the dataset.
      train_x, test_x: [P, ...], both float32 or integers of at most 32 bits; images are uint8 [P, H, W, C].
      train_y, test_y: int32 [P], the classes; for other targets float32 [P] or numbers [P, ...].
      num_classes: K; 0 for targets that are not classes.
      mean, std: of uint8 pixels divided by 255, per channel; None for inputs that are not rescaled.
      keep_split: whether training and test examples must not be mixed, as for scikit-learn's digits, which are split by
        writer.
      class_names: names of the classes 0 to K - 1; () if the names are the numbers.
      train_client, test_client: int32 [P], client of each example if the data has its own clients, otherwise None.
      client_names: names of the data's own clients.
      note: description of files that are not the published ones, such as "JPEG copy"; see
        `pfl_jax.data.idx_and_cifar.note`.
      preparation: turns rows of a user's table into inputs, `pfl_jax.data.preparation.Preparation`; otherwise None.
      test_rows: numbers of the test rows among all rows of a user's data that `min_rows` leaves; otherwise None.
    """

    name: str
    source: str
    origin: str
    is_real: bool
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    num_classes: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    keep_split: bool = False
    class_names: tuple[str, ...] = ()
    train_client: np.ndarray | None = None
    test_client: np.ndarray | None = None
    client_names: tuple[str, ...] = ()
    note: str = ""
    preparation: Any = None
    test_rows: np.ndarray | None = None

    def __repr__(self) -> str:
        """A line for each field, instead of all numbers."""
        return described(self)

    @property
    def description(self) -> str:
        """Name and source of the data for display: "cifar100 (embedded digit pairs)", "cifar10 (tfds: 3.0.2)",
        "cifar10, JPEG copy (files: FOLDER)"."""
        name, source = f"{self.name}, {self.note}" if self.note else self.name, self.source
        return f"{name} ({source}: {self.origin})" if self.origin else f"{name} ({source})"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input, (H, W, C) for an image."""
        return self.train_x.shape[1:]


def print_to_stderr(message: str) -> None:
    """Print a message to stderr; the default `notify` of `load`."""
    print(message, file=sys.stderr, flush=True)


@check_arguments
def load(
    name: str,
    source: Source = "auto",
    data_dir: str | Path | None = None,
    seed: int = 0,
    notify: Notify = print_to_stderr,
    *,
    normalization: PixelNormalization = "fedas",
) -> Dataset:
    """Load a dataset. EMNIST's published images are transposed; here they are upright.

    Args:
      name: cifar10, cifar100, cinic10, fashion_mnist, emnist (its "byclass" variant: 62 classes) or digits.
      source: "tfds" (prepared data, or download), "files" (IDX or CIFAR's binary files), "embedded" (synthetic images
        composed of scikit-learn's digits), or "auto": the first available one of prepared tfds data, files, download
        and embedded. The dataset "digits" is part of scikit-learn, with source "auto" or "embedded".
      data_dir: folder of tensorflow-datasets or of the files; by default ~/tensorflow_datasets, and the folders in
        which Linux distributions install datasets.
      seed: seed of the embedded images.
      notify: function that receives messages before slow steps, and if "auto" selects embedded images.
      normalization: paper whose released code defines the mean and standard deviation that normalize pixels. For CIFAR:
        0.5 ("fedas"), or the values of CIFAR-10's training pixels ("fedpac"). The other datasets have only one choice.

    Raises:
      InvalidInput: the name, source or normalization is unknown, the source does not have the data, or files are
        unusable.

    Example:
      >>> from pfl_jax import data
      >>> dataset = data.load("digits")
      >>> dataset.description, dataset.train_x.shape, dataset.num_classes
      ('digits (scikit-learn digits)', (1287, 8, 8, 1), 10)
    """
    if name not in SPECS:
        raise InvalidInput(unknown("dataset", name, SPECS))
    spec = SPECS[name].normalized(normalization)
    folder = None if data_dir is None else Path(data_dir).expanduser()
    if folder is not None and folder.exists() and not folder.is_dir():
        raise InvalidInput(f"the data folder {folder} is not a folder")
    if spec.in_scikit_learn and source not in ("auto", "embedded"):
        raise InvalidInput(f"{name} comes from inside scikit-learn: use source embedded or auto")
    if spec.in_scikit_learn or source == "embedded":
        return _embedded(spec, seed)
    # Unusable data is an error; only missing data is skipped.
    if source != "files" and (prepared := tfds.find(spec, folder, notify)) is not None:
        return _real(spec, "tfds", *prepared, notify)
    if source != "tfds" and (paths := idx_and_cifar.find(spec, folder)):
        dataset = _real(spec, "files", *idx_and_cifar.load(spec, paths), notify)
        return dataset._replace(note=idx_and_cifar.note(spec, paths[0].parent, dataset.test_y))
    if source == "files":
        raise InvalidInput(idx_and_cifar.missing(spec, folder))
    try:
        return _real(spec, "tfds", *tfds.download(spec, folder, notify), notify)
    except InvalidInput as error:
        if source == "tfds":
            raise
        dataset = _embedded(spec, seed)
        notify(
            f"THIS IS NOT {spec.name.upper()}, but {dataset.source} in its place: all results are labeled "
            f"{dataset.description}. Neither prepared data nor files were found, and {error}"
        )
        return dataset


def _embedded(spec: DatasetSpec, seed: int) -> Dataset:
    """scikit-learn's digits, or images composed of them in place of the dataset."""
    is_real = spec.in_scikit_learn
    arrays = embedded.digits() if is_real else _composed(spec, seed)
    composed = "embedded digit pairs" if embedded.is_pairs(spec.num_classes) else "embedded digits"
    source = "scikit-learn digits" if is_real else composed
    return Dataset(spec.name, source, "", is_real, *arrays, spec.num_classes, spec.mean, spec.std, keep_split=True)


@functools.lru_cache(maxsize=1)
def _composed(spec: DatasetSpec, seed: int) -> Arrays:
    """Embedded images, cached because they take seconds and a command with many runs loads them for each run."""
    arrays = embedded.compose_images(spec, seed)
    for array in arrays:
        array.flags.writeable = False
    return arrays


def _real(spec: DatasetSpec, source: str, arrays: Arrays, origin: str, notify: Notify) -> Dataset:
    """Real data, whose origin says how many examples are missing, if any."""
    sizes = len(arrays.train_y), len(arrays.test_y)
    if spec.published not in (None, sizes):
        text = f"{sizes[0]} + {sizes[1]} of {spec.published[0]} + {spec.published[1]} examples"
        notify(f"{spec.name} is incomplete: {text}")
        origin += f", {text}"
    return Dataset(spec.name, source, origin, True, *arrays, spec.num_classes, spec.mean, spec.std)
