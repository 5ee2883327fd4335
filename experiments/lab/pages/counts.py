"""What the rows of docs/results.md come to."""

import itertools
from collections.abc import Sequence

from experiments.cli.command import RunCommand
from experiments.lab.pages.compared import CLOSE, Compared, Found

VERDICTS = {
    "supported": "cause supported by a run without it",
    "refuted": "supposed cause refuted by a run without it",
    "plausible": "cause plausible",
    "open": "open",
}
"""`Compared.verdict` -> its words."""


def different(rows: Sequence[Compared]) -> list[Compared]:
    """Of the rows that one run stands for, that which is furthest away."""
    nearest_first = sorted(rows, key=lambda one: abs(one.entry.difference or 0))
    return list({RunCommand.of(one.entry.row).command(): one for one in nearest_first}.values())


def counts(found: Found) -> list[list[str]]:
    """Rows by what is known of them: FedPAC's, its replication's, and one for each run."""
    every = list(itertools.chain(*found.values()))
    of_replication = [one for one in every if one.entry.row.paper == "fedpac_replication"]
    columns = [[one for one in every if one not in of_replication], of_replication, different(every)]
    names = {f"within {CLOSE:g} point of the paper": lambda one: one.is_close is True}
    for verdict, words in VERDICTS.items():
        names[f"further away, {words}"] = lambda one, verdict=verdict: one.is_close is False and one.verdict == verdict
    names |= {"no finished run yet": lambda one: one.is_close is None, "all": lambda one: True}
    return [[name, *(str(sum(map(fits, rows))) for rows in columns)] for name, fits in names.items()]


def by_trained(rows: Sequence[Compared]) -> dict[str, str]:
    """Rows far from the paper: which are close by `trained`, and which further away; and close ones it loses."""
    far = [one for one in rows if one.is_close is False]
    kinds = {
        "closer": [one for one in far if one.fits_trained],
        "lost": [one for one in rows if one.is_close and abs(one.trained_difference or 0) > CLOSE],
        "further": [one for one in far if abs(one.trained_difference or 0) > abs(one.entry.difference or 0)],
    }
    return {
        kind: ", ".join(
            f"`{one.entry.row.method}` of {one.entry.row.source.replace(',', '')} ({one.trained_difference:+.2f})"
            for one in there
            if one.trained_difference is not None
        )
        for kind, there in kinds.items()
    }
