"""Rounds beside those of PFLlib itself, on the same clients and network, with the same steps; 13 minutes on two cores.

PFLlib's own `main.py` is run as its README says, in a copy of its folder. PFLlib imports torchvision for networks that
are not used here; where it is not installed, an empty module takes its place. Its times are those that it prints for
each round; the first round, in which it evaluates, is left out. FedAS is run as PFLlib has it: alignment to class
means, summed over classes, and traces of mean gradients of mini-batches.
"""

import os
import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lab.benchmark import measure, workload
from experiments.lab.benchmark.child import last_line
from experiments.lab.benchmark.jax_rounds import Rounds
from experiments.lab.benchmark.records import Row, Section
from experiments.lab.benchmark.workload import Scale, Setup
from pfl_jax import models
from pfl_jax.data.federated import FederatedData
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import make_method

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg", {}),
    "FedPer": ("fedper", {}),
    "FedAS": ("fedas", {"target": "class_mean", "align_loss": "class_sum", "reduction": "batch_means"}),
}
"""PFLlib's name -> ours, and its options here."""

ROUNDS = 3
"""Timed rounds of a repetition; the median counts."""


def pfllib(setup: Setup) -> Section:
    """Seconds of a round of each method, ours and PFLlib's in turn."""
    scale = setup.scale
    data = workload.federation(scale.clients, scale.examples)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_clients(root / "dataset" / "FashionMNIST", data)
        copy_programs(setup, root)
        for their_name, (name, own) in METHODS.items():
            play, seconds = ours(scale, data, name, own), {"PFLlib": [], "pfl_jax": []}
            for number in range(scale.repetitions[1]):
                setup.notify(f"{their_name}, {number + 1} of {scale.repetitions[1]}")
                seconds["PFLlib"].append(statistics.median(theirs(setup, root, their_name)))
                seconds["pfl_jax"].append(statistics.median(measure.seconds(play) for _ in range(ROUNDS)))
            medians = {f"{by}, s": statistics.median(times) for by, times in seconds.items()}
            ratio = medians["PFLlib, s"] / medians["pfl_jax, s"]
            rows.append({"method": their_name, **medians, "ratio": ratio, **seconds})
    note = (
        f"synthetic images in Fashion-MNIST's shape, {scale.clients} clients of {scale.examples} examples, all in "
        f"every round, batches of {scale.batch_size}, one epoch, no evaluation, seconds per round"
    )
    return Section("Beside PFLlib", rows, note)


def write_clients(folder: Path, data: FederatedData) -> None:
    """Write the clients as PFLlib reads them: a file for each in each half, with images channel first."""
    pool = (np.asarray(data.x, np.float32) / 255 - np.asarray(data.mean)) / np.asarray(data.std)
    for half, table in (("train", data.train_index), ("test", data.test_index)):
        (folder / half).mkdir(parents=True)
        for number, rows in enumerate(np.asarray(table)):
            content = {"x": np.moveaxis(pool[rows], -1, 1), "y": np.asarray(data.y)[rows]}
            np.savez_compressed(folder / half / f"{number}.npz", data=np.array(content, dtype=object))


def copy_programs(setup: Setup, root: Path) -> None:
    """Copy PFLlib's programs to a folder, beside a place for the module that it may lack."""
    assert setup.pfllib is not None
    shutil.copytree(setup.pfllib / "system", root / "system")
    (root / "modules").mkdir()
    if subprocess.run([setup.pythons[0], "-c", "import torchvision"], capture_output=True, check=False).returncode:
        (root / "modules" / "torchvision.py").touch()


def theirs(setup: Setup, root: Path, name: str) -> Sequence[float]:
    """Seconds of each round of PFLlib, without the first.

    Raises:
      InvalidInput: PFLlib failed; with the last line that it wrote.
    """
    scale = setup.scale
    words = f"-data FashionMNIST -m CNN -algo {name} -gr {ROUNDS} -nc {scale.clients} -lbs {scale.batch_size}"
    words += f" -lr {scale.lr} -ls 1 -eg {ROUNDS + 1} -dev cpu"
    path = os.pathsep.join(filter(None, [str(root / "modules"), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [setup.pythons[0], "main.py", *words.split()],
        cwd=root / "system",
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    times = [float(found) for found in re.findall(r"time cost -+ ([\d.]+)", ended.stdout)]
    if len(times) != ROUNDS + 1:
        line = last_line(ended.stderr or ended.stdout)
        raise InvalidInput(f"PFLlib's {name} ended after {len(times)} of {ROUNDS + 1} rounds: {line}")
    return times[1:]


def ours(scale: Scale, data: FederatedData, name: str, own: dict[str, Any]) -> Callable[[], None]:
    """One round of pfl_jax on all clients, compiled."""
    model = models.fedavg_cnn(data.x.shape[1:], 10)
    rates = {"lr": scale.lr, "momentum": 0.0, "weight_decay": 0.0, "batch_size": scale.batch_size, "epochs": 1}
    method = make_method(name, model, **rates, **own)
    rounds = Rounds(method, data, evaluation=False)
    rounds.round()
    return rounds.round
