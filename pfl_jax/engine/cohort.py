"""Participation in a round: settings, and random cohorts, stragglers, drop-outs and attackers."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_type_hints

import jax
import jax.numpy as jnp

from pfl_jax.base import Cohort, PRNGKey
from pfl_jax.engine.asynchronous import Timetable
from pfl_jax.engine.selection import Selection, Weights
from pfl_jax.errors import InvalidInput
from pfl_jax.streams import ATTACKERS, COHORT, DROPOUTS, EVALUATED_CLIENTS, SELECTION, STRAGGLERS
from pfl_jax.validation import AboveZero, BelowOne, Count, Fraction, Positive, check_shapes, check_values
from pfl_jax.wrappers.attacks import Attack

DRAWS = ("participation", "full_last_round", "straggler_fraction", "drop_rate", "select")
"""Names of the settings on which the draw of cohorts depends."""


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """Settings on which the program of a round depends, see `pfl_jax.build`.

    Attributes:
      participation: share of the N clients in each round's cohort, in (0, 1]; at least one client. A round gets its
        number of clients as an argument; an evaluation in which clients take turns has cohorts of this size.
      straggler_fraction: share of the clients that are stragglers, the same ones in all rounds (FedAS, Fig. 4a).
      straggler_rate: weight of a straggler in the draw of a cohort, where other clients have weight 1; in (0, 1].
      drop_rate: share of each cohort that drops out, in [0, 1), drawn anew in every round: these clients train and keep
        their new state, but their messages do not arrive. At least one message arrives.
      chunk: clients under one vmap on each device: 1 trains one after another, None all at once. "auto" lets
        `pfl_jax.engine.chunking` choose by model, backend and the clients' sizes; for several networks it becomes a
        tuple with a choice for each. Time and memory depend on it, results do not.
      attack: behavior of attackers, see `pfl_jax.wrappers.attacks`: "labels" (train on label K - 1 - y, of K classes),
        "signs" (send the update with the opposite sign) or "noise" (send Gaussian noise as long as the update); None
        for no attack. Without attackers it has no effect.
      attackers: share of the clients that attack, the same ones in all rounds; in [0, 1).
      attack_scale: factor of the update or noise that attackers send.
      eval_clients: number of clients that are evaluated by `received`, drawn once for a run; the others' scores are
        NaN. None evaluates all. Cannot be given with `Settings.before_aggregation`, whose mean over a sample would
        count cohorts too often.
      timetable: the clients that take part in each round, and the age of the state from which each one trains, as
        simulated by `pfl_jax.engine.asynchronous.timetable`; None draws cohorts.
      select: weights of the clients in the draw of a cohort, from `pfl_jax.engine.selection` or a function of your own,
        see `Weights` there; None weighs all alike. Selections with equal weights draw equal cohorts. `straggler_rate`
        multiplies the weights.
    """

    participation: AboveZero = 1.0
    straggler_fraction: Fraction = 0.0
    straggler_rate: AboveZero = 1.0
    drop_rate: BelowOne = 0.0
    chunk: Count | Literal["auto"] | tuple[int, ...] | None = "auto"
    attack: Attack | None = None
    attackers: BelowOne = 0.0
    attack_scale: Positive = 1.0
    eval_clients: Count | None = None
    timetable: Timetable | None = None
    select: Annotated[Selection | Weights | None, "a selection, a function of clients' weights, or None"] = None

    def __post_init__(self) -> None:
        check_values(vars(self), get_type_hints(type(self), include_extras=True))
        if self.attackers and self.attack is None:
            raise InvalidInput("attackers needs an attack: labels, signs or noise")
        for name in DRAWS if self.timetable is not None else ():
            if (value := getattr(self, name, None)) != getattr(type(self), name, None):
                raise InvalidInput(f"{name} {value} cannot be given with a timetable, which says who takes part")

    @property
    def selection(self) -> Selection | None:
        """`select` as a `Selection`, made from a function of weights if necessary; None without."""
        return self.select if self.select is None or isinstance(self.select, Selection) else Selection(self.select)

    @property
    def reads_losses(self) -> bool:
        """Whether the draw of a cohort depends on training losses."""
        return self.selection is not None and self.selection.losses

    @property
    def versions(self) -> int:
        """Number of earlier states of the server that clients may begin with, see `timetable`."""
        return 0 if self.timetable is None else self.timetable.largest_staleness

    def of_a_round(self) -> "RoundSettings":
        """These settings without the fields that only a run has."""
        return RoundSettings(**{one.name: getattr(self, one.name) for one in fields(RoundSettings)})

    def usual_size(self, num_clients: int) -> int:
        """Size of a cohort drawn from this number of clients."""
        return max(1, round(self.participation * num_clients))

    def arrivals(self, cohort_size: int) -> int:
        """Number of messages of a cohort that arrive."""
        return max(1, cohort_size - round(self.drop_rate * cohort_size))


@dataclass(frozen=True)
class Settings(RoundSettings):
    """Settings of a run, independent of the method: the settings of a round, and the settings of the loop over rounds.

    Attributes:
      rounds: communication rounds.
      full_last_round: whether all clients take part in the last round (FedPAC, Section 6.2).
      eval_every: rounds between two evaluations of `received`; the last round is always evaluated.
      before_aggregation: also evaluate by the protocol `pfl_jax.primitives.metrics.before_aggregation`. With partial
        participation this costs a second evaluation in every evaluated round whose previous round was not evaluated.
      patience: end the run at the first evaluation this many rounds or more after the best one, by the mean over
        clients of the primary score of `received` on validation examples, which the federation must have; None trains
        all rounds. A run that continues from a state begins to count there.

    Example:
      >>> from pfl_jax import Settings
      >>> settings = Settings(rounds=100, participation=0.3, full_last_round=True)
      >>> settings.cohort_size(20, 0), settings.cohort_size(20, 99)
      (6, 20)
    """

    rounds: Count
    full_last_round: bool = False
    eval_every: Count = 1
    before_aggregation: bool = False
    patience: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timetable is not None and self.rounds > (there := len(self.timetable.seconds)):
            raise InvalidInput(f"rounds is {self.rounds}, and the timetable has {there}")
        if self.before_aggregation and self.eval_clients is not None:
            raise InvalidInput("eval_clients cannot be given with before_aggregation, which needs the scores of all")

    def cohort_size(self, num_clients: int, round_index: int) -> int:
        """Cohort size M of the round with this index, counted from 0."""
        if self.timetable is not None:
            return self.timetable.clients.shape[1]
        if self.full_last_round and round_index == self.rounds - 1:
            return num_clients
        return self.usual_size(num_clients)

    def is_evaluated(self, number: int) -> bool:
        """Whether the round with this number, counted from 1, is evaluated."""
        return number % self.eval_every == 0 or number == self.rounds


def evaluated_clients(key: PRNGKey, num_clients: int, settings: RoundSettings) -> jax.Array:
    """Clients that are evaluated by `received`, the same in all rounds of the run with this key: int32, ascending."""
    if settings.eval_clients is None or settings.eval_clients >= num_clients:
        return jnp.arange(num_clients, dtype=jnp.int32)
    drawn = jax.random.permutation(jax.random.fold_in(key, EVALUATED_CLIENTS), num_clients)[: settings.eval_clients]
    return jnp.sort(drawn).astype(jnp.int32)


def stragglers(key: PRNGKey, num_clients: int, share: float) -> jax.Array:
    """Fixed stragglers of a run: bool [N], round(share * N) of them."""
    return _fixed_share(key, STRAGGLERS, num_clients, share)


def attackers(key: PRNGKey, num_clients: int, share: float) -> jax.Array:
    """Fixed attackers of a run: bool [N], round(share * N) of them."""
    return _fixed_share(key, ATTACKERS, num_clients, share)


def _fixed_share(key: PRNGKey, stream: int, num_clients: int, share: float) -> jax.Array:
    ranks = jax.random.permutation(jax.random.fold_in(key, stream), num_clients)
    return ranks < round(share * num_clients)


def sample_cohort(
    key: PRNGKey,
    round_index: jax.Array,
    counts: jax.Array,
    size: int,
    settings: RoundSettings,
    losses: jax.Array | None = None,
    active: jax.Array | None = None,
) -> Cohort:
    """Draw a round's cohort without replacement, in the order of client numbers; drop-outs are absent.

    Args:
      key: the run's key.
      round_index: from 0.
      counts: [N], training examples of each client.
      size: M.
      settings: fraction and rate of stragglers, the drop rate, and the selection.
      losses: [N], training losses for the selection, NaN before the first; None without losses.
      active: bool [N]; other clients are absent, and drawn only if the active ones do not suffice. None for all.
    """
    (num_clients,) = counts.shape
    if not 1 <= size <= num_clients:
        raise InvalidInput(f"a cohort has 1 to {num_clients} of {num_clients} clients, not {size}")
    if settings.timetable is not None:
        clients = _from_timetable(settings.timetable, round_index, num_clients, size)
    elif size == num_clients:
        # All clients take part: avoid random numbers, which take a small program longest to compile.
        clients = jnp.arange(num_clients, dtype=jnp.int32)
    else:
        here = counts if active is None else jnp.where(active, counts, 0)
        scores = _scores(key, round_index, here, size, settings, losses)
        _, clients = jax.lax.top_k(scores if active is None else jnp.where(active, scores, -jnp.inf), size)
        clients = jnp.sort(clients).astype(jnp.int32)
    sizes = counts if size == num_clients else counts[clients]
    present = jnp.ones(size, bool) if active is None else active[clients]
    if settings.arrivals(size) < size:
        # Drop-outs are drawn by rank of size, so that a seed's draw does not depend on the numbering of the clients.
        drop_key = jax.random.fold_in(jax.random.fold_in(key, DROPOUTS), round_index)
        order = largest_first(sizes)[jax.random.permutation(drop_key, size)]
        arrivals: int | jax.Array = settings.arrivals(size)
        if active is not None:
            arrivals = jnp.array([settings.arrivals(number) for number in range(size + 1)])[jnp.sum(present)]
        present &= jnp.zeros(size, bool).at[order].set(jnp.cumsum(present[order]) <= arrivals)
    equal = None
    if settings.selection is not None and settings.selection.equal and size < num_clients:
        # Where all active clients take part, no draw has favored large ones.
        equal = jnp.array(True) if active is None else jnp.sum(active) > size
    return Cohort(clients, jnp.where(present, sizes, 0), present, num_clients, equal)


def _from_timetable(timetable: Timetable, round_index: jax.Array, num_clients: int, size: int) -> jax.Array:
    """Clients of a round of a timetable: int32 [M], ascending."""
    if (last := int(timetable.clients.max())) >= num_clients:
        raise InvalidInput(f"the timetable has a client {last}, and the federation has {num_clients}")
    if (known := timetable.num_clients) not in (None, num_clients):
        raise InvalidInput(f"the timetable is for {known} clients, and the federation has {num_clients}")
    if size != timetable.clients.shape[1]:
        raise InvalidInput(f"the timetable has {timetable.clients.shape[1]} clients in a round, not {size}")
    return jnp.asarray(timetable.clients, jnp.int32)[round_index]


def staleness(round_index: jax.Array, settings: RoundSettings) -> jax.Array | None:
    """Staleness [M] of the clients of a round of the settings' timetable; None if it is 0 in all rounds."""
    if settings.timetable is None or not settings.versions:
        return None
    return jnp.asarray(settings.timetable.staleness, jnp.int32)[round_index]


