"""How much memory there is, and how much of it a federation's clients take between rounds."""

import os
from typing import Any, Literal

import jax
import jax.numpy as jnp

from experiments.records import Experiment, devices
from pfl_jax import engine
from pfl_jax.trees import byte_count

CLIENTS_SHARE = 0.25
"""Of the free memory: what the clients' states may take on the devices, since a round may need them twice."""


def free_bytes(device: Any) -> int:
    """Free memory of a device; that of the machine for a CPU, and where nothing else is known."""
    figures = device.memory_stats() or {}
    if "bytes_limit" in figures:
        return figures["bytes_limit"] - figures["bytes_in_use"]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 2**32


def clients_bytes(experiment: Experiment) -> int:
    """What the states of all clients take, without running anything."""
    parts = engine.pieces(experiment.method, experiment.settings)
    data, key = experiment.data, jax.random.key(0)
    server = jax.eval_shape(parts.start_server, data, key)
    one = jax.eval_shape(parts.start_clients, data, server, key, jnp.zeros(1, jnp.int32))
    return data.num_clients * byte_count(one)


def state_place(experiment: Experiment) -> Literal["device", "host"]:
    """Where the clients' states are kept: as asked, or on the host if they would fill the devices."""
    place = experiment.request.options.state_on
    if place != "auto":
        return place
    used = devices(experiment.request.options)
    # Every device keeps all of them, and the devices of a CPU share one memory.
    used = [one for one in used if one.process_index == jax.process_index()]
    copies = len(used) if jax.default_backend() == "cpu" else 1
    return "host" if copies * clients_bytes(experiment) > CLIENTS_SHARE * free_bytes(used[0]) else "device"
