"""Rounds of pfl_jax beside those of PFLlib, FL-bench, fluke and BlazeFL, on the same clients, network and steps.

python -m experiments.lab.benchmark.peers --pfllib PFLlib --flbench FL-bench --fluke FOLDER --out FILE

--pfllib and --flbench are checkouts, --fluke a folder with fluke's package; BlazeFL, PyTorch and what they all need are
installed in this Python. Every contestant is a process of its own (`peer.py`), and they take turns round by round.
"""

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
from rich.console import Console

from experiments.cli.parser import parse
from experiments.fields import Argument
from experiments.host import jax_config
from experiments.host.exit_codes import exit_code, leave
from experiments.lab.benchmark import measure, workload
from experiments.lab.benchmark.jax_rounds import everywhere
from experiments.lab.benchmark.peer import RUNS
from experiments.lab.benchmark.records import Row, Section, store
from experiments.show.tables import Table
from experiments.spec import Spec
from pfl_jax import models, simulate
from pfl_jax.data import federated, partition
from pfl_jax.data.federated import FederatedData
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import make_method
from pfl_jax.primitives.mini_batches import FIXED_ORDER, epoch_order


@dataclass(frozen=True)
class Setting:
    """Clients of equal size, of which a cohort trains in each round; timed rounds by method."""

    clients: int
    examples: int
    cohort: int
    rounds: dict[str, int]


SETTINGS = {
    "20 of 20 clients, 600 examples": Setting(20, 600, 20, {"FedAvg": 3, "FedPer": 3, "Ditto": 3}),
    "20 of 200 clients, 60 examples": Setting(200, 60, 20, {"FedAvg": 3, "FedPer": 5, "Ditto": 5}),
}
QUICK = Setting(4, 60, 2, {"FedAvg": 1, "FedPer": 1, "Ditto": 1})
"""Tiny sizes, which only show that it runs."""
BATCH_SIZE, LR = 50, 0.01
PERSONAL = ("pfl_jax", "pfl_jax, incomplete batches left out", "PFLlib", "FL-bench", "fluke")
"""Contestants that also have FedPer and Ditto."""
WHOLE = "pfl_jax, incomplete batches left out"
"""Contestant only where there are incomplete batches, which PFLlib always leaves out."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line."""

    pfllib: Annotated[Path, Argument(metavar="FOLDER")] = Path("PFLlib")
    """Checkout of PFLlib."""
    flbench: Annotated[Path, Argument(metavar="FOLDER")] = Path("FL-bench")
    """Checkout of FL-bench."""
    fluke: Annotated[Path, Argument(metavar="FOLDER")] = Path("fluke")
    """Folder with the package fluke."""
    only: str = ""
    """One part: "compare", or a method and the examples of a client, as "FedAvg 600"."""
    out: Annotated[Path | None, Argument(metavar="FILE")] = None
    """File of measurements, a line of JSON for each part."""
    quick: bool = False
    """Tiny sizes, which only show that it runs."""


def federation(job: dict[str, Any]) -> FederatedData:
    """Synthetic images in Fashion-MNIST's shape."""
    data = workload.dataset()
    sizes = {"train_size": job["examples"], "test_size": 10}
    return federated.federate(data, partition.grouped(data, job["clients"], s=20, seed=0, **sizes))


