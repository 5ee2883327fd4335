"""Peak memory of 1, 2 and 4 processes on one machine; minutes on two cores.

The processes train FedPer over loopback on random images in EMNIST's shape; each client has its own images.
"""

import contextlib
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from experiments.cli.exit_codes import leave
from experiments.cli.parser import at_least_one
from experiments.lab.benchmark import command, measure
from experiments.lab.benchmark.records import Row, Section
from pfl_jax.errors import InvalidInput

TRAIN, TEST = 180, 20
_MIB = 2**20
_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "test-images-idx3-ubyte", "test-labels-idx1-ubyte")


@dataclass(frozen=True, kw_only=True)
class Options(command.Options):
    """Command line of the comparison."""

    clients: int = 2500
    """Clients of the federation."""
    processes: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N...")] = (1, 2, 4)
    """Numbers of processes to compare."""
    checkout: Annotated[Path, tyro.conf.arg(metavar="DIR")] = measure.ROOT
    """Folder of the program that runs; by default this one."""

    def check(self) -> None:
        """Raise InvalidInput for values that cannot be used."""
        at_least_one(clients=self.clients, processes=min(self.processes, default=0))
        if not (self.checkout / "experiments" / "emnist.py").is_file():
            raise InvalidInput(f"--checkout {self.checkout}: no experiments/emnist.py there")
        super().check()


def write_images(folder: Path, clients: int) -> float:
    """Write uncompressed IDX files with examples for so many clients; return their size in MiB."""
    rng = np.random.default_rng(0)
    for images, labels, size in zip(_NAMES[::2], _NAMES[1::2], (TRAIN * clients, TEST * clients), strict=True):
        with (folder / f"emnist-byclass-{images}").open("wb") as file:
            file.write(struct.pack(">HBB3I", 0, 8, 3, size, 28, 28))
            for start in range(0, size, 10_000):
                file.write(rng.bytes(784 * min(10_000, size - start)))
        content = (np.arange(size) % 62).astype(np.uint8).tobytes()
        (folder / f"emnist-byclass-{labels}").write_bytes(struct.pack(">HBBI", 0, 8, 1, size) + content)
    return sum(path.stat().st_size for path in folder.iterdir()) / _MIB


def trained(checkout: Path, folder: Path, clients: int, number: int) -> Row:
    """Figures of one run.

    Args:
      checkout: folder of the program.
      folder: of the images.
      clients: number of clients.
      number: of processes.

    Returns:
      Largest peak memory of a process, and seconds of the run.

    Raises:
      InvalidInput: a process failed; with the last line that one wrote.
    """
    out = folder.parent / f"run{number}"
    words = f"--method fedper --model mlp --epochs 1 --rounds 2 --eval-every 2 --num-clients {clients}".split()
    words += f"--source files --partition iid --train-size {TRAIN} --test-size {TEST} --eval-clients 50".split()
    words += f"--participation {min(1, 10 / clients)} --state-on host --keep-state never --checkpoint-every 2".split()
    words += ["--data-dir", str(folder), "--out", str(out)]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words += f"--distributed --coordinator 127.0.0.1:{port} --num-processes {number} --devices {number}".split()
    words += ["--process-id"]
    began = time.perf_counter()
    with contextlib.ExitStack() as held:
        # Not pipes, which would have to be read while the processes run.
        errors = [held.enter_context(tempfile.TemporaryFile("w+")) for _ in range(number)]
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "experiments", "emnist", *words, str(index)],
                cwd=checkout,
                stdout=subprocess.DEVNULL,
                stderr=error,
            )
            for index, error in enumerate(errors)
        ]
        peaks = _watched(children)
        for child, error in zip(children, errors, strict=True):
            if child.returncode:
                error.seek(0)
                line = (error.read().strip().splitlines() or ["it wrote nothing"])[-1]
                raise InvalidInput(f"one of {number} processes ended with exit code {child.returncode}: {line}")
    row: Row = {"processes": number, "largest peak MiB": max(peaks.values()) / _MIB}
    return row | {"s": time.perf_counter() - began}


def _watched(children: Sequence["subprocess.Popen[bytes]"]) -> dict[int, int]:
    """Peak memory of every process by its number, once all have ended; nothing is left of them after an error."""
    peaks: dict[int, int] = {}
    try:
        while any(child.poll() is None for child in children):
            for child in children:
                for process in _family(child.pid):
                    peaks[process] = max(peaks.get(process, 0), measure.peak_memory_of(process))
            time.sleep(0.1)
    finally:
        for child in children:
            child.kill()
            child.wait()
    return peaks


def _family(pid: int) -> list[int]:
    """A process and its children."""
    try:
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    except OSError:
        return [pid]


def compare(options: Options, notify: command.Notify) -> tuple[dict[str, Section], dict[str, Any]]:
    """Peak memory and seconds by number of processes."""
    with tempfile.TemporaryDirectory() as place:
        images = Path(place, "images")
        images.mkdir()
        size = write_images(images, options.clients)
        rows: list[Row] = []
        for number in options.processes:
            notify(f"processes: {number}")
            rows.append(trained(options.checkout, images, options.clients, number))
    note = (
        f"FedPer, {options.clients:,} clients of {TRAIN + TEST} images, {size:,.0f} MiB in all; 2 rounds, a checkpoint"
    )
    return {"processes": Section("Memory by number of processes", rows, note)}, {}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
      words: after the module's name; by default those of this process.

    Returns:
      The exit code, see `exit_codes.exit_code`.
    """
    return command.command(Options, "experiments.lab.benchmark.processes", __doc__, words, compare)


if __name__ == "__main__":
    leave(main())
