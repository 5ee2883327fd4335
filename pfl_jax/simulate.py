"""A federation's run, round by round."""

import time
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pfl_jax import host
from pfl_jax.base import Info, Method, PRNGKey, State
from pfl_jax.engine import Engine, Federation, Settings, build, client_mesh, map_clients, sample_cohort, stragglers
from pfl_jax.placement import PlacedData, everywhere

__all__ = [
    "Engine",
    "RoundResult",
    "Settings",
    "build",
    "client_mesh",
    "map_clients",
    "run",
    "sample_cohort",
    "stragglers",
]


class RoundResult(NamedTuple):
    """What a round has to tell.

    Attributes:
      round: number of the round, counted from 1.
      state: after the round. Its buffers are given to the next round: copy what you want to keep. With
        state_on="host" the clients' leaves are NumPy arrays; over several processes, the rows of the own clients
        alone (`host.whole` brings them together).
      info: the method's `Info`, on the device.
      cohort: [M], the clients that took part, as NumPy integers.
      received: [N] accuracies in [0, 1] of what every client would deploy now, or None if not evaluated.
      trained: [N] accuracies of every client's model right after its own last local training, NaN before the first.
      examples: training examples of the cohort, each counted once.
      seconds: wall time of the round; compilation is in it where a program is new.
    """

    round: int
    state: State
    info: Info
    cohort: np.ndarray
    received: np.ndarray | None
    trained: np.ndarray
    examples: int
    seconds: float


def run(
    method: Method,
    data: Federation,
    settings: Settings,
    key: PRNGKey,
    *,
    state: State | None = None,
    mesh: Mesh | None = None,
    state_on: Literal["device", "host"] = "device",
) -> Iterator[RoundResult]:
    """Runs a federation, one `RoundResult` after each round.

    Args:
      method: what each client and the server do.
      data: the federation's examples; as `PlacedData`, with their clients' owners, in one process or many.
      settings: rounds, participation, chunk, how often to evaluate.
      key: the run's key: same key, same result.
      state: continue from here instead of initialising from the key; a state carries its own key.
      mesh: spread the clients over these devices, see `client_mesh`; None uses the default device alone, or those of
        `PlacedData`.
      state_on: where the clients' states are kept between rounds; "host" moves the cohort's part to the device for each
        round, and all others' in blocks for each evaluation. The results are the same.
    """
    placed = isinstance(data, PlacedData)
    if placed:
        mesh = data.mesh
    engine = host.build(method, settings, mesh) if state_on == "host" else build(method, settings, mesh).jit(mesh)
    num_clients = data.num_clients
    if not placed:
        data = everywhere(data, mesh)
    if state is None:
        current = engine.init(data, everywhere(key, mesh))
    elif state_on == "host":
        current = host.copy(state, data, mesh)
    else:
        # A round takes its state's buffers over: a state that came from outside stays the caller's.
        current = everywhere(jax.tree.map(jnp.copy, state), mesh)
    start = time.perf_counter()
    for index in range(int(current.round), settings.rounds):
        current, info, cohort = engine.round(data, current, settings.cohort_size(num_clients, index))
        number = index + 1
        received = None
        if number % settings.eval_every == 0 or number == settings.rounds:
            received = np.asarray(engine.evaluate(data, current))
        # A copy: on the host the next round writes into the array.
        trained, examples = np.array(current.trained_accuracy), int(np.sum(np.asarray(cohort.counts)))
        seconds = time.perf_counter() - start
        yield RoundResult(number, current, info, np.asarray(cohort.clients), received, trained, examples, seconds)
        start = time.perf_counter()
