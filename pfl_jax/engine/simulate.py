"""Simulation of a federation, round by round."""

import time
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pfl_jax.base import Info, Method, MethodSchedule, PRNGKey, Scores, State
from pfl_jax.engine import host_state
from pfl_jax.engine.cohort import Settings, sample_cohort, stragglers
from pfl_jax.engine.mapping import client_mesh, map_clients
from pfl_jax.engine.rounds import Engine, Federation, Outcome, build
from pfl_jax.engine.sharding import PlacedData, replicate
from pfl_jax.errors import Diverged
from pfl_jax.primitives.metrics import before_aggregation

__all__ = [
    "Engine",
    "OnNaN",
    "Outcome",
    "RoundResult",
    "Settings",
    "build",
    "client_mesh",
    "map_clients",
    "run",
    "sample_cohort",
    "stragglers",
]


OnNaN: TypeAlias = Literal["stop", "skip-client"]
"""What happens when a client diverges: the run ends with `Diverged`, or the client is left out of the round."""


class RoundResult(NamedTuple):
    """Result of one round.

    Attributes:
      round: number of the round, counted from 1.
      state: after the round. Its buffers are given to the next round: copy what you want to keep. With
        state_on="host" the clients' leaves are NumPy arrays; over several processes, the rows of the own clients
        alone (`host_state.whole` brings them together).
      info: the method's `Info`, on the device.
      cohort: [M], the clients that took part, as NumPy integers.
      arrived: [M], bool: whose message the server had, see `Settings.drop_rate` and `run`'s on_nan. Rows of the others
        in `info` mean nothing.
      diverged: the clients of the cohort that were left out because they had diverged.
      received: Scores [N] of what every client would deploy now, or None if not evaluated.
      trained: Scores [N] of every client's model right after its own last local training, NaN before the first.
      newcomers: where received is evaluated and there are any, the Scores of clients that never took part: of what they
        would deploy with the server's state alone, and after local training of one round from there.
      examples: training examples of the cohort, each counted once.
      seconds: wall time of the round; compilation is in it where a program is new.
      before_aggregation: Scores [N] of what every client held in the middle of this round, see
        `pfl_jax.primitives.metrics.before_aggregation`; None unless `Settings.before_aggregation` asks for it.
    """

    round: int
    state: State
    info: Info
    cohort: np.ndarray
    arrived: np.ndarray
    diverged: np.ndarray
    received: Scores | None
    trained: Scores
    newcomers: tuple[Scores, Scores] | None
    examples: int
    seconds: float
    before_aggregation: Scores | None = None


def run(
    method: Method | MethodSchedule,
    data: Federation,
    settings: Settings,
    key: PRNGKey,
    *,
    state: State | None = None,
    mesh: Mesh | None = None,
    state_on: Literal["device", "host"] = "device",
    on_nan: OnNaN = "stop",
    newcomers: Federation | None = None,
) -> Iterator[RoundResult]:
    """Run a federation and yield a `RoundResult` after each round; `pfl_jax` begins with an example.

    Args:
      method: what each client and the server do; or a function from the round, counted from 0 and traced, to that, by
        which real-valued hyper-parameters change from round to round:
        lambda round: fedavg(model, LocalSGD(lr=optax.cosine_decay_schedule(0.1, 100)(round))). Between rounds clients
        fine-tune as in the last one.
      data: the federation's examples; as `PlacedData`, with their clients' owners, in one process or many.
      settings: rounds, participation, chunk, how often to evaluate.
      key: the run's key: same key, same result.
      state: continue from here instead of initialising from the key; a state carries its own key.
      mesh: spread the clients over these devices, see `client_mesh`; None uses the default device alone, or those of
        `PlacedData`.
      state_on: where the clients' states are kept between rounds; "host" moves the cohort's part to the device for each
        round, and all others' in blocks for each evaluation. The results are the same.
      on_nan: what happens to clients whose state, message or loss becomes NaN or infinite: the run stops, or they are
        left out of the round, as if they had not been drawn.
      newcomers: clients that never take part, see `pfl_jax.data.federated.hold_out`: what the method would do for them
        is measured at every evaluation.

    Raises:
      Diverged: a client diverged, or with on_nan="skip-client" all of a cohort did, or what the server computed.
    """
    num_clients = data.num_clients
    if isinstance(data, PlacedData):
        mesh = data.mesh
    else:
        data, newcomers = replicate((data, newcomers), mesh)
    engine, current = _start(method, data, settings, key, state, mesh, on_host=state_on == "host")
    start, received = time.perf_counter(), None
    for index in range(int(current.round), settings.rounds):
        number, size = index + 1, settings.cohort_size(num_clients, index)
        evaluated = settings.is_evaluated(number)
        everyone = size == num_clients and on_nan == "stop"
        # After an evaluated round it is known what the clients outside this cohort have received.
        if evaluated and settings.before_aggregation and not everyone and received is None:
            received = jax.tree.map(np.asarray, engine.evaluate(data, current))
        current, outcome = engine.round(data, current, size)
        cohort, clients = outcome.cohort, np.asarray(outcome.cohort.clients)
        _check_finite(number, clients, outcome, on_nan)
        # A copy: on the host the next round writes into the arrays.
        trained = jax.tree.map(np.array, current.trained)
        before = None
        if evaluated and settings.before_aggregation:
            members = np.isin(np.arange(num_clients), clients[np.asarray(outcome.finite)])
            before = before_aggregation(trained if received is None else received, trained, members)
        received = of_newcomers = None
        if evaluated:
            received = jax.tree.map(np.asarray, engine.evaluate(data, current))
            if newcomers is not None:
                of_newcomers = jax.tree.map(np.asarray, engine.evaluate_new(newcomers, current))
        yield RoundResult(
            round=number,
            state=current,
            info=outcome.info,
            cohort=clients,
            arrived=np.asarray(cohort.present),
            diverged=clients[~np.asarray(outcome.finite)],
            received=received,
            trained=trained,
            newcomers=of_newcomers,
            examples=int(outcome.examples),
            seconds=time.perf_counter() - start,
            before_aggregation=before,
        )
        start = time.perf_counter()


def _start(
    method: Method | MethodSchedule,
    data: Federation,
    settings: Settings,
    key: PRNGKey,
    state: State | None,
    mesh: Mesh | None,
    *,
    on_host: bool,
) -> tuple[Engine, State]:
    """The compiled engine, and the state before the first round of this run."""
    engine = host_state.build(method, settings, mesh) if on_host else build(method, settings, mesh).jit(mesh)
    if state is None:
        return engine, engine.init(data, replicate(key, mesh))
    if on_host:
        return engine, host_state.copy(state, data, mesh)
    # A round takes its state's buffers over: a state that came from outside stays the caller's.
    return engine, replicate(jax.tree.map(jnp.copy, state), mesh)


def _check_finite(number: int, clients: np.ndarray, outcome: Outcome, on_nan: OnNaN) -> None:
    """Raise Diverged where the next round must not continue from this one."""
    broken = clients[~np.asarray(outcome.finite)]
    if broken.size and (on_nan == "stop" or not np.asarray(outcome.cohort.present).any()):
        raise Diverged(number, sorted(broken.tolist()))
    if not bool(outcome.server_finite):
        raise Diverged(number, [])
