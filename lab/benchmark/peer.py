"""Rounds of one library in a process of its own, one for each line that comes in: `peers.py` starts it.

The other libraries run as their users run them: PFLlib and FL-bench by their own `main.py`, fluke by its algorithms,
BlazeFL by its trainers and the loop of its example. Only the start of a round is caught, and the weights are given.
"""

import enum
import gzip
import importlib
import json
import os
import pickle
import runpy
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np


def imported(name: str) -> Any:
    """A module by name, so that the type checker asks for nothing that may not be installed."""
    return importlib.import_module(name)


class Turns:
    """The pipe to the parent: a library calls `begin` before every round.

    Attributes:
      job: what `peers.py` wrote: method, clients, cohort, batch_size, lr, fixed_order, folders.
      clients: arrays of the clients: x [n, 28, 28, 1] of bytes, y [n], rows [N, m], mean and std.
      start: the initial weights in the order and shapes of PyTorch.
    """

    def __init__(self, folder: Path, out: TextIO):
        self.folder, self._out, self._begun, self.steps = folder, out, False, 0
        self.job: dict[str, Any] = json.loads((folder / "job.json").read_text())
        self.clients: dict[str, Any] = dict(np.load(folder / "clients.npz"))
        self.start: list[Any] = list(np.load(folder / "start.npz").values())

    def begin(self, weights: Callable[[], list[Any]], threads: int | None = None) -> None:
        """Say that the last round is over, with its weights if they are compared, and wait until the next may start."""
        if self._begun and self.job["fixed_order"]:
            np.savez(self.folder / "after.npz", *weights())
        self._out.write(json.dumps({"steps": self.steps, "threads": threads}) + "\n")
        self._out.flush()
        if not sys.stdin.readline():
            # Not at once: a library may have to end processes of its own.
            sys.exit()
        self._begun = True

    def examples(self, client: int) -> tuple[Any, Any]:
        """Normalized images [m, 1, 28, 28] and labels of a client."""
        rows, given = self.clients["rows"][client], self.clients
        x = (given["x"][rows].astype(np.float32) / 255 - given["mean"]) / given["std"]
        return np.moveaxis(x, -1, 1).astype(np.float32), given["y"][rows].astype(np.int64)


def keep_order(torch: Any) -> None:
    """Let every shuffle of PyTorch leave its examples where they are."""
    torch.randperm = lambda n, **_: torch.arange(n)


def prepare_torch(turns: Turns) -> Any:
    """PyTorch; where results are compared its steps are counted, and examples keep their order."""
    torch = imported("torch")
    if turns.job["fixed_order"]:

        def count(*_: Any) -> None:
            turns.steps += 1

        imported("torch.optim.optimizer").register_optimizer_step_post_hook(count)
        keep_order(torch)
    return torch


def begin(turns: Turns, model: Any) -> None:
    """Begin a round of a server with this model of PyTorch."""
    values = model.values() if isinstance(model, dict) else model.parameters()
    turns.begin(lambda: [one.detach().numpy() for one in values], imported("torch").get_num_threads())


def assign(start: list[Any], network: Any) -> None:
    """Give a network the initial weights."""
    torch = imported("torch")
    with torch.no_grad():
        for parameter, value in zip(network.parameters(), start, strict=True):
            parameter.copy_(torch.from_numpy(value))


