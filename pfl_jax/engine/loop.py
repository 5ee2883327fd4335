"""Loop over the rounds of a run, or of several runs together, and the result of each round."""

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pfl_jax.base import Info, PyTree, Scores, State
from pfl_jax.data.phases import Phases
from pfl_jax.engine.body import Outcome
from pfl_jax.engine.build import Engine
from pfl_jax.engine.cohort import Settings
from pfl_jax.engine.store import Federation
from pfl_jax.errors import Diverged, InvalidInput
from pfl_jax.primitives.metrics import before_aggregation
from pfl_jax.schedules import at_round
from pfl_jax.tasks import Score

OnNaN: TypeAlias = Literal["stop", "skip-client"]
"""Treatment of a client that diverges: end the run, or leave the client out of the round."""


class RoundResult(NamedTuple):
    """Result of one round; for R runs at once (`pfl_jax.sweep`), arrays have a leading axis R.

    Attributes:
      round: number of the round, counted from 1.
      state: state after the round; with donate=True it can be used only until the next round. With state_on="host" the
        clients' leaves are NumPy arrays; of several processes, each has only the rows of its own clients. With "disk"
        they are NumPy arrays of mapped files, into which the next round writes. In a sweep, rows after the first
        R pad the devices' shares of the runs, here and in `info`.
      info: the method's `Info`, on the device. Its rows follow `cohort`: row j of `info["head_weights"]`
        belongs to client `cohort[j]`. If all clients take part, row i is client i, as in `received` and `trained`.
      cohort: [M], the numbers of the clients that took part, ascending, as NumPy integers.
      arrived: [M], bool: whether the server received the client's message, see `Settings.drop_rate` and `run`'s
        on_nan. Rows of `info` for other clients are meaningless.
      finite: [M], bool: False for clients that were left out because they diverged. All are False in a run of a sweep
        whose server diverged.
      received: Scores [N] of the model that each client would deploy now, NaN for clients left out by
        `Settings.eval_clients`; None if not evaluated.
      trained: Scores [N] of every client's model right after its own last local training, NaN before the first.
      newcomers: two Scores of clients that never took part, see `Engine.evaluate_new`; None without such clients, or if
        this round is not evaluated.
      examples: training examples of the cohort, each counted once: int, or a list of R numbers in a sweep.
      seconds: wall time of the round and its evaluation, including any compilation.
      before_aggregation: Scores [N] of the model that every client had in the middle of this round, see
        `pfl_jax.primitives.metrics.before_aggregation`; None unless `Settings.before_aggregation` asks for it.
      kept: with `Settings.patience` the number of the best evaluated round so far, 0 before the first; otherwise None.
        A run of a sweep whose patience has ended has NaN for all scores of later rounds, while others go on.
      phases: with `Phases`, Scores [N] of `received` on the test examples of each phase, for the round's own phase
        equal to `received`; None without phases, or if not evaluated.
      untrained: with `Phases`, the same Scores before the first round, in all results.
      ended: [R], bool, in a sweep: runs that have diverged, whose scores are NaN from this round on while others go on.
        None for a run alone, which ends with `Diverged`.
    """

    round: int
    state: State
    info: Info
    cohort: np.ndarray
    arrived: np.ndarray
    finite: np.ndarray
    received: Scores | None
    trained: Scores
    newcomers: tuple[Scores, Scores] | None
    examples: Any
    seconds: float
    before_aggregation: Scores | None = None
    kept: Any = None
    phases: tuple[Scores, ...] | None = None
    untrained: tuple[Scores, ...] | None = None
    ended: np.ndarray | None = None

    def __repr__(self) -> str:
        """Round and means over clients, instead of all numbers."""
        means = [
            f"{protocol} {name} {np.nanmean(values):.4g}"
            for protocol, scores in (("received", self.received), ("trained", self.trained))
            for name, values in ({} if scores is None else scores.by_name).items()
            if np.isfinite(values).any()
        ]
        return f"RoundResult(round {self.round}, {np.shape(self.cohort)[-1]} clients: {', '.join(means)})"

    @property
    def diverged(self) -> np.ndarray:
        """Clients of the cohort of one run that were left out because they diverged."""
        return self.cohort[~self.finite]


