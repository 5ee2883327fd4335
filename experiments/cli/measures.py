"""Definitions of the accuracy of a run: evaluation protocol, round, and average over clients or test examples."""

from typing import Literal, TypeAlias

Protocol = Literal["received", "trained", "before_aggregation"]
ALWAYS: tuple[Protocol, ...] = ("received", "trained")
"""Evaluation protocols of every run."""
PROTOCOLS: tuple[Protocol, ...] = (*ALWAYS, "before_aggregation")
"""All evaluation protocols; before_aggregation is evaluated only on request."""

Average = Literal["clients", "examples"]
AVERAGES: tuple[Average, ...] = ("clients", "examples")
"""Averages of the clients' accuracies: equal weights for clients, or for test examples."""

FIELD: dict[Average, str] = {"clients": "mean", "examples": "pooled"}
"""Average -> its field in `pfl_jax.primitives.metrics.Summary` and in records."""

Score: TypeAlias = Literal["last", "best"]
"""Round of a run that is reported: the last one, or the one with the highest mean."""
