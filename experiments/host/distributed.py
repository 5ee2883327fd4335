"""Runs of several processes, on one or more machines: start of JAX's runtime, and the end of a process.

Every process stores the examples of its own clients; only the first one prints and writes files. An error before the
rounds, or while files are written, stops all of them with one line. One that dies, or fails alone in a collective
computation, ends the others within a minute: those that notice it in Python with one line, the others by JAX's runtime,
which aborts them. What started them, such as srun, stops those that are left.
"""

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments.fields import flag
from experiments.host.exit_codes import INVALID, print_line
from experiments.host.jax_config import devices
from experiments.host.processes import LOST, EndedAlone, Processes, lost, without_output
from experiments.own_code import by_content
from experiments.spec import Spec
from pfl_jax.engine.mapping import AXIS, client_mesh
from pfl_jax.errors import InvalidInput

WAIT = 300
"""Seconds that a process waits for the others to connect."""

HEARTBEAT = 30
"""Seconds without a sign of life after which a process counts as dead, also for those that wait for it to leave."""


def work_with_others(work: Callable[[Processes], object], spec: Spec) -> None:
    """Do the work of one process of a run.

    A process that fails alone ends at once, so that the others do not wait for it; JAX's own end would wait for all.
    """
    try:
        work(_start(spec))
    except EndedAlone as error:
        print_line(f"error: {error}")
        os._exit(INVALID)
    except (InvalidInput, KeyboardInterrupt, SystemExit):
        # All processes have agreed on it, or find it by themselves.
        raise
    except BaseException as error:
        if lost(error):
            print_line(f"error: {LOST}")
            os._exit(INVALID)
        traceback.print_exc()
        os._exit(1)


def _start(spec: Spec) -> Processes:
    """Connect the processes of a run, after `jax_config.prepare` and before JAX's first computation."""
    # The runtime's own log would fill the screen, for example about a port in use; errors are exceptions.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # CPUs need Gloo for collectives between processes; it has no effect on other devices.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # SIGTERM ends a round and writes a checkpoint, see `exit_codes.stoppable`.
    jax.config.update("jax_enable_preemption_service", False)
    explicit: dict[str, Any] = {}
    if spec.coordinator is not None:
        explicit = {
            "coordinator_address": spec.coordinator,
            "num_processes": spec.num_processes,
            "process_id": spec.process_id,
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(
            **explicit,
            initialization_timeout=WAIT,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=HEARTBEAT,
        )
    except ValueError as error:
        raise InvalidInput(
            f"--distributed found no cluster ({error}): start it under Slurm or another scheduler that JAX knows, or "
            "give --coordinator HOST:PORT --num-processes N --process-id I"
        ) from None
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), "")
        raise InvalidInput(
            f"--distributed cannot start ({reason}): do all processes run, and is the coordinator's port free?"
        ) from None
    processes = Processes(jax.process_index(), jax.process_count())
    _check_same(processes, spec)
    with processes.synchronized():
        mesh = client_mesh(devices(spec))
    with without_output():
        # Devices connect when the first program with a collective runs, so run one now.
        by_device = NamedSharding(mesh, PartitionSpec(AXIS))
        ones = jax.make_array_from_callback((mesh.size,), by_device, lambda _: np.ones(1, np.float32))
        jax.block_until_ready(jax.jit(jnp.sum)(ones))
    return processes


def _check_same(processes: Processes, spec: Spec) -> None:
    """Raise InvalidInput, see `Processes.synchronized`, unless all processes have the same command line and JAX."""
    options = {name: value for name, value in spec.options.items() if name != "process_id"}
    everything = {"dataset": spec.dataset, **options, **spec.hyper_parameters}
    everything |= by_content(everything, spec.own_code)
    own_values = {flag(name) if name != "dataset" else name: value for name, value in everything.items()}
    found = [
        json.loads(text) for text in processes.exchange(json.dumps(own_values | {"version of JAX": jax.__version__}))
    ]
    with processes.synchronized():
        for index, other in enumerate(found):
            for name in sorted(found[0].keys() | other.keys()):
                ours, theirs = found[0].get(name), other.get(name)
                if ours != theirs:
                    raise InvalidInput(
                        f"the processes' command lines differ: {name} is {ours} in process 0 and {theirs} in "
                        f"process {index}"
                    )
