"""Datasets from files in their published formats: IDX (Fashion-MNIST, EMNIST) and CIFAR's binary archives.

Archives are read into memory, one member at a time and by name; nothing is unpacked onto the disk or unpickled. By rows
(`pfl_jax.data.rows`), labels are read whole and images only when they are asked for.
"""

import contextlib
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pfl_jax.data import cifar_files, rows
from pfl_jax.data.cifar_files import FoundFiles, check_labels
from pfl_jax.data.rows import Rows
from pfl_jax.data.specs import Arrays, DatasetSpec
from pfl_jax.errors import InvalidInput
from pfl_jax.safe_read import open_file

SYSTEM_FOLDERS = (Path("/usr/share/datasets"), Path("/usr/local/share/datasets"))
"""Folders in which Linux distributions install datasets, such as Debian's package `dataset-fashion-mnist`."""

_MAX_EXAMPLES = 2_000_000  # more than in any of these datasets: a larger count means that the file is another one

# First labels of MNIST's test set. Its files have the same names, shapes and label range as those of Fashion-MNIST.
_MNIST_TEST_LABELS = (7, 2, 1, 0, 4, 1, 4, 9, 5, 9, 0, 6, 9, 0, 1, 5)


def expected_names(spec: DatasetSpec) -> str:
    """Names of the expected files, for messages."""
    layout = cifar_files.FORMATS.get(spec.name)
    if layout is not None:
        return f"{layout.archive} or {layout.folder}/"
    return f"{_idx_names(spec)[0][0]}[.gz] and its three companions"


def search_folders(spec: DatasetSpec, data_dir: Path | None) -> list[Path]:
    """Folders that are searched, in order."""
    roots = [] if data_dir is None else [data_dir]
    system = [folder / name for folder in SYSTEM_FOLDERS for name in spec.folders]
    return roots + [root / name for root in roots for name in spec.folders] + system


def find(spec: DatasetSpec, data_dir: Path | None) -> FoundFiles | None:
    """Find the dataset's files; None if there are none that this module can read.

    Raises:
      InvalidInput: some of the files are missing.
    """
    for folder in search_folders(spec, data_dir) if spec.folders else ():
        layout = cifar_files.FORMATS.get(spec.name)
        found = _find_idx(spec, folder) if layout is None else cifar_files.find(layout, folder)
        if found is not None:
            return found
    return None


def load(spec: DatasetSpec, found: FoundFiles, *, by_rows: bool = False) -> Arrays:
    """Read and check files.

    Args:
      spec: the dataset.
      found: its files.
      by_rows: whether the images are `pfl_jax.data.rows.Rows`, which are read later.

    Returns:
      The examples; EMNIST's images are transposed to be upright.

    Raises:
      InvalidInput: a file is damaged or of another dataset.
    """
    try:
        layout = cifar_files.FORMATS.get(spec.name)
        if layout is None:
            return _load_idx(spec, found, by_rows=by_rows)
        return (cifar_files.load_by_rows if by_rows else cifar_files.load)(spec, layout, found)
    except InvalidInput as error:
        raise InvalidInput(f"{error}; put a whole copy of {spec.name} there, or remove it") from None


def _load_idx(spec: DatasetSpec, found: FoundFiles, *, by_rows: bool) -> Arrays:
    def upright(x: np.ndarray) -> np.ndarray:
        return (x.swapaxes(1, 2) if spec.transposed else x)[..., None]

    arrays = []
    for images, labels in (found.paths[:2], found.paths[2:]):
        most = max(spec.published or (_MAX_EXAMPLES,))
        y = _read_idx(labels, (), most)
        x: Any = (_idx_rows if by_rows else _read_idx)(images, spec.shape[:2], most)
        if len(x) != len(y):
            raise InvalidInput(f"{images} holds {len(x)} images, but {labels} holds {len(y)} labels")
        check_labels(labels, y, spec)
        x = x.map(upright, spec.shape, np.uint8) if isinstance(x, Rows) else np.ascontiguousarray(upright(x))
        arrays += [x, y.astype(np.int32)]
    result = Arrays(*arrays)
    # Several datasets have the same file names; the largest label shows whether these files are of the right one.
    if result.train_y.max() != spec.num_classes - 1:
        raise InvalidInput(
            f"{found.paths[1]} is not {spec.name}: its labels end at {result.train_y.max()}, not {spec.num_classes - 1}"
        )
    first = tuple(result.test_y[: len(_MNIST_TEST_LABELS)].tolist())
    if spec.name == "fashion_mnist" and first == _MNIST_TEST_LABELS:
        raise InvalidInput(f"{found.folder} holds MNIST's digits, not Fashion-MNIST")
    return result


