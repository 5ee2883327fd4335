"""Local training of FedPAC's network as the library has it, and as users write it; a minute for each version."""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from experiments.lab.benchmark import measure, workload
from experiments.lab.benchmark.child import in_process
from experiments.lab.benchmark.jax_rounds import local_training
from experiments.lab.benchmark.records import Row, Section
from experiments.lab.benchmark.sections import has_torch
from experiments.lab.benchmark.workload import Scale, Setup
from pfl_jax import client_mesh, networks
from pfl_jax.base import Model

CLIENTS = 8
INPUT, CLASSES = (28, 28, 1), 10
SIDES = ((1, 1), (1, 1))


def own_networks(setup: Setup) -> Section:
    """Seconds of an epoch by network, and relative to the built-in one in the same process, by version of JAX."""
    rows: list[Row] = []
    for python in setup.pythons:
        setup.notify(f"own networks, {python}")
        found = in_process(by_network, setup.scale, python=python)
        version, times = found["jax"], found["seconds"]
        rows += [
            {"jax": version, "network": name, "s": seconds, "built-in = 1": seconds / times["built-in"]}
            for name, seconds in times.items()
        ]
    note = (
        f"an epoch of {CLIENTS} clients of {setup.scale.examples} examples, batches of {setup.scale.batch_size}; "
        f"medians of {3 * setup.scale.repetitions[0]} interleaved repetitions"
    )
    return Section("Own networks", rows, note)


def by_network(scale: Scale) -> Row:
    """Median seconds by network, in this process."""
    data, mesh = workload.federation(CLIENTS, scale.examples), client_mesh()
    models = {"built-in": workload.network(), "flax.linen": linen(), "flax.nnx": of_nnx(), "jax.lax": plain()}
    contestants: dict[str, Callable[[], Any]] = {
        name: local_training(data, scale, clients=CLIENTS, epochs=1, chunk=1, mesh=mesh, model=model)
        for name, model in models.items()
    }
    if has_torch():
        from experiments.lab.benchmark import torch_rounds

        network = torch_rounds.Network(models["built-in"].init(jax.random.key(0)))
        examples = torch_rounds.clients(data)
        start = torch_rounds.weights(network)
        contestants["PyTorch"] = functools.partial(torch_rounds.train_clients, network, start, examples, 1, scale)
    for work in contestants.values():
        work()
    return {"jax": jax.__version__, "seconds": measure.medians(3 * scale.repetitions[0], contestants)}


class Linen(nn.Module):
    """FedPAC's network in flax.linen."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.max_pool(nn.leaky_relu(nn.Conv(16, (5, 5), padding="VALID")(x)), (2, 2), (2, 2))
        x = nn.max_pool(nn.leaky_relu(nn.Conv(32, (5, 5), padding=SIDES)(x)), (2, 2), (2, 2))
        x = nn.leaky_relu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.Dense(CLASSES, name="head")(x)


def linen() -> Model:
    """Model of `Linen`."""
    return networks.from_flax(Linen(), INPUT, CLASSES)


class Nnx(nnx.Module):
    """FedPAC's network in flax.nnx."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (5, 5), padding="VALID", rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (5, 5), padding=SIDES, rngs=rngs)
        self.dense = nnx.Linear(800, 128, rngs=rngs)
        self.head = nnx.Linear(128, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.leaky_relu(self.conv1(x)), (2, 2), (2, 2))
        x = nnx.max_pool(nnx.leaky_relu(self.conv2(x)), (2, 2), (2, 2))
        return self.head(nnx.leaky_relu(self.dense(x.reshape(len(x), -1))))


def of_nnx() -> Model:
    """Model of `Nnx`."""
    return networks.from_flax(lambda rngs: Nnx(rngs), INPUT, CLASSES)


def plain() -> Model:
    """The network as functions of `jax.lax`."""
    shapes = {"conv1": (5, 5, 1, 16), "conv2": (5, 5, 16, 32), "dense": (800, 128), "head": (128, CLASSES)}

    def init(key):
        keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
        params = {
            name: (jax.random.normal(keys[name], shape) / math.sqrt(math.prod(shape[:-1])), jnp.zeros(shape[-1]))
            for name, shape in shapes.items()
        }
        return {"head": params.pop("head"), "backbone": params}

    def block(params, x, padding):
        (kernel, bias), layout = params, ("NHWC", "HWIO", "NHWC")
        x = jax.nn.leaky_relu(jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=layout) + bias)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def features(backbone, x):
        x = block(backbone["conv2"], block(backbone["conv1"], x, "VALID"), SIDES)
        return jax.nn.leaky_relu(dense(backbone["dense"], x.reshape(len(x), -1)))

    def dense(params, x):
        return x @ params[0] + params[1]

    return Model(init, features, dense, 128, CLASSES)
