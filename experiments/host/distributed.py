"""Runs of several processes, on one or more machines: start of JAX's runtime, and a parent for each process.

Every process stores the examples of its own clients; only the first one prints and writes files. An error before the
rounds, or while files are written, stops all of them with one line. One that dies, or fails alone in a collective
computation, ends the others within a minute: JAX's runtime aborts them from C++. The command that the user starts is
therefore a parent that runs the same command in a child, and says in one line how that was ended.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import experiments
from experiments.fields import flag
from experiments.host.exit_codes import INVALID, print_line
from experiments.host.jax_config import devices
from experiments.host.processes import LOST, EndedAlone, Processes, lost, without_output
from experiments.host.signals import wait
from experiments.own_code import by_content
from experiments.spec import Spec
from pfl_jax.engine.mapping import AXIS, client_mesh
from pfl_jax.errors import InvalidInput

CHILD = "PFL_JAX_CHILD"
"""Environment variable of the child that does the work."""

WAIT = 300
"""Seconds that a process waits for the others to connect."""

HEARTBEAT = 30
"""Seconds without a sign of life after which a process counts as dead, also for those that wait for it to leave."""


def supervise(dataset: str, arguments: Sequence[str]) -> int:
    """Run a command in a child process; return its exit code, 2 if another process died, 128 + N after signal N."""
    path = [str(Path(experiments.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    # The runtime's own log would fill the screen, for example about a port in use; errors are exceptions.
    environment = {"GRPC_VERBOSITY": "NONE"} | os.environ
    environment |= {CHILD: "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, "-m", "experiments", dataset, *arguments]
    with tempfile.TemporaryFile() as errors:
        # A group of its own, so that Ctrl-C reaches the child only once.
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=errors, process_group=0) as child:
            code = wait(child)
        errors.seek(0)
        return _ended(code, errors.read().decode(errors="replace"))


def _ended(code: int, errors: str) -> int:
    """Exit code for a child's; print its stderr, or one line on the signal that ended it."""
    if code >= 0:
        print(errors, end="", file=sys.stderr, flush=True)
        return code
    # What JAX's runtime writes when it aborts; at most log levels nothing.
    is_runtime = not errors.strip() or any(words in errors for words in ("distributed service", "oordination"))
    if code == -signal.SIGABRT and is_runtime:
        print_line(f"error: {LOST}: --resume goes on after the last checkpoint")
        return INVALID
    print(errors, end="", file=sys.stderr, flush=True)
    name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
    why = ", perhaps because the machine's memory did not suffice" if -code == signal.SIGKILL else ""
    print_line(f"error: this process was ended by {name}{why}: --resume goes on after the last checkpoint")
    return 128 - code


def work_as_child(work: Callable[[Processes], None], spec: Spec) -> None:
    """Do the work of one process of a run.

    A process that fails alone ends at once, so that the others do not wait for it; JAX's own end would wait for all.
    """

    def watch() -> None:
        # The parent's end closes the pipe.
        os.read(0, 1)
        os._exit(INVALID)

    threading.Thread(target=watch, daemon=True).start()
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
    # CPUs need Gloo for collectives between processes; it has no effect on other devices.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # SIGTERM ends a round and writes a checkpoint, see `signals.stoppable`.
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
