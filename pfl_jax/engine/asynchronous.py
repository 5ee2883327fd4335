"""Asynchronous rounds and virtual time: clients' devices, who trains when, and messages from earlier server states.

Time does not depend on values, so a run's events are simulated on the host before anything is trained. The result is a
`Timetable`, which `pfl_jax.Settings` takes. docs/time.md has an example and the format of the files.
"""

import bisect
import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Mean, Method, PyTree, Server
from pfl_jax.errors import InvalidInput
from pfl_jax.messages import has_means, map_means, trained_from
from pfl_jax.validation import Count, check_arguments
from pfl_jax.wrappers.server_state import ExtendedServer, with_server_state

Availability: TypeAlias = tuple[float, Sequence[Sequence[float]]]
"""A period in seconds, and the ascending intervals [start, end) within it in which a client can begin its work."""

TICK = 1e-6
"""Seconds by which a client may begin before its interval, because sums of times are rounded."""

SHORTEST, LATEST = 10 * TICK, 1e9
"""Seconds of the shortest interval, and the latest time to which clients may wait: sums of later times lose a tick."""


@dataclass(frozen=True, eq=False)
class Devices:
    """Devices of the clients.

    Attributes:
      seconds_per_example: [N], seconds of training on one example.
      bytes_per_second: [N], for receiving and sending.
      available: `Availability` of each client, None for always. A client that has begun also finishes.

    Raises:
      InvalidInput: numbers that are not positive and finite; intervals too short or not ascending within their period.
    """

    seconds_per_example: np.ndarray
    bytes_per_second: np.ndarray
    available: Sequence[Availability | None]

    def __post_init__(self) -> None:
        if not len(self.seconds_per_example) == len(self.bytes_per_second) == len(self.available) > 0:
            raise InvalidInput("devices need a speed, a bandwidth and an availability, or None, for each client")
        speeds = np.stack([self.seconds_per_example, self.bytes_per_second]).astype(np.float64)
        for client, (pair, when) in enumerate(zip(speeds.T, self.available, strict=True)):
            if not (np.isfinite(pair) & (pair > 0)).all():
                raise InvalidInput(f"device {client} must have positive seconds_per_example and bytes_per_second")
            edges = [0.0] if when is None else [0, *(edge for interval in when[1] for edge in interval), when[0]]
            # Starts are below ends, and an interval may begin at the end of the previous one.
            is_whole = when is None or (len(edges) % 2 == 0 and len(edges) > 2 and np.isfinite(edges).all())
            steps = np.diff(edges) if is_whole else np.array([-1.0, -1.0])
            if when is not None and (min(steps) < 0 or min(steps[1::2]) < SHORTEST):
                raise InvalidInput(
                    f"device {client} must have ascending intervals [start, end] within its period, of at least "
                    f"{SHORTEST:g} seconds"
                )

    def seconds(self, examples: np.ndarray, bytes_up: int, bytes_down: int) -> np.ndarray:
        """Seconds [n] of the work of the first n clients in a round, download and upload included.

        Args:
          examples: [n], examples that each client visits; with several epochs, counted once per epoch.
          bytes_up, bytes_down: see `pfl_jax.engine.communication.Traffic`.
        """
        number = len(examples)
        moved = (bytes_up + bytes_down) / np.asarray(self.bytes_per_second[:number], np.float64)
        return np.asarray(examples) * np.asarray(self.seconds_per_example[:number], np.float64) + moved

    def wait(self, client: int, now: float) -> float:
        """Seconds from `now` until a client is available; 0 if it is."""
        if (available := self.available[client]) is None:
            return 0.0
        if now > LATEST:
            raise InvalidInput(
                f"virtual time is beyond {LATEST:g} seconds, and device {client} is not always available"
            )
        period, intervals = available
        time = (now + TICK) % period
        place = bisect.bisect_right(intervals, time, key=lambda interval: interval[0])
        if place and time < intervals[place - 1][1]:
            return 0.0
        following = intervals[place][0] if place < len(intervals) else intervals[0][0] + period
        return following - time + TICK


