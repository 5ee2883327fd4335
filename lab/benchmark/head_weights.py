"""Weights of the heads by number of clients: FedPAC's quadratic programs, and its replication's class prototypes."""

import functools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from lab.benchmark import measure, workload
from lab.benchmark.records import Row, Section
from lab.benchmark.workload import Scale
from pfl_jax.data.partition import dominant_classes
from pfl_jax.methods.fedpac_proto import prototype_weights
from pfl_jax.primitives.head_combination import head_weights


def section(scale: Scale) -> Section:
    """Times of the weights of all clients in a round, for each number of clients."""
    rows: list[Row] = []
    for clients in scale.cohorts:
        contestants = programs(clients, scale.examples)
        for compute in contestants.values():
            compute()
        times = measure.interleaved(scale.repetitions[0], contestants)
        row: Row = {"clients": clients}
        row |= {f"{by}, ms": 1000 * statistics.median(seconds) for by, seconds in times.items()}
        row["ratio"] = row["quadratic programs, ms"] / row["prototypes, ms"]
        rows.append(row | {f"{by}, repetitions": seconds for by, seconds in times.items()})
    note = (
        f"all clients take part, {scale.examples} examples each, in FedPAC's groups; statistics and heads are drawn at "
        f"random; medians of {scale.repetitions[0]} interleaved repetitions"
    )
    return Section("Head weights of a round", rows, note)


def programs(clients: int, examples: int) -> dict[str, Callable[[], jax.Array]]:
    """Both ways to compute the weights [M, M] of a cohort, from what M clients send."""
    model, rng = workload.network(), np.random.default_rng(0)
    groups = dominant_classes(model.num_classes)
    shares = np.full((clients, model.num_classes), 0.2 / model.num_classes)
    for client, row in enumerate(shares):
        own = groups[client % len(groups)]
        row[own] += 0.8 / len(own)
    # Class means with features of variance 1 about them.
    shape = model.num_classes, model.num_features
    centroids = rng.normal(size=shape) + 0.1 * rng.normal(size=(clients, *shape))
    mu = shares[:, :, None] * centroids
    second = np.sum(shares * np.sum(centroids**2 + 1, axis=2), axis=1)
    variance, counts = second - np.sum(mu**2, axis=(1, 2)), np.full(clients, examples)
    heads = jax.vmap(model.init)(jax.random.split(jax.random.key(0), clients))["head"]
    sent = [jnp.float32(each) for each in (mu, variance, counts)]
    prototypes = jax.jit(functools.partial(prototype_weights, model))
    held = heads, jnp.float32(centroids), jnp.float32(shares * examples)
    return {
        "quadratic programs": lambda: jax.block_until_ready(head_weights(*sent)),
        "prototypes": lambda: jax.block_until_ready(prototypes(*held)),
    }
