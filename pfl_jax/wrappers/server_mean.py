"""Robust statistics of the clients' values in place of every weighted mean that a method's server asks for."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pfl_jax.base import Method, Survey
from pfl_jax.errors import InvalidInput
from pfl_jax.messages import MEAN_OF_UPDATES, Unsummed, Update, map_means, needs_changeable
from pfl_jax.primitives import robust_means
from pfl_jax.primitives.robust_means import Statistic
from pfl_jax.validation import Range, Words

_BELOW_HALF = Annotated[float, Range(0, 0.5, below=True)]

MEANS = Words(
    ("mean", "median", "geometric_median", "krum", "multi_krum"),
    {"trimmed": _BELOW_HALF, "krum": _BELOW_HALF, "multi_krum": _BELOW_HALF},
)
"""Values of `ServerMean.server_mean`."""

ATTACKING = 0.2
"""Share of the clients that Krum and Multi-Krum take for possible attackers if no share is given."""


@dataclass(frozen=True)
class ServerMean:
    """Statistic with which a server combines the clients' values where it needs only their mean.

    Attributes:
      server_mean: statistic that takes the place of the weighted mean of the clients' messages: mean, median of every
        coordinate, trimmed:SHARE (mean without this share of the weight at each end), krum:SHARE and multi_krum:SHARE
        (this share may attack; without a number 0.2), or geometric_median. Only mean is compatible with secure
        aggregation.
    """

    server_mean: Annotated[str, MEANS] = "mean"


def robust(method: Method, recipe: ServerMean) -> Method:
    """Method whose server takes a robust statistic wherever the server of `method` takes a weighted mean.

    Each `Mean` of the messages arrives with the statistic of the present clients' values and the sum of their weights,
    see `pfl_jax.primitives.robust_means`. For it the server needs every single message: devices do not add messages up
    as clients finish. Other parts of the messages, and exact means (`pfl_jax.base.Exact`), are as in `method`. Krum
    chooses a client for each `Mean` separately.

    Args:
      method: the method to derive from. If its messages have no `Mean`, or only exact ones, it is refused when it runs.
      recipe: the statistic; with mean, and with trimmed:0, the method is returned unchanged.

    Returns:
      A `Method` with the states of `method`.

    Raises:
      InvalidInput: an unknown statistic, or a share out of its range.

    Reference:
      Yin, Chen, Ramchandran, Bartlett. Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates.
      ICML 2018 (median, trimmed mean). Blanchard, El Mhamdi, Guerraoui, Stainer. Machine Learning with Adversaries:
      Byzantine Tolerant Gradient Descent. NeurIPS 2017 (Krum). Pillutla, Kakade, Harchaoui. Robust Aggregation for
      Federated Learning. IEEE Transactions on Signal Processing 2022 (geometric median).

    Deviations:
      Median, trimmed mean and Multi-Krum use the clients' weights, the papers equal weights. An attacker
      states its weight truthfully here.
    """
    statistic = _statistic(*MEANS.parse(recipe.server_mean, "server_mean"))
    if statistic is None:
        return method

    def unsummed(message):
        needs_changeable(message, "server_mean")
        return map_means(of_mean, message, rest=lambda leaf: leaf)

    def of_mean(part):
        if isinstance(part, Update):
            raise InvalidInput(f"server_mean cannot be given with client_clip: {MEAN_OF_UPDATES}")
        if isinstance(part, Unsummed):
            raise InvalidInput("server_mean is there already: the server has one statistic of the clients' values")
        return Unsummed(*part)

    def means(messages):
        def combined(part):
            # An exact mean has arrived as a mean.
            return robust_means.robust_mean(statistic, *part) if isinstance(part, Unsummed) else part

        return map_means(combined, messages, rest=lambda leaf: leaf)

    def local(key, server, client, data):
        result = method.local(key, server, client, data)
        return result._replace(message=unsummed(result.message))

    def aggregate(key, server, clients, messages, cohort):
        return method.aggregate(key, server, clients, means(messages), cohort)

    survey = method.survey
    if survey is not None:
        survey = Survey(
            lambda key, server, data, ask=survey.local: unsummed(ask(key, server, data)),
            lambda server, messages, answer=survey.aggregate: answer(server, means(messages)),
        )
    return method._replace(local=local, aggregate=aggregate, survey=survey, privacy=method.privacy)


def _statistic(name: str, number: float | None) -> Statistic | None:
    """Statistic for a name and its number; None for the weighted mean."""
    if name == "trimmed" and number:
        return partial(robust_means.trimmed_mean, share=number)
    if name in ("krum", "multi_krum"):
        share = ATTACKING if number is None else number
        return partial(robust_means.krum, share=share, several=name == "multi_krum")
    return {"median": robust_means.coordinate_median, "geometric_median": robust_means.geometric_median}.get(name)