class Patience(NamedTuple):
    """Best evaluation of a run so far, arrays [] or [R].

    Attributes:
      kept: number of its round; 0 before the first evaluation.
      mean: mean over clients of that round's primary score on validation examples, times -1 for errors.
      ended: bool; whether the run has waited long enough for a better one.
    """

    kept: np.ndarray
    mean: np.ndarray
    ended: np.ndarray

    @classmethod
    def begin(cls, shape: tuple[int, ...]) -> "Patience":
        """Patience before the first evaluation of runs of this shape, () or (R,)."""
        return cls(np.zeros(shape, int), np.full(shape, -np.inf), np.zeros(shape, bool))

    def after(self, number: int, received: Scores, primary: Score, patience: int) -> "Patience":
        """Patience after the evaluation of round `number`; the first of equal means is kept, and ended runs stay ended.

        `received` are scores [N] or [R, N], `primary` is the task's score that counts, and a run ends after `patience`
        rounds without a better mean.
        """
        assert received.validation is not None
        with warnings.catch_warnings():
            # The mean of a run without any score is NaN, which is never better.
            warnings.simplefilter("ignore", RuntimeWarning)
            mean = np.nanmean(np.asarray(received.validation[primary.name], np.float64), axis=-1)
        mean = mean if primary.higher_is_better else -mean
        better = (mean > self.mean) & ~self.ended
        kept = np.where(better, number, self.kept)
        return Patience(kept, np.where(better, mean, self.mean), self.ended | (number - kept >= patience))


def check_not_traced(*trees: Any) -> None:
    """Raise InvalidInput if `trees` show that a run is called inside a transformation of JAX: it loops on the host."""
    leaves = jax.tree.leaves((trees, jnp.zeros(())))
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        raise InvalidInput(
            "run loops on the host, so it cannot be within jit, vmap, scan or grad: pfl_jax.build gives the functions "
            "that can, and pfl_jax.sweep.run takes several keys and values at once"
        )


