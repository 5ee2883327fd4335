"""Parts of the hour that measure, each in a process of its own that `lab.gpu` starts."""

import dataclasses
import functools
import importlib.util
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pfl_jax.engine.sweep
from experiments.host.jax_config import MATMUL_PRECISION, prepare
from experiments.spec.spec import Spec
from lab.benchmark import measure, workload
from lab.benchmark.jax_rounds import Rounds, local_training, operations
from lab.benchmark.records import Row
from lab.benchmark.workload import FULL, Scale
from lab.committed import ROOT
from lab.gpu.log import Log, OutOfTime
from pfl_jax import LocalTraining, build, data, methods, models, networks, simulate
from pfl_jax.backends import choices
from pfl_jax.base import Method, Model
from pfl_jax.data.federated import FederatedData
from pfl_jax.engine.cohort import RoundSettings
from pfl_jax.fast.forms import FORMS
from pfl_jax.methods import make_method
from pfl_jax.networks import adapters
from pfl_jax.networks.vit import vit
from pfl_jax.primitives.head_combination import head_weights

federation = functools.cache(workload.federation)

QUICK = dataclasses.replace(workload.QUICK, clients=2, examples=10)
"""For tests: every measurement in seconds."""

MANY = 5
"""Clients of the larger federation for each of the smaller one: 100 beside 20."""


NETWORKS = (
    ("fedpac_cnn", "fashion_mnist"),
    ("fedavg_cnn", "fashion_mnist"),
    ("own flax CNN", "fashion_mnist"),
    ("fedpac_cnn", "cifar10"),
    ("fedavg_cnn", "cifar10"),
    ("resnet18", "cifar10"),
)
"""Networks, and the dataset whose shape their pictures have."""


def network(name: str, like: str) -> Model:
    """One of NETWORKS."""
    source = workload.dataset(like)
    if name == "own flax CNN":
        return networks.from_flax(workload.Linen(), source.input_shape, source.num_classes)
    return models.MODELS[name](source.input_shape, source.num_classes)


# --- what is there


def machine(log: Log, scale: Scale) -> None:
    """The card and its versions, the peaks of matrix products, and whether a round is the CPU's."""
    log.add("machine", there, scale)
    for precision, words in MATMUL_PRECISION.items():
        log.add(f"peak {precision}", peak, scale, words, jnp.float32)
    log.add("peak bf16 operands", peak, scale, None, jnp.bfloat16)
    for method in ("fedpac", "fedas"):
        log.add(f"{method} beside the CPU", equal, scale, method)


def there(scale: Scale) -> Row:
    """This machine, the driver of its card, and the memory."""
    row, limits = measure.machine() | {"quick": scale == QUICK}, jax.local_devices()[0].memory_stats() or {}
    if shutil.which("nvidia-smi"):
        words = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        row["card"] = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    return row | {"usable GiB": limits.get("bytes_limit", 0) / 2**30}


def peak(scale: Scale, precision: str | None, dtype: jnp.dtype) -> Row:
    """Rate of matrix products."""
    size = scale.matmul if jax.default_backend() == "cpu" else 4 * scale.matmul
    with jax.default_matmul_precision(precision):
        return {"TFLOP/s": measure.matmul_peak(size, simulate.client_mesh(), dtype=dtype)["peak"] / 1e12}


def equal(scale: Scale, method: str) -> Row:
    """Largest difference of a round's results, here and on this machine's CPU, relative to the largest number."""
    clients, results = min(4, scale.clients), []
    for device in (jax.local_devices()[0], jax.devices("cpu")[-1]):
        with jax.default_device(device):
            own = jax.device_put(federation(clients, min(100, scale.examples)), device)
            engine = build(workload.method(method, scale, epochs=1), RoundSettings(chunk=1)).jit()
            state, _ = engine.round(own, engine.init(own, jax.random.key(0)), clients)
            results.append([np.asarray(leaf) for leaf in jax.tree.leaves((state.server, state.clients, state.trained))])
    apart = max(
        float(np.max(np.abs(ours - theirs), initial=0) / max(1e-6, np.max(np.abs(theirs), initial=0)))
        for ours, theirs in zip(*results, strict=True)
        if np.issubdtype(ours.dtype, np.floating)
    )
    return {"apart": apart, "within 1e-4": "yes" if apart < 1e-4 else "no"}


# --- local training


class Cell(NamedTuple):
    """A setting of local training: place in NETWORKS, form of the convolutions, clients under one vmap, precision."""

    network: int
    form: str
    chunk: int
    precision: str

    @property
    def name(self) -> str:
        return " ".join([*NETWORKS[self.network], self.form, f"chunk {self.chunk}", self.precision])


