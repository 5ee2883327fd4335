"""Peak memory of several processes on one machine, minutes on two cores: they train FedPer over loopback.

The images are random, in EMNIST's shape; each client has its own.
"""

import contextlib
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.lab.benchmark import measure
from experiments.lab.benchmark.child import last_line
from experiments.lab.benchmark.records import Row, Section
from experiments.lab.benchmark.workload import Setup
from pfl_jax.errors import InvalidInput

TRAIN, TEST = 180, 20
_MIB = 2**20
_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "test-images-idx3-ubyte", "test-labels-idx1-ubyte")


def processes(setup: Setup) -> Section:
    """Peak memory and seconds by number of processes."""
    clients, numbers = setup.scale.processes
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        images = Path(place, "images")
        images.mkdir()
        size = write_images(images, clients)
        for number in numbers:
            setup.notify(f"processes: {number}")
            rows.append(trained(images, clients, number))
    note = f"FedPer, {clients:,} clients of {TRAIN + TEST} images, {size:,.0f} MiB in all; 2 rounds, a checkpoint"
    return Section("Memory by number of processes", rows, note)


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


def trained(folder: Path, clients: int, number: int) -> Row:
    """Figures of one run.

    Args:
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
                cwd=measure.ROOT,
                stdout=subprocess.DEVNULL,
                stderr=error,
            )
            for index, error in enumerate(errors)
        ]
        peaks = _watched(children)
        for child, error in zip(children, errors, strict=True):
            if child.returncode:
                error.seek(0)
                line = last_line(error.read())
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