class Ours:
    """pfl_jax's rounds of a job, compiled.

    Attributes:
      steps: gradient steps so far, as the recipe of local training counts them.
    """

    def __init__(self, job: dict[str, Any], drop_last: bool = False):
        jax_config.prepare(Spec.of("digits"))
        data = federation(job)
        model = models.fedavg_cnn(data.x.shape[1:], 10)
        recipe = {"lr": LR, "momentum": 0.0, "weight_decay": 0.0, "batch_size": BATCH_SIZE, "epochs": 1}
        recipe |= {"drop_last": drop_last, "shuffle": not job["fixed_order"]}
        own = {"personal_epochs": 1, "lam": 1.0} if job["method"] == "Ditto" else {}
        method = make_method(job["method"].lower(), model, **recipe, **own)
        mesh = simulate.client_mesh()
        settings = simulate.Settings(rounds=1, participation=job["cohort"] / job["clients"], chunk=1)
        engine: Any = simulate.build(method, settings, mesh).jit(mesh, donate=True)
        self._data = everywhere(mesh, data)
        self.state = everywhere(mesh, engine.init(self._data, jax.random.key(0)))
        self._round = engine.round.lower(self._data, self.state, job["cohort"]).compile()
        batches = job["examples"] / BATCH_SIZE
        each = int(batches) if drop_last else int(np.ceil(batches))
        self._steps = job["cohort"] * each * (2 if job["method"] == "Ditto" else 1)
        self.steps = 0

    def round(self) -> None:
        """Run one round, and wait for its end."""
        self.state, _ = jax.block_until_ready(self._round(self._data, self.state))
        self.steps += self._steps

    def weights(self) -> list[Any]:
        """The server's weights in the order and shapes of PyTorch."""
        from experiments.lab.benchmark import torch_rounds

        network = torch_rounds.Network(jax.device_get(self.state.server), "fedavg_cnn")
        return [one.detach().numpy() for one in network.parameters()]


class Contestant:
    """A process that plays a round for each call, see `peer.py`."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder, self.threads = name, folder, -1
        words = [sys.executable, "-m", "experiments.lab.benchmark.peer", name, str(folder)]
        root = Path(__file__).parents[3]
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        variables = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "RAY_USAGE_STATS_ENABLED": "0"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process: Any = subprocess.Popen(words, env=variables, cwd=root, **pipes)

    def answer(self) -> dict[str, Any]:
        """Wait until its next round may begin; gradient steps so far and PyTorch's threads."""
        line = self._process.stdout.readline()
        if not line:
            log = (self.folder / "log.txt").read_text().strip().splitlines()
            raise InvalidInput(f"{self.name} ended: {' | '.join(log[-6:])}")
        return json.loads(line)

    def __call__(self) -> dict[str, Any]:
        """Play a round."""
        self._process.stdin.write("round\n")
        self._process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        """Let it end, or end it: not every library ends at once."""
        self._process.stdin.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()