LAST = -1e3
"""Logarithm of weight zero: below all others in float32, and such clients are still drawn at random."""


def _scores(
    key: PRNGKey,
    round_index: jax.Array,
    counts: jax.Array,
    size: int,
    settings: RoundSettings,
    losses: jax.Array | None,
) -> jax.Array:
    """Scores [N]; the clients with the largest scores are drawn, see `sample_cohort`."""
    num_clients, selection = len(counts), settings.selection
    cohort_key = jax.random.fold_in(jax.random.fold_in(key, COHORT), round_index)
    # The M largest values of log weight + Gumbel noise are a weighted draw without replacement (Gumbel-top-k); always
    # in one precision, so that the cohorts do not depend on jax_enable_x64.
    scores = jax.random.gumbel(cohort_key, (num_clients,), jnp.float32)
    # Skipped without stragglers, because finding them permutes all clients in every round.
    if settings.straggler_fraction:
        is_straggler = stragglers(key, num_clients, settings.straggler_fraction)
        scores += jnp.where(is_straggler, jnp.log(settings.straggler_rate), 0.0)
    if selection is not None:
        known = jnp.full(num_clients, jnp.inf) if losses is None else jnp.where(jnp.isnan(losses), jnp.inf, losses)
        own_key = jax.random.fold_in(jax.random.fold_in(key, SELECTION), round_index)
        weights = jnp.asarray(selection.weights(own_key, round_index, counts, known, size), jnp.float32)
        check_shapes(weights=(weights, "N"), counts=(counts, "N"))
        scores += jnp.where(weights > 0, jnp.log(weights), LAST)
    return scores


def largest_first(counts: jax.Array) -> jax.Array:
    """Positions of `counts` [M] from the largest to the smallest, equal ones in their order: int32 [M]."""
    return jnp.argsort(-counts, stable=True).astype(jnp.int32)
