"""Runs of several processes, on one or more machines: start of JAX's runtime, and agreement between processes.

Every process runs the same program over the same mesh and stores the examples of its own clients
(`pfl_jax.engine.placement`). Only the first process prints and writes files. An error in one process before the rounds,
or while files are written, stops all processes with one line. One that dies, or fails alone in a collective
computation, ends the others within a minute, see `experiments.host.supervise`.
"""

import contextlib
import dataclasses
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments.cli.exit_codes import INVALID, print_line
from experiments.cli.options import Options, flag
from experiments.cli.own_code import by_content
from experiments.cli.request import Request
from experiments.host.jax_config import devices
from experiments.host.supervise import LOST
from pfl_jax.engine.mapping import AXIS, client_mesh
from pfl_jax.errors import InvalidInput

WAIT = 300
"""Seconds that a process waits for the others to connect."""

HEARTBEAT = 30
"""Seconds without a sign of life after which a process counts as dead, also for those that wait for it to leave."""

_PEERS = ("gloo", "connection closed by peer", "connection reset", "coordination", "barrier", "heartbeat", "nccl")
"""Words in errors of collective computations and barriers whose other participants are gone."""

_Result = TypeVar("_Result")


class EndedAlone(InvalidInput):
    """Error of one process in the middle of a collective computation; the others learn it from its end."""


def lost(error: BaseException) -> bool:
    """Whether the error of a computation or barrier means that another process is gone."""
    if isinstance(error, InvalidInput) or not isinstance(error, RuntimeError | ValueError):
        return False
    return any(part in str(error).lower() for part in _PEERS)


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


class Processes:
    """Group of processes of one run, with the index of the current process.

    Args:
      index: index of this process; the first one is 0.
      count: number of processes; 1 for an ordinary run, in which nothing is sent.
    """

    def __init__(self, index: int = 0, count: int = 1):
        self.index, self.count = index, count

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes."""
        return self.index == 0

    def exchange(self, text: str) -> list[str]:
        """Texts of all processes, in order of their indices; a collective call."""
        if self.count == 1:
            return [text]
        with _without_output():
            return self._exchange(text)

    def _exchange(self, text: str) -> list[str]:
        from jax.experimental.multihost_utils import process_allgather

        encoded = text.encode()
        sizes = np.asarray(process_allgather(np.array([len(encoded)], np.int32))).reshape(-1)
        if not sizes.any():
            return [""] * self.count
        # Padded to a power of two, because each length compiles a separate program.
        width = 2 ** int(np.ceil(np.log2(max(64, sizes.max()))))
        padded = np.zeros(width, np.uint8)
        padded[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        rows = np.asarray(process_allgather(padded))
        return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]

    def agree(self, asked: bool) -> bool:
        """Whether `asked` is True in any process; a collective call."""
        return any(self.exchange("yes" if asked else ""))

    @contextlib.contextmanager
    def synchronized(self) -> Iterator[None]:
        """Context in which an error of one process ends all of them; none continues before all have left it.

        Raises:
          InvalidInput: in the first process, if one or more processes failed; the message has their reasons.
          SystemExit: in all other processes then.
        """
        if self.count == 1:
            yield
            return
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
        # Any exception must be exchanged, because the other processes would wait for ever.
        reason = "interrupted" if isinstance(failure, KeyboardInterrupt) else str(failure) or type(failure).__name__
        problem = "" if failure is None else reason
        problems = self.exchange(problem)
        if failure is not None and not isinstance(failure, InvalidInput):
            raise failure
        if any(problems):
            if not self.is_first:
                raise SystemExit(INVALID) from None
            raise InvalidInput(_one_line(problems)) from None

    def first_then_others(self, work: Callable[[], _Result]) -> _Result:
        """Do the work in the first process, then in the others, which can use the files that it downloaded."""
        results: list[_Result] = []
        for first in (True, False):
            with self.synchronized():
                if self.is_first == first:
                    results.append(work())
        return results[0]

    def check_round(self, number: int) -> None:
        """Raise InvalidInput, see `synchronized`, unless all processes resume after the same round."""
        found = self.exchange(str(number))
        with self.synchronized():
            if len(set(found)) > 1:
                raise InvalidInput(
                    f"the processes found checkpoints of rounds {', '.join(found)}: all must see the same folder"
                )

    def check_same(self, request: Request) -> None:
        """Raise InvalidInput, see `synchronized`, unless all processes have the same command line and JAX."""
        options = {name: value for name, value in dataclasses.asdict(request.options).items() if name != "process_id"}
        everything = {"dataset": request.dataset, **options, **request.hyper_parameters}
        everything |= by_content(everything, request.own_code)
        own_values = {flag(name) if name != "dataset" else name: value for name, value in everything.items()}
        found = [
            json.loads(text) for text in self.exchange(json.dumps(own_values | {"version of JAX": jax.__version__}))
        ]
        with self.synchronized():
            for index, other in enumerate(found):
                for name in sorted(found[0].keys() | other.keys()):
                    ours, theirs = found[0].get(name), other.get(name)
                    if ours != theirs:
                        raise InvalidInput(
                            f"the processes' command lines differ: {name} is {ours} in process 0 and {theirs} in "
                            f"process {index}"
                        )


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
    processes.check_same(request)
    with processes.synchronized():
        mesh = client_mesh(devices(options))
    with _without_output():
        # Devices connect when the first program with a collective runs, so run one now.
        by_device = NamedSharding(mesh, PartitionSpec(AXIS))
        ones = jax.make_array_from_callback((mesh.size,), by_device, lambda _: np.ones(1, np.float32))
        jax.block_until_ready(jax.jit(jnp.sum)(ones))
    return processes


@contextlib.contextmanager
def _without_output() -> Iterator[None]:
    """Suppress stdout, also from C++: Gloo prints its connections there."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


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


def _one_line(problems: list[str]) -> str:
    """Reasons why the processes stopped, in one line; a reason that all processes have is given once."""
    by_process = {index: problem for index, problem in enumerate(problems) if problem}
    if set(by_process) == {0} or set(problems) == {problems[0]}:
        return problems[0]
    return "; ".join(f"process {index}: {problem}" for index, problem in by_process.items())
