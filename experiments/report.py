"""Report of runs as an HTML page, or a picture of their curves.

    python -m experiments.report runs/digits-fedpac-seed0-001
    python -m experiments.report runs/sweeps/digits --out sweep.html
    python -m experiments.report runs/digits-fedpac-seed0-001 --plot curves.svg
    python -m experiments.report runs/sweeps/digits --plot curves.pdf --width 3.3 --band interval

Folders of sweeps, tables and figures are searched for runs. Runs that differ only in their seed are one line with a
band. The page is one file that needs no network.
"""

import base64
import dataclasses
import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from markupsafe import Markup

from experiments.cli.parser import check_new, parse
from experiments.commands import report_charts as charts
from experiments.folder import stored_runs
from experiments.folder.best_round import evaluations
from experiments.folder.load import StoredRun
from experiments.folder.run_folder import ATTACKERS, HONEST, VALIDATION, rounded, score_text, slug
from experiments.folder.stored_runs import Group, Mean, chosen_on, goodness, option_text, ordered, value_text
from experiments.folder.version import source_versions, versions_behind
from experiments.host.console import Terminal, duration, print_line
from experiments.host.exit_codes import exit_code, exit_process
from experiments.show import curves, tables
from experiments.show.draw import Band
from experiments.show.pictures import ENDINGS, Picture, as_svg
from experiments.show.tables import Table, score
from experiments.spec.choices import FIELD, Protocol
from experiments.spec.groups import Data, Federation, Robustness
from experiments.spec.option_notes import Argument, flag
from pfl_jax.atomic_write import write_text
from pfl_jax.compare import MANY_RUNS
from pfl_jax.errors import InvalidInput
from pfl_jax.validation import Positive, Range, listed

SIGNATURE = "pfl_jax · report".encode()
"""Text in every page, which shows that a report made it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line of the report."""

    runs: Annotated[tuple[Path, ...], Argument("positional", "RUN...")]
    """Folders of runs, or folders above runs."""
    out: Annotated[Path | None, Argument(metavar="FILE")] = None
    """File of the page; None is report.html."""
    plot: Annotated[Path | None, Argument(metavar="FILE")] = None
    """Write only a picture of the curves: .png, .svg or .pdf."""
    width: Positive | None = None
    """Width of the --plot in inches, for a column of a paper (3.3, for example); it then has one protocol, a band over
    seeds and a serif font."""
    band: Band | None = None
    """Band over the seeds (with --width): the standard deviation, the 95 % interval of the mean, or the range; None is
    deviation."""
    eval_protocol: Protocol | None = None
    """Evaluation protocol shown first; None is the one that most runs report."""
    select: Literal["validation"] | None = None
    """Show only the best setting of each method on validation examples."""
    name: Annotated[tuple[str, ...], Argument("repeated", "SHORT=NAME")] = ()
    """Short names for methods or settings; may be repeated."""
    client: Annotated[int, Range(0)] | None = None
    """Add a section on this client: its labels, its scores, and whom it learns from."""
    features: bool = False
    """Add a PCA of the features of the clients' models, for runs that kept their state (--keep-state always)."""


Maker: TypeAlias = Callable[[Sequence[Group]], list[Picture]]
"""Function that makes the charts of groups shown side by side."""

