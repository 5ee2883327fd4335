"""Peak memory of 1, 2 and 4 processes on one machine: `python -m experiments.benchmark.processes`.

The processes train FedPer over loopback on random images in EMNIST's shape, which every client has its own of; minutes
on two cores. `--clients N` sets the number of clients.
"""

import argparse
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

TRAIN, TEST = 180, 20
_MIB = 2**20
_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "test-images-idx3-ubyte", "test-labels-idx1-ubyte")


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


def measure(folder: Path, clients: int, number: int) -> dict[str, float]:
    """Figures of one run.

    Args:
      folder: of the images.
      clients: number of clients.
      number: of processes.

    Returns:
      Largest peak memory of a process, and seconds of the run.
    """
    out = folder.parent / f"run{number}"
    words = ["--method", "fedper", "--model", "mlp", "--source", "files", "--data-dir", str(folder), "--rounds", "2"]
    words += ["--partition", "iid", "--num-clients", str(clients), "--train-size", str(TRAIN), "--test-size", str(TEST)]
    words += ["--participation", str(10 / clients), "--epochs", "1", "--eval-every", "2", "--eval-clients", "50"]
    words += ["--state-on", "host", "--keep-state", "never", "--checkpoint-every", "2", "--out", str(out)]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words += ["--distributed", "--coordinator", f"127.0.0.1:{port}", "--num-processes", str(number), "--devices"]
    words += [str(number), "--process-id"]
    began = time.perf_counter()
    children = [
        subprocess.Popen([sys.executable, "-m", "experiments", "emnist", *words, str(index)], stdout=subprocess.DEVNULL)
        for index in range(number)
    ]
    peaks: dict[int, int] = {}
    while any(child.poll() is None for child in children):
        for child in children:
            for pid in _family(child.pid):
                peaks[pid] = max(peaks.get(pid, 0), _peak(pid))
        time.sleep(0.1)
    if any(child.returncode for child in children):
        raise RuntimeError(f"{number} processes ended with {[child.returncode for child in children]}")
    return {"peak MiB": max(peaks.values()) / _MIB, "s": time.perf_counter() - began}


def _family(pid: int) -> list[int]:
    """A process and its children."""
    try:
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    except OSError:
        return [pid]


def _peak(pid: int) -> int:
    """Peak memory of a process in bytes; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=2500)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    arguments = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).parents[2]))
    with tempfile.TemporaryDirectory() as place:
        images = Path(place, "images")
        images.mkdir()
        print(f"{arguments.clients} clients, images {write_images(images, arguments.clients):,.0f} MiB", flush=True)
        for number in arguments.processes:
            figures = measure(images, arguments.clients, number)
            listed = ", ".join(f"{key} {value:,.0f}" for key, value in figures.items())
            print(f"{number} processes: {listed}", flush=True)