def start_from(start: list[Any], network: Any) -> None:
    """Let every new network of this class have the initial weights."""
    make = network.__init__

    def init(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        assign(start, self)

    network.__init__ = init


def run_main(words: str) -> None:
    """Run main.py in this folder."""
    sys.argv = ["main.py", *words.split()]
    runpy.run_path("main.py", run_name="__main__")


def work_in_copy(source: Path, to: Path) -> None:
    """Go to a copy of a library's folder, whose modules can be imported."""
    shutil.copytree(source, to)
    os.chdir(to)
    sys.path.insert(0, str(to))


def pfllib(turns: Turns) -> None:
    """PFLlib's main.py; before the first round, which is not timed, it evaluates."""
    job = turns.job
    prepare_torch(turns)
    for half in ("train", "test"):
        (turns.folder / "dataset" / "FashionMNIST" / half).mkdir(parents=True)
        for client in range(job["clients"]):
            content = dict(zip("xy", turns.examples(client), strict=True))
            file = turns.folder / "dataset" / "FashionMNIST" / half / f"{client}.npz"
            np.savez_compressed(file, data=np.array(content, dtype=object))
    work_in_copy(Path(job["pfllib"]) / "system", turns.folder / "system")
    start_from(turns.start, imported("flcore.trainmodel.models").FedAvgCNN)
    server = imported("flcore.servers.serverbase").Server
    select = server.select_clients

    def select_clients(self: Any) -> Any:
        begin(turns, self.global_model)
        return select(self)

    server.select_clients = select_clients
    words = f"-data FashionMNIST -m CNN -algo {job['method']} -gr 1000 -eg 10000 -ls 1 -pls 1 -dev cpu"
    words += f" -nc {job['clients']} -jr {job['cohort'] / job['clients']} -lbs {job['batch_size']} -lr {job['lr']}"
    run_main(words)


def flbench(turns: Turns) -> None:
    """FL-bench's main.py, one client after another: its workers of Ray are only for machines with a GPU."""
    job = turns.job
    prepare_torch(turns)
    work_in_copy(Path(job["flbench"]), turns.folder / "bench")
    write_for_flbench(turns, Path("data/fmnist"))
    constants = imported("src.utils.constants")
    constants.DATA_MEAN["fmnist"], constants.DATA_STD["fmnist"] = (
        [float(turns.clients[name].reshape(()))] for name in ("mean", "std")
    )
    start_from(turns.start, imported("src.utils.models").FedAvgCNN)
    module = imported(f"src.server.{job['method'].lower()}")
    server = getattr(module, f"{job['method']}Server")
    train = server.train_one_round

    def train_one_round(self: Any) -> None:
        begin(turns, self.public_model_params)
        train(self)

    server.train_one_round = train_one_round
    words = f"method={job['method'].lower()} dataset.name=fmnist model.name=avgcnn mode=serial common.local_epoch=1"
    words += f" common.join_ratio={job['cohort'] / job['clients']} common.batch_size={job['batch_size']}"
    words += f" optimizer.lr={job['lr']} common.global_epoch=1000 common.verbose_gap=10000 common.use_cuda=false"
    words += " common.client_side_evaluation=false common.test.client.interval=-1 common.test.client.test=false"
    run_main(words)


def write_for_flbench(turns: Turns, folder: Path) -> None:
    """The clients as FL-bench reads them: a data set in torchvision's files, and tables of rows."""
    x, y, raw = turns.clients["x"], turns.clients["y"], folder / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, end in (("train", len(y)), ("t10k", 2)):
        for kind, values in (("images-idx3", x[:end, :, :, 0]), ("labels-idx1", y[:end])):
            head = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
            content = head + values.astype(np.uint8).tobytes()
            (raw / f"{name}-{kind}-ubyte").write_bytes(content)
            (raw / f"{name}-{kind}-ubyte.gz").write_bytes(gzip.compress(content, 1))
    clients = list(range(turns.job["clients"]))
    separation = dict.fromkeys(("train", "test", "val"), clients) | {"total": len(clients)}
    rows = [{"train": one.tolist(), "val": [], "test": []} for one in turns.clients["rows"]]
    (folder / "partition.pkl").write_bytes(pickle.dumps({"separation": separation, "data_indices": rows}))
    (folder / "args.json").write_text(json.dumps({"split": "sample", "client_num": len(clients)}))


def make_network(start: list[Any]) -> tuple[Any, Any]:
    """The same network for libraries that leave it to their users: encoder and head."""
    nn = imported("torch.nn")
    blocks = []
    for channels in ((1, 32), (32, 64)):
        blocks += [nn.Conv2d(*channels, 5), nn.ReLU(), nn.MaxPool2d(2)]
    pair = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(1024, 512), nn.ReLU()), nn.Linear(512, 10)
    assign(start, nn.Sequential(*pair))
    return pair


def fluke(turns: Turns) -> None:
    """fluke's algorithms, without evaluation."""
    job, torch = turns.job, prepare_torch(turns)
    sys.path.insert(0, job["fluke"])
    library, data, nets = (imported(name) for name in ("fluke", "fluke.data", "fluke.nets"))
    torch.manual_seed(0)
    library.FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    loaders = []
    for client in range(job["clients"]):
        tensors = [torch.from_numpy(one) for one in turns.examples(client)]
        loaders.append(data.FastDataLoader(*tensors, num_labels=10, batch_size=job["batch_size"], shuffle=True))
    splitter = data.DataSplitter(data.DummyDataContainer(loaders, [None] * len(loaders), None, 10))
    whole, encoder = nets.EncoderHeadNet(*make_network(turns.start)), make_network(turns.start)[0]
    client = {
        "batch_size": job["batch_size"],
        "local_epochs": 1,
        "loss": "CrossEntropyLoss",
        "scheduler": library.DDict(name="StepLR", step_size=1, gamma=1),
    }
    client |= {"optimizer": {"name": "SGD", "lr": job["lr"]}}
    client |= {"FedPer": {"model": whole}, "Ditto": {"model": whole, "tau": 1, "lam": 1.0}}.get(job["method"], {})
    module, name = {"FedAvg": ("fedavg", "FedAVG")}.get(job["method"], (job["method"].lower(), job["method"]))
    values = {"client": client, "server": {"weighted": True}, "model": encoder if name == "FedPer" else whole}
    algorithm = getattr(imported(f"fluke.algorithms.{module}"), name)(job["clients"], splitter, library.DDict(values))
    select = algorithm.server.get_eligible_clients

    def get_eligible_clients(share: float) -> Any:
        begin(turns, algorithm.server.model)
        return select(share)

    algorithm.server.get_eligible_clients = get_eligible_clients
    algorithm.run(1000, job["cohort"] / job["clients"] if job["cohort"] < job["clients"] else 1)


