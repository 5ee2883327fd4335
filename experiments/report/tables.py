"""Tables of a report: results beside the papers', configuration, timings and versions."""

import functools
import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from markupsafe import Markup

from experiments.choices import FIELD, Protocol
from experiments.fields import flag
from experiments.folder import load
from experiments.folder.run_folder import ATTACKERS, HONEST, VALIDATION, rounded, score_text
from experiments.folder.stored_runs import Group, Run, plain
from experiments.host.console import duration
from experiments.papers import settings
from experiments.papers.published import Published
from experiments.show.curves import chosen_on, goodness, ordered
from experiments.show.tables import NOTHING, mean_text

_SCORES = {"pooled": "pooled", "std": "std over clients", "worst_decile": "worst decile", "jain": "Jain"}
"""Name in the metrics log -> heading; scores other than the primary one come after these."""
_HEADINGS = {"macro_f1": "macro F1", "auc": "AUC"}
"""Score -> heading, where that is not its name."""
_SUBSETS = {"honest": HONEST, "attackers": ATTACKERS, "new clients": "new_clients"}
"""Heading -> entry of an evaluation with some clients by themselves."""

Row: TypeAlias = Mapping[str, str | None]
"""Heading of a column -> text or markup; the first names the row."""


class Table:
    """Rows under the headings of all of them, columns without any content left out; `strong` are the numbers of rows
    that stand out."""

    def __init__(self, rows: Sequence[Row], strong: Sequence[int] = ()):
        names = dict.fromkeys(itertools.chain.from_iterable(rows))
        self.columns = [name for name in names if any(row.get(name) for row in rows)]
        self.rows, self.strong = [[row.get(name) or NOTHING for name in self.columns] for row in rows], strong
        self.numbers = [
            all(re.match(r"(<.*?>)?[-\d+\N{MINUS SIGN}—]", text) for text in of) for of in zip(*self.rows, strict=True)
        ]


code = Markup("<code>{}</code>").format
unfinished = Markup('<span class="unfinished">{}</span>').format


def results(groups: Sequence[Group]) -> dict[Protocol, Table]:
    """Results of each protocol after the last round, beside the paper's, on one kind of data; the best stand out."""
    made, on = {}, chosen_on(groups)
    for protocol in ordered(groups):
        by = [goodness(group, protocol, on) for group in groups]
        known = len(groups) > 1 and max(by) > -math.inf
        best = [number for number, one in enumerate(by) if known and one == max(by)]
        made[protocol] = Table([_result(group, protocol) for group in groups], best)
    return made


def _result(group: Group, protocol: Protocol) -> Row:
    config, last, figure = group.runs[0].config, group.rounds[-1] if group.rounds else 0, group.published
    percents: list[str] = load.task_of(config)["in_percent"]
    scores: list[str] = load.task_of(config)["scores"]
    primary, *others = scores
    is_percent = dict.fromkeys(_SCORES, primary in percents) | {name: name in percents for name in (*others, "jain")}
    text = functools.partial(_mean, percent=primary in percents)
    # How many there are is a column of its own.
    values = group.values(last, protocol, "mean")
    mean = mean_text(values, percent=primary in percents).partition(" (")[0]
    row: dict[str, str | None] = {"setting": group.label, "mean": mean if group.rounds else None}
    summaries = [line[protocol] for line in group.lines(last) if protocol in line]
    row["clients"] = load.over(summaries, load.number_of_clients(config)).removesuffix(" clients") or None
    row[VALIDATION] = text(group.values(last, protocol, on=VALIDATION))
    for name, heading in (_SCORES | {name: _HEADINGS.get(name, name) for name in others}).items():
        row[heading] = _mean(group.values(last, protocol, name), percent=is_percent[name])
    row["best (round)"] = _best(group, protocol, percent=primary in percents)
    for heading, entry in _SUBSETS.items():
        means = [((line.get(entry) or {}).get(protocol) or {}).get("mean") for line in group.lines(last)]
        row[heading] = text([mean for mean in means if mean is not None])
    row["paper"], row["difference"] = None, None
    if figure is not None:
        row["paper"] = Markup("{:.2f}<small>{}</small>").format(figure.accuracy_percent, figure.source)
        row["difference"] = _difference(group, protocol, figure)
    rounds = group.runs[0].spec.rounds
    state = str(last) if group.is_finished else unfinished(f"{last} of {rounds}")
    return row | {"seeds": str(len(group.counted)), "round": state}


