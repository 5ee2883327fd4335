"""Definitions of a federation's accuracy: protocol, round, and average over clients or test examples."""

from typing import Literal, TypeAlias

Protocol = Literal["received", "trained", "before_aggregation"]
ALWAYS: tuple[Protocol, ...] = ("received", "trained")
"""The protocols that every run is evaluated by."""
PROTOCOLS: tuple[Protocol, ...] = (*ALWAYS, "before_aggregation")
"""All protocols; the last one is measured only if a run requests it."""

Average = Literal["clients", "examples"]
AVERAGES: tuple[Average, ...] = ("clients", "examples")
"""How clients' accuracies are averaged: each client, or each test example, counting the same."""

FIELD: dict[Average, str] = {"clients": "mean", "examples": "pooled"}
"""Average -> its field in `pfl_jax.primitives.metrics.Summary` and in records."""

Score: TypeAlias = Literal["last", "best"]
"""Which round of a run counts: the last one, or the one with the highest mean."""