def _idx_names(spec: DatasetSpec) -> list[tuple[str, ...]]:
    """Possible names of the four IDX files, without .gz."""
    patterns = ["{}-images-idx3-ubyte", "{}-labels-idx1-ubyte"]
    plain = tuple(pattern.format(part) for part in ("train", "t10k") for pattern in patterns)
    if spec.name != "emnist":
        return [plain]
    byclass = tuple(f"emnist-byclass-{pattern.format(part)}" for part in ("train", "test") for pattern in patterns)
    return [byclass, plain]


def _find_idx(spec: DatasetSpec, folder: Path) -> FoundFiles | None:
    for names in _idx_names(spec):
        candidates = [[path for path in (folder / name, folder / f"{name}.gz") if path.is_file()] for name in names]
        if all(candidates):
            return FoundFiles(folder, tuple(paths[0] for paths in candidates))
        if any(candidates):
            missing = next(name for name, paths in zip(names, candidates, strict=True) if not paths)
            raise InvalidInput(f"{folder} holds a part of {spec.name}: {missing}[.gz] is missing")
    return None


def _read_idx(path: Path, shape: tuple[int, ...], most: int) -> np.ndarray:
    """Read an IDX file as uint8 [count, *shape]: a magic number, the sizes as big-endian int32, then the bytes.

    A count above `most` is refused, so that a file takes no more memory than the data set.
    """
    try:
        with _open_idx(path) as file:
            count = _idx_count(file, path, shape, most)
            size = count * int(np.prod(shape, dtype=int))
            data = file.read(size + 1)  # one byte more, to detect files that are too long
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidInput(f"{path} cannot be read, it may be truncated: {error}") from error
    _check_length(path, size, len(data))
    return np.frombuffer(data, np.uint8).reshape(count, *shape)


def _idx_rows(path: Path, shape: tuple[int, ...], most: int) -> Rows:
    """`_read_idx` by rows; the length of a compressed file is checked when they are read."""
    begin = 4 * (2 + len(shape))
    try:
        with _open_idx(path) as file:
            count = _idx_count(file, path, shape, most)
        if path.suffix != ".gz":
            _check_length(path, count * int(np.prod(shape, dtype=int)), path.stat().st_size - begin)
            return rows.of_file(path, begin, (count, *shape), np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidInput(f"{path} cannot be read, it may be truncated: {error}") from error
    return rows.of_stream(path, lambda: _open_idx(path), begin, (count, *shape), np.uint8)


@contextlib.contextmanager
def _open_idx(path: Path) -> Iterator[Any]:
    with open_file(path) as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
        yield file


def _idx_count(file: Any, path: Path, shape: tuple[int, ...], most: int) -> int:
    """Number of items by an IDX file's header, checked."""
    magic, header = 0x0800 + 1 + len(shape), file.read(4 * (2 + len(shape)))
    if len(header) < 4 * (2 + len(shape)):
        raise InvalidInput(f"{path} is truncated: {len(header)} bytes")
    found_magic, count, *found_shape = np.frombuffer(header, ">u4").tolist()
    if found_magic != magic:
        raise InvalidInput(f"{path} is not an IDX file: magic number {magic:#06x} expected, {found_magic:#x} found")
    if tuple(found_shape) != shape or not 0 < count <= most:
        raise InvalidInput(
            f"{path}: expected at most {most} items of shape {shape}, found {count} of {tuple(found_shape)}"
        )
    return count


def _check_length(path: Path, size: int, found: int) -> None:
    if found != size:
        found_size = f"more than {size}" if found > size else str(found)
        raise InvalidInput(f"{path} is damaged: its header promises {size} bytes of data, it has {found_size}")
