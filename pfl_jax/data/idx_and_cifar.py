"""Datasets from files in their published formats: IDX (Fashion-MNIST, EMNIST) and CIFAR's binary archives.

Archives are read into memory, one member at a time; nothing is unpacked onto the disk or unpickled.
"""

import gzip
import tarfile
import zlib
from pathlib import Path

import numpy as np

from pfl_jax.data.specs import Arrays, DatasetSpec
from pfl_jax.errors import InvalidInput, one_line

SYSTEM_FOLDERS = (Path("/usr/share/datasets"), Path("/usr/local/share/datasets"))
"""Folders in which Linux distributions install datasets, such as Debian's package `dataset-fashion-mnist`."""

UNREADABLE = (OSError, EOFError, ValueError, KeyError, zlib.error, tarfile.TarError)
"""Errors of files that are damaged, truncated or of another kind."""

NOTE = "note.txt"
"""File beside a dataset's files that describes them if they are not the published ones."""

# First labels of MNIST's test set. Its files have the same names, shapes and label range as Fashion-MNIST's.
_MNIST_TEST_LABELS = (7, 2, 1, 0, 4, 1, 4, 9, 5, 9, 0, 6, 9, 0, 1, 5)
_CIFAR10_TEST_LABELS = (3, 8, 8, 0, 6, 6, 1, 6, 3, 1, 0, 9, 5, 7, 9, 8)


CIFAR = {
    "cifar10": ("cifar-10-batches-bin", [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]),
    "cifar100": ("cifar-100-binary", ["train.bin", "test.bin"]),
}
"""Folder of CIFAR's archive, and its files; the last one has the test examples."""


def missing(spec: DatasetSpec, data_dir: Path | None) -> str:
    """Message for the case that `find` finds nothing."""
    if not spec.folders:
        return f"{spec.name} comes only through tensorflow-datasets: use source tfds or auto"
    names = _sets_of_files(spec)[0][1][0] + ("" if spec.name in CIFAR else "[.gz] and its companions")
    searched = ", ".join(map(str, _search_folders(spec, data_dir)[:3]))
    return (
        f"no files of {spec.name} found: give data_dir (--data-dir) the folder of {names} (looked in {searched}, ...)"
    )


def _search_folders(spec: DatasetSpec, data_dir: Path | None) -> list[Path]:
    """Folders that are searched, in order."""
    roots = [] if data_dir is None else [data_dir]
    return roots + [folder / name for folder in (*roots, *SYSTEM_FOLDERS) for name in spec.folders]


def _sets_of_files(spec: DatasetSpec) -> list[tuple[str, list[str]]]:
    """Sets of files that form the whole dataset, by sub-folder: CIFAR's archive or batches, or four IDX files."""
    if spec.name in CIFAR:
        folder, batches = CIFAR[spec.name]
        return [("", [Path(spec.url).name]), (folder, batches), ("", batches)]
    kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
    plain = [f"{part}-{kind}" for part in ("train", "t10k") for kind in kinds]
    byclass = [f"emnist-byclass-{part}-{kind}" for part in ("train", "test") for kind in kinds]
    return [("", byclass), ("", plain)] if spec.name == "emnist" else [("", plain)]


def find(spec: DatasetSpec, data_dir: Path | None) -> tuple[Path, ...]:
    """The dataset's files, see `_sets_of_files`; () if none is there, InvalidInput if only some are."""
    for parent in _search_folders(spec, data_dir) if spec.folders else ():
        for folder, names in _sets_of_files(spec):
            here = parent / folder
            paths = [next(filter(Path.is_file, (here / name, here / f"{name}.gz")), None) for name in names]
            if None not in paths:
                return tuple(path for path in paths if path is not None)
            if any(paths):
                raise InvalidInput(f"{here} holds a part of {spec.name}: {names[paths.index(None)]} is missing")
    return ()


