"""FedPAC's quadratic programs for large cohorts, beside the prototype weights of its replication."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.lab.benchmark import measure, workload
from experiments.lab.benchmark.records import Row, Section
from experiments.lab.benchmark.workload import QUICK, Setup
from pfl_jax.methods.fedpac_proto import prototype_weights
from pfl_jax.primitives.head_combination import head_weights as solve
from pfl_jax.primitives.simplex_qp import Solver, solve_simplex_qp

COHORTS = (20, 100, 300, 1000)
"""Clients of a cohort."""

BOTH_RULES = 300
"""Largest cohort whose whole weights are timed, by programs and by prototypes."""

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


def rules(clients: int) -> dict[str, Callable[[], None]]:
    """Head weights of a whole cohort by quadratic programs, and by the losses of class prototypes."""
    means, variances = (jnp.asarray(part, jnp.float32) for part in statistics(clients))
    model = workload.network()
    heads = jax.vmap(model.init)(jax.random.split(jax.random.key(0), clients))["head"]
    counts = jnp.full((clients, CLASSES), EXAMPLES / CLASSES)
    of_programs = jax.jit(solve)
    of_prototypes = jax.jit(functools.partial(prototype_weights, model))
    return {
        "all programs, ms": lambda: jax.block_until_ready(of_programs(means, variances, jnp.sum(counts, axis=1))),
        "prototype weights, ms": lambda: jax.block_until_ready(of_prototypes(heads, CLASSES * means, counts)),
    }


def head_weights(setup: Setup) -> Section:
    """Milliseconds of a program with both solvers, of a whole cohort by both rules, and its temporary memory."""
    rows: list[Row] = []
    for clients in COHORTS[:2] if setup.scale == QUICK else COHORTS:
        setup.notify(f"head weights of {clients} clients")
        matrices = programs(clients)
        solvers: tuple[Solver, ...] = ("auto", "interior_point")
        ways = {f"{name}, ms": functools.partial(_solved, matrices, name) for name in solvers}
        for way in ways.values():
            way()
        times = measure.medians(setup.scale.repetitions[0], ways)
        row: Row = {"clients": clients} | {name: 1e3 * seconds / PROGRAMS for name, seconds in times.items()}
        row["ratio"] = times["interior_point, ms"] / times["auto, ms"]
        shapes = [jax.ShapeDtypeStruct(part.shape, jnp.float32) for part in statistics(clients)]
        sizes = jax.ShapeDtypeStruct((clients,), jnp.float32)
        memory = jax.jit(solve).lower(*shapes, sizes).compile().memory_analysis()
        row |= {} if memory is None else {"temporary memory of all, MB": memory.temp_size_in_bytes / 1e6}
        if clients <= BOTH_RULES:
            both = rules(clients)
            for rule in both.values():
                rule()
            times = measure.medians(setup.scale.repetitions[0], both)
            row |= {name: 1e3 * seconds for name, seconds in times.items()}
            row["programs / prototypes"] = times["all programs, ms"] / times["prototype weights, ms"]
        rows.append(row)
    return Section("FedPAC's quadratic programs", rows, f"mean of {PROGRAMS} programs; clients in {GROUPS} groups")


def _solved(matrices: jax.Array, solver: Solver) -> None:
    jax.block_until_ready(solve_simplex_qp(matrices, solver=solver, tolerance=1e-7))