@contextlib.contextmanager
def usual_settings() -> Iterator[None]:
    """Context with the settings of JAX, about transfers and types, that the engine is written for."""
    with jax.transfer_guard("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def play(
    engine: Engine,
    data: Federation,
    settings: Settings,
    begin: Callable[[], State],
    newcomers: Federation | None,
    explains: Callable[[], Any],
    on_nan: OnNaN,
    phases: Phases | None = None,
) -> Iterator[RoundResult]:
    """Loop over rounds and their evaluations, of one run or of several whose arrays have a leading axis.

    Args:
      engine: compiled.
      data, settings, newcomers: see `run`.
      begin: function that makes the first state.
      explains: context in which a model that does not fit the data becomes an InvalidInput.
      on_nan: see `run`; of several runs, those that diverge go on without scores.
      phases: data of each round, in place of `data`; None if they do not change.
    """
    with usual_settings():
        with explains():
            state = begin()
        num_clients, completed = state.trained.shape[-1], int(np.ravel(state.round)[0])
    start, received, primary = time.perf_counter(), None, at_round(engine.method, 0).task.primary
    waiting, untrained, phase = Patience.begin(state.trained.shape[:-1]), None, 0
    ended = np.zeros(state.trained.shape[:-1], bool)
    if phases is not None:
        with usual_settings():
            begun = state if not completed else engine.init(data, state.key)
            untrained = _on_phases(engine, phases, begun, 0, None)
    for index in range(completed, settings.rounds):
        # The caller's own settings hold between rounds.
        with usual_settings():
            number, size = index + 1, settings.cohort_size(num_clients, index)
            evaluated, on_phases = settings.is_evaluated(number), None
            if phases is not None:
                # Forgetting is measured from the end of each phase.
                evaluated = evaluated or number in phases.starts
                phase = phases.phase_of(index)
                # Scores from before are of other examples.
                data, received = phases.parts[phase], None if index in phases.starts else received
            all_train = size == num_clients and on_nan == "stop" and data.active is None
            # Clients outside this cohort get the scores of the models they received, which may be evaluated already.
            if evaluated and settings.before_aggregation and not all_train and received is None:
                received = _on_host(engine.evaluate(data, state))
            with explains():
                state, outcome = engine.round(data, state, size)
            # A number of the method may have been traced.
            check_not_traced(outcome.finite)
            cohort, finite = outcome.cohort, np.asarray(outcome.finite)
            arrived, all_finite = np.asarray(cohort.present), finite & np.asarray(outcome.server_finite)[..., None]
            # A round without any message is no divergence.
            ended = ended | ~all_finite.all(-1) & ((on_nan == "stop") | ~(all_finite & arrived).any(-1))
            if ended.ndim == 0 and ended:
                by_clients = on_nan == "stop" or not (finite & arrived).any()
                raise Diverged(number, np.asarray(cohort.clients)[~finite & by_clients].tolist())
            # Copied, because the next round may write into these arrays.
            trained = jax.tree.map(np.array, state.trained)
            before = new = None
            if evaluated and settings.before_aggregation:
                before = _in_the_middle(received, trained, outcome, data.active)
            received = _on_host(engine.evaluate(data, state)) if evaluated else None
            if np.any(over := ended | waiting.ended):
                received, trained, before = _of_others(over, (received, trained, before))
            if received is not None and phases is not None:
                on_phases = _on_phases(engine, phases, state, phase, received)
            if evaluated and newcomers is not None:
                new = _on_host(engine.evaluate_new(newcomers, state))
            if received is not None and settings.patience is not None:
                waiting = waiting.after(number, received, primary, settings.patience)
            result = RoundResult(
                round=number,
                state=state,
                info=outcome.info,
                cohort=np.asarray(cohort.clients),
                arrived=arrived,
                finite=all_finite,
                received=received,
                trained=trained,
                newcomers=new,
                examples=np.asarray(outcome.examples).tolist(),
                seconds=time.perf_counter() - start,
                before_aggregation=before,
                kept=None if settings.patience is None else waiting.kept.tolist(),
                phases=on_phases,
                untrained=untrained,
                ended=ended if ended.ndim else None,
            )
        yield result
        if np.all(waiting.ended):
            return
        start = time.perf_counter()


def _on_phases(engine: Engine, phases: Phases, state: State, phase: int, received: Scores | None) -> tuple[Scores, ...]:
    """Scores of what clients would deploy in a phase, on each phase's test examples; `received` on those of `phase`."""
    return tuple(
        received if on == phase and received is not None else _on_host(engine.evaluate(phases.tested(phase, on), state))
        for on in range(len(phases.parts))
    )


def _in_the_middle(received: Scores | None, trained: Scores, outcome: Outcome, active: jax.Array | None) -> Scores:
    """Scores of a round by the protocol `before_aggregation`; `received` are from before it, None if all trained."""
    members = np.zeros(trained.shape, bool)
    np.put_along_axis(members, np.asarray(outcome.cohort.clients), np.asarray(outcome.finite), axis=-1)
    members &= True if active is None else np.asarray(active)
    trained = dataclasses.replace(trained, train=None)
    return before_aggregation(trained if received is None else received, trained, members)


def _of_others(ended: np.ndarray, scores: PyTree) -> Any:
    """The `scores`, leaves [R, N], with NaN for the runs that have `ended` [R]; None stays None."""
    return jax.tree.map(lambda leaf: np.where(ended[..., None], np.nan, leaf).astype(leaf.dtype), scores)


def _on_host(tree: PyTree) -> PyTree:
    return jax.tree.map(np.asarray, tree)