def load(spec: DatasetSpec, paths: tuple[Path, ...]) -> tuple[Arrays, str]:
    """Examples in the files that `find` found, EMNIST's images turned upright; and the folder or archive.

    InvalidInput if a file is damaged or from another dataset.
    """
    origin = paths[0] if len(paths) == 1 else paths[0].parent
    try:
        arrays = _load_cifar(spec.name, paths) if spec.name in CIFAR else _load_idx(spec, paths)
        # Several datasets have the same file names; the largest label shows whether these are the right files.
        highest = arrays.train_y.max(), arrays.test_y.max()
        if highest[0] != spec.num_classes - 1 or highest[1] >= spec.num_classes:
            raise ValueError(
                f"its training labels end at {highest[0]} and its test labels at {highest[1]}, and the classes are 0 "
                f"to {spec.num_classes - 1}"
            )
        if spec.name == "fashion_mnist" and tuple(arrays.test_y[: len(_MNIST_TEST_LABELS)]) == _MNIST_TEST_LABELS:
            raise ValueError("it holds MNIST's digits")
    except UNREADABLE as error:
        raise InvalidInput(
            f"{origin} is not {spec.name}, or damaged ({one_line(error)}): put a whole copy there, or remove it"
        ) from error
    return arrays, str(origin)


def note(spec: DatasetSpec, folder: Path, test_y: np.ndarray) -> str:
    """First line of a folder's NOTE, such as "JPEG copy"; without one, a note on the order of CIFAR-10's labels, or "".

    InvalidInput if the file cannot be read.
    """
    try:
        if (folder / NOTE).exists():
            return (folder / NOTE).read_text().strip().partition("\n")[0]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{folder / NOTE} cannot be read: {error}; it is a line of text") from None
    is_in_order = tuple(test_y[: len(_CIFAR10_TEST_LABELS)]) == _CIFAR10_TEST_LABELS
    return "" if is_in_order or spec.name != "cifar10" else "a copy in another order"


def _load_idx(spec: DatasetSpec, paths: tuple[Path, ...]) -> Arrays:
    arrays = []
    for images, labels in (paths[:2], paths[2:]):
        x, y = _read_idx(images, spec.shape[:2]), _read_idx(labels, ())
        if len(x) != len(y):
            raise ValueError(f"{images.name} has {len(x)} images, and {labels.name} {len(y)} labels")
        upright = x.swapaxes(1, 2) if spec.transposed else x
        arrays += [np.ascontiguousarray(upright[..., None]), y.astype(np.int32)]
    return Arrays(*arrays)


def _read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read an IDX file as uint8 [count, *shape]: a magic number, the sizes as big-endian int32, then the bytes."""
    begin = 4 * (2 + len(shape))
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
        magic, count, *found = np.frombuffer(content[:begin], ">u4").tolist()
        if magic != 0x0800 + 1 + len(shape) or tuple(found) != shape:
            raise ValueError(f"magic {magic:#06x} and sizes {[count, *found]}, not bytes of shape {shape}")
        return np.frombuffer(content, np.uint8, offset=begin).reshape(count, *shape)
    except UNREADABLE as error:
        raise ValueError(f"{path.name}: {one_line(error)}") from error


def _load_cifar(name: str, paths: tuple[Path, ...]) -> Arrays:
    """Records of label bytes (CIFAR-100 has two; the last one is used) and 3072 bytes R, G, B."""
    contents = _members(paths[0]) if len(paths) == 1 else {path.name: path.read_bytes() for path in paths}
    labels = 2 if name == "cifar100" else 1
    *train, test = (np.frombuffer(contents[file], np.uint8).reshape(-1, labels + 3072) for file in CIFAR[name][1])
    arrays = []
    for records in (np.concatenate(train), test):
        x = records[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays += [np.ascontiguousarray(x), records[:, labels - 1].astype(np.int32)]
    return Arrays(*arrays)


def _members(archive: Path) -> dict[str, bytes]:
    """Name -> content of the archive's files, whatever their folder."""
    with tarfile.open(archive, "r:gz") as tar:
        files = ((Path(member.name).name, tar.extractfile(member)) for member in tar if member.isfile())
        return {name: file.read() for name, file in files if file is not None}
