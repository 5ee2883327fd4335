"""Files of the papers' data sets that commands refuse."""

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from archives import IDX_NAMES, cifar_members, idx, images, write_idx, write_tar
from bad_input import Case, Evil, Prepare, evil_pickle, file, folder

GREY = (*images(40, 10, (28, 28)), *images(20, 10, (28, 28), 1))
COLOUR = (*images(20, 10, (32, 32, 3)), *images(10, 10, (32, 32, 3), 1))


def cases() -> Iterator[Case]:
    """All of them."""
    files = "--source files --data-dir data"

    def gray(what: str, message: str, change: Prepare, dataset: str = "fashion_mnist") -> Case:
        def prepare(here: Path) -> None:
            write_idx(here / "data", GREY)
            change(here / "data")

        return Case(f"{dataset} {files}", what, message, prepare)

    def part(number: int, change: Callable[[bytes], bytes]) -> Prepare:
        def apply(data: Path) -> None:
            path = data / f"{IDX_NAMES[number]}.gz"
            path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))

        return apply

    def cut(name: str, by: int) -> Prepare:
        return lambda data: (data / name).write_bytes((data / name).read_bytes()[:-by])

    yield Case(
        f"fashion_mnist {files}",
        "data is empty",
        "--data-dir) the folder of train-images-idx3-ubyte[.gz] and",
        folder("data"),
    )
    yield Case(f"fashion_mnist {files}", "data is a file", "the data folder data is not a folder", file("data"))
    yield gray(
        "test labels are missing",
        "data holds a part of fashion_mnist: t10k-labels-idx1-ubyte is missing",
        lambda data: (data / f"{IDX_NAMES[3]}.gz").unlink(),
    )
    yield gray(
        "training images: the file is cut off",
        "Compressed file ended before the end-of-stream marker was",
        cut(f"{IDX_NAMES[0]}.gz", 100),
    )
    yield gray(
        "training images: an example is missing",
        "(train-images-idx3-ubyte.gz: cannot reshape array",
        part(0, lambda text: text[:-784]),
    )
    yield gray(
        "test images: another magic number",
        "sizes [20, 28, 28], not bytes of shape (28, 28)",
        part(2, lambda content: b"\1" + content[1:]),
    )
    yield gray(
        "39 labels for 40 images",
        "has 40 images, and train-labels-idx1-ubyte.gz 39 labels",
        part(1, lambda _: idx(np.zeros(39, np.uint8))),
    )
    yield gray(
        "a label that is no class",
        "its training labels end at 9 and its test labels at 10",
        part(3, lambda content: content[:-1] + b"\x0a"),
    )
    yield gray(
        "MNIST's labels",
        "data is not fashion_mnist, or damaged (it holds MNIST's digits): put a whole copy there",
        part(3, lambda _: idx(np.array([7, 2, 1, 0, 4, 1, 4, 9, 5, 9, 0, 6, 9, 0, 1, 5] + [0] * 4, np.uint8))),
    )
    yield gray(
        "Fashion-MNIST's files", "its training labels end at 9 and its test labels at 9", lambda data: None, "emnist"
    )

    def color(what: str, message: str, change: Callable[[dict[str, bytes]], dict[str, bytes]]) -> Case:
        def prepare(here: Path) -> None:
            write_tar(here / "data" / "cifar-10-binary.tar.gz", change(cifar_members("cifar10", COLOUR)))

        return Case(f"cifar10 {files}", what, message, prepare)

    yield color(
        "a batch is missing",
        "(there is no 'data_batch_3.bin'): put a whole copy there",
        lambda m: {name: m[name] for name in m if "batch_3" not in name},
    )
    yield Case(
        f"cifar10 {files}",
        "data holds CIFAR's Python archive, which is made of pickles",
        "--data-dir) the folder of cifar-10-binary.tar.gz",
        lambda here: write_tar(
            here / "data" / "cifar-10-python.tar.gz", {"cifar-10-batches-py/data_batch_1": evil_pickle()}
        ),
    )
    yield Case(
        f"cinic10 {files}",
        "data is empty",
        "cinic10 comes through tensorflow-datasets alone: use source tfds or auto",
        folder("data"),
    )
    yield Case(
        "cifar10 --data-dir data",
        "what was kept of prepared data is cut off",
        "data/pfl_jax/cifar10-3.0.2.npz is damaged",
        file("data/pfl_jax/cifar10-3.0.2.npz", b"PK\3\4"),
    )
    yield Case(
        "cifar10 --data-dir data", "it holds a pickle", "data/pfl_jax/cifar10-3.0.2.npz is damaged", _pickled_arrays
    )


def _pickled_arrays(here: Path) -> None:
    (here / "data" / "pfl_jax").mkdir(parents=True)
    array = np.array([Evil()], object)
    arrays = dict.fromkeys(("fingerprint", "train_x", "train_y", "test_x", "test_y"), array)
    np.savez(here / "data" / "pfl_jax" / "cifar10-3.0.2.npz", allow_pickle=True, **arrays)
