"""Small data files in the true formats: IDX, CIFAR's binary records and archives, and CINIC-10's archive."""

import gzip
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

IDX_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

CIFAR_FILES = {
    "cifar10": ("cifar-10-batches-bin", [f"data_batch_{number}.bin" for number in range(1, 6)], ["test_batch.bin"]),
    "cifar100": ("cifar-100-binary", ["train.bin"], ["test.bin"]),
}


def images(size: int, num_classes: int, shape: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random pictures uint8 [size, *shape] and labels uint8 [size] in which every class occurs."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (size, *shape), dtype=np.uint8), (np.arange(size) % num_classes).astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    """The IDX file of an array of bytes."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder: Path, arrays, names=IDX_NAMES, *, compress: bool = True) -> list[Path]:
    """Writes four IDX files; arrays: training images, training labels, test images, test labels."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, array in zip(names, arrays, strict=True):
        path = folder / (f"{name}.gz" if compress else name)
        path.write_bytes(gzip.compress(idx(array), 1) if compress else idx(array))
        paths.append(path)
    return paths


def cifar_records(x: np.ndarray, y: np.ndarray, coarse: bool) -> bytes:
    """CIFAR's records: labels (a coarse one before it for CIFAR-100), then the planes R, G, B."""
    columns = [y[:, None] // 5, y[:, None]] if coarse else [y[:, None]]
    return np.concatenate([*columns, x.transpose(0, 3, 1, 2).reshape(len(x), -1)], axis=1).astype(np.uint8).tobytes()


def cifar_members(name: str, arrays) -> dict[str, bytes]:
    """The files of CIFAR's archive by path; arrays: training images, labels, test images, labels."""
    folder, train, test = CIFAR_FILES[name]
    coarse = name == "cifar100"
    members = {}
    for files, x, y in ((train, *arrays[:2]), (test, *arrays[2:])):
        for file, part_x, part_y in zip(
            files, np.array_split(x, len(files)), np.array_split(y, len(files)), strict=True
        ):
            members[f"{folder}/{file}"] = cifar_records(part_x, part_y, coarse)
    if coarse:
        members[f"{folder}/coarse_label_names.txt"] = "\n".join(f"coarse{i}" for i in range(20)).encode()
        members[f"{folder}/fine_label_names.txt"] = "\n".join(f"fine{i}" for i in range(100)).encode()
    else:
        members[f"{folder}/batches.meta.txt"] = "\n".join(f"class{i}" for i in range(10)).encode()
    return members


def cinic_members(arrays, classes) -> dict[str, bytes]:
    """The files of CINIC-10's archive by path; arrays: training images, labels, test images, labels."""
    members = {"README.md": b"about", "imagenet-contributors.csv": b"synset,image\n"}
    x, y, test_x, test_y = arrays
    # Validation pictures are there too; here they are the test pictures upside down.
    for folder, images_, labels in (("train", x, y), ("valid", test_x[:, ::-1], test_y), ("test", test_x, test_y)):
        for number, (image, label) in enumerate(zip(images_, labels, strict=True)):
            content = io.BytesIO()
            Image.fromarray(image).save(content, "png")
            members[f"{folder}/{classes[label]}/cifar10-{folder}-{number}.png"] = content.getvalue()
    # As macOS leaves it behind.
    members["train/bird/._cifar10-train-2.png"] = b"hidden"
    return members


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    """A .tar.gz of the members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path
