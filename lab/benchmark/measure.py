"""The machine, its time and memory: interleaved repetitions, peak of matrix products, resident memory."""

import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MIB = 2**20


def machine() -> dict[str, Any]:
    """Processor, devices and versions of this machine."""
    packages = ("jax", "jaxlib", "torch", "numpy")
    there = {found.metadata["Name"]: found.version for found in metadata.distributions()}
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    devices = jax.local_devices()
    return {
        "devices": f"{devices[0].device_kind} x {len(devices)}",
        "backend": jax.default_backend(),
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version()} | {name: there[name] for name in packages if name in there},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call, which must return only when its results are computed."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def interleaved(repetitions: int, contestants: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of every call of each contestant, in turn, so that a disturbance of the machine affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(repetitions):
        # Reversed every time, so that no contestant always follows the same one.
        for name in list(contestants)[:: 1 if repetition % 2 == 0 else -1]:
            times[name].append(seconds(contestants[name]))
    return times


def medians(repetitions: int, contestants: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each contestant, see `interleaved`."""
    times = interleaved(repetitions, contestants)
    return {name: statistics.median(values) for name, values in times.items()}


def matmul_peak(size: int, mesh: Mesh, repetitions: int = 5, dtype: Any = jnp.float32) -> dict[str, float]:
    """Highest rates of floating-point operations per second in products of square matrices [size, size].

    Returns:
      "one_device": one product, which a CPU splits over its cores. "every_device": one product on each device at
      once. "peak": the larger.
    """
    matrix = jax.random.normal(jax.random.key(0), (size, size), dtype)
    sharded = PartitionSpec("clients")
    stack = jax.device_put(jnp.broadcast_to(matrix, (mesh.size, size, size)), NamedSharding(mesh, sharded))
    each = jax.jit(jax.shard_map(lambda a: (a[0] @ a[0])[None], mesh=mesh, in_specs=sharded, out_specs=sharded))

    def rate(product: Callable[[jax.Array], jax.Array], operand: jax.Array, products: int) -> float:
        jax.block_until_ready(product(operand))
        best = min(seconds(lambda: jax.block_until_ready(product(operand))) for _ in range(repetitions))
        return products * 2 * size**3 / best

    rates = {
        "one_device": rate(jax.jit(lambda a: a @ a), matrix, 1),
        "every_device": rate(each, stack, mesh.size),
    }
    return rates | {"peak": max(rates.values())}
