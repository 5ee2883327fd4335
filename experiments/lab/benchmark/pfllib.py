"""Rounds beside those of PFLlib itself, on the same clients and network, with the same steps; 13 minutes on two cores:

    git clone https://github.com/TsingZ0/PFLlib
    python -m experiments.lab.benchmark.pfllib --checkout PFLlib --out pfllib.json

runs PFLlib's own `main.py` as its README says, in a copy of its folder, with the Python of --python, which needs
PFLlib's packages (torch, scikit-learn, h5py, calmsize, cvxpy). PFLlib imports torchvision for networks that are not
used here; where it is not installed, an empty module takes its place. Its times are those that it prints for each
round; the first round, in which it evaluates, is left out.

Fashion-MNIST, 20 clients of 600 examples, batches of 50, one epoch, all clients in every round, no evaluation. FedAS is
run as PFLlib has it: alignment to class means, summed over classes, and traces of mean gradients of mini-batches.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from experiments.cli.exit_codes import leave
from experiments.cli.parser import Switch
from experiments.lab.benchmark import command, measure
from experiments.lab.benchmark.records import Row, Section
from pfl_jax.errors import InvalidInput

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "FedAvg": ("fedavg", {}),
    "FedPer": ("fedper", {}),
    "FedAS": ("fedas", {"target": "class_mean", "align_loss": "class_sum", "reduction": "batch_means"}),
}
"""PFLlib's name -> ours, and its options here."""

CLIENTS, EXAMPLES, BATCH_SIZE, LR = 20, 600, 50, 0.01
ROUNDS = 3
"""Timed rounds of a repetition; the median counts."""


@dataclass(frozen=True, kw_only=True)
class Options(command.Options):
    """Command line of the comparison."""

    checkout: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder of PFLlib."""
    python: str = sys.executable
    """Python that runs PFLlib."""
    repetitions: int = 3
    """Of each method, in turn with ours."""
    embedded: Switch = False
    """Synthetic images in Fashion-MNIST's shape."""

    def check(self) -> None:
        """Raise InvalidInput for values that cannot be used."""
        if not (self.checkout / "system" / "main.py").is_file():
            raise InvalidInput(f"--checkout {self.checkout}: no system/main.py there; name a clone of PFLlib")
        if self.repetitions < 1:
            raise InvalidInput(f"--repetitions must be at least 1, not {self.repetitions}")
        super().check()


def write_clients(folder: Path, train: Sequence[Any], test: Sequence[Any]) -> None:
    """Write the clients as PFLlib reads them: a file for each, with images channel first.

    Args:
      folder: of the data set.
      train, test: (images [P, H, W, C], labels [P]) of each client.
    """
    import numpy as np

    for name, clients in (("train", train), ("test", test)):
        (folder / name).mkdir(parents=True)
        for number, (images, labels) in enumerate(clients):
            content = {"x": np.moveaxis(np.asarray(images), -1, 1), "y": np.asarray(labels)}
            np.savez_compressed(folder / name / f"{number}.npz", data=np.array(content, dtype=object))


def theirs(options: Options, root: Path, name: str, rounds: int) -> list[float]:
    """Seconds of each round of PFLlib, without the first.

    Raises:
      InvalidInput: PFLlib failed; with the last line that it wrote.
    """
    words = f"-data FashionMNIST -m CNN -algo {name} -gr {rounds} -nc {CLIENTS} -lbs {BATCH_SIZE} -lr {LR} -ls 1"
    line = [options.python, "main.py", *words.split(), "-eg", str(rounds + 1), "-dev", "cpu"]
    path = os.pathsep.join(filter(None, [str(root / "modules"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        line,
        cwd=root / "system",
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    times = [float(found) for found in re.findall(r"time cost -+ ([\d.]+)", done.stdout)]
    if len(times) != rounds + 1:
        said = (done.stderr or done.stdout).strip().splitlines() or ["it wrote nothing"]
        raise InvalidInput(f"PFLlib's {name} ended after {len(times)} of {rounds + 1} rounds: {said[-1]}")
    return times[1:]


def prepare(options: Options, root: Path) -> Any:
    """Federation of the clients, also written to `root` with a copy of PFLlib's programs."""
    import jax
    import numpy as np

    from pfl_jax.data import federated, partition, sources

    kind = "embedded" if options.embedded else "files"
    dataset = sources.load("fashion_mnist", kind, None, notify=lambda message: None)
    parts = partition.grouped(dataset, CLIENTS, s=20, train_size=EXAMPLES, test_size=EXAMPLES, seed=0)
    data = federated.federate(dataset, parts)
    pool = (np.asarray(data.x, np.float32) / 255 - np.asarray(data.mean)) / np.asarray(data.std)
    tables = [np.asarray(table) for table in (data.train_index, data.test_index)]
    train, test = ([(pool[rows], np.asarray(data.y)[rows]) for rows in table] for table in tables)
    write_clients(root / "dataset" / "FashionMNIST", train, test)
    shutil.copytree(options.checkout / "system", root / "system")
    (root / "modules").mkdir()
    found = subprocess.run([options.python, "-c", "import torchvision"], capture_output=True, check=False)
    if found.returncode:
        (root / "modules" / "torchvision.py").touch()
    jax.block_until_ready(data)
    return data


def ours(data: Any, name: str, own: dict[str, Any]) -> Callable[[], None]:
    """One round of pfl_jax on all clients, compiled."""
    from experiments.lab.benchmark.jax_rounds import Rounds
    from pfl_jax import models, simulate
    from pfl_jax.methods import make_method

    model = models.fedavg_cnn(data.x.shape[1:], 10)
    rates = {"lr": LR, "momentum": 0.0, "weight_decay": 0.0, "batch_size": BATCH_SIZE, "epochs": 1}
    method = make_method(name, model, **rates, **own)
    rounds = Rounds(method, data, participation=1.0, chunk=1, mesh=simulate.client_mesh(), evaluation=False)
    rounds.round()
    return rounds.round


def compare(options: Options, notify: command.Notify) -> tuple[dict[str, Section], dict[str, Any]]:
    """Seconds of a round of each method, ours and PFLlib's in turn."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = prepare(options, root)
        for their_name, (name, own) in METHODS.items():
            play, seconds = ours(data, name, own), {"PFLlib": [], "pfl_jax": []}
            for number in range(options.repetitions):
                notify(f"{their_name}, {number + 1} of {options.repetitions}")
                seconds["PFLlib"].append(statistics.median(theirs(options, root, their_name, ROUNDS)))
                seconds["pfl_jax"].append(statistics.median(measure.seconds(play) for _ in range(ROUNDS)))
            medians = {f"{by}, s": statistics.median(times) for by, times in seconds.items()}
            ratio = medians["PFLlib, s"] / medians["pfl_jax, s"]
            rows.append({"method": their_name, **medians, "ratio": ratio, **seconds})
    images = "synthetic images in Fashion-MNIST's shape" if options.embedded else "Fashion-MNIST"
    note = f"{images}, {CLIENTS} clients of {EXAMPLES} examples, batches of {BATCH_SIZE}, one epoch, seconds per round"
    return {"pfllib": Section("Beside PFLlib", rows, note)}, {}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
      words: after the module's name; by default those of this process.

    Returns:
      The exit code, see `exit_codes.exit_code`.
    """
    return command.command(Options, "experiments.lab.benchmark.pfllib", __doc__, words, compare)


if __name__ == "__main__":
    leave(main())
