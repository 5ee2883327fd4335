"""Files of the papers' data sets that commands refuse."""

import gzip
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from archives import IDX_NAMES, cifar_members, idx, images, write_idx, write_tar
from bad_input import Case, Evil, Prepare, evil_pickle, file, folder

GREY = (*images(40, 10, (28, 28)), *images(20, 10, (28, 28), 1))
COLOUR = (*images(20, 10, (32, 32, 3)), *images(10, 10, (32, 32, 3), 1))


FILES = "--source files --data-dir data"
OF_MNIST = idx(np.array([7, 2, 1, 0, 4, 1, 4, 9, 5, 9, 0, 6, 9, 0, 1, 5] + [0] * 4, np.uint8))


def changed(number: int, change: Callable[[bytes], bytes]) -> Prepare:
    """Changes the content of one of the four IDX files."""

    def apply(data: Path) -> None:
        path = data / f"{IDX_NAMES[number]}.gz"
        path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))

    return apply


def _cut_off(data: Path) -> None:
    path = data / f"{IDX_NAMES[0]}.gz"
    path.write_bytes(path.read_bytes()[:-100])


GRAY: dict[str, tuple[str, Prepare]] = {
    "test labels are missing": (
        "data holds a part of fashion_mnist: t10k-labels-idx1-ubyte is missing",
        lambda data: (data / f"{IDX_NAMES[3]}.gz").unlink(),
    ),
    "a file is cut off": ("Compressed file ended before the end-of-stream marker was", _cut_off),
    "a label that is no class": (
        "its training labels end at 9 and its test labels at 10",
        changed(3, lambda content: content[:-1] + b"\x0a"),
    ),
    "MNIST's labels": ("or damaged (it holds MNIST's digits): put a whole copy there", changed(3, lambda _: OF_MNIST)),
}
"""What is wrong with Fashion-MNIST's four files -> part of the message, and what makes it so."""


def _without_a_batch(here: Path) -> None:
    members = cifar_members("cifar10", COLOUR)
    whole = {name: content for name, content in members.items() if "batch_3" not in name}
    write_tar(here / "data" / "cifar-10-binary.tar.gz", whole)


def _of_pickles(here: Path) -> None:
    write_tar(here / "data" / "cifar-10-python.tar.gz", {"cifar-10-batches-py/data_batch_1": evil_pickle()})


def _pickled_arrays(here: Path) -> None:
    (here / "data" / "pfl_jax").mkdir(parents=True)
    array = np.array([Evil()], object)
    arrays = dict.fromkeys(("fingerprint", "train_x", "train_y", "test_x", "test_y"), array)
    np.savez(here / "data" / "pfl_jax" / "cifar10-3.0.2.npz", allow_pickle=True, **arrays)


def cases() -> Iterator[Case]:
    """All of them."""
    kept = "data/pfl_jax/cifar10-3.0.2.npz"
    for what, (message, change) in GRAY.items():

        def prepare(here: Path, change: Prepare = change) -> None:
            write_idx(here / "data", GREY)
            change(here / "data")

        yield Case(f"fashion_mnist {FILES}", what, message, prepare)
    for command, what, message, make in (
        (f"fashion_mnist {FILES}", "data is empty", "the folder of train-images-idx3-ubyte[.gz] and", folder("data")),
        (f"fashion_mnist {FILES}", "data is a file", "the data folder data is not a folder", file("data")),
        (f"cinic10 {FILES}", "data is empty", "comes only through tensorflow-datasets: use source", folder("data")),
        (f"cifar10 {FILES}", "a batch is missing", "(there is no 'data_batch_3.bin'): put a whole", _without_a_batch),
        (f"cifar10 {FILES}", "an archive of pickles", "the folder of cifar-10-binary.tar.gz", _of_pickles),
        ("cifar10 --data-dir data", "what was kept is cut off", f"{kept} is damaged", file(kept, b"PK\3\4")),
        ("cifar10 --data-dir data", "it holds a pickle", f"{kept} is damaged", _pickled_arrays),
    ):
        yield Case(command, what, message, make)
