"""Charts of what methods tell of their rounds (Info), such as head weights, and of a single client."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.choices import Protocol
from experiments.folder import load
from experiments.folder.stored_runs import Group, Run
from experiments.report.charts import Chart, alone
from experiments.show.curves import headline
from experiments.show.pictures import ROUND, Bars, Heat, Lines, OverRounds, Panel, Series
from pfl_jax.errors import InvalidInput

MOST_BARS = 100
"""Entries of a vector that are drawn."""
MOST_SEEDS = 3
"""Runs of a setting whose Info is drawn."""
MOST_ROUNDS = 4
"""Rounds of a run in which a matrix is drawn."""
NOISE = 1e-9
"""Size of numbers up to which an entry of Info is rounding, such as the gap of a solved program."""
INFO = {
    "head_weights": "Head weights",
    "weights": "Aggregation weights",
    "trace": "Fisher traces",
    "mixture": "Mixture weights",
    "alpha": "Share of the own model",
}
"""Name in Info -> title; other entries have their name as title. Captions are what the method's docstring says."""


def information(groups: Sequence[Group]) -> list[Chart]:
    """Vectors and matrices of Info, such as head weights, over the rounds of each group's runs.

    A vector over the cohort is a map of clients by rounds, one for each seed; of a matrix there is a map for each seed
    in a few of the rounds.
    """
    charts = []
    for group in groups:
        runs = [run for run in group.counted if any(line.get("info") for line in run.lines)][:MOST_SEEDS]
        for name, text in _told(runs).items():
            found = {run.seed: known for run in runs if (known := _entries(run, name, text))}
            # What a solver leaves of zero says nothing.
            if any(np.abs(entry.values).max() > NOISE for entries in found.values() for entry in entries):
                charts.append(_information(f"{INFO.get(name, name)}: {group.label}", name, found, text))
    return charts


def client(groups: Sequence[Group], number: int) -> list[Chart]:
    """One client in the first run of each group: its labels, its scores over the rounds, and whom it learns from.

    Raises:
      InvalidInput: the runs have no such client.
    """
    runs = {group.label: group.counted[0] for group in groups if group.counted}
    for name, run in runs.items():
        if number >= (everyone := load.number_of_clients(run.config)):
            raise InvalidInput(f"--client {number}: the clients of {name} are 0 to {everyone - 1}")
    tables = [run.config.get("class_table") for run in runs.values()]
    labels = {tuple(table[number]): run.seed for table, run in zip(tables, runs.values(), strict=True) if table}
    charts = []
    for counts, seed in labels.items():
        names = [str(place) for place in range(len(counts))]
        charts.append(alone(Bars(f"Its training examples, seed {seed}", "class", "examples", [""], [names], [counts])))
    protocol = headline(groups)
    series = [_scores_of(name, run, protocol, number) for name, run in runs.items()]
    if any(line.x for line in series):
        charts.append(alone(Lines(f"Its scores ({protocol})", ROUND, groups[0].axis, series)))
    return charts + [chart for name, run in runs.items() for chart in _teachers(name, run, number)]


def _scores_of(title: str, run: Run, protocol: Protocol, number: int) -> Series:
    rows = [(line["round"], line.get(f"{protocol}_per_client")) for line in run.lines]
    known = [(at, row[number]) for at, row in rows if row is not None and row[number] is not None]
    return Series(title, [at for at, _ in known], [score for _, score in known])


def _teachers(title: str, run: Run, number: int) -> list[Chart]:
    """A client's row of each matrix of clients by clients, from the last round in which it took part."""
    charts = []
    for name, text in _told([run]).items():
        found = [one for one in _entries(run, name, text) if one.kinds == ["client", "client"]]
        there = [one for one in found if str(number) in one.names[0]]
        if there:
            at, values, _, (rows, columns) = there[-1]
            row = values[rows.index(str(number))].tolist()
            heading = f"{INFO.get(name, name)} of this client: {title}, round {at}"
            charts.append(alone(Bars(heading, "client", name, [""], [columns], [row]), text))
    return charts


def _told(runs: Sequence[Run]) -> dict[str, str]:
    """Entries of Info -> what they are, those of the papers' figures first."""
    names = dict.fromkeys(name for run in runs for line in run.lines for name in line.get("info") or {})
    said = runs[0].config.get("info", {}) if runs else {}
    return {name: said.get(name, "") for name in sorted(names, key=lambda name: name not in INFO)}