def _mean(values: Sequence[float], *, percent: bool) -> str | None:
    return score_text(statistics.fmean(values), percent=percent) if values else None


def units(group: Group) -> str:
    """Which score counts, and which ones are in percent, in a sentence."""
    config = group.runs[0].config
    task = load.task_of(config)
    percents = ", ".join(str(_HEADINGS.get(name, name)) for name in task["in_percent"])
    return f"Values are of {task['scores'][0]}; in percent: {percents or 'none'}."


def _difference(group: Group, protocol: Protocol, figure: Published) -> str | None:
    """Our result minus the paper's: the mean after the last round, or the paper's own measure."""
    measure = settings.MEASURES[figure.paper]
    _, table = group.curve(protocol, FIELD[measure.average])
    if not table.size:
        return None
    ours = table[:, -1] if measure.score == "last" else table.max(1)
    words = f"{ours.mean() - figure.accuracy_percent:+.2f}".replace("-", "\N{MINUS SIGN}")
    return words if measure.score == "last" else Markup("{}<small>best pooled</small>").format(words)


def _best(group: Group, protocol: Protocol, *, percent: bool) -> str | None:
    """Accuracy and number of the best round, chosen on validation examples if there are any."""
    rounds, means = group.curve(protocol)
    if not rounds:
        return None
    over = means.mean(0).tolist()
    validation = [group.values(number, protocol, on=VALIDATION) for number in rounds]
    # As the terminal does: the first of those that are equal as they are written.
    by = [rounded(mean) for mean in (map(statistics.fmean, validation) if all(validation) else over)]
    best = by.index(load.chosen(group.runs[0].config, by))
    return f"{score_text(over[best], percent=percent)} ({rounds[best]})"


def options(groups: Sequence[Group]) -> tuple[Table | None, dict[str, str]]:
    """Options that differ or that not all of some settings side by side have; and options that all share."""
    names = {group.label: group.setting for group in groups}
    every = dict.fromkeys(itertools.chain.from_iterable(names.values()))
    values = {name: [plain(of.get(name)) for of in names.values()] for name in every}
    alike = {_named(name): of[0] for name, of in values.items() if len(set(of)) == 1}
    apart = {name: dict(zip(names, of, strict=True)) for name, of in values.items() if len(set(of)) > 1}
    rows: list[Row] = [{"option": code(_named(name))} | of for name, of in apart.items()]
    if len(names) > len(apart):
        rows = [{"setting": label} | {_named(name): of[label] for name, of in apart.items()} for label in names]
    return Table(rows) if apart else None, alike


def _named(name: str) -> str:
    return name if name in ("dataset", "method") else flag(name)


def timings(groups: Sequence[Group]) -> Table:
    """Progress and time of each run."""
    return Table([_timing(group.label, run) for group in groups for run in group.runs])


def _timing(label: str, run: Run) -> Row:
    speed = (run.summary or (run.lines[-1] if run.lines else {})).get("examples_per_second")
    return {
        "setting": label,
        "seed": str(run.seed),
        "state": run.state if run.summary else unfinished(run.state),
        "time": duration(run.lines[-1]["seconds"]) if run.lines else None,
        "examples/s": None if speed is None else f"{speed:,.0f}",
        "device, chunk": f"{run.config.get('device', NOTHING)}, {run.config.get('chunk', NOTHING)}",
        "folder": code(str(run.folder)),
    }


def versions(kinds: Mapping[str, Sequence[Group]]) -> tuple[Table | None, dict[str, Any]]:
    """Versions and devices that differ between runs, with their runs, and those that all runs share; groups by the
    headings under which they stand side by side."""
    runs = [(heading, group, run) for heading, groups in kinds.items() for group in groups for run in group.runs]
    found: dict[str, dict[str, list[str]]] = {}
    for heading, group, run in runs:
        who = f"{group.label}, seed {run.seed}" + (f", {heading}" if len(kinds) > 1 else "")
        for name, value in [*run.config.get("versions", {}).items(), ("device", run.config.get("device"))]:
            found.setdefault(name, {}).setdefault(str(value), []).append(who)
    apart = {name: of for name, of in found.items() if len(of) > 1 or sum(map(len, of.values())) < len(runs)}
    rows: list[Row] = [
        {"program": name, "version": value, "runs": f"{len(who)} of {len(runs)} runs" if who[3:] else "; ".join(who)}
        for name, of in apart.items()
        for value, who in of.items()
    ]
    alike = {name: next(iter(of)) for name, of in found.items() if name not in apart}
    return Table(rows) if rows else None, alike