@dataclass(frozen=True, eq=False, repr=False)
class Timetable:
    """Clients that send a message in each round, the age of each message, and the time when each round ends.

    Attributes:
      clients: [R, K], int32, distinct client numbers of each round, ascending.
      staleness: [R, K], int32, number of server steps between a client's download and the round's own step; 0 for a
        client that trained from the latest state.
      seconds: [R], virtual time of each server step, ascending.
      num_clients: number of clients N among which they were drawn; None if unknown.

    Raises:
      InvalidInput: wrong shapes, clients that are not ascending, or a staleness above the number of rounds before.
    """

    clients: np.ndarray
    staleness: np.ndarray
    seconds: np.ndarray
    num_clients: int | None = None

    def __post_init__(self) -> None:
        shape = np.shape(self.clients)
        if len(shape) != 2 or shape != np.shape(self.staleness) or shape[:1] != np.shape(self.seconds):
            raise InvalidInput("a timetable has clients [R, K], staleness [R, K] and seconds [R]")
        if np.min(self.clients) < 0 or np.any(np.diff(self.clients) <= 0):
            raise InvalidInput("the clients of a timetable's round must be distinct, and in ascending order")
        if np.min(self.staleness) < 0 or np.any(np.max(self.staleness, axis=1) > np.arange(shape[0])):
            raise InvalidInput("the staleness of a timetable's round must be between 0 and the number of rounds before")
        if np.any(np.diff(self.seconds) < 0):
            raise InvalidInput("the seconds of a timetable must ascend")

    @property
    def largest_staleness(self) -> int:
        """Largest staleness of all rounds."""
        return int(np.max(self.staleness))


@check_arguments
def timetable(
    devices: Devices,
    seconds: np.ndarray,
    rounds: Count,
    *,
    buffer: Count,
    concurrency: Count | None = None,
    seed: int = 0,
) -> Timetable:
    """Simulate the events of synchronous or asynchronous rounds.

    Asynchronous: `concurrency` clients train at any time. A client that finishes puts its message into the buffer, and
    another one begins with the server's latest state. When the buffer has `buffer` messages, the server takes its step.
    A client that trains, or has a message in the buffer, does not begin again. Synchronous: `buffer` clients begin
    after each step, and the step waits for the slowest. In both cases the clients that begin are drawn uniformly among
    the available ones; if there are too few, free places are taken as soon as clients become available. Messages that
    arrive at the same time all arrive before any client begins. So asynchronous rounds with equal devices, always
    available, and `concurrency` equal to `buffer` equal synchronous rounds.

    Args:
      devices: devices of the clients, at least N.
      seconds: [N], seconds of each client's work, see `Devices.seconds`.
      rounds: R, number of server steps.
      buffer: K, number of messages in a step.
      concurrency: clients that train at once; None for synchronous rounds.
      seed: seed of the draws, by NumPy's generator.

    Raises:
      InvalidInput: `buffer` or `concurrency` above the number of clients; fewer devices than clients; seconds
        that are not finite, or so large that rounding loses a device's availability.

    Reference:
      Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba. Federated Learning with Buffered Asynchronous Aggregation.
      AISTATS 2022. Algorithm 1 (FedBuff).

    Example:
      >>> import numpy as np
      >>> from pfl_jax.engine.asynchronous import Devices, timetable
      >>> devices = Devices(np.array([1.0, 1.0, 5.0]), np.full(3, 1e6), [None] * 3)
      >>> found = timetable(devices, devices.seconds(np.full(3, 10), 0, 0), 3, buffer=2, concurrency=3)
      >>> found.clients.tolist(), found.staleness.tolist(), found.seconds.tolist()
      ([[0, 1], [0, 1], [0, 1]], [[0, 0], [0, 0], [0, 0]], [10.0, 20.0, 30.0])
    """
    clients, rng = len(seconds), np.random.default_rng(seed)
    if len(devices.available) < clients:
        raise InvalidInput(f"there are {len(devices.available)} devices, and {clients} clients: each needs its own")
    for name, number in (("buffer", buffer), ("concurrency", concurrency or 1)):
        if number > clients:
            raise InvalidInput(f"{name} must be at most the number of clients, {clients}, not {number}")
    if not (np.isfinite(seconds) & (np.asarray(seconds) >= 0)).all():
        raise InvalidInput("seconds must be finite, and not negative")
    idle, now = np.ones(clients, bool), 0.0
    # (end, client, server steps before its start), and (client, staleness).
    training: list[tuple[float, int, int]] = []
    waiting: list[tuple[int, int]] = []
    steps: list[tuple[list[tuple[int, int]], float]] = []
    while len(steps) < rounds:
        free = buffer - len(training) - len(waiting) if concurrency is None else concurrency - len(training)
        for client in rng.permutation(np.flatnonzero(idle)).tolist() if free > 0 else ():
            if free and devices.wait(client, now) == 0:
                heapq.heappush(training, (now + float(seconds[client]), client, len(steps)))
                idle[client], free = False, free - 1
        events = [training[0][0]] if training else []
        if free > 0:
            events += [now + devices.wait(client, now) for client in np.flatnonzero(idle).tolist()]
        now = min(events)
        while training and training[0][0] <= now and len(steps) < rounds:
            _, client, begun = heapq.heappop(training)
            waiting.append((client, len(steps) - begun))
            if len(waiting) == buffer:
                steps.append((sorted(waiting), now))
                idle[[client for client, _ in waiting]], waiting = True, []
    pairs = np.array([pairs for pairs, _ in steps], np.int32)
    return Timetable(pairs[..., 0], pairs[..., 1], np.array([time for _, time in steps]), len(seconds))


