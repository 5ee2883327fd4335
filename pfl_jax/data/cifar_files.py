"""CIFAR's binary files and archives: whole, or by rows (`pfl_jax.data.rows`)."""

import contextlib
import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from pfl_jax.data import rows
from pfl_jax.data.rows import Rows
from pfl_jax.data.specs import Arrays, DatasetSpec
from pfl_jax.errors import InvalidInput
from pfl_jax.safe_read import Bounded, open_file, read_file


class FoundFiles(NamedTuple):
    """Files of a dataset.

    Attributes:
      folder: folder or archive that outputs name as the origin.
      paths: IDX: training images, training labels, test images, test labels. CIFAR: the archive, or the binary files.
    """

    folder: Path
    paths: tuple[Path, ...]


class CifarFormat(NamedTuple):
    """CIFAR's binary format: records of `labels` label bytes, of which the last is used, and 3072 bytes R, G, B."""

    archive: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: int
    max_records: int


FORMATS = {
    "cifar10": CifarFormat(
        "cifar-10-binary.tar.gz",
        "cifar-10-batches-bin",
        tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        ("test_batch.bin",),
        labels=1,
        max_records=10_000,
    ),
    "cifar100": CifarFormat(
        "cifar-100-binary.tar.gz", "cifar-100-binary", ("train.bin",), ("test.bin",), labels=2, max_records=50_000
    ),
}


def find(layout: CifarFormat, parent: Path) -> FoundFiles | None:
    """Archive or binary files in a folder; None if there are none.

    Raises:
      InvalidInput: some of the files are missing.
    """
    if (parent / layout.archive).is_file():
        return FoundFiles(parent / layout.archive, (parent / layout.archive,))
    names = layout.train + layout.test
    for folder in (parent / layout.folder, parent):
        present = [(folder / name).is_file() for name in names]
        if all(present):
            return FoundFiles(folder, tuple(folder / name for name in names))
        if any(present):
            raise InvalidInput(f"{folder} is incomplete: {names[present.index(False)]} is missing")
    return None


def load(spec: DatasetSpec, layout: CifarFormat, found: FoundFiles) -> Arrays:
    """All examples; InvalidInput for damaged files."""
    names = layout.train + layout.test
    contents = _archive_members(found.paths[0], layout) if len(found.paths) == 1 else _binary_files(found, layout)
    parsed = {}
    for path, name, content in contents:
        count = _record_count(path, len(content), layout)
        records = np.frombuffer(content, np.uint8).reshape(count, -1)
        y = records[:, layout.labels - 1]
        check_labels(path, y, spec)
        parsed[name] = (_images(records, layout), y.astype(np.int32))
    missing = [name for name in names if name not in parsed]
    if missing:
        raise InvalidInput(f"{found.folder} is not {spec.name}: {layout.folder}/{missing[0]} is missing")
    arrays = []
    for part in (layout.train, layout.test):
        arrays += [
            np.concatenate([parsed[name][0] for name in part]),
            np.concatenate([parsed[name][1] for name in part]),
        ]
    return Arrays(*arrays)


