"""Table of the fastest choices on each kind of device; only the CPU's were measured."""

import os
from typing import Literal, NamedTuple, TypeAlias

import jax

from pfl_jax.lapack import keep_to_one_thread

keep_to_one_thread()

Precision: TypeAlias = Literal["float32", "tf32", "bf16"]
"""Precision of matrix products and convolutions; a CPU always computes in float32."""


class Choices(NamedTuple):
    """Choices for one backend of JAX.

    Attributes:
      convolution: form of `pfl_jax.fast.convolution.conv2d` for "auto".
      chunk: largest number of clients under one vmap for chunk "auto" and models with convolutions; None for no limit.
      precision: default precision of matrix products in the commands of `experiments`.
    """

    convolution: str
    chunk: int | None
    precision: Precision = "float32"


BACKENDS: dict[str, Choices] = {"cpu": Choices("direct", 1), "default": Choices("matmul", None)}
"""Name of a backend -> its choices. "default" is for all other backends, such as GPUs. Only the CPU's choices were
measured (docs/performance.md): elsewhere "lax" would become grouped convolutions under vmap, and "direct" a loop."""


def choices(backend: str | None = None) -> Choices:
    """Choices for the backend with this name; None for JAX's default backend."""
    return BACKENDS.get(backend or jax.default_backend(), BACKENDS["default"])


def cpu_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