@functools.cache
def given(method: str, clients: int, examples: int, fixed_order: bool) -> tuple[dict[str, Any], list[Any]]:
    """What every contestant starts from: the clients, and the initial weights; in the order that pfl_jax fixes."""
    job = {"method": method, "clients": clients, "cohort": clients, "examples": examples, "fixed_order": fixed_order}
    data = federation(job)
    rows = np.stack([np.asarray(index) for index in data.train_index])
    if fixed_order:
        length = -(-examples // BATCH_SIZE) * BATCH_SIZE
        order = epoch_order(jax.random.key(FIXED_ORDER), jax.numpy.ones(examples, bool), length)
        rows = rows[:, np.asarray(order)[:examples]]
    arrays = {"x": data.x, "y": data.y, "rows": rows, "mean": data.mean, "std": data.std}
    return {name: np.asarray(array) for name, array in arrays.items()}, Ours(job).weights()


def started(root: Path, names: Iterable[str], job: dict[str, Any]) -> dict[str, Contestant]:
    """Contestants on the same clients and weights, on the way to their first round."""
    clients, start = given(job["method"], job["clients"], job["examples"], job["fixed_order"])
    found = {}
    for name in names:
        folder = root / name.replace(" ", "_")
        folder.mkdir()
        np.savez(folder / "clients.npz", **clients)
        np.savez(folder / "start.npz", *start)
        (folder / "job.json").write_text(json.dumps(job))
        found[name] = Contestant(name, folder)
    return found


def ready(one: Contestant) -> bool:
    """Wait until its first round may begin; False, with what it said, if it cannot run here."""
    try:
        one.threads = one.answer()["threads"]
    except InvalidInput as error:
        print(error, flush=True)
    return one.threads != -1


def contestants(method: str, examples: int) -> list[str]:
    """Names of those that have the method."""
    names = [name for name in RUNS if method == "FedAvg" or name in PERSONAL]
    # New processes for every round cost the same in both settings; once is enough to say so.
    left_out = {WHOLE} if examples % BATCH_SIZE == 0 else set()
    left_out |= {"BlazeFL, 2 processes"} if examples >= 600 else set()
    return [name for name in names if name not in left_out]


def timed(method: str, title: str, setting: Setting, folders: dict[str, str]) -> Section:
    """Seconds of a round of each contestant, in turn."""
    job = folders | dataclasses.asdict(setting)
    job |= {"method": method, "batch_size": BATCH_SIZE, "lr": LR, "fixed_order": False}
    with tempfile.TemporaryDirectory() as root:
        found = started(Path(root), contestants(method, setting.examples), job)
        found = {name: one for name, one in found.items() if ready(one)}
        try:
            for name, one in found.items():
                # Its processes are new ones in every round.
                if name != "BlazeFL, 2 processes":
                    one()
            times = measure.interleaved(setting.rounds[method], found)
        finally:
            for one in found.values():
                one.end()
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    rows: list[Row] = []
    for name, seconds in times.items():
        row = {"method": method, "clients": title, "by": name, "s/round": medians[name]}
        ratio = medians[name] / medians["pfl_jax"]
        rows.append(row | {"pfl_jax = 1": ratio, "threads of PyTorch": found[name].threads, "rounds": seconds})
    return Section(f"{method}, {title}", rows, f"batches of {BATCH_SIZE}, one epoch, no evaluation; in turn")


def compared(folders: dict[str, str], examples: int = 60) -> Section:
    """One round of a single client with its examples in a fixed order: gradient steps, and how far weights differ."""
    rows: list[Row] = []
    for method in ("FedAvg", "FedPer", "Ditto"):
        job = folders | dataclasses.asdict(Setting(1, examples, 1, {}))
        job |= {"method": method, "batch_size": BATCH_SIZE, "lr": LR, "fixed_order": True}
        with tempfile.TemporaryDirectory() as root:
            after: dict[str, list[Any]] = {}
            for name, one in started(Path(root), contestants(method, examples), job).items():
                if not ready(one):
                    continue
                steps = one()["steps"]
                one.end()
                start = list(np.load(one.folder / "start.npz").values())
                after[name] = list(np.load(one.folder / "after.npz").values())
                like = after[WHOLE if name in ("PFLlib", WHOLE) else "pfl_jax"]
                row = {"method": method, "examples": examples, "by": name, "steps": steps}
                rows.append(
                    row | {"largest change": distance(after[name], start), "apart": distance(after[name], like)}
                )
    return Section("The same work", rows, "one client, one epoch in a fixed order; PFLlib beside what leaves out as it")


def distance(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Largest difference of two lists of weights; where one lacks the head, of the others."""
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=False))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark with command-line arguments, by default those of this process; return the exit code."""

    def work() -> None:
        options, _ = parse(Options, "experiments.lab.benchmark.peers", __doc__, arguments)
        jax_config.prepare(Spec.of("digits"))
        machine, console = measure.machine() | {"quick": options.quick}, Console()
        folders = {name: str(getattr(options, name).absolute()) for name in ("pfllib", "flbench", "fluke")}
        parts = {"compare": lambda: compared(folders)}
        for title, setting in {"2 of 4 clients, 60 examples": QUICK}.items() if options.quick else SETTINGS.items():
            for method in setting.rounds:
                given = (method, title, setting, folders)
                parts[f"{method} {setting.examples}"] = lambda given=given: timed(*given)
        for name in [options.only] if options.only else parts:
            section = parts[name]()._replace(machine=machine)
            console.print(Table(section.title, section.headings, section.cells).terminal(caption=section.note))
            if options.out is not None:
                store(options.out, f"peers {name}", section)

    return exit_code(work)


if __name__ == "__main__":
    leave(main())
