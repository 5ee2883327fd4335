"""Factorizations that JAX runs on a CPU: one thread for each, and one matrix at a time."""

import importlib
import os
import sys
import warnings

import jax
import jax.numpy as jnp

# Loaded before THREADS is set, with as many threads as without this package.
import numpy as np  # noqa: F401

THREADS = "OPENBLAS_NUM_THREADS"
"""Variable that OpenBLAS reads when it is loaded."""


def keep_to_one_thread() -> None:
    """Keep SciPy's OpenBLAS, with which JAX factorizes matrices on a CPU, from starting its own threads inside XLA's.

    With such threads, batched factorizations take many times as long on a busy machine. SciPy's library is loaded while
    the variable THREADS is 1; the variable is then removed, so that a separate library of NumPy keeps its threads. A
    user's own value stays and holds for both. `pfl_jax.base` imports `pfl_jax.backends`, which calls this.
    """
    if THREADS in os.environ:
        return
    was_loaded = "scipy.linalg" in sys.modules
    os.environ[THREADS] = "1"
    try:
        importlib.import_module("scipy.linalg.cython_lapack")
    finally:
        del os.environ[THREADS]
    try:
        # threadpoolctl comes with scikit-learn. Conda has one library for NumPy and SciPy, which is loaded already.
        libraries = importlib.import_module("threadpoolctl").ThreadpoolController().lib_controllers
    except ImportError:
        if was_loaded:
            warnings.warn(
                "scipy was imported before pfl_jax, so that factorizations may be many times slower: import "
                f"pfl_jax.base first, set {THREADS}=1, or install threadpoolctl",
                stacklevel=3,
            )
        return
    for library in libraries:
        if library.internal_api == "openblas" and "numpy.libs" not in library.filepath:
            library.set_num_threads(1)


@jax.custom_batching.sequential_vmap
def thin_svd(matrix: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Thin singular value decomposition of a matrix [m, n]: U [m, r], values [r], V' [r, n], with r = min(m, n).

    Under vmap, one matrix is decomposed after another. LAPACK's batched functions on a CPU wait for threads of XLA's
    pool: two that run at the same time, for two layers or on two devices, can use up all threads and wait forever.
    """
    left, values, right = jnp.linalg.svd(matrix, full_matrices=False)
    return left, values, right