_TEMPLATE = Path(charts.__file__).with_name("page.html.jinja")
_SHARED = ("rounds", "eval_clients", "target_accuracy", "patience")
_SHARED += tuple(field.name for part in (Data, Federation, Robustness) for field in dataclasses.fields(part))
"""Options that all runs of a ranking share: about the clients, and the length of training."""
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
    """HTML page of a report.

    Args:
      groups: settings with their runs.
      repeated: runs that are left out, see `stored_runs.grouped`.
      notes: sentences above the results.
      more: heading of a further section -> maker of its charts.
    """
    by_kind = kinds(groups)
    makers = _CHARTS | dict(more or {})
    made = {heading: {data: make(some) for data, some in by_kind.items()} for heading, make in makers.items()}
    return tables.page(
        _TEMPLATE,
        is_html=True,
        style=Markup(_TEMPLATE.with_name("page.css").read_text()),
        source=lambda panel: f"data:image/svg+xml;base64,{base64.b64encode(as_svg(panel).encode()).decode()}",
        groups=groups,
        kinds=by_kind,
        charts={heading: charts for heading, charts in made.items() if any(charts.values()) or heading == "Curves"},
        notes=notes,
        chosen_on=chosen_on,
        duration=duration,
        left_out={data: curves.left_out(some) for data, some in by_kind.items()},
        enumerated=listed,
        slug=slug,
        results=results,
        options=configuration,
        versions=versions,
        runs=[run for group in groups for run in group.runs],
        repeated=repeated,
        titles=charts.PROTOCOL_TITLES,
        units=" ".join(dict.fromkeys(_units(group.first.task) for group in groups)),
    )


