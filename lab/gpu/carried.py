"""What the machine with the GPU lacks: packages and the papers' datasets, small enough to be carried there.

    python -m lab.gpu.carried --cifar10 FILE.npz    # lays all into build/gpu, and prints the command

FILE.npz is a JPEG copy of CIFAR-10: for "train" and "test" the bytes of all files, their sizes and their labels, as
`train_bytes`, `train_sizes` and `train_labels`.
"""

import gzip
import hashlib
import io
import itertools
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from experiments.cli.parser import Folder, parse
from experiments.host.exit_codes import exit_code, exit_process
from lab.committed import ROOT
from pfl_jax.atomic_write import write_binary
from pfl_jax.data import idx_and_cifar
from pfl_jax.data.specs import SPECS
from pfl_jax.errors import InvalidInput

FOLDER = Path("build/gpu")
"""Of a checkout; git ignores it."""

PACKAGES = ("jaxopt==0.8.5",)
"""Packages in pure Python that the machine lacks and the hour imports."""

MOST = 64
"""MiB that the working tree may have with the folder."""

FASHION, CIFAR, SITE, EARLIER = "fashion_mnist.tar.xz", "cifar10_jpeg.npz", "site", "earlier"
SPLITS = ("train", "test")


@dataclass(frozen=True)
class Options:
    """Command line."""

    cifar10: Path | None = None
    """JPEG copy of CIFAR-10; without it the runs on CIFAR-10 are left out."""
    earlier: Folder = None
    """Results that came back from an earlier call, which the next one goes on from."""
    unpack: Folder = None
    """Only unpack the datasets that were carried, as their published files, into this folder."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Lay out the folder with command-line arguments, by default those of this process; return the exit code."""

    def work() -> None:
        options, _ = parse(Options, "lab.gpu.carried", __doc__, arguments)
        folder = ROOT.parent / FOLDER
        if options.unpack:
            print(unpack(folder, options.unpack))
            return
        pack(folder, options.cifar10)
        if options.earlier:
            unused = shutil.ignore_patterns("runs", "log")
            shutil.copytree(options.earlier, folder / EARLIER, ignore=unused, dirs_exist_ok=True)
        carried, tree = _size(folder.rglob("*")), _size(_tree())
        if carried + tree > MOST and options.cifar10 is not None:
            # The runs on CIFAR-10 come first there.
            carried -= _size([folder / FASHION])
            (folder / FASHION).unlink()
            print("Fashion-MNIST does not fit beside CIFAR-10, and is left out with its runs")
        print(f"{FOLDER} has {carried:.1f} MiB, the working tree {tree:.1f} MiB; {MOST} MiB may be carried")
        if carried + tree > MOST:
            raise InvalidInput(f"{carried + tree - MOST:.1f} MiB too much: remove untracked files")
        print(f"carry: {FOLDER}\ncommand: {COMMAND}")

    return exit_code(work)


COMMAND = (
    f"export PYTHONPATH=$PWD/{FOLDER}/{SITE} PYTHONUNBUFFERED=1; cp -r {FOLDER}/{EARLIER}/* $OUT/ 2>/dev/null; set -o "
    f"pipefail; python3 -m lab.gpu --minutes 9 --out $OUT --runs /tmp/runs 2>&1 | tee "
    "$OUT/log"
)
"""On the other machine; $OUT is the folder whose files come back."""


def _size(paths: Iterable[Path]) -> float:
    """Size of files in MiB."""
    return sum(path.stat().st_size for path in paths if path.is_file()) / 2**20


def _tree() -> list[Path]:
    words = ["git", "-C", str(ROOT.parent), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    return [ROOT.parent / name for name in listed.split("\0") if name]


def pack(folder: Path, cifar10: Path | None) -> None:
    """Lay packages and datasets into a folder; InvalidInput if a dataset is not there. What is there stays."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--upgrade", "--target"]
    subprocess.run([*words, str(folder / SITE), *PACKAGES], check=True)
    found = idx_and_cifar.find(SPECS["fashion_mnist"], None)
    if not found:
        raise InvalidInput(idx_and_cifar.missing(SPECS["fashion_mnist"], None))
    if not (folder / FASHION).exists():
        with tarfile.open(folder / FASHION, "w:xz") as archive:
            for path in found:
                content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
                member = tarfile.TarInfo(f"fashion-mnist/{path.name.removesuffix('.gz')}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    if cifar10 is not None:
        pack_cifar10(cifar10, folder / CIFAR)


def pack_cifar10(source: Path, file: Path) -> None:
    """Store the JPEG copy compressed, since all its files begin alike, with the digest of its pixels."""
    arrays: dict[str, Any] = dict(np.load(source)) | {"digest": np.array(_digest(records(source)))}
    write_binary(file, lambda opened: np.savez_compressed(opened, **arrays))


def _images(file: Path, split: str) -> list[bytes]:
    """JPEG files of a split."""
    stored = np.load(file)
    content, ends = stored[f"{split}_bytes"].tobytes(), np.cumsum(stored[f"{split}_sizes"], dtype=np.int64)
    return [content[start:end] for start, end in itertools.pairwise([0, *ends.tolist()])]


def records(file: Path) -> dict[str, np.ndarray]:
    """Records of CIFAR's binary format [P, 3073] by split, from a JPEG copy, shuffled by a fixed permutation.

    The copy has its images class by class, and CIFAR's own files have them mixed.
    """

    def pixels(image: bytes) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(image)).convert("RGB")).transpose(2, 0, 1).ravel()

    found = {}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for split in SPLITS:
            rows, labels = np.array(list(threads.map(pixels, _images(file, split)))), np.load(file)[f"{split}_labels"]
            order = np.random.default_rng(0).permutation(len(rows))
            found[split] = np.concatenate([labels[:, None], rows], axis=1)[order]
    return found


def _digest(rows: dict[str, np.ndarray]) -> str:
    return hashlib.sha256(rows["train"].tobytes() + rows["test"].tobytes()).hexdigest()


def unpack(folder: Path, target: Path) -> str:
    """Write the datasets as their published files into a folder, unless they are there; return what to say of them."""
    datasets = []
    if (folder / FASHION).exists() and not (target / "fashion-mnist").exists():
        with tarfile.open(folder / FASHION) as archive:
            archive.extractall(target, filter="data")
        datasets.append("Fashion-MNIST")
    own_folder, names = idx_and_cifar.CIFAR["cifar10"]
    cifar = target / own_folder
    if (folder / CIFAR).exists() and not cifar.exists():
        rows = records(folder / CIFAR)
        cifar.mkdir(parents=True)
        (cifar / idx_and_cifar.NOTE).write_text("JPEG copy\n")
        for name, some in zip(names, [*np.split(rows["train"], len(names) - 1), rows["test"]], strict=True):
            some.tofile(cifar / name)
        same = str(np.load(folder / CIFAR)["digest"]) == _digest(rows)
        datasets.append(
            "CIFAR-10, JPEG copy" + ("" if same else ", whose pixels DIFFER from those of the packing machine")
        )
    return f"{' and '.join(datasets) or 'no dataset'} unpacked in {target}"


if __name__ == "__main__":
    exit_process(main())
