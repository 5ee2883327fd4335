"""Charts of a report: curves, accuracies of the clients, partitions, Info of methods, one client, and features."""

import functools
import json
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
import pandas as pd

from experiments.folder.load import StoredRun, coverage_text
from experiments.folder.stored_runs import Group, headline
from experiments.show import curves as by_round
from experiments.show.curves import explained_band, shown_groups
from experiments.show.draw import MARKERS, ROUND, bars, grays, lines, matrix, over_runs, rows_of, scatter
from experiments.show.pictures import Panel, Picture, chart
from experiments.spec.option_notes import label
from pfl_jax.errors import InvalidInput

MOST_PARTITIONS = 4
MOST_CLIENTS = 500
"""Maximum number of clients in a partition's picture."""
MOST_SEEDS = 3
"""Maximum number of a setting's runs whose Info is drawn."""
MOST_ROUNDS = 4
"""Maximum number of a run's rounds in which a matrix is drawn."""
MOST_EXAMPLES = 60
"""Maximum number of a client's test examples whose features are drawn."""
NOISE = 1e-9
"""Size up to which numbers of Info count as rounding errors, such as the gap of a solved program."""
PROTOCOL_TITLES: dict[str, str] = {
    "received": "After aggregation (received)",
    "trained": "After own training (trained)",
    "before_aggregation": "Between the round's training and its aggregation (before_aggregation)",
}
INFO = {
    "head_weights": "Head weights",
    "weights": "Aggregation weights",
    "trace": "Fisher traces",
    "mixture": "Mixture weights",
    "alpha": "Share of the own model",
}
"""Name in Info -> title; other entries have their name as title. Captions are from the method's docstring."""
_BYTES = "MB up and down, all clients together"
"""Label of the axis of bytes, over which curves are drawn too."""

Entries: TypeAlias = dict[int, "pd.Series | pd.DataFrame"]
"""Round -> an entry of Info, whose axes are numbered by clients or by entries."""


def curves(groups: Sequence[Group]) -> list[Picture]:
    """Mean accuracy of each group for each protocol, over rounds and, if the runs count bytes, over bytes."""
    everyone, charts, by_bytes, some = groups[0].first.everyone, [], [], shown_groups(groups)
    main, band = some[0].label if len(some) == 1 else "", explained_band(some)
    for panel in by_round.curves(groups):
        protocol = panel.title
        evaluated = [line[protocol] for one in some for run in one.counted for line in run.lines if protocol in line]
        over = coverage_text(evaluated, everyone)
        caption = " ".join(filter(None, [f"Means over {over}." if over else "", band]))
        charts.append(Picture(PROTOCOL_TITLES[protocol], caption, [panel._replace(title="")]))
        frame: Any = _over_bytes(some, panel.frame)
        if frame[_BYTES].any():
            by_bytes.append(chart(f"{PROTOCOL_TITLES[protocol]}, by bytes sent", band, lines, frame, main=main))
    return charts + by_bytes


def _over_bytes(groups: Sequence[Group], frame: pd.DataFrame) -> pd.DataFrame:
    """Curves over the mean number of bytes sent instead of rounds; settings without this number are left out."""
    means = {}
    for group in groups:
        for number in group.rounds:
            sent = [line.get("bytes_up", np.nan) + line.get("bytes_down", np.nan) for line in group.lines(number)]
            means[group.label, number] = float(np.mean(sent)) / 1e6
    x = [means[key] for key in zip(frame.line, frame[ROUND], strict=True)]
    found: Any = frame.assign(**{_BYTES: x}).dropna(subset=_BYTES)
    return found[["line", _BYTES, *frame.columns[2:]]]


def clients(groups: Sequence[Group]) -> list[Picture]:
    """Accuracies of the clients after the last round, sorted: mean and range over runs, at 101 quantiles."""
    protocol, axis, shares = headline(groups), groups[0].first.axis, np.linspace(0, 100, 101)
    labels = {"x_label": "share of the clients in %", "y_label": axis}
    found = {group.label: group.per_client(group.results, protocol) for group in shown_groups(groups)}
    rows = [
        rows_of(name, shares.tolist(), [np.percentile(row, shares) for row in runs], **labels)
        for name, runs in found.items()
        if runs
    ]
    if not rows:
        return []
    frame, main = over_runs(pd.concat(rows)), next(name for name, runs in found.items() if runs)
    several = "Bands: from the lowest to the highest seed." if frame.low.notna().any() else ""
    title = f"Clients in order of their {axis.removesuffix(' in %')} ({protocol})"
    return [chart(title, several, lines, frame, main=main if len(rows) == 1 else "")]


def partitions(groups: Sequence[Group]) -> list[Picture]:
    """Classes by clients: each partition once, at most MOST_PARTITIONS."""
    runs = [run for group in groups for run in group.runs if run.config.get("class_table")]
    different = {json.dumps(run.config["class_table"]): run for run in reversed(runs)}
    some = [run for run in runs if run in different.values()]
    charts = [_partition(run) for run in some[:MOST_PARTITIONS]]
    if (more := len(some) - MOST_PARTITIONS) > 0:
        charts[-1] = charts[-1]._replace(caption=f"{charts[-1].caption} {more} more partitions are not shown.")
    return charts


