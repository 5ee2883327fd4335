"""FedPAC's and FedAS's networks, built in and from a PyTorch module, beside a plain PyTorch loop."""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from lab.benchmark import measure, workload
from lab.benchmark.jax_rounds import local_training, operations
from lab.benchmark.records import Row, Section
from lab.benchmark.workload import Scale
from pfl_jax import models, networks
from pfl_jax.errors import InvalidInput


def section(scale: Scale, mesh: Mesh, peak: float) -> Section:
    """An epoch of local training of all clients, on all devices; `peak` of matrix products, in operations per second.

    Raises:
      InvalidInput: PyTorch is not installed.
    """
    try:
        from lab.benchmark import torch_rounds
    except ImportError:
        raise InvalidInput("this section needs PyTorch: pip install -r requirements-bench.txt") from None
    data, shape = workload.federation(scale.clients, scale.examples), workload.dataset().input_shape
    examples, classes = torch_rounds.clients(data), workload.dataset().num_classes
    rows: list[Row] = []
    for name in torch_rounds.NETWORKS:
        built_in = models.MODELS[name](shape, classes)
        module = torch_rounds.Network(built_in.init(jax.random.key(0)), name)
        ours = {
            "pfl_jax, built in": built_in,
            "pfl_jax, from_torch": networks.from_torch(module.cpu(), shape, classes, head="head"),
        }
        everyone = {"clients": scale.clients, "epochs": 1, "chunk": workload.usual_chunk(), "mesh": mesh}
        contestants: dict[str, Callable[[], Any]] = {
            by: local_training(data, scale, model=model, **everyone) for by, model in ours.items()
        }
        start = torch_rounds.weights(module.to(torch_rounds.DEVICE))
        contestants["PyTorch"] = functools.partial(torch_rounds.train_clients, module, start, examples, 1, scale)
        for work in contestants.values():
            work()
        times = measure.interleaved(scale.repetitions[1], contestants)
        medians = {by: statistics.median(seconds) for by, seconds in times.items()}
        done = scale.clients * scale.examples * operations(built_in, shape)
        for by, seconds in medians.items():
            row = {"network": name, "by": by, "s": seconds, "repetitions": times[by]}
            speed_up = None if by == "PyTorch" else medians["PyTorch"] / seconds
            rows.append(row | {"speed-up": speed_up, "of peak %": 100 * done / seconds / peak})
    note = f"{scale.clients} clients of {scale.examples} examples, one epoch; medians of interleaved repetitions"
    return Section("Networks, built in and from PyTorch", rows, note)
