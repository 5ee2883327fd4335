"""Solvers of FedPAC's quadratic programs: time, gap and error by size of the cohort.

python -m experiments.lab.benchmark.head_weights
"""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import nnls

from pfl_jax.primitives import simplex_solvers

COHORTS = (5, 20, 100, 200, 300, 1000)
"""Clients of a cohort."""

PROGRAMS = 4
"""Programs that are solved for a time: those of the first clients."""

GROUPS, CLASSES, FEATURES, EXAMPLES = 5, 10, 128, 600
"""Of a federation like FedPAC's on Fashion-MNIST."""

FLOOR = float(np.finfo(np.float32).eps)


def programs(clients: int, groups: int) -> np.ndarray:
    """Matrices [PROGRAMS, M, M] of the first clients (FedPAC, Eq. 46); means within a group differ by sampling."""
    generator = np.random.default_rng(0)
    variances = generator.uniform(30, 50, clients)
    centers = 0.3 * np.abs(generator.normal(size=(groups, CLASSES * FEATURES)))
    errors = np.sqrt(variances / EXAMPLES / (CLASSES * FEATURES))[:, None]
    means = centers[np.arange(clients) % groups] + errors * generator.normal(size=(clients, CLASSES * FEATURES))
    apart = np.float32(means[:PROGRAMS, None] - means[None]).astype(np.float64)
    matrices = np.einsum("ijd,ikd->ijk", apart, apart, optimize=True) + np.diag(variances / EXAMPLES)
    return matrices / np.abs(matrices).max((1, 2), keepdims=True)


def exact(matrix: np.ndarray) -> np.ndarray:
    """Minimizer by an active-set method: nonnegative least squares |Ax|^2 + (sum x - 1)^2, normalized."""
    system = np.vstack([np.linalg.cholesky(matrix).T, np.ones(len(matrix))])
    weights, _ = nnls(system, np.r_[np.zeros(len(matrix)), 1.0], maxiter=100 * len(matrix))
    return weights / weights.sum()


def solvers(clients: int) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """Functions P [m, m] -> weights [m]."""
    zero = jnp.zeros(clients)
    found = {
        "projected_gradient": lambda p: simplex_solvers.projected_gradient(p, zero, floor=FLOOR),
        "interior_point": lambda p: simplex_solvers.interior_point(p, zero, tolerance=1e-9, floor=FLOOR),
    }
    if clients <= 20:
        found["osqp"] = lambda p: simplex_solvers.osqp(p, zero, tolerance=1e-7)
    if clients >= 256:
        few = functools.partial(simplex_solvers.few_coordinates, size=max(128, clients // 4), tolerance=1e-7)
        found["few_coordinates"] = lambda p: few(p, zero, floor=FLOOR)[0]
    return found


def main() -> None:
    """Print a line of the table for each cohort, population and solver."""
    jax.config.update("jax_enable_x64", True)
    print("| clients | groups | solver | ms a program | gap | error of weights | weights above 1e-3 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for clients in COHORTS:
        for groups in (GROUPS, max(clients // 2, 1)):
            matrices = programs(clients, groups)
            want = np.stack([exact(matrix) for matrix in matrices])
            for name, solver in solvers(clients).items():
                solve = jax.jit(functools.partial(jax.lax.map, solver))
                weights = jax.block_until_ready(solve(jnp.asarray(matrices)))
                times = []
                for _ in range(3):
                    start = time.perf_counter()
                    jax.block_until_ready(solve(jnp.asarray(matrices)))
                    times.append(time.perf_counter() - start)
                gaps = [
                    float(simplex_solvers.frank_wolfe_gap(*program, FLOOR))
                    for program in zip(matrices, np.zeros(weights.shape), weights, strict=True)
                ]
                error, support = np.abs(weights - want).max(), int((want > 1e-3).sum(1).max())
                milliseconds = 1e3 * sorted(times)[1] / PROGRAMS
                print(
                    f"| {clients:,} | {groups} | {name} | {milliseconds:.3g} | {max(gaps):.0e} | {error:.0e} "
                    f"| {support} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