class _Entry(NamedTuple):
    """Entry of Info after a round: a vector or matrix, what its axes are, and the names along each."""

    round: int
    values: np.ndarray
    kinds: list[str]
    names: list[list[str]]


def _entries(run: Run, name: str, text: str) -> list[_Entry]:
    """An entry of Info in all evaluations that have it as a vector or matrix of finite numbers of one shape."""
    found = []
    for line in run.lines:
        values = _numbers((line.get("info") or {}).get(name))
        if values is not None:
            cohorts = _cohorts(text, values.shape, line.get("cohort") or [])
            found.append(_in_order_of_clients(line["round"], values, cohorts))
    return [one for one in found if one.values.ndim == found[-1].values.ndim]


def _in_order_of_clients(number: int, values: np.ndarray, cohorts: Sequence[Sequence[int] | None]) -> _Entry:
    kinds, names = [], []
    for axis, cohort in enumerate(cohorts):
        numbers = np.asarray(range(values.shape[axis]) if cohort is None else cohort, np.int64)
        # The cohorts of older runs stand in another order.
        values = np.take(values, np.argsort(numbers), axis)
        kinds.append("entry" if cohort is None else "client")
        names.append([str(number) for number in np.sort(numbers)])
    return _Entry(number, values, kinds, names)


def _information(title: str, name: str, found: dict[int, list[_Entry]], text: str) -> Chart:
    """Chart of one entry of Info: the runs' evaluations by their seeds."""
    of_seeds = list(found.items())
    if of_seeds[0][1][0].values.ndim == 1:
        if all(len(entries) == 1 for entries in found.values()):
            panels: list[Panel] = [_bars(f"seed {seed}, round {one.round}", name, one) for seed, (one,) in of_seeds]
        else:
            panels = [_over_rounds(f"seed {seed}", name, entries) for seed, entries in of_seeds]
        return Chart(title, panels, text, min(2, len(panels)))
    # As many of each, so that a row of maps is a seed.
    columns = min(MOST_ROUNDS, *(len(entries) for entries in found.values()))
    panels = []
    for seed, entries in of_seeds:
        picked = np.linspace(len(entries) - 1, 0, columns).round().astype(int)[::-1].tolist()
        panels += [_map(f"seed {seed}, round {entries[at].round}", name, entries[at]) for at in picked]
    return Chart(title, panels, text, columns)


def _bars(title: str, name: str, entry: _Entry) -> Bars:
    level = float(entry.values.mean()) if name == "weights" else None
    bars = entry.names[0][:MOST_BARS], entry.values[:MOST_BARS].tolist()
    return Bars(title, entry.kinds[0], name, [name], [bars[0]], [bars[1]], level, "if all counted the same")


def _map(title: str, name: str, entry: _Entry) -> Heat:
    (y, x), (rows, columns) = entry.kinds, entry.names
    return Heat(title, x, y, entry.values.tolist(), rows=rows, columns=columns, unit=name)


def _over_rounds(title: str, name: str, entries: Sequence[_Entry]) -> Heat:
    """Map of clients by rounds, white where a client did not take part."""
    rows = sorted({row for entry in entries for row in entry.names[0]}, key=int)
    table = np.full((len(rows), len(entries)), np.nan)
    for column, entry in enumerate(entries):
        table[[rows.index(row) for row in entry.names[0]], column] = entry.values
    columns = [str(entry.round) for entry in entries]
    kind = entries[0].kinds[0]
    return OverRounds(title, "round", kind, table.tolist(), rows=rows, columns=columns, unit=name)


def _cohorts(text: str, shape: tuple[int, ...], cohort: Sequence[int]) -> list[Sequence[int] | None]:
    """Clients along each axis, None where an axis has something else, as a text such as "[M, K], ..." says.

    Without a shape in the text, axes as long as the cohort have its clients.
    """
    named = re.match(r"\[(.*?)\]", text)
    letters = named[1].split(", ") if named else []
    clients = "cohort" if "cohort" in letters else "M"
    if len(letters) != len(shape):
        letters = [clients] * len(shape)
    return [
        cohort if letter == clients and size == len(cohort) else None
        for letter, size in zip(letters, shape, strict=True)
    ]


def _numbers(entry: Any) -> np.ndarray | None:
    """Vector or matrix of finite numbers; None of anything else."""
    try:
        values = np.asarray(entry, np.float64)
    except (TypeError, ValueError):
        return None
    return values if values.ndim in (1, 2) and values.size and np.isfinite(values).all() else None
