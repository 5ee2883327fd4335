"""Runs of several processes, on one or more machines: their start, their agreement, and their end.

Every process stores the examples of its own clients; only the first one prints and writes files. An error before the
rounds, or while files are written, stops all processes with one line. If a process dies, or fails alone in a collective
computation, the others end within a minute: with one line if Python notices it, otherwise aborted by JAX's runtime. The
program that started the processes, such as srun, stops any that are left.
"""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from experiments.host.exit_codes import INVALID, print_line
from experiments.host.jax_config import devices
from experiments.spec.option_notes import flag
from experiments.spec.own_code import by_content
from experiments.spec.spec import Spec
from pfl_jax.engine.mapping import AXIS, client_mesh
from pfl_jax.errors import InvalidInput

WAIT = 300
"""Seconds that a process waits for the others to connect."""

HEARTBEAT = 30
"""Seconds without a sign of life after which a process counts as dead, also while others wait for its end."""

LOST = "another process of the run has died, or cannot be reached"

_PEERS = ("gloo", "connection closed by peer", "connection reset", "coordination", "barrier", "heartbeat", "nccl")
"""Words in errors of collective computations and barriers if another process is gone."""

_Result = TypeVar("_Result")


class EndedAlone(InvalidInput):
    """Error of one process in a collective computation; the other processes only notice that this one has ended."""


def is_peer_lost(error: BaseException) -> bool:
    """Whether the error of a computation or barrier means that another process is gone."""
    if isinstance(error, InvalidInput) or not isinstance(error, RuntimeError | ValueError):
        return False
    return any(part in str(error).lower() for part in _PEERS)


class Processes:
    """Processes of one run, seen from one of them. The first one prints and writes; a single process sends nothing."""

    def __init__(self, index: int = 0, count: int = 1):
        self.index, self.count = index, count

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def exchange(self, text: str) -> list[str]:
        """Texts of all processes, in order of their indices; a collective call."""
        if self.count == 1:
            return [text]
        from jax.experimental.multihost_utils import process_allgather

        encoded = np.frombuffer(text.encode(), np.uint8)
        with without_output():
            sizes = np.asarray(process_allgather(np.array([len(encoded)], np.int32))).reshape(-1)
            if not sizes.any():
                return [""] * self.count
            # Padded to a power of two, because each length compiles a separate program.
            width = 2 ** int(np.ceil(np.log2(max(64, sizes.max()))))
            rows = np.asarray(process_allgather(np.pad(encoded, (0, width - len(encoded)))))
        return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]

    def agree(self, request: bool) -> bool:
        """Whether `request` is True in any process; a collective call."""
        return any(self.exchange("yes" if request else ""))

    @contextlib.contextmanager
    def synchronized(self) -> Iterator[None]:
        """Context in which an error of one process ends all processes; none continues before all have left the context.

        The first process raises InvalidInput with the reasons of all that failed, the others SystemExit.
        """
        if self.count == 1:
            yield
            return
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            # Any exception must be exchanged, because the other processes would wait for ever.
            failure = error
        reason = "interrupted" if isinstance(failure, KeyboardInterrupt) else str(failure) or type(failure).__name__
        problems = self.exchange("" if failure is None else reason)
        if failure is not None and not isinstance(failure, InvalidInput):
            raise failure
        if any(problems):
            if not self.is_first:
                raise SystemExit(INVALID) from None
            raise InvalidInput(_one_line(problems)) from None

    def first(self, work: Callable[[], _Result]) -> _Result | None:
        """Do the work in the first process alone, see `synchronized`; None in the others."""
        with self.synchronized():
            return work() if self.is_first else None

    def first_then_others(self, work: Callable[[], _Result]) -> _Result:
        """Do the work in the first process, then in the others, which can use the files that it downloaded."""
        found = self.first(work)
        with self.synchronized():
            return work() if found is None else found


@contextlib.contextmanager
def without_output() -> Iterator[None]:
    """Suppress stdout, also from C++: Gloo prints its connections there."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _one_line(problems: list[str]) -> str:
    """Reasons why the processes stopped, in one line; a reason of all, or of the first alone, is given once."""
    if {*problems} <= {problems[0]} or not any(problems[1:]):
        return problems[0]
    return "; ".join(f"process {index}: {problem}" for index, problem in enumerate(problems) if problem)


def work_with_others(work: Callable[[Processes], object], spec: Spec) -> None:
    """Do the work of one process of a run.

    A process that fails alone ends at once, so that the others do not wait for it; JAX's own exit would wait for all.
    """
    try:
        work(_start(spec))
    except EndedAlone as error:
        print_line(f"error: {error}")
        os._exit(INVALID)
    except (InvalidInput, KeyboardInterrupt, SystemExit):
        # All processes have agreed on this error, or raise it themselves.
        raise
    except BaseException as error:
        if is_peer_lost(error):
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
    values = spec.values | by_content(spec.values, spec.own_code)
    own = {flag(name): value for name, value in values.items() if name != "process_id"}
    own |= {"dataset": spec.dataset, "version of JAX": jax.__version__}
    first, *others = map(json.loads, processes.exchange(json.dumps(own)))
    with processes.synchronized():
        for index, other in enumerate(others, 1):
            for name in sorted(first.keys() | other.keys()):
                if first.get(name) != other.get(name):
                    raise InvalidInput(
                        f"the processes' command lines differ: {name} is {first.get(name)} in process 0 and "
                        f"{other.get(name)} in process {index}"
                    )