def _images(records: np.ndarray, layout: CifarFormat) -> np.ndarray:
    return records[:, layout.labels :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _record_count(path: str | Path, size: int, layout: CifarFormat) -> int:
    record = layout.labels + 3072
    if size == 0 or size % record:
        raise InvalidInput(f"{path} is damaged: {size} bytes are not a multiple of {record}, its record")
    return size // record


def load_by_rows(spec: DatasetSpec, layout: CifarFormat, found: FoundFiles) -> Arrays:
    """`load` by rows; an archive is gone through once for each of its files, a binary file read by offset."""
    arrays = []
    for part in (layout.train, layout.test):
        images, labels = [], []
        for name in part:
            path, records = (_member_rows if len(found.paths) == 1 else _binary_rows)(found, layout, name)
            y = np.concatenate([block[:, layout.labels - 1] for _, block in rows.blocks(records)])
            check_labels(path, y, spec)
            images.append(records.map(lambda block: _images(block, layout), spec.shape, np.uint8))
            labels.append(y.astype(np.int32))
        arrays += [rows.concatenate(images), np.concatenate(labels)]
    return Arrays(*arrays)


def _binary_rows(found: FoundFiles, layout: CifarFormat, name: str) -> tuple[str, Rows]:
    """Path and records of a binary file."""
    path = next(path for path in found.paths if path.name == name)
    try:
        size = path.stat().st_size
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    _check_size(str(path), size, layout)
    count = _record_count(path, size, layout)
    return str(path), rows.of_file(path, 0, (count, layout.labels + 3072), np.uint8)


def _member_rows(found: FoundFiles, layout: CifarFormat, name: str) -> tuple[str, Rows]:
    """Path and records of a file in an archive."""
    archive = found.paths[0]
    try:
        with _open_member(archive, layout, name) as (member, _):
            path, size = f"{archive}:{member.name}", member.size
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise InvalidInput(f"{archive} cannot be read, it may be truncated: {error}") from error
    _check_size(path, size, layout)

    @contextlib.contextmanager
    def opened() -> Iterator[IO[bytes]]:
        with _open_member(archive, layout, name) as (_, content):
            yield content

    return path, rows.of_stream(path, opened, 0, (_record_count(path, size, layout), layout.labels + 3072), np.uint8)


@contextlib.contextmanager
def _open_member(archive: Path, layout: CifarFormat, name: str) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
    """Entry and content of one of the archive's files."""
    with open_file(archive) as raw, gzip.open(raw) as unpacked, _tar(unpacked, layout) as tar:
        for member in tar:
            if member.isfile() and member.name.removeprefix("./") == f"{layout.folder}/{name}":
                yield member, tar.extractfile(member) or io.BytesIO()
                return
    raise InvalidInput(f"{archive} is not {layout.folder}: {name} is missing")


def _archive_members(archive: Path, layout: CifarFormat) -> Iterator[tuple[str, str, bytes]]:
    """(path for messages, name, bytes) of the archive members that form the dataset; others are skipped."""
    wanted = {f"{layout.folder}/{name}": name for name in layout.train + layout.test}
    try:
        with open_file(archive) as raw, gzip.open(raw) as unpacked, _tar(unpacked, layout) as tar:
            for member in tar:
                name = wanted.get(member.name.removeprefix("./"))
                if name is None or not member.isfile():
                    continue
                _check_size(f"{archive}:{member.name}", member.size, layout)
                yield f"{archive}:{member.name}", name, (tar.extractfile(member) or io.BytesIO()).read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise InvalidInput(f"{archive} cannot be read, it may be truncated: {error}") from error


def _tar(unpacked: IO[bytes] | gzip.GzipFile, layout: CifarFormat) -> tarfile.TarFile:
    # Twice what the data set has: other members are skipped, but unpacked.
    limit = 2 * len(layout.train + layout.test) * layout.max_records * (layout.labels + 3072)
    return tarfile.open(fileobj=Bounded(unpacked, limit), mode="r:")  # pyright: ignore[reportArgumentType]


def _binary_files(found: FoundFiles, layout: CifarFormat) -> Iterator[tuple[str, str, bytes]]:
    for path in found.paths:
        try:
            _check_size(str(path), path.stat().st_size, layout)
            content = read_file(path)
        except OSError as error:
            raise InvalidInput(f"{path} cannot be read: {error}") from error
        yield str(path), path.name, content


def _check_size(path: str, size: int, layout: CifarFormat) -> None:
    limit = layout.max_records * (layout.labels + 3072)
    if size > limit:
        raise InvalidInput(f"{path} is not {layout.folder}: {size} bytes, at most {limit} expected")


def check_labels(path: Path | str, y: np.ndarray, spec: DatasetSpec) -> None:
    """Raise InvalidInput if a file has a label that the data set has not."""
    if y.max() >= spec.num_classes:
        raise InvalidInput(f"{path}: label {y.max()} found, {spec.name} has 0 to {spec.num_classes - 1}")
