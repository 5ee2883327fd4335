"""Charts of what methods tell of their rounds (Info), such as head weights, and of a single client."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.folder import load
from experiments.folder.load import Run
from experiments.folder.stored_runs import Group
from experiments.report.charts import alone
from experiments.show.curves import headline
from experiments.show.panels import ROUND, Bars, Heat, Lines, Series
from experiments.show.pictures import Picture
from experiments.spec.choices import Protocol
from pfl_jax.errors import InvalidInput

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


class Entry(NamedTuple):
    """Entry of Info after a round: a vector or matrix, what its axes are, and the names along each."""

    round: int
    values: np.ndarray
    kinds: list[str]
    names: list[list[str]]


def information(groups: Sequence[Group]) -> list[Picture]:
    """Vectors and matrices of Info, such as head weights, over the rounds of each group's runs.

    A vector is a map of clients by rounds, one for each seed; of a matrix there is a map for each seed in a few of the
    rounds.
    """
    charts = []
    for group in groups:
        runs = [run for run in group.counted if any(line.get("info") for line in run.lines)][:MOST_SEEDS]
        for name, text in _descriptions(runs).items():
            by_seed = {run.seed: entries for run in runs if (entries := _entries(run, name, text))}
            # What a solver leaves of zero says nothing.
            if any(np.abs(entry.values).max() > NOISE for entries in by_seed.values() for entry in entries):
                panels = [heat for seed, entries in by_seed.items() for heat in _maps(seed, name, entries)]
                columns = len(panels) // len(by_seed) if len(panels) > len(by_seed) else 2
                charts.append(Picture(f"{INFO.get(name, name)}: {group.label}", text, panels, columns))
    return charts


def client(groups: Sequence[Group], number: int) -> list[Picture]:
    """One client in the first run of each group: its labels, its scores over the rounds, and whom it learns from.

    Raises:
      InvalidInput: the runs have no such client.
    """
    runs = {group.label: group.counted[0] for group in groups if group.counted}
    for name, run in runs.items():
        if number >= (everyone := load.number_of_clients(run.config)):
            raise InvalidInput(f"--client {number}: the clients of {name} are 0 to {everyone - 1}")
    tables = {run.seed: table for run in runs.values() if (table := run.config.get("class_table"))}
    charts = [
        alone(Bars(f"Its training examples, seed {seed}", "class", "examples", {"": _named(table[number])}))
        for seed, table in tables.items()
    ]
    protocol = headline(groups)
    series = [_scores_of(name, run, protocol, number) for name, run in runs.items()]
    if any(line.x for line in series):
        charts.append(alone(Lines(f"Its scores ({protocol})", ROUND, groups[0].axis, series)))
    return charts + [chart for name, run in runs.items() for chart in _teachers(name, run, number)]


def _named(values: Sequence[float]) -> dict[str, float]:
    return {str(place): value for place, value in enumerate(values)}


def _scores_of(title: str, run: Run, protocol: Protocol, number: int) -> Series:
    rows = [(line["round"], line.get(f"{protocol}_per_client")) for line in run.lines]
    known = [(at, row[number]) for at, row in rows if row is not None and row[number] is not None]
    return Series(title, [at for at, _ in known], [score for _, score in known])


def _teachers(title: str, run: Run, number: int) -> list[Picture]:
    """A client's row of each matrix of clients by clients, from the last round in which it took part."""
    charts = []
    for name, text in _descriptions([run]).items():
        matrices = [one for one in _entries(run, name, text) if one.kinds == ["client", "client"]]
        there = [one for one in matrices if str(number) in one.names[0]]
        if there:
            at, values, _, (rows, columns) = there[-1]
            bars = dict(zip(columns, values[rows.index(str(number))].tolist(), strict=True))
            heading = f"{INFO.get(name, name)} of this client: {title}, round {at}"
            charts.append(alone(Bars(heading, "client", name, {"": bars}), text))
    return charts


def _descriptions(runs: Sequence[Run]) -> dict[str, str]:
    """Entries of Info -> what they are, those of the papers' figures first."""
    names = dict.fromkeys(name for run in runs for line in run.lines for name in line.get("info") or {})
    texts = runs[0].config.get("info", {}) if runs else {}
    return {name: texts.get(name, "") for name in sorted(names, key=lambda name: name not in INFO)}


def _entries(run: Run, name: str, text: str) -> list[Entry]:
    """An entry of Info in all evaluations that have it as a vector or matrix of finite numbers of one shape."""
    entries = []
    for line in run.lines:
        values = _numbers((line.get("info") or {}).get(name))
        if values is None:
            continue
        kinds, names = [], []
        for axis, cohort in enumerate(_cohorts(text, values.shape, line.get("cohort") or [])):
            numbers = np.asarray(range(values.shape[axis]) if cohort is None else cohort, np.int64)
            # The cohorts of older runs stand in another order.
            values = np.take(values, np.argsort(numbers), axis)
            kinds.append("entry" if cohort is None else "client")
            names.append([str(number) for number in np.sort(numbers)])
        entries.append(Entry(line["round"], values, kinds, names))
    return [one for one in entries if one.values.ndim == entries[-1].values.ndim]


def _maps(seed: int, name: str, entries: Sequence[Entry]) -> list[Heat]:
    """Maps of a run: of a vector the clients by rounds, of a matrix some of the rounds."""
    if entries[0].values.ndim == 1:
        return [_over_rounds(f"seed {seed}", name, entries)]
    places = np.linspace(len(entries) - 1, 0, min(MOST_ROUNDS, len(entries))).round().astype(int)[::-1]
    maps = []
    for number, values, (y, x), (rows, columns) in (entries[place] for place in places):
        title, is_square = f"seed {seed}, round {number}", rows == columns
        heat = Heat(title, x, y, values.tolist(), (), rows, columns, unit=name, has_square_cells=is_square)
        maps.append(heat)
    return maps


def _over_rounds(title: str, name: str, entries: Sequence[Entry]) -> Heat:
    """Map of clients by rounds, white where a client did not take part."""
    rows = sorted({row for entry in entries for row in entry.names[0]}, key=int)
    table = np.full((len(rows), len(entries)), np.nan)
    for column, entry in enumerate(entries):
        table[[rows.index(row) for row in entry.names[0]], column] = entry.values
    columns = [str(entry.round) for entry in entries]
    return Heat(title, ROUND, entries[0].kinds[0], table.tolist(), (), rows, columns, unit=name)


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