class Part(enum.StrEnum):
    """BlazeFL's halves of a client."""

    TRAIN = "train"


class Stored:
    """Clients in files, as in BlazeFL's example, but without transformations of single images."""

    def __init__(self, folder: Path):
        self.folder = folder

    def get_dataset(self, type_: str, cid: int) -> Any:
        """Read a client's examples."""
        return imported("torch.utils.data").TensorDataset(*imported("torch").load(self.folder / f"{cid}.pt"))

    def set_dataset(self, type_: str, cid: int, dataset: Any) -> None:
        """Keep nothing: the examples stay as they are."""

    def get_dataloader(self, type_: str, cid: int, batch_size: int, generator: Any = None) -> Any:
        """Mini-batches of a client in a new order."""
        loader = imported("torch.utils.data").DataLoader
        return loader(self.get_dataset(type_, cid), batch_size=batch_size, shuffle=True, generator=generator)


class Selector:
    """BlazeFL's way to a network, in every process."""

    def __init__(self, turns: Turns):
        self._start, self._fixed_order = turns.start, turns.job["fixed_order"]

    def select_model(self, name: str) -> Any:
        """The network with the initial weights."""
        if self._fixed_order:
            keep_order(imported("torch"))
        return imported("torch.nn").Sequential(*make_network(self._start))


def blazefl(turns: Turns, by: str) -> None:
    """BlazeFL's FedAvg with the loop of its example; by "serial", two "threads" or two "processes"."""
    job, torch = turns.job, prepare_torch(turns)
    library = imported("blazefl.contrib.fedavg")
    clients = turns.folder / "clients"
    clients.mkdir()
    for client in range(job["clients"]):
        torch.save([torch.from_numpy(one) for one in turns.examples(client)], clients / f"{client}.pt")
    common = {"model_selector": Selector(turns), "model_name": "cnn", "dataset": Stored(clients), "device": "cpu"}
    common |= {"num_clients": job["clients"], "batch_size": job["batch_size"], "seed": 0}
    handler = library.FedAvgBaseServerHandler(**common, global_round=1000, sample_ratio=job["cohort"] / job["clients"])
    common |= {"epochs": 1, "lr": job["lr"]}
    if by == "serial":
        trainer = library.FedAvgBaseClientTrainer(**common)
    elif by == "threads":
        trainer = library.FedAvgThreadPoolClientTrainer(**common, num_parallels=2)
    else:
        imported("torch.multiprocessing").set_start_method("spawn")
        folders = {"share_dir": turns.folder / "share", "state_dir": turns.folder / "state"}
        mode = imported("blazefl.core").IPCMode.SHARED_MEMORY
        trainer = library.FedAvgProcessPoolClientTrainer(**common, **folders, num_parallels=2, ipc_mode=mode)
    while True:
        begin(turns, handler.model)
        sampled, package = handler.sample_clients(), handler.downlink_package()
        trainer.local_process(package, sampled)
        for upload in trainer.uplink_package():
            handler.load(upload)


def pfl_jax(turns: Turns, drop_last: bool = False) -> None:
    """pfl_jax's own rounds, compiled, on as many devices as there are cores."""
    rounds = imported("experiments.lab.benchmark.peers").Ours(turns.job, drop_last)
    while True:
        turns.steps = rounds.steps
        turns.begin(rounds.weights)
        rounds.round()


RUNS: dict[str, Callable[[Turns], None]] = {
    "pfl_jax": pfl_jax,
    "pfl_jax, incomplete batches left out": lambda turns: pfl_jax(turns, drop_last=True),
    "PFLlib": pfllib,
    "FL-bench": flbench,
    "fluke": fluke,
    "BlazeFL": lambda turns: blazefl(turns, "serial"),
    "BlazeFL, 2 threads": lambda turns: blazefl(turns, "threads"),
    "BlazeFL, 2 processes": lambda turns: blazefl(turns, "processes"),
}
"""Contestant -> its rounds, which never end by themselves."""


def main(name: str, folder: str) -> None:
    """Run the rounds of a contestant; what the library prints goes to log.txt."""
    out = os.fdopen(os.dup(1), "w")
    log = os.open(Path(folder) / "log.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    RUNS[name](Turns(Path(folder), out))


if __name__ == "__main__":
    main(*sys.argv[1:])
