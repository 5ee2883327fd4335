"""Free memory, the place of the clients' states, and shortages that JAX or NumPy notice; the kernel just kills."""

import math
import os
from collections.abc import Callable
from typing import Any

import jax

from experiments.host.jax_config import devices
from experiments.run.build import Experiment
from pfl_jax.engine.simulate import StateOn
from pfl_jax.primitives.tree import byte_count

CLIENTS_SHARE = 0.25
"""Share of the free memory that the clients' states may take on the devices; a round may need them twice."""

HOST_SHARE = 0.5
"""Share of the machine's memory that they may take on the host."""

SHORTAGE = (
    "the memory does not suffice: use a smaller --chunk, fewer --devices, --state-on host or disk, a smaller "
    "--batch-size or --train-size, or fewer --num-clients"
)
"""Advice after a shortage; the first line of a run has its chunk and devices."""

MOST_BYTES = 2**28
"""Size up to which --keep-state auto keeps a state."""


def free_bytes(device: Any) -> int:
    """Free memory of a device; of the machine for a CPU or where nothing else is known."""
    figures = device.memory_stats() or {}
    if "bytes_limit" in figures:
        return figures["bytes_limit"] - figures["bytes_in_use"]
    return int(machine_bytes("SC_AVPHYS_PAGES", 2**32))


def machine_bytes(name: str = "SC_PHYS_PAGES", unknown: float = math.inf) -> float:
    """Memory of the machine, or of those pages that `os.sysconf` calls `name`; `unknown` where it is not known."""
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return unknown


def clients_bytes(experiment: Experiment) -> int:
    """Size of all clients' states, computed without running anything."""
    return byte_count(experiment.state_shapes().clients)


def state_place(experiment: Experiment) -> StateOn:
    """Place of the clients' states: as requested, or where they fit. Several processes share them on their hosts."""
    place = experiment.spec.state_on
    if place != "auto":
        return place
    used = devices(experiment.spec)
    # Every device keeps all of them, and the devices of a CPU share one memory.
    used = [one for one in used if one.process_index == jax.process_index()]
    copies, size = len(used) if jax.default_backend() == "cpu" else 1, clients_bytes(experiment)
    if size > HOST_SHARE * machine_bytes() and not experiment.spec.distributed:
        return "disk"
    return "host" if copies * size > CLIENTS_SHARE * free_bytes(used[0]) else "device"


def is_kept(experiment: Experiment, notify: Callable[[str], None]) -> bool:
    """Whether the final state of a run is kept; `notify` receives a message if it is too large for that."""
    wanted = experiment.spec.keep_state
    if wanted != "auto":
        return wanted == "always"
    size = byte_count(experiment.state_shapes()._replace(key=()))
    if size > MOST_BYTES:
        notify(f"The final state has {size / 2**20:,.0f} MiB and is not kept: --keep-state always would keep it.")
    return size <= MOST_BYTES


def is_shortage(error: BaseException) -> bool:
    """Whether the error means that JAX or NumPy could not allocate memory."""
    if isinstance(error, MemoryError):
        return True
    text = str(error)
    is_from_jax = isinstance(error, jax.errors.JaxRuntimeError)
    return is_from_jax and ("out of memory" in text.lower() or "RESOURCE_EXHAUSTED" in text)
