"""Budgets of differential privacy: the guarantee of a run with clipping and noise, for an example or a client.

Needs Google's dp-accounting, `pip install dp-accounting`. The neighboring relation is dp-accounting's REPLACE_SPECIAL:
the data of one unit, an example of a client or a whole client, is replaced by an empty one that counts but contributes
nothing. Every use of a unit is then one Gaussian mechanism with sensitivity C, the norm to which its contribution is
clipped; k uses with noise multiplier z together are one mechanism with z / sqrt(k).

No amplification by sampling is assumed where it does not hold. A local epoch visits every example once, in batches that
are drawn without replacement, so it is one use of each example. Cohorts are drawn by the run's key, independently of
the data: given the cohorts, a client is used once in each round in which it takes part.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Method, Privacy, PRNGKey
from pfl_jax.engine.cohort import Settings, sample_cohort
from pfl_jax.errors import InvalidInput, imported, one_line
from pfl_jax.methods import factory_of
from pfl_jax.methods.factories import annotations, check_hyper_parameters, hyper_parameters, on_linear_model, recipes_of
from pfl_jax.validation import Positive, Range, check_arguments, check_value
from pfl_jax.wrappers.client_privacy import ClientPrivacy

Delta: TypeAlias = Annotated[float, Range(0, 1, above=True, below=True)]
"""Type of delta."""

DEFAULT_SHARE = 0.1
"""Default of delta, as a share of 1 / N for N units."""

RELATION = "one {unit} is replaced by an empty one, which counts but contributes nothing (zero-out)"


class Budget(NamedTuple):
    """Differential privacy of a run for one kind of unit.

    Attributes:
      unit: "example" (of one client) or "client".
      clip: largest norm of a unit's contribution.
      noise: noise multiplier.
      delta: delta.
      uses: [rounds], int: after each round, uses of the data of the client that has taken part most often; None if
        unknown.
      cohort: (M, N) if cohorts of M of N clients are drawn uniformly and differ from round to round; otherwise None.
      uncovered: results computed from the data without clipping and noise.
      unknown: why the uses are unknown; "" if they are known.
    """

    unit: str
    clip: float
    noise: float
    delta: float
    uses: np.ndarray | None
    cohort: tuple[int, int] | None
    uncovered: tuple[str, ...]
    unknown: str = ""

    def epsilon(self, rounds: int) -> float:
        """Epsilon after a number of rounds; infinite without noise, NaN if unknown."""
        return self._bounds(rounds)[0]

    def sampling(self, rounds: int) -> str:
        """Assumption about sampling, in words, behind the epsilon after a number of rounds."""
        return self._bounds(rounds)[1]

    def _bounds(self, rounds: int) -> tuple[float, str]:
        if self.uses is None:
            return float("nan"), f"unknown: {self.unknown}"
        uses = int(self.uses[rounds - 1]) if rounds else 0
        plain = gaussian_epsilon(self.noise, uses, self.delta)
        words = f"{uses} uses of each {self.unit}, no amplification by sampling"
        if self.unit == "client" and self.cohort is not None and self.noise > 0:
            size, clients = self.cohort
            amplified = sampled_epsilon(self.noise, rounds, size, clients, self.delta)
            if amplified < plain:
                return amplified, f"{rounds} cohorts of {size} of {clients} clients without replacement, kept secret"
        return plain, words

    def record(self, rounds: int) -> dict[str, Any]:
        """Budget after a number of rounds, for JSON."""
        epsilon, words = self._bounds(rounds)
        return {
            "unit": self.unit,
            "clip": self.clip,
            "noise": self.noise,
            "delta": self.delta,
            "epsilon": float(f"{epsilon:.6g}"),
            "relation": RELATION.format(unit=self.unit),
            "sampling": words,
            "uncovered": list(self.uncovered),
        }

    def spent(self, rounds: int) -> str:
        """Epsilon and delta after a number of rounds, in words."""
        epsilon, words = self._bounds(rounds)
        if self.uses is None:
            return f"epsilon is {words}"
        return f"epsilon {epsilon:.4g} at delta {self.delta:.3g} ({words})"

    def __str__(self) -> str:
        rest = f"; not covered: {'; '.join(self.uncovered)}" if self.uncovered else ""
        rounds = 0 if self.uses is None else len(self.uses)
        return f"differential privacy of every {self.unit}: {self.spent(rounds)}{rest}"


def gaussian_epsilon(noise: float, uses: int, delta: float) -> float:
    """Epsilon of k Gaussian mechanisms with noise multiplier z, equal to one mechanism with z / sqrt(k).

    Args:
      noise: z.
      uses: k.
      delta: delta.

    Raises:
      InvalidInput: dp-accounting is not installed.
    """
    if uses == 0:
        return 0.0
    return float(_accounting().get_epsilon_gaussian(noise / uses**0.5, delta)) if noise > 0 else float("inf")


@check_arguments
def gaussian_noise(epsilon: Positive, uses: int, delta: float) -> float:
    """Smallest noise multiplier with which k Gaussian mechanisms have a given epsilon.

    Args:
      epsilon: epsilon.
      uses: k.
      delta: delta.

    Raises:
      InvalidInput: dp-accounting is not installed, or epsilon is not positive.
    """
    return float(_accounting().get_sigma_gaussian(epsilon, delta)) * uses**0.5


def sampled_epsilon(noise: float, rounds: int, size: int, clients: int, delta: float) -> float:
    """Epsilon of Gaussian mechanisms on cohorts drawn without replacement, for observers who do not know the cohorts.

    dp-accounting has this bound for replacing a client by any other one. That moves a sum twice as far as leaving the
    client out, so the noise counts half.

    Args:
      noise: noise multiplier.
      rounds: number of cohorts.
      size: clients of a cohort.
      clients: all clients.
      delta: delta.

    Raises:
      InvalidInput: dp-accounting is not installed.

    Reference:
      Wang, Balle, Kasiviswanathan. Subsampled Renyi Differential Privacy and Analytical Moments Accountant. AISTATS
      2019. Theorem 27.
    """
    if rounds == 0:
        return 0.0
    accounting = _accounting()
    accountant = accounting.rdp.RdpAccountant(neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE)
    event = accounting.SampledWithoutReplacementDpEvent(clients, size, accounting.GaussianDpEvent(noise / 2))
    accountant.compose(accounting.SelfComposedDpEvent(event, rounds))
    return float(accountant.get_epsilon(delta))


def budgets(
    factory: str | Callable[..., Method],
    values: dict[str, Any],
    settings: Settings,
    counts: np.ndarray,
    key: PRNGKey,
    delta: float | None = None,
) -> list[Budget]:
    """Budgets of a run: one for examples with `dp_clip`, one for clients with `client_clip`.

    The epsilon of a budget is unknown (NaN) if the method says too little about its use of the data, or if the method
    cannot be built for a linear model, from which its statement is read. The budget then gives the reason. Phases in
    which clients are absent are not accounted: the others are then drawn more often.

    Args:
      factory: a name in METHODS, or a factory with the same kind of signature.
      values: hyper-parameters as in `pfl_jax.make_method`; defaults of the method for those left out.
      settings: settings of the run.
      counts: [N], training examples of each client.
      key: the run's key, from which cohorts are drawn.
      delta: delta; None for a tenth of 1 / N for N units.

    Raises:
      InvalidInput: the method is unknown, it has no such hyper-parameter, a value is wrong, delta is above 1 / N, or
        dp-accounting is not installed.

    Example:
      >>> import jax
      >>> import numpy as np
      >>> from pfl_jax import Settings
      >>> from pfl_jax.privacy import budgets
      >>> values = {"epochs": 1, "dp_clip": 1.0, "dp_noise": 4.0}
      >>> (budget,) = budgets("fedper", values, Settings(rounds=10), np.full(20, 600), jax.random.key(0))
      >>> print(budget.uses[-1], f"{budget.delta:.2g} {budget.epsilon(10):.2f}")
      10 8.3e-06 3.38
    """
    factory = factory_of(factory)
    if callable(lr := values.get("lr")):
        # No budget depends on the learning rate.
        values = values | {"lr": lr(0)}
    # Without this check, a misspelled dp_clip would mean a run without privacy.
    check_hyper_parameters(factory, values, annotations(factory))
    every = hyper_parameters(factory, values)
    makers = []
    if every["dp_clip"] is not None:
        makers.append(_example_budget)
    # A user's own factory can have an argument with that name too.
    if ClientPrivacy in recipes_of(factory) and every["client_clip"] is not None:
        makers.append(_client_budget)
    if not makers:
        return []
    _accounting()
    privacy, unknown = None, "the method does not say how it uses the data"
    try:
        privacy = on_linear_model(factory, values).privacy
    except Exception as error:  # any error of a user's own factory
        unknown = f"the method cannot be made for a linear model, to ask how it uses the data ({one_line(error)})"
    rounds = participations(settings, np.asarray(counts), key)
    return [make(privacy, unknown, every, settings, np.asarray(counts), rounds, delta) for make in makers]


def participations(settings: Settings, counts: np.ndarray, key: PRNGKey) -> np.ndarray:
    """Largest number of rounds in which one client has taken part, after each round: int [rounds].

    Args:
      settings: settings of the run.
      counts: [N], training examples of each client.
      key: the run's key.
    """
    clients, total = len(counts), settings.rounds
    size = settings.cohort_size(clients, 0)
    if size == clients:
        return np.arange(1, total + 1)
    if settings.reads_losses:
        raise InvalidInput("differential privacy is not accounted where clients are drawn by their losses")
    sizes = jnp.asarray(counts, jnp.int32)

    def take_part(taken, index):
        taken = taken.at[sample_cohort(key, index, sizes, size, settings).clients].add(1)
        return taken, jnp.max(taken)

    # Round by round: the cohorts of all rounds together would take memory for rounds x clients.
    count = jax.jit(lambda rounds: jax.lax.scan(take_part, jnp.zeros(clients, jnp.int32), rounds)[1])
    most = np.array(count(jnp.arange(total, dtype=jnp.int32)), np.int64)
    if settings.cohort_size(clients, total - 1) == clients:
        most[-1] = most[-2] + 1
    return most


def _example_budget(privacy: Privacy | None, unknown, values, settings, counts, rounds, delta) -> Budget:
    known = _delta(delta, int(counts.sum()), "training examples")
    numbers = ("example", float(values["dp_clip"]), float(values["dp_noise"]), known)
    if privacy is None:
        uncovered = ("whatever the method computes from the examples outside of LocalTraining.fit",)
        return Budget(*numbers, None, None, uncovered, unknown)
    uses = rounds * int(privacy.passes) + int(privacy.deployment)
    return Budget(*numbers, uses, None, privacy.examples)


def _client_budget(privacy: Privacy | None, unknown, values, settings, counts, rounds, delta) -> Budget:
    known = _delta(delta, len(counts), "clients")
    numbers = ("client", float(values["client_clip"]), float(values["client_noise"]), known)
    if privacy is None or privacy.clients is None:
        return Budget(*numbers, None, None, ("whatever clients send besides their updates",), unknown)
    size, clients = settings.cohort_size(len(counts), 0), len(counts)
    uniform = size < clients and not settings.full_last_round and not settings.straggler_fraction
    uniform = uniform and settings.timetable is None and settings.select is None
    return Budget(*numbers, rounds, (size, clients) if uniform else None, privacy.clients)


def _delta(delta: float | None, units: int, named: str) -> float:
    """Delta for N units; raise InvalidInput above 1 / N, where losing one unit's data altogether would be private."""
    if delta is None:
        return DEFAULT_SHARE / units
    check_value("delta", delta, Delta)
    if delta > 1 / units:
        raise InvalidInput(f"delta must be at most 1 / {units} = {1 / units:.3g} for {units} {named}, not {delta:g}")
    return delta


def _accounting() -> Any:
    """The library dp_accounting."""
    return imported("dp_accounting", "differential privacy needs Google's dp-accounting: pip install dp-accounting")