def read_devices(path: str | Path) -> Devices:
    """Read the devices of clients from a file.

    Args:
      path: JSON, {"devices": [{"seconds_per_example": s, "bytes_per_second": b}, ...]}. A device that is not always
        available also has "period", in seconds, and "available", [[start, end], ...].

    Raises:
      InvalidInput: the file cannot be read, or has another form.
    """
    try:
        rows = json.loads(Path(path).expanduser().read_text())["devices"]
        speeds = [np.array([float(row[name]) for row in rows]) for name in ("seconds_per_example", "bytes_per_second")]
        available = [
            (float(row["period"]), [(float(start), float(end)) for start, end in row["available"]])
            if "available" in row
            else None
            for row in rows
        ]
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError) as error:
        why = f"{type(error).__name__}: {error}"
        raise InvalidInput(f"{path} is not a trace of devices ({why}); docs/time.md has the format") from None
    return Devices(speeds[0], speeds[1], available)


def with_versions(method: Method, versions: int) -> Method:
    """Method whose server also keeps its states before the last `versions` rounds.

    Args:
      method: the method to derive from.
      versions: S; with 0 the method is returned unchanged.

    Returns:
      A `Method` with an `ExtendedServer`, whose `extra` has leaves [S, ...], the latest of the earlier states first.
    """
    if not versions:
        return method

    def init(server):
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (versions, *jnp.shape(leaf))), server)

    def step(past, before, after):
        return after, jax.tree.map(lambda old, leaf: jnp.concatenate([leaf[None], old[:-1]]), past, before)

    return with_server_state(method, init, step)


def stale(method: Method, staleness: jax.Array) -> Method:
    """Method of one client that trained from an earlier state of the server.

    In place of the value v of a `Mean` that it trained from received parameters, the client sends

        r + s (v - r');   s = 1 / sqrt(1 + staleness)

    where r' are the parameters that it received and r the parameters that it would receive now, see `trained_from` of
    `pfl_jax.base.Method`. A `Mean` without received parameters, such as class means, has s times its weight instead.
    Arrays without received parameters in a `Mean` that has others, exact means (`pfl_jax.base.Exact`) and all other
    parts are sent unchanged. With staleness 0 all messages are unchanged.

    Args:
      method: a method from `with_versions`, in the form that a client runs.
      staleness: int32 scalar, server steps since the client's download; at most the number of versions.

    Returns:
      A `Method` with the states of `method`; its `local` raises InvalidInput if the messages have no `Mean`.

    Reference:
      Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba. Federated Learning with Buffered Asynchronous Aggregation.
      AISTATS 2022. Algorithm 1 (FedBuff), with updates scaled by 1 / sqrt(1 + staleness).

    Deviations:
      The mean has the weights of `method`, most often numbers of examples; the paper's mean is unweighted. The server's
      learning rate is 1, or the rate of `pfl_jax.wrappers.server_optimizer`.
    """

    def local(key, server: ExtendedServer, client, data):
        def version(now, past):
            return jnp.where(staleness > 0, past[jnp.maximum(staleness - 1, 0)], now)

        begun: Server = server._replace(plain=jax.tree.map(version, server.plain, server.extra))
        result = method.local(key, begun, client, data)
        if not has_means(result.message):
            raise InvalidInput(
                "asynchronous rounds are for methods that send a Mean, and the messages of this one have none"
            )
        old, flags = trained_from(method, begun, client, result.message)
        new, _ = trained_from(method, server, client, result.message)
        factor = jax.lax.rsqrt(1 + staleness.astype(jnp.float32))

        def of_mean(part: Mean, flags: PyTree, old: PyTree, new: PyTree) -> Mean:
            if not any(jax.tree.leaves(flags)):
                return part._replace(weight=factor * part.weight)

            def moved(flag, value, old, new):
                return jnp.where(staleness > 0, new + factor * (value - old), value) if flag else value

            return part._replace(value=jax.tree.map(moved, flags, part.value, old, new))

        return result._replace(message=map_means(of_mean, result.message, flags, old, new, rest=lambda leaf, *_: leaf))

    return method._replace(local=local, privacy=method.privacy)
