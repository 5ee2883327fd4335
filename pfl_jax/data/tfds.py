"""Datasets from tensorflow-datasets (tfds): read if prepared, otherwise downloaded and prepared.

TensorFlow is slow to import, so the first run caches the data as uint8 arrays in `<data folder>/pfl_jax/*.npz`; later
runs read this file and import neither TensorFlow nor tfds.
"""

import contextlib
import io
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from pfl_jax.atomic_write import make_folder, write_binary
from pfl_jax.data.specs import Arrays, DatasetSpec
from pfl_jax.errors import CannotWrite, InvalidInput, imported, one_line
from pfl_jax.safe_read import BAD_NPZ, open_npz

Notify: TypeAlias = Callable[[str], None]
"""Function that receives each message for the user."""

CINIC10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""Folder names of CINIC-10 in the order of their labels, which is CIFAR-10's."""

HOST_TIMEOUT = 5.0
"""Seconds within which the download host must answer; tfds itself would try for more than 200."""


def folder_or_default(data_dir: Path | None) -> Path:
    """The data folder `data_dir`, or by default the folder of tfds."""
    if data_dir is not None:
        return data_dir
    return Path(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser()


def find(spec: DatasetSpec, data_dir: Path | None, notify: Notify) -> tuple[Arrays, str] | None:
    """Examples and version of the dataset as prepared by tfds, or as cached by an earlier run; None if neither exists.

    Arguments are as in `pfl_jax.data.sources.load`. Prepared data that cannot be read is an InvalidInput.
    """
    folder = folder_or_default(data_dir)
    kept = _newest((folder / "pfl_jax").glob(f"{spec.name}-*.npz"))
    prepared = _newest(info.parent for info in (folder / (spec.tfds_name or spec.name)).glob("*/dataset_info.json"))
    if kept is not None and (prepared is None or _version(kept) == _version(prepared)):
        arrays = _read_cache(kept, spec)
        if arrays is not None:
            return arrays, _version(kept)
        if prepared is None:
            raise InvalidInput(f"{kept} is damaged, or not {spec.name}: put a whole copy of it there, or remove it")
    if prepared is None:
        return None
    notify(f"reading {spec.name} from {prepared} with TensorFlow; later runs will be faster")
    arrays = _read_prepared(spec, prepared)
    cache = folder / "pfl_jax" / f"{spec.name}-{_version(prepared)}.npz"
    try:
        make_folder(cache.parent)
        write_binary(cache, lambda file: np.savez(file, **arrays._asdict()))
    except CannotWrite as error:
        notify(f"the next run will need TensorFlow again: {str(error).partition(';')[0]}")
    return arrays, _version(prepared)


def download(spec: DatasetSpec, data_dir: Path | None, notify: Notify) -> tuple[Arrays, str]:
    """Download and prepare the dataset with tfds; arguments and results are as in `find`.

    A host that does not answer within HOST_TIMEOUT, and any failure in tfds, is an InvalidInput.
    """
    folder = folder_or_default(data_dir)
    reason = _unreachable(spec.url) if spec.tfds_name else "it is not in tensorflow-datasets"
    if reason:
        raise InvalidInput(
            f"{spec.name} cannot be downloaded: {reason}; give data_dir (--data-dir) a folder that has it, or "
            "use source embedded"
        )
    notify(f"downloading {spec.name} from {urllib.parse.urlsplit(spec.url).netloc} into {folder}")
    with _tensorflow_datasets() as tfds:
        try:
            config = tfds.download.DownloadConfig(try_download_gcs=False)
            if spec.name == "cinic10":
                _prepare_cinic10(tfds, spec.url, folder, config)
            else:
                builder = tfds.builder(spec.tfds_name, data_dir=folder, try_gcs=False)
                builder.download_and_prepare(download_config=config)
        except Exception as error:  # any error of requests, TensorFlow, tar or the file system
            raise InvalidInput(
                f"tensorflow-datasets cannot prepare {spec.name} in {folder}: {one_line(error)}; if an archive is "
                f"damaged, remove it from {folder / 'downloads'}, and it is downloaded again"
            ) from error
    result = find(spec, folder, notify)
    assert result is not None  # The dataset was prepared there.
    return result


def _version(path: Path) -> str:
    """Version in the name of a folder "3.0.2" or file "cifar10-3.0.2.npz"; "" without a version."""
    found = re.fullmatch(r"(?:.*-)?(\d+\.\d+\.\d+)(?:\.npz)?", path.name)
    return found[1] if found else ""


def _newest(paths: Iterable[Path]) -> Path | None:
    return max(filter(_version, paths), key=lambda path: [*map(int, _version(path).split("."))], default=None)


def _read_cache(path: Path, spec: DatasetSpec) -> Arrays | None:
    """Cached arrays; None if they are damaged, or belong to other data."""
    try:
        with open_npz(path) as stored:
            arrays = Arrays(*(np.asarray(stored[name]) for name in Arrays._fields))
    except BAD_NPZ:
        return None
    is_whole = all(x.shape == (*y.shape, *spec.shape) for x, y in (arrays[:2], arrays[2:]))
    return arrays if is_whole else None


def _read_prepared(spec: DatasetSpec, folder: Path) -> Arrays:
    """All examples of a prepared folder, in tfds' fixed order."""
    arrays = []
    with _tensorflow_datasets() as tfds:
        try:
            builder = tfds.builder_from_directory(folder)
            for split in ("train", "test"):
                # Read in order and as one batch.
                found = tfds.as_numpy(builder.as_dataset(split=split, batch_size=-1))
                x, y = found["image"], found["label"].astype(np.int32)
                arrays += [np.ascontiguousarray(x.swapaxes(1, 2)) if spec.transposed else x, y]
        except Exception as error:  # as above
            raise InvalidInput(
                f"{folder} is not a usable {spec.name}: {one_line(error)}; remove it, and it is prepared again"
            ) from error
    return Arrays(*arrays)


def _unreachable(url: str) -> str:
    """Reason why the host cannot be reached in time; "" if it answers. Sends one request and does not read the body."""
    host = urllib.parse.urlsplit(url).netloc
    try:
        with urllib.request.urlopen(url, timeout=HOST_TIMEOUT):
            return ""
    except urllib.error.HTTPError as error:
        return f"{host} answered {error.code}"
    except (OSError, ValueError) as error:
        return f"{host} cannot be reached ({one_line(getattr(error, 'reason', error))})"


@contextlib.contextmanager
def _tensorflow_datasets() -> Iterator[Any]:
    """The module tensorflow_datasets, with TensorFlow kept off the GPU and the logs of both silenced."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        missing = "source tfds needs TensorFlow and tensorflow-datasets: pip install -r requirements.txt"
        tf, tfds, logging = (imported(name, missing) for name in ("tensorflow", "tensorflow_datasets", "absl.logging"))
        logging.set_verbosity(logging.ERROR)
        # Fails if the user's program has already initialized TensorFlow; its own setting then applies.
        with contextlib.suppress(RuntimeError):
            tf.config.set_visible_devices([], "GPU")
        if not sys.stderr.isatty():
            tfds.disable_progress_bar()
        yield tfds


def _prepare_cinic10(tfds: Any, url: str, folder: Path, config: Any) -> None:
    """Download and prepare CINIC-10 (Darlow, Crowley, Antoniou, Storkey 2018), which tensorflow-datasets lacks.

    The published archive has folders train/, valid/ and test/, each with a folder of 9,000 PNG images for each class;
    valid/ is not used, as in FedPAC's released code.
    """
    downloads = tfds.download.DownloadManager(download_dir=folder / "downloads", dataset_name="cinic10")
    archive, features = downloads.download(url), tfds.features

    def examples(split: str) -> Iterator[tuple[str, dict[str, Any]]]:
        # Skips the hidden files that macOS leaves behind.
        pattern = re.compile(rf"(?:.*/)?{split}/({'|'.join(CINIC10_CLASSES)})/([^./][^/]*\.png)")
        # The archive is read member by member and not unpacked onto the disk.
        for path, file in downloads.iter_archive(archive):
            if found := pattern.fullmatch(path):
                yield "/".join(found.groups()), {"image": io.BytesIO(file.read()), "label": found[1]}

    tfds.dataset_builders.store_as_tfds_dataset(
        "cinic10",
        version="1.0.0",
        features=features.FeaturesDict(
            {"image": features.Image(shape=(32, 32, 3)), "label": features.ClassLabel(names=CINIC10_CLASSES)}
        ),
        split_datasets={split: examples(split) for split in ("train", "test")},
        data_dir=folder,
        download_config=config,
    )