def cells(clients: int) -> list[Cell]:
    """All settings, those first that differ least from the usual one: "matmul", all clients at once, float32.

    Args:
      clients: of the smaller federation; with a larger chunk, MANY times as many train.
    """
    chunks = (1, max(2, clients // 4), clients, MANY * clients)
    every = itertools.product(range(len(NETWORKS)), FORMS, chunks, MATMUL_PRECISION)
    return sorted(dict.fromkeys(itertools.starmap(Cell, every)), key=lambda cell: _unusual(cell, clients))


def _unusual(cell: Cell, clients: int) -> int:
    return (cell.form != "matmul") + (cell.chunk != clients) + (cell.precision != "float32")


def training(log: Log, scale: Scale) -> None:
    """Local training of one epoch in every setting; for tests in few that have each network, form, chunk, precision."""
    for cell in cells(scale.clients):
        if scale == QUICK and _unusual(cell, scale.clients) > (cell.network == 0):
            continue
        peak = log.there.get(f"machine/peak {cell.precision}", {}).get("TFLOP/s")
        log.add(cell.name, train, scale, cell, peak)


def train(scale: Scale, cell: Cell, peak: float | None) -> Row:
    """Time and memory of local training in one setting, and its share of the peak in TFLOP/s."""
    name, like = NETWORKS[cell.network]
    clients, model = max(scale.clients, cell.chunk), network(name, like)
    with jax.default_matmul_precision(MATMUL_PRECISION[cell.precision]):
        own, options = federation(clients, scale.examples, like), {"form": cell.form, "model": model}
        program = local_training(own, scale, clients=clients, epochs=1, chunk=cell.chunk, mesh=None, **options)
    program()
    seconds = statistics.median(measure.seconds(program) for _ in range(scale.repetitions[1]))
    rate = clients * scale.examples / seconds
    row: Row = {"network": name, "pictures like": like, "form": cell.form, "chunk": cell.chunk}
    row |= {"precision": cell.precision, "clients": clients, "s": seconds, "examples/s": rate}
    if peak:
        row["of peak %"] = 100 * rate * operations(model, workload.dataset(like).input_shape) / (peak * 1e12)
    return row | {"MiB": program.memory / measure.MIB, "compiled, s": program.seconds}


def pytorch(log: Log, scale: Scale) -> None:
    """The same local training in PyTorch: client after client, with a CUDA graph, and under torch.func's vmap."""
    if importlib.util.find_spec("torch") is None:
        return
    from lab.benchmark.torch_rounds import DEVICE

    ways = ("loop", "vmap", *(["loop with a CUDA graph"] if DEVICE.type == "cuda" else []))
    compared = [one for one in NETWORKS if one[0] in ("fedpac_cnn", "fedavg_cnn")]
    for precision, many, one, way in itertools.product(("float32", "tf32"), (1, MANY), compared, ways):
        clients = many * scale.clients
        log.add(f"{' '.join(one)} {clients} {way} {precision}", torch_train, scale, *one, clients, way, precision)


def torch_train(scale: Scale, name: str, like: str, clients: int, way: str, precision: str) -> Row:
    """Time of local training in PyTorch."""
    from lab.benchmark import torch_rounds
    from lab.benchmark.torch_rounds import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    net = torch_rounds.Network(network(name, like).init(jax.random.key(0)), name)
    examples = torch_rounds.clients(federation(clients, scale.examples, like))
    arguments = (net, torch_rounds.weights(net), examples, 1, scale)
    began = time.perf_counter()
    if way == "loop with a CUDA graph":
        work = torch_rounds.train_by_graph(*arguments)
    else:
        work = functools.partial(
            torch_rounds.train_clients if way == "loop" else torch_rounds.train_at_once, *arguments
        )
    work()
    prepared = time.perf_counter() - began
    seconds = statistics.median(measure.seconds(work) for _ in range(scale.repetitions[1]))
    row: Row = {"network": name, "pictures like": like, "by": f"PyTorch, {way}", "precision": precision}
    return row | {
        "clients": clients,
        "s": seconds,
        "examples/s": clients * scale.examples / seconds,
        "first, s": prepared,
    }


# --- rounds


def rounds(log: Log, scale: Scale) -> None:
    """Rounds of FedPAC and FedAS, a sweep, very many clients, and adapters on a vision transformer."""
    quick = scale == QUICK
    numbers = (scale.clients, *(() if quick else (MANY * scale.clients,)))
    for clients, method in itertools.product(numbers, ("fedpac", "fedas")):
        log.add(f"{method} {clients}", one_round, scale, method, clients)
    log.add("sweep", sweep, scale, *((2, 2, scale.clients, 1) if quick else (16, 4, MANY * scale.clients, 4)))
    log.add("many clients", many_clients, scale, 100 if quick else 10_000)
    for clients in (1,) if quick else (1, 8, 32):
        log.add(f"adapters {clients}", adapted, scale, clients)


def one_round(scale: Scale, method: str, clients: int) -> Row:
    """Time of a round and an evaluation, and FedPAC's share in quadratic programs of as many clients."""
    began = time.perf_counter()
    work = Rounds(workload.method(method, scale), federation(clients, scale.examples))
    work.both()
    prepared = time.perf_counter() - began
    times = measure.medians(scale.repetitions[1], {"round": work.round, "evaluation": work.evaluate})
    row: Row = {"what": method, "clients": clients, "E": scale.epochs, "s/round": times["round"]}
    row |= {"s/evaluation": times["evaluation"], "first, s": prepared}
    if method == "fedpac":
        draw = np.random.default_rng(0)
        mu = jnp.asarray(draw.normal(size=(5, 10, 128))[np.arange(clients) % 5] / 10, jnp.float32)
        solve, counts = jax.jit(head_weights), jnp.full(clients, float(scale.examples))

        def programs():
            jax.block_until_ready(solve(mu, jnp.ones(clients), counts))

        programs()
        row["quadratic programs %"] = 100 * measure.medians(scale.repetitions[1], {"": programs})[""] / times["round"]
    return row


def sweep(scale: Scale, rates: int, seeds: int, clients: int, together: int) -> Row:
    """Learning rates and seeds of FedAvg in one program, so many runs under one vmap."""
    every = list(itertools.product(np.geomspace(0.003, 0.3, rates), range(seeds)))
    settings = simulate.Settings(rounds=2 + scale.repetitions[1], chunk=min(clients, scale.clients))

    def make(lr):
        return methods.fedavg(workload.network(), LocalTraining(lr=lr, batch_size=scale.batch_size, epochs=1))

    keys = jax.vmap(jax.random.key)(jnp.array([seed for _, seed in every]))
    values = {"lr": jnp.array([rate for rate, _ in every], jnp.float32)}
    # On a CPU convolutions are computed client by client.
    chunk = 1 if choices().chunk == 1 else together
    results = pfl_jax.engine.sweep.run(
        make, federation(clients, scale.examples), settings, keys, values, chunk=chunk, donate=True
    )
    first, *others = [result.seconds for result in results]
    seconds = statistics.median(others)
    row: Row = {"what": f"{len(every)} runs of fedavg in one program", "clients": clients, "E": 1, "s/round": seconds}
    return row | {"examples/s": len(every) * clients * scale.examples / seconds, "first, s": first}


def many_clients(scale: Scale, clients: int, examples: int = 50) -> Row:
    """A round of all of very many clients, with small perceptrons."""
    method = make_method("fedavg", models.mlp((8, 8, 1), 10), batch_size=10, epochs=1)
    return _rounds("fedavg, mlp", method, noise((clients, examples, 8, 8, 1)), examples, scale)


def adapted(scale: Scale, clients: int, examples: int = 64) -> Row:
    """A round of FedPer with low-rank adapters on the small vision transformer of results/vit.npz."""
    base = vit((28, 28, 1), 10, path=ROOT / "vit.npz")
    model = adapters.lora(base, (28, 28, 1), rank=8, targets="layer_[23]/(query|value)")
    own = noise((clients, examples, 28, 28, 1)).with_frozen(model.frozen)
    method = methods.fedper(model, LocalTraining(lr=0.1, batch_size=16, epochs=1))
    return _rounds("fedper, LoRA on a small ViT", method, own, examples, scale)


def noise(shape: tuple[int, ...]) -> FederatedData:
    """Clients with random examples [N, P, ...] of ten classes, the first of which is their test example too."""
    draw = np.random.default_rng(0)
    pictures, labels = draw.normal(size=shape).astype(np.float32), draw.integers(0, 10, shape[:2])
    rows = [{"x": x, "y": y, "test_x": x[:1], "test_y": y[:1]} for x, y in zip(pictures, labels, strict=True)]
    return data.federate(rows, num_classes=10)


def _rounds(what: str, method: Method, own: FederatedData, examples: int, scale: Scale) -> Row:
    began = time.perf_counter()
    work = Rounds(method, own, evaluation=False)
    work.round()
    prepared, clients = time.perf_counter() - began, own.num_clients
    seconds = measure.medians(scale.repetitions[1], {"": work.round})[""]
    row: Row = {"what": what, "clients": clients, "E": 1, "s/round": seconds}
    return row | {"examples/s": clients * examples / seconds, "first, s": prepared}


PARTS = {part.__name__: part for part in (machine, training, pytorch, rounds)}


def main(part: str, file: str, until: str, quick: str) -> None:
    """Measure what a part lacks until the time is over."""
    prepare(Spec.of("digits"))
    try:
        PARTS[part](Log(Path(file), part, float(until)), QUICK if json.loads(quick) else FULL)
    except OutOfTime:
        print(f"{part}: its time is over", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