def _partition(run: StoredRun) -> Picture:
    spec = run.spec
    details = {
        "grouped": f", s = {spec.s:g}",
        "pathological": f" ({spec.pathological_protocol})",
        "dirichlet": f", beta = {spec.beta:g}",
    }
    shift = "" if spec.shift == "none" else f", shift of {spec.shift}"
    words = f"{label(spec.partition)}{details.get(spec.partition, '')}{shift}, seed {run.seed}"
    return classes_by_clients(run.config["class_table"], words)


def classes_by_clients(table: Any, title: str, names: Sequence[str] = ()) -> Picture:
    """Picture of the numbers of training examples by client and class, with clients from left to right.

    Args:
      table: numbers of examples [N, K].
      title: title of the picture.
      names: names of the classes; by default their numbers.
    """
    table = np.asarray(table, np.int64)
    sizes, some = table.sum(1), table[:MOST_CLIENTS]
    equal = bool(sizes.min() == sizes.max())
    words = f"{len(table)} clients with {sizes.min()}{'' if equal else f' to {sizes.max()}'} training examples, shaded "
    words += "by examples of each class" + ("." if equal else "; bars above: all examples of a client.")
    if len(some) < len(table):
        words += f" The first {len(some)} clients."
    classes = pd.Index(names or range(table.shape[1]), name="class")
    frame = pd.DataFrame(some.T, classes, pd.RangeIndex(len(some), name="client"))
    totals = () if equal else some.sum(1).tolist()
    look = {"unit": "examples", "limits": grays([frame]), "totals": totals, "inches": (4.3, 2.5)}
    return chart(title, words, matrix, frame, **look)


def information(groups: Sequence[Group]) -> list[Picture]:
    """Vectors and matrices of Info, such as head weights, over the rounds of each group's runs.

    A vector becomes one map of clients by rounds for each seed; a matrix becomes several maps for each seed, one for
    each of a few rounds.
    """
    charts = []
    for group in groups:
        runs = [run for run in group.counted if any(line.get("info") for line in run.lines)][:MOST_SEEDS]
        for name in _names(runs):
            maps = {title: frame for run in runs for title, frame in _maps(run, name).items()}
            # Skip zeros with the rounding errors of a solver.
            if any(np.nanmax(np.abs(frame.to_numpy())) > NOISE for frame in maps.values()):
                draw = functools.partial(matrix, unit=name, limits=grays([*maps.values()]))
                panels = [_map(title, draw, frame) for title, frame in maps.items()]
                text = group.first.config.get("info", {}).get(name, "")
                charts.append(Picture(f"{INFO.get(name, name)}: {group.label}", text, panels, 2))
    return charts


def _map(title: str, draw: Any, frame: pd.DataFrame) -> Panel:
    is_square = frame.index.name == frame.columns.name and len(frame) == len(frame.columns)
    return Panel(title, functools.partial(draw, is_square=is_square), frame, (3.2 if is_square else 4.3, 2.5))


def client(groups: Sequence[Group], number: int) -> list[Picture]:
    """One client in the first run of each group: its labels, its scores over the rounds, and whom it learns from.

    Raises:
      InvalidInput: the runs have no such client.
    """
    runs = {group.label: group.counted[0] for group in groups if group.counted}
    for name, run in runs.items():
        if number >= run.everyone:
            raise InvalidInput(f"--client {number}: the clients of {name} are 0 to {run.everyone - 1}")
    tables = {run.seed: table for run in runs.values() if (table := run.config.get("class_table"))}
    charts = [
        _bars(f"Its training examples, seed {seed}", pd.Series(table[number]).rename_axis("class"), "examples")
        for seed, table in tables.items()
    ]
    protocol, axis = headline(groups), groups[0].first.axis
    evaluated = [(name, line) for name, run in runs.items() for line in run.lines if f"{protocol}_per_client" in line]
    scores = [(name, line["round"], line[f"{protocol}_per_client"][number]) for name, line in evaluated]
    frame = pd.DataFrame(scores, columns=["line", ROUND, axis]).dropna()
    if len(frame):
        charts.append(chart(f"Its scores ({protocol})", "", lines, frame))
    return charts + [one for name, run in runs.items() for one in _teachers(name, run, number)]


def _bars(title: str, heights: pd.Series, unit: str, caption: str = "") -> Picture:
    return chart(title, caption, bars, heights.to_frame("").rename_axis(columns=unit), inches=(4.8, 2.9))


def _teachers(title: str, run: StoredRun, number: int) -> list[Picture]:
    """A client's row of each matrix of clients by clients, from the last round in which it took part."""
    charts = []
    for name in _names([run]):
        matrices = {
            at: entry
            for at, entry in _entries(run, name).items()
            if [axis.name for axis in entry.axes] == ["client", "client"] and number in entry.index
        }
        if matrices:
            at = max(matrices)
            heading = f"{INFO.get(name, name)} of this client: {title}, round {at}"
            charts.append(_bars(heading, matrices[at].loc[number], name, run.config.get("info", {}).get(name, "")))
    return charts


