"""Evaluation that holds the results of a run: the last one, the best one, or the one that --patience kept."""

import math
from collections.abc import Sequence

import numpy as np

from experiments.folder.run_folder import TRAINED_BETWEEN, VALIDATION, Line
from experiments.spec.choices import FIELD, Average, Protocol
from pfl_jax.primitives.metrics import transfer

PHASE, PHASES, UNTRAINED = "phase", "phases", "phases_untrained"
"""Entries of an evaluation: number of the phase, from 0; means of `received` on the test examples of each phase; and
these means before the first round."""


def best(
    lines: Sequence[Line], protocol: Protocol, average: Average = "clients", *, higher_is_better: bool = True
) -> Line:
    """First evaluation with the best mean score over clients or examples, on validation examples if there are any.

    Only the lines from `evaluations` count.
    """

    def goodness(line: Line) -> float:
        mean = line.get(VALIDATION, line)[protocol][FIELD[average]]
        return -math.inf if mean is None else mean if higher_is_better else -mean

    return max(evaluations(lines, protocol), key=goodness)


def final(lines: Sequence[Line], protocol: Protocol, patience: int | None, *, higher_is_better: bool) -> Line:
    """Evaluation whose scores are the results of a run: with --patience the best one, see `best`, otherwise the last.

    For a diverged run it is the last one, which has no score.
    """
    last = lines[-1]
    if patience is None or last.get(VALIDATION, {}).get(protocol, {}).get("mean") is None:
        return last
    return best(lines, protocol, higher_is_better=higher_is_better)


def evaluations(lines: Sequence[Line], protocol: Protocol) -> list[Line]:
    """Evaluations that are compared for the best round.

    By `trained`, all rounds have one, unless there are validation examples. Evaluations of fewer clients than the last
    one are left out, because their means are over other clients.
    """
    found = list(lines)
    if protocol == "trained" and VALIDATION not in lines[-1]:
        tables = [table for line in lines if (table := line.get(TRAINED_BETWEEN))]
        rows = [dict(zip(table, row, strict=True)) for table in tables for row in zip(*table.values(), strict=True)]
        found = sorted(
            [*found, *({"round": row["round"], protocol: row} for row in rows)], key=lambda line: line["round"]
        )
    clients = lines[-1][protocol].get("clients")
    return [line for line in found if line[protocol].get("clients") == clients]


def phase_summary(lines: Sequence[Line], *, higher_is_better: bool) -> dict[str, float]:
    """Average, forgetting and forward transfer over the phases by name, see `pfl_jax.primitives.metrics.transfer`;
    empty if the data do not change."""
    ends = {line[PHASE]: line[PHASES] for line in lines if PHASE in line}
    if not ends:
        return {}
    after, (untrained,) = (
        [[math.nan if one is None else one for one in row] for row in rows]
        for rows in (ends.values(), [lines[-1][UNTRAINED]])
    )
    return transfer(np.array(after), np.array(untrained), higher_is_better=higher_is_better)._asdict()
