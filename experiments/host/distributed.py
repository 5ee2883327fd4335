"""Runs of several processes, on one or more machines: start of JAX's runtime, and supervision of each process.

Every process runs the same program over the same mesh and stores the examples of its own clients
(`pfl_jax.engine.placement`). Only the first process prints and writes files. An error in one process before the rounds,
or while files are written, stops all processes with one line. One that dies, or fails alone in a collective
computation, ends the others within a minute.

If another process dies, JAX's runtime aborts this one from a thread in C++, with a stack trace and an exit code of its
own, and nothing in Python can prevent it. The command that the user starts is therefore a supervisor. It runs the same
command in a child process, passes signals on, keeps what C++ writes to stderr, and says in one line how the child
ended. If the supervisor is killed, the child ends too.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import experiments
from experiments.cli.exit_codes import INTERRUPTED, INVALID, print_line
from experiments.cli.options import Options, flag
from experiments.cli.own_code import by_content
from experiments.cli.request import Request
from experiments.host.jax_config import devices
from experiments.host.processes import LOST, EndedAlone, Processes, lost, note_in, without_output
from pfl_jax.engine.mapping import AXIS, client_mesh
from pfl_jax.errors import InvalidInput

_CHILD = "PFL_JAX_SUPERVISED"
"""Environment variable of the child, with file descriptors: of stderr, of a pipe from the supervisor, of the note."""

_OF_RUNTIME = ("distributed service detected fatal errors", "coordination service", "CoordinationService")
"""Parts of what JAX's runtime writes when it aborts because another process is gone; at most log levels, nothing."""

WAIT = 300
"""Seconds that a process waits for the others to connect."""

HEARTBEAT = 30
"""Seconds without a sign of life after which a process counts as dead, also for those that wait for it to leave."""


@contextlib.contextmanager
def leaving_others() -> Iterator[None]:
    """Context of a process's work: one that fails alone ends at once, so that the others do not wait for it.

    JAX's own end would wait for all processes.
    """
    try:
        yield
    except EndedAlone as error:
        print_line(f"error: {error}")
        _leave(INVALID)
    except (InvalidInput, KeyboardInterrupt, SystemExit):
        # All processes have agreed on it, or find it by themselves.
        raise
    except BaseException as error:
        if lost(error):
            print_line(f"error: {LOST}")
            _leave(INVALID)
        traceback.print_exc()
        _leave(1)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start(request: Request) -> Processes:
    """Connect the processes of a run, after `jax_config.prepare` and before JAX's first computation.

    Args:
      request: the run's request; without --distributed there is only this process.

    Raises:
      InvalidInput: no cluster was found, the coordinator cannot be reached, or the command lines differ.
    """
    options = request.options
    if not options.distributed:
        return Processes()
    # Silence the runtime's own log, for example about a port in use; errors are reported by exceptions.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # CPUs need Gloo for collectives between processes; it has no effect on other devices.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # SIGTERM ends a round and writes a checkpoint, see `signals.stoppable`.
    jax.config.update("jax_enable_preemption_service", False)
    explicit: dict[str, Any] = {}
    if options.coordinator is not None:
        explicit = {
            "coordinator_address": options.coordinator,
            "num_processes": options.num_processes,
            "process_id": options.process_id,
            "cluster_detection_method": "deactivate",
        }
    try:
        with _connection_timeout(options):
            jax.distributed.initialize(
                **explicit,
                initialization_timeout=WAIT + 60,
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
        raise InvalidInput(f"--distributed cannot start ({reason}): is the coordinator's port in use?") from None
    processes = Processes(jax.process_index(), jax.process_count())
    _check_same(processes, request)
    with processes.synchronized():
        mesh = client_mesh(devices(options))
    with without_output():
        # Devices connect when the first program with a collective runs, so run one now.
        by_device = NamedSharding(mesh, PartitionSpec(AXIS))
        ones = jax.make_array_from_callback((mesh.size,), by_device, lambda _: np.ones(1, np.float32))
        jax.block_until_ready(jax.jit(jnp.sum)(ones))
    return processes


@contextlib.contextmanager
def _connection_timeout(options: Options) -> Iterator[None]:
    """End the process with one line if the others do not connect; JAX's runtime would abort with a stack trace."""
    where = f" at {options.coordinator}" if options.coordinator else ""

    def give_up() -> None:
        print(
            f"error: the processes of --distributed did not all meet{where} within {WAIT} seconds: start each of them, "
            "with the same --coordinator and --num-processes",
            file=sys.stderr,
            flush=True,
        )
        # The main thread is inside the runtime and cannot be interrupted.
        os._exit(INVALID)

    timer = threading.Timer(WAIT, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_same(processes: Processes, request: Request) -> None:
    """Raise InvalidInput, see `Processes.synchronized`, unless all processes have the same command line and JAX."""
    options = {name: value for name, value in dataclasses.asdict(request.options).items() if name != "process_id"}
    everything = {"dataset": request.dataset, **options, **request.hyper_parameters}
    everything |= by_content(everything, request.own_code)
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


def is_supervised() -> bool:
    """Whether this process is the child of a supervisor."""
    return _CHILD in os.environ


def supervise(dataset: str, arguments: Sequence[str]) -> int:
    """Run a command in a child process.

    Args:
      dataset: name of the experiment.
      arguments: command-line arguments.

    Returns:
      The exit code: the child's, 2 if another process has died, or 128 and the number of the signal that ended the
      child.
    """
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as note:
        handed = (os.dup(2), reader, note.fileno())
        path = [str(Path(experiments.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {_CHILD: " ".join(map(str, handed)), "PYTHONPATH": os.pathsep.join(filter(None, path))}
        # A group of its own, so that Ctrl-C reaches the child only once.
        child = subprocess.Popen(
            [sys.executable, "-m", "experiments", dataset, *arguments],
            env=os.environ | environment,
            stderr=errors,
            pass_fds=handed,
            process_group=0,
        )
        os.close(reader)
        os.close(handed[0])

        def pass_on(number: int, _: FrameType | None) -> None:
            # Not if it has ended: its number may be another process's then.
            if child.poll() is None:
                child.send_signal(number)

        previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = child.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(writer)
        return _ended(code, _content(errors), _content(note))


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _ended(code: int, errors: str, note: str) -> int:
    """Exit code for a child's; say what needs to be said, given what C++ wrote and the note of `remember`."""
    if code == -signal.SIGABRT and (not errors.strip() or any(part in errors for part in _OF_RUNTIME)):
        print_line(f"error: {LOST}{note}")
        return INVALID
    # What led to 2 and 130 has been said by Python.
    if errors and code not in (0, INVALID, INTERRUPTED):
        print(errors, end="", file=sys.stderr, flush=True)
    if code >= 0:
        return code
    name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
    why = ", perhaps because the machine's memory did not suffice" if -code == signal.SIGKILL else ""
    print_line(f"error: this process was ended by {name}{why}{note}")
    return 128 - code


def attach() -> None:
    """Take over what the supervisor has handed to this process; at its start, before anything else."""
    said, alive, note = map(int, os.environ.pop(_CHILD).split())
    for descriptor in (said, alive, note):
        os.set_inheritable(descriptor, False)
    note_in(note)
    # Python's messages go where the user reads them at once, those of C++ into the supervisor's file.
    sys.stderr = open(said, "w", buffering=1, encoding=sys.stderr.encoding, errors=sys.stderr.errors)  # noqa: SIM115

    def watch() -> None:
        os.read(alive, 1)
        os._exit(INVALID)

    threading.Thread(target=watch, daemon=True).start()