def _names(runs: Sequence[StoredRun]) -> list[str]:
    """Names of the entries of Info; entries in the papers' figures come first."""
    names = dict.fromkeys(name for run in runs for line in run.lines for name in line.get("info") or {})
    return sorted(names, key=lambda name: name not in INFO)


def _entries(run: StoredRun, name: str) -> Entries:
    """Entry of Info in evaluations where it is finite, and a vector or matrix as in the last one."""
    found: Entries = {}
    for line in run.lines:
        try:
            values = np.asarray((line.get("info") or {}).get(name), np.float64)
        except (TypeError, ValueError):
            continue
        if values.ndim not in (1, 2) or not values.size or not np.isfinite(values).all():
            continue
        axes: Any = _axes(run.config.get("info", {}).get(name, ""), values.shape, line.get("cohort") or [])
        # The cohorts of older runs are not sorted.
        entry = pd.Series(values, *axes) if values.ndim == 1 else pd.DataFrame(values, *axes).sort_index(axis=1)
        found[line["round"]] = entry.sort_index()
    return {number: entry for number, entry in found.items() if entry.ndim == found[max(found)].ndim}


def _axes(text: str, shape: tuple[int, ...], cohort: Sequence[int]) -> list[pd.Index]:
    """Index of each axis, clients or numbers of entries, from a text such as "[M, K], ..." that begins with the shape.

    Without a shape in the text, axes as long as the cohort are its clients.
    """
    named = re.match(r"\[(.*?)\]", text)
    letters = named[1].split(", ") if named else []
    clients = "cohort" if "cohort" in letters else "M"
    if len(letters) != len(shape):
        letters = [clients] * len(shape)
    return [
        pd.Index(cohort, name="client")
        if letter == clients and size == len(cohort)
        else pd.RangeIndex(size, name="entry")
        for letter, size in zip(letters, shape, strict=True)
    ]


def _maps(run: StoredRun, name: str) -> dict[str, pd.DataFrame]:
    """Title -> map of a run: for a vector, clients by rounds (NaN if absent); for a matrix, one map for each of some
    rounds."""
    entries, title = _entries(run, name), f"seed {run.seed}"
    if not entries:
        return {}
    if entries[max(entries)].ndim == 1:
        return {title: pd.concat(entries, axis=1).sort_index().rename_axis(columns=ROUND)}
    places = np.linspace(len(entries) - 1, 0, min(MOST_ROUNDS, len(entries))).round().astype(int)[::-1]
    return {f"{title}, round {number}": entries[number] for number in np.take([*entries], places)}  # pyright: ignore


def features(groups: Sequence[Group]) -> list[Picture]:
    """Features of the clients' models in the first run of each group, and the reasons why groups have none."""
    charts, remarks = [], []
    for group in groups:
        run = next((run for run in group.counted if run.summary is not None), None)
        if run is None:
            continue
        try:
            words = "Features of test examples, each by its own client's model, in the two principal components of "
            words += "all; colors are classes, shapes are clients."
            title = f"{group.label}, seed {run.seed}"
            charts.append(chart(title, words, scatter, _features(run), inches=(4.3, 3.4)))
        except InvalidInput as error:
            remarks.append(f"{group.label}: {error}.")
    return charts + ([Picture("Without features", " ".join(remarks), [])] if remarks else [])


def _features(stored: StoredRun) -> pd.DataFrame:
    """Frame for `draw.scatter`: features of some test examples of a few clients in two principal components."""
    # Imported only here: most reports load no model.
    from sklearn.decomposition import PCA

    from experiments.run.loaded_run import load_run

    run, rows = load_run(stored.path), []
    if not run.model.num_features:
        raise InvalidInput("its model has no features")
    for client in np.unique(np.linspace(0, run.data.num_clients - 1, len(MARKERS)).round().astype(int)).tolist():
        data = run.client_data(client)
        inputs: Any = jax.tree.map(lambda leaf: leaf[:MOST_EXAMPLES], data.x)
        values = np.asarray(run.model.features(run.params(client)["backbone"], inputs))
        if values.ndim != 2 or np.ndim(data.y) != 1 or not np.issubdtype(np.asarray(data.y).dtype, np.integer):
            raise InvalidInput("features are drawn by class, and these examples have none")
        rows.append(pd.DataFrame(values).assign(client=client, **{"class": np.asarray(data.y)[:MOST_EXAMPLES]}))
    table = pd.concat(rows, ignore_index=True)
    values = table.drop(columns=["client", "class"]).to_numpy()
    analysis = PCA(2).fit(values)
    first, second = 100 * analysis.explained_variance_ratio_
    names = [f"first component, {first:.0f} % of the variance", f"second component, {second:.0f} %"]
    return pd.DataFrame(analysis.transform(values), columns=names).join(table[["client", "class"]])
