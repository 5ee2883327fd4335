"""FedPAC's quadratic programs for large cohorts: time of one client's program, beside the prototype weights of its
replication, and memory of all."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmark import measure
from experiments.benchmark.records import Row, Section
from experiments.benchmark.workload import QUICK, Setup
from pfl_jax import models
from pfl_jax.methods.fedpac import head_weights as solve
from pfl_jax.methods.fedpac_proto import prototype_weights
from pfl_jax.primitives.simplex_qp import Solver, solve_simplex_qp

COHORTS = (20, 100, 300, 1000)
"""Clients of a cohort."""

PROTOTYPES = "prototypes, ms"
"""Column of the weights that `fedpac_proto` computes."""

PROGRAMS = 4
"""Programs that are solved for a time: those of the first clients."""

GROUPS, CLASSES, FEATURES, EXAMPLES = 5, 10, 128, 600
"""Of a federation like FedPAC's on Fashion-MNIST."""


def statistics(clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean terms mu [M, K, d] and variances V [M] of clients in groups, whose means differ by their sampling error."""
    generator = np.random.default_rng(0)
    variances = generator.uniform(30, 50, clients)
    centers = 0.3 * np.abs(generator.normal(size=(GROUPS, CLASSES, FEATURES)))
    errors = np.sqrt(variances / EXAMPLES / (CLASSES * FEATURES))[:, None, None]
    return centers[np.arange(clients) % GROUPS] + errors * generator.normal(
        size=(clients, CLASSES, FEATURES)
    ), variances


def programs(clients: int) -> jax.Array:
    """Matrices [PROGRAMS, M, M] of the first clients' programs (FedPAC, Eq. 46)."""
    means, variances = statistics(clients)
    means = means.reshape(clients, -1)
    apart = means[:PROGRAMS, None] - means[None]
    matrices = np.einsum("ijd,ikd->ijk", apart, apart, optimize=True) + np.diag(variances / EXAMPLES)
    return jnp.asarray(matrices, jnp.float32)


def prototypes(clients: int) -> Callable[[], jax.Array]:
    """Weights [M, M] by prototypes (replication, Eq. 12-13) of linear heads, and the centroids of the same clients."""
    model = models.mlp((FEATURES,), CLASSES, hidden=(FEATURES,))
    centroids, _ = statistics(clients)
    generator = np.random.default_rng(1)
    kernels, biases = (generator.normal(size=(clients, *shape)) for shape in ((FEATURES, CLASSES), (CLASSES,)))
    heads = {"kernel": jnp.asarray(kernels, jnp.float32), "bias": jnp.asarray(biases, jnp.float32)}
    counts = jnp.full((clients, CLASSES), EXAMPLES / CLASSES)
    return functools.partial(
        jax.jit(functools.partial(prototype_weights, model)), heads, jnp.asarray(centroids, jnp.float32), counts
    )


def head_weights(setup: Setup) -> Section:
    """Milliseconds of a client's weights by two solvers and by prototypes, and temporary memory of a whole cohort's."""
    rows: list[Row] = []
    for clients in COHORTS[:2] if setup.scale == QUICK else COHORTS:
        setup.notify(f"head weights of {clients} clients")
        matrices = programs(clients)
        solvers: tuple[Solver, ...] = ("auto", "interior_point")
        ways: dict[str, Callable[[], None]] = {
            f"{name}, ms": functools.partial(_solved, matrices, name) for name in solvers
        }
        ways[PROTOTYPES] = functools.partial(_weighted, prototypes(clients))
        for way in ways.values():
            way()
        times = measure.medians(setup.scale.repetitions[0], ways)
        shared = {name: clients if name == PROTOTYPES else PROGRAMS for name in times}
        row: Row = {"clients": clients} | {name: 1e3 * seconds / shared[name] for name, seconds in times.items()}
        row["interior point / auto"] = row["interior_point, ms"] / row["auto, ms"]
        row["auto / prototypes"] = row["auto, ms"] / row[PROTOTYPES]
        shapes = [jax.ShapeDtypeStruct(part.shape, jnp.float32) for part in statistics(clients)]
        sizes = jax.ShapeDtypeStruct((clients,), jnp.float32)
        memory = jax.jit(solve).lower(*shapes, sizes).compile().memory_analysis()
        rows.append(row | ({} if memory is None else {"temporary memory of all, MB": memory.temp_size_in_bytes / 1e6}))
    return Section(
        "FedPAC's quadratic programs", rows, f"of one client, the mean of {PROGRAMS} programs; {GROUPS} groups"
    )


def _weighted(weights: Callable[[], jax.Array]) -> None:
    jax.block_until_ready(weights())


def _solved(matrices: jax.Array, solver: Solver) -> None:
    jax.block_until_ready(solve_simplex_qp(matrices, solver=solver, tolerance=1e-7))