def kinds(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Heading -> groups shown side by side: with the same data, clients, rounds and score."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        key = [group.first.data, group.first.axis, {name: group.first.setting.get(name) for name in _SHARED}]
        found.setdefault(json.dumps(key, default=str), []).append(group)
    return {_heading(some[0], groups): some for some in found.values()}


def _heading(group: Group, groups: Sequence[Group]) -> str:
    """Heading of a group: its data, and the options in which it differs from other groups on these data."""
    own = group.first
    alike = [one.first for one in groups if one.first.data == own.data]
    words = [own.axis] if len({one.axis for one in alike}) > 1 else []
    apart = [name for name in _SHARED if len({repr(one.setting.get(name)) for one in alike}) > 1]
    words += [option_text(name, own.setting[name]) for name in apart if name in own.setting]
    return ", ".join([own.data, *words])


_HEADINGS = {"std": "std over clients", "worst_decile": "worst decile", "jain": "Jain"}
_HEADINGS |= {"macro_f1": "macro F1", "auc": "AUC"}
"""Name in the metrics log -> heading of its column, where the two differ."""
_SUBSETS = {"honest": HONEST, "attackers": ATTACKERS, "new clients": "new_clients"}
"""Heading -> entry of an evaluation that covers only some of the clients."""

Row: TypeAlias = Mapping[str, str | None]
"""Heading of a column -> text or markup; the first column names the row."""


code = Markup("<code>{}</code>").format
unfinished = Markup('<span class="unfinished">{}</span>').format


def results(groups: Sequence[Group]) -> dict[Protocol, Table]:
    """Table of each protocol's results after the last round, beside the paper's; the best settings stand out."""
    made, on = {}, chosen_on(groups)
    for protocol in ordered(groups):
        by = [goodness(group, protocol, on) for group in groups]
        known = len(groups) > 1 and max(by) > -math.inf
        best = [number for number, one in enumerate(by) if known and one == max(by)]
        made[protocol] = Table.of("", [_result(group, protocol) for group in groups], best)
    return made


def _result(group: Group, protocol: Protocol) -> Row:
    first, lines, counted = group.first, group.results, group.counted
    primary, *others = first.task["scores"]
    percents = {*first.task["in_percent"]}
    if primary in percents:
        percents |= {"mean", "pooled", "std", "worst_decile"}
    percent = "mean" in percents

    def text(mean: Mean, name: str = "mean") -> str | None:
        """Mean without its deviation, which is in the first column of numbers."""
        return mean.text(percent=name in percents).partition(" ±")[0]

    mean = group.mean(protocol)
    row: dict[str, str | None] = {"setting": group.label, "mean": mean.text(percent=percent)}
    if mean.known and 1 < len(counted) < MANY_RUNS:
        row["each seed"] = " ".join(score(value, percent=percent) for value in mean.per_seed.values())
    row |= {"clients": group.coverage(protocol).removesuffix(" clients")}
    row[VALIDATION] = text(group.mean(protocol, on=VALIDATION))
    for name in ("pooled", "std", "worst_decile", "jain", *others):
        row[_HEADINGS.get(name, name)] = text(group.mean(protocol, name), name)
    row["best (round)"] = _best(group, protocol, percent=percent)
    row |= {heading: text(group.mean(protocol, on=entry)) for heading, entry in _SUBSETS.items()}
    if protocol == "received":
        row |= {name: text(mean) for name, mean in group.phases().items()}
    row["by network"] = _by_network(group, protocol, percent=percent)
    if (figure := group.published) is not None:
        row["paper"] = Markup("{:.2f}<small>{}</small>").format(figure.accuracy_percent, figure.source)
        row["difference"] = _difference(group, protocol)
    state = ", ".join(dict.fromkeys(str(line["round"]) for line in lines)) or "0"
    if group.keeps:
        state += " (kept)"
    elif not group.is_finished:
        state = unfinished(f"{state} of {first.spec.rounds}")
    seeds = str(len(counted)) if len(counted) == len(group.runs) else f"{len(counted)} of {len(group.runs)}"
    return row | {"seeds": seeds, "round": state}


def _by_network(group: Group, protocol: Protocol, *, percent: bool) -> str | None:
    """Mean over the clients of each network after the last round; None without several networks."""
    found: dict[str, list[float]] = {}
    for run, line in zip(group.counted, group.results, strict=False):
        scores = line.get(f"{protocol}_per_client") or ()
        for network, value in zip(run.config.get("networks", ()), scores, strict=False):
            found.setdefault(network, []).extend([] if value is None else [value])
    means = {network: statistics.fmean(scores) for network, scores in found.items() if scores}
    return ", ".join(f"{network} {score_text(mean, percent=percent)}" for network, mean in means.items()) or None


def _units(task: Mapping[str, Any]) -> str:
    """Sentence on the score that counts, and the values in percent."""
    percents = ", ".join(_HEADINGS.get(str(name), str(name)) for name in task["in_percent"])
    return f"Values are of {task['scores'][0]}; in percent: {percents or 'none'}."


def _difference(group: Group, protocol: Protocol) -> str | None:
    """Our result minus the paper's, with the round and average that the paper reports."""
    assert group.published is not None
    measure = group.published.measure._replace(protocol=protocol)
    if not group.curve(protocol, FIELD[measure.average])[0] or (ours := group.accuracy(measure).value) is None:
        return None
    words = f"{ours - group.published.accuracy_percent:+.2f}".replace("-", "\N{MINUS SIGN}")
    return words if measure.score == "last" else Markup("{}<small>best pooled</small>").format(words)


def _best(group: Group, protocol: Protocol, *, percent: bool) -> str | None:
    """Score and number of the best round, which is chosen on validation examples if there are any."""
    if not group.curve(protocol)[0]:
        return None
    rounds = [{line["round"]: line for line in evaluations(run.lines, protocol)} for run in group.counted]
    common = {at: [of_run[at] for of_run in rounds] for at in sorted(set.intersection(*map(set, rounds)))}
    validated = all(protocol in line.get(VALIDATION, {}) for lines in common.values() for line in lines)

    def mean(at: int, *, validated: bool) -> float | None:
        means = [(line[VALIDATION] if validated else line)[protocol]["mean"] for line in common[at]]
        mean = Mean(dict(enumerate(means))).value
        return None if mean is None else rounded(mean)

    # As in the terminal: the first of several rounds with the same rounded mean.
    means = {at: value for at in common if (value := mean(at, validated=validated)) is not None}
    best = next((at for at, value in means.items() if value == group.first.best(means.values())), None)
    shown = None if best is None else mean(best, validated=False)
    return None if shown is None else f"{score_text(shown, percent=percent)} ({best})"


def configuration(groups: Sequence[Group]) -> tuple[Table | None, dict[str, str]]:
    """Table of the options that differ between settings shown side by side, and the options that all of them share."""
    names = {group.label: group.first.setting for group in groups}
    values = {
        name if name in ("dataset", "method") else flag(name): [value_text(one.get(name)) for one in names.values()]
        for name in dict.fromkeys(itertools.chain.from_iterable(names.values()))
    }
    alike = {name: of[0] for name, of in values.items() if len({*of}) == 1}
    apart = {name: dict(zip(names, of, strict=True)) for name, of in values.items() if name not in alike}
    rows: list[Row] = [{"option": code(name)} | of for name, of in apart.items()]
    if len(names) > len(apart):
        rows = [{"setting": label} | {name: of[label] for name, of in apart.items()} for label in names]
    return Table.of("", rows) if apart else None, alike


def versions(kinds: Mapping[str, Sequence[Group]]) -> tuple[Table | None, dict[str, Any]]:
    """Table of the versions and devices that differ between runs, and the versions that all runs share; `kinds` maps
    headings to groups."""
    runs = [(heading, group, run) for heading, groups in kinds.items() for group in groups for run in group.runs]
    found: dict[str, dict[str, list[str]]] = {}
    for heading, group, run in runs:
        who = f"{group.label}, seed {run.seed}" + (f", {heading}" if len(kinds) > 1 else "")
        about = run.config.get("versions", {}) | {"device": run.config.get("device")}
        for name in source_versions().keys() & about.keys():
            # A resumed run lists all versions that made it.
            about[name] = ", then ".join(dict.fromkeys(str(code[name]) for code in versions_behind(run.config)))
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


def main(arguments: Sequence[str] | None = None) -> int:

    def work() -> None:
        options, _ = parse(Options, "experiments.report", __doc__, arguments)
        if options.out is not None and options.plot is not None:
            raise InvalidInput("--out is for the page and --plot for a picture: give one of them")
        for name, needed in (("width", "plot"), ("band", "width")):
            if getattr(options, name) and not getattr(options, needed):
                raise InvalidInput(f"--{name} needs --{needed}")
        out, headline = (options.plot or options.out or Path("report.html")).expanduser(), options.eval_protocol
        check_new("--plot", options.plot, *ENDINGS)
        # A page may be overwritten while its runs continue; a picture may not, since it has no signature.
        if options.plot is None and out.exists() and not (out.is_file() and SIGNATURE in out.read_bytes()):
            raise InvalidInput(f"{out} exists already and is not a report: give another name, or remove it")
        groups, repeated = stored_runs.grouped(*options.runs, main_protocol=headline)
        evaluated = [line for group in groups for run in group.runs for line in run.lines]
        if headline is not None and not any(headline in line for line in evaluated):
            raise InvalidInput(f"--eval-protocol {headline}: none of the runs has been evaluated by it")
        notes, of_kinds = [], kinds(groups)
        if options.select is not None:
            for heading, some in of_kinds.items():
                of_kinds[heading], which = stored_runs.best_setting_per_method(some, stored_runs.headline(some))
                notes.append(f"{heading}: {which}" if len(of_kinds) > 1 else which)
        elif options.plot is None:
            of_kinds = {heading: stored_runs.labelled(some) for heading, some in of_kinds.items()}
        groups = stored_runs.renamed([one for some in of_kinds.values() for one in some], options.name)
        if options.plot is None:
            more = {"Features": charts.features} if options.features else {}
            if options.client is not None:
                more = {f"Client {options.client}": functools.partial(charts.client, number=options.client)} | more
            write_text(out, page(groups, repeated, notes, more=more))
        else:
            curves.save_picture(groups, out, width=options.width, band=options.band or "deviation")
        runs = sum(len(group.runs) for group in groups)
        print_line(Terminal(), f"{runs} run{'s' if runs > 1 else ''}: saved {out}")

    return exit_code(work)


if __name__ == "__main__":
    exit_process(main())
