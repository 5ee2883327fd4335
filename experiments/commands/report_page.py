"""Report page: its tables, the values for the template page.html.jinja, and the text of one self-contained file."""

import base64
import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from markupsafe import Markup

from experiments.commands import report_charts as charts
from experiments.folder import load
from experiments.folder.best_round import evaluations, phase_summary
from experiments.folder.load import StoredRun
from experiments.folder.run_folder import ATTACKERS, HONEST, VALIDATION, rounded, score_text, slug
from experiments.folder.stored_runs import Group, chosen_on, goodness, ordered, plain, short
from experiments.folder.version import source_versions, versions_behind
from experiments.host.console import duration
from experiments.show.curves import left_out
from experiments.show.pictures import Panel, Picture, as_svg
from experiments.show.tables import Table, mean_text, number
from experiments.show.tables import page as render
from experiments.spec.choices import FIELD, Protocol
from experiments.spec.groups import Data, Federation, Robustness
from experiments.spec.option_notes import flag
from pfl_jax.compare import MANY_RUNS
from pfl_jax.primitives.metrics import Transfer
from pfl_jax.validation import listed

Maker: TypeAlias = Callable[[Sequence[Group]], list[Picture]]
"""Makes the charts of groups that stand side by side."""

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_OF_A_TABLE = ("rounds", "eval_clients", "target_accuracy", "patience")
_OF_A_TABLE += tuple(field.name for part in (Data, Federation, Robustness) for field in dataclasses.fields(part))
"""Options that all runs of a ranking share: about its clients, and how far they train."""
_CHARTS: dict[str, Maker] = {
    "Curves": charts.curves,
    "Clients": charts.clients,
    "Weights": charts.information,
    "Partition": charts.partitions,
}


def page(
    groups: Sequence[Group],
    repeated: Sequence[StoredRun] = (),
    notes: Sequence[str] = (),
    more: Mapping[str, Maker] | None = None,
) -> str:
    """The whole page.

    Args:
      groups: the settings.
      repeated: runs that are left out, see `stored_runs.group`.
      notes: sentences above the results.
      more: heading of a further section -> maker of its charts.
    """
    by_kind = kinds(groups)
    makers = _CHARTS | dict(more or {})
    made = {heading: {data: make(some) for data, some in by_kind.items()} for heading, make in makers.items()}
    return render(
        _TEMPLATE,
        is_html=True,
        style=Markup(_TEMPLATE.with_name("page.css").read_text()),
        source=_as_link,
        groups=groups,
        kinds=by_kind,
        charts={heading: of for heading, of in made.items() if any(of.values()) or heading == "Curves"},
        notes=notes,
        chosen_on=chosen_on,
        duration=duration,
        left_out={data: left_out(some) for data, some in by_kind.items()},
        enumerated=listed,
        slug=slug,
        results=results,
        options=options,
        versions=versions,
        runs=[run for group in groups for run in group.runs],
        repeated=repeated,
        titles=charts.PROTOCOL_TITLES,
        units=" ".join(dict.fromkeys(map(units, groups))),
    )


def _as_link(panel: Panel) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(as_svg(panel).encode()).decode()}"


