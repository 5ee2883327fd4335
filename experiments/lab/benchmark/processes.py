"""Peak memory of several processes on one machine, minutes on two cores: FedPer on random images, over loopback."""

import contextlib
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from experiments.lab.benchmark import measure
from experiments.lab.benchmark.child import in_process, last_line
from experiments.lab.benchmark.records import Row, Section
from experiments.lab.benchmark.workload import Setup
from pfl_jax.errors import InvalidInput

TRAIN, TEST = 180, 20
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
            rows.append(in_process(trained, folder=str(images), clients=clients, number=number))
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
    return sum(path.stat().st_size for path in folder.iterdir()) / measure.MIB


def trained(folder: str, clients: int, number: int) -> Row:
    """Largest peak memory and time of one run of a number of processes, in a process without other children.

    Raises:
      InvalidInput: a process failed; with the last line that one wrote.
    """
    words = f"--method fedper --model mlp --epochs 1 --rounds 2 --eval-every 2 --num-clients {clients}".split()
    words += f"--source files --partition iid --train-size {TRAIN} --test-size {TEST} --eval-clients 50".split()
    words += f"--participation {min(1, 10 / clients)} --state-on host --keep-state never --checkpoint-every 2".split()
    words += ["--data-dir", folder, "--out", str(Path(folder).parent / f"run{number}")]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    words += f"--distributed --coordinator 127.0.0.1:{port} --num-processes {number} --devices {number}".split()
    began = time.perf_counter()
    with contextlib.ExitStack() as held:
        # Not pipes, which would have to be read while the processes run.
        errors = [held.enter_context(tempfile.TemporaryFile("w+")) for _ in range(number)]
        children = []
        for index, error in enumerate(errors):
            command = [sys.executable, "-m", "experiments", "emnist", *words, "--process-id", str(index)]
            children.append(subprocess.Popen(command, cwd=measure.ROOT, stdout=subprocess.DEVNULL, stderr=error))
            held.callback(children[-1].kill)
        for child, error in zip(children, errors, strict=True):
            if child.wait():
                error.seek(0)
                line = last_line(error.read())
                raise InvalidInput(f"one of {number} processes ended with exit code {child.returncode}: {line}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {"processes": number, "largest peak MiB": peak, "s": time.perf_counter() - began}