def kinds(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Heading -> the groups that stand side by side: on the same data and clients, with the same rounds and score."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        key = [group.data, group.axis, {name: group.setting.get(name) for name in _OF_A_TABLE}]
        found.setdefault(json.dumps(key, default=str), []).append(group)
    return {_heading(some[0], groups): some for some in found.values()}


def _heading(group: Group, groups: Sequence[Group]) -> str:
    """Words that tell the data and clients of a group from others."""
    alike = [one for one in groups if one.data == group.data]
    words = [group.axis] if len({one.axis for one in alike}) > 1 else []
    apart = [name for name in _OF_A_TABLE if len({repr(one.setting.get(name)) for one in alike}) > 1]
    words += [short(name, group.setting[name]) for name in apart if name in group.setting]
    return ", ".join([group.data, *words])


_HEADINGS = {"std": "std over clients", "worst_decile": "worst decile", "jain": "Jain"}
_HEADINGS |= {"macro_f1": "macro F1", "auc": "AUC"}
"""Name in the metrics log -> heading, where that is not its name."""
_SUBSETS = {"honest": HONEST, "attackers": ATTACKERS, "new clients": "new_clients"}
"""Heading -> entry of an evaluation with some clients by themselves."""

Row: TypeAlias = Mapping[str, str | None]
"""Heading of a column -> text or markup; the first names the row."""


code = Markup("<code>{}</code>").format
unfinished = Markup('<span class="unfinished">{}</span>').format


def results(groups: Sequence[Group]) -> dict[Protocol, Table]:
    """Results of each protocol after the last round, beside the paper's, on one kind of data; the best stand out."""
    made, on = {}, chosen_on(groups)
    for protocol in ordered(groups):
        by = [goodness(group, protocol, on) for group in groups]
        known = len(groups) > 1 and max(by) > -math.inf
        best = [number for number, one in enumerate(by) if known and one == max(by)]
        made[protocol] = Table.of("", [_result(group, protocol) for group in groups], best)
    return made


def _result(group: Group, protocol: Protocol) -> Row:
    config, last = group.runs[0].config, group.rounds[-1] if group.rounds else 0
    lines = group.lines(None)
    primary, *others = load.task_of(config)["scores"]
    percents = {*load.task_of(config)["in_percent"]}
    if primary in percents:
        percents |= {"mean", "pooled", "std", "worst_decile"}

    def text(values: Sequence[float], name: str = "mean") -> str | None:
        return score_text(statistics.fmean(values), percent=name in percents) if values else None

    # How many there are is a column of its own.
    mean = mean_text(group.values(None, protocol), percent="mean" in percents).partition(" (")[0]
    row: dict[str, str | None] = {"setting": group.label, "mean": mean if group.rounds else None}
    if 1 < len(group.counted) < MANY_RUNS:
        values = group.values(None, protocol)
        row["each seed"] = " ".join(score_text(value, percent="mean" in percents) for value in values)
    over = load.coverage_text([line[protocol] for line in lines if protocol in line], load.number_of_clients(config))
    row |= {"clients": over.removesuffix(" clients"), VALIDATION: text(group.values(None, protocol, on=VALIDATION))}
    for name in ("pooled", "std", "worst_decile", "jain", *others):
        row[_HEADINGS.get(name, name)] = text(group.values(None, protocol, name), name)
    row["best (round)"] = _best(group, protocol, percent="mean" in percents)
    for heading, entry in _SUBSETS.items():
        means = [((line.get(entry) or {}).get(protocol) or {}).get("mean") for line in lines]
        row[heading] = text([mean for mean in means if mean is not None])
    if protocol == "received":
        higher = load.task_of(config)["higher_is_better"]
        over = [phase_summary(run.lines, higher_is_better=higher) for run in group.counted]
        row |= {name: text([one[name] for one in over if one]) for name in Transfer._fields}
    row["by network"] = _by_network(group, protocol, percent="mean" in percents)
    if (figure := group.published) is not None:
        row["paper"] = Markup("{:.2f}<small>{}</small>").format(figure.accuracy_percent, figure.source)
        row["difference"] = _difference(group, protocol)
    state = str(last) if group.is_finished else unfinished(f"{last} of {group.runs[0].spec.rounds}")
    state = ", ".join(str(line["round"]) for line in lines) + " (kept)" if group.keeps else state
    return row | {"seeds": str(len(group.counted)), "round": state}


def _by_network(group: Group, protocol: Protocol, *, percent: bool) -> str | None:
    """Mean over the clients of each network after the last round, where a federation has several networks."""
    found: dict[str, list[float]] = {}
    for run, line in zip(group.counted, group.lines(None), strict=False):
        scores = line.get(f"{protocol}_per_client") or ()
        for network, score in zip(run.config.get("networks", ()), scores, strict=False):
            found.setdefault(network, []).extend([] if score is None else [score])
    means = {network: statistics.fmean(of) for network, of in found.items() if of}
    return ", ".join(f"{network} {score_text(mean, percent=percent)}" for network, mean in means.items()) or None


def units(group: Group) -> str:
    """Which score counts, and which ones are in percent, in a sentence."""
    task = load.task_of(group.runs[0].config)
    percents = ", ".join(_HEADINGS.get(str(name), str(name)) for name in task["in_percent"])
    return f"Values are of {task['scores'][0]}; in percent: {percents or 'none'}."


def _difference(group: Group, protocol: Protocol) -> str | None:
    """Our result minus the paper's, by the round and average of the paper's own measure."""
    figure = group.published
    assert figure is not None
    measure = figure.measure
    if not group.curve(protocol, FIELD[measure.average])[0]:
        return None
    ours: list[Any] = [run.accuracy(protocol, measure.score, measure.average) for run in group.counted]
    words = number(float(np.mean(ours)) - figure.accuracy_percent, "+.2f").replace("-", "\N{MINUS SIGN}")
    return words if measure.score == "last" else Markup("{}<small>best pooled</small>").format(words)


def _best(group: Group, protocol: Protocol, *, percent: bool) -> str | None:
    """Accuracy and number of the best round, chosen on validation examples if there are any."""
    if not group.curve(protocol)[0]:
        return None
    rounds = [{line["round"]: line for line in evaluations(run.lines, protocol)} for run in group.counted]
    common = {at: [of_run[at] for of_run in rounds] for at in sorted(set.intersection(*map(set, rounds)))}
    validated = all(protocol in line.get(VALIDATION, {}) for lines in common.values() for line in lines)

    def mean(at: int, *, validated: bool) -> float:
        summaries = [(line[VALIDATION] if validated else line)[protocol]["mean"] for line in common[at]]
        return math.nan if None in summaries else rounded(statistics.fmean(summaries))

    # As the terminal does: the first of those that are equal as they are written.
    means = {at: of for at in common if not math.isnan(of := mean(at, validated=validated))}
    best = next((at for at, of in means.items() if of == load.best_mean(group.runs[0].config, means.values())), None)
    return None if best is None else f"{score_text(mean(best, validated=False), percent=percent)} ({best})"


def options(groups: Sequence[Group]) -> tuple[Table | None, dict[str, str]]:
    """Options that differ or that not all of some settings side by side have; and options that all share."""
    names = {group.label: group.setting for group in groups}
    every = dict.fromkeys(itertools.chain.from_iterable(names.values()))
    values = {_named(name): [plain(of.get(name)) for of in names.values()] for name in every}
    alike = {name: of[0] for name, of in values.items() if len({*of}) == 1}
    apart = {name: dict(zip(names, of, strict=True)) for name, of in values.items() if name not in alike}
    rows: list[Row] = [{"option": code(name)} | of for name, of in apart.items()]
    if len(names) > len(apart):
        rows = [{"setting": label} | {name: of[label] for name, of in apart.items()} for label in names]
    return Table.of("", rows) if apart else None, alike


def _named(name: str) -> str:
    return name if name in ("dataset", "method") else flag(name)


def versions(kinds: Mapping[str, Sequence[Group]]) -> tuple[Table | None, dict[str, Any]]:
    """Versions and devices that differ between runs, with their runs, and those that all runs share; groups by the
    headings under which they stand side by side."""
    runs = [(heading, group, run) for heading, groups in kinds.items() for group in groups for run in group.runs]
    found: dict[str, dict[str, list[str]]] = {}
    for heading, group, run in runs:
        who = f"{group.label}, seed {run.seed}" + (f", {heading}" if len(kinds) > 1 else "")
        about = run.config.get("versions", {}) | {"device": run.config.get("device")}
        # Of a run that went on under other code, all that made it.
        of_code = {
            name: dict.fromkeys(str(one[name]) for one in versions_behind(run.config)) for name in source_versions()
        }
        about |= {name: ", then ".join(values) for name, values in of_code.items() if name in about}
        for name, value in about.items():
            found.setdefault(name, {}).setdefault(str(value), []).append(who)
    alike = {name: next(iter(of)) for name, of in found.items() if [len(who) for who in of.values()] == [len(runs)]}
    rows: list[Row] = [
        {"program": name, "version": value, "runs": f"{len(who)} of {len(runs)} runs" if who[3:] else "; ".join(who)}
        for name, of in found.items()
        if name not in alike
        for value, who in of.items()
    ]
    return Table.of("", rows) if rows else None, alike
