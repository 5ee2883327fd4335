"""Report page: what the template page.html.jinja shows, as one self-contained file."""

import base64
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from experiments.folder.load import Run
from experiments.folder.run_folder import slug
from experiments.folder.stored_runs import Group, short
from experiments.groups import Data, Federation, Robustness
from experiments.report import charts, info, tables
from experiments.show.curves import chosen_on, left_out
from experiments.show.pictures import Picture, as_svg
from experiments.show.tables import page as render
from pfl_jax.validation import listed

_HERE = Path(__file__).parent
_OF_A_TABLE = ("rounds", "eval_clients", "target_accuracy")
_OF_A_TABLE += tuple(field.name for part in (Data, Federation, Robustness) for field in dataclasses.fields(part))
"""Options that all runs of a ranking share: those of its clients, and how far they train."""
_CHARTS = {
    "curves": charts.curves,
    "clients": charts.clients,
    "weights": info.information,
    "partition": charts.partitions,
}


def page(
    groups: Sequence[Group],
    repeated: Sequence[Run] = (),
    notes: Sequence[str] = (),
    more: Mapping[str, Callable[[list[Group]], list[Picture]]] | None = None,
) -> str:
    """The whole page.

    Args:
      groups: the settings.
      repeated: runs that are left out, see `stored_runs.group`.
      notes: sentences above the results.
      more: heading of a further section -> the charts in it of groups that stand side by side.
    """
    sections = {"curves": "Curves", "clients": "Clients", "weights": "Weights", "partition": "Partition"}
    further = {slug(heading): heading for heading in more or {}}
    makers = _CHARTS | {slug(heading): make for heading, make in (more or {}).items()}
    runs = [run for group in groups for run in group.runs]
    by_kind = kinds(groups)
    made = {name: {data: make(some) for data, some in by_kind.items()} for name, make in makers.items()}
    return render(
        _HERE / "page.html.jinja",
        is_html=True,
        title=title(groups),
        style=Markup((_HERE / "page.css").read_text()),
        source=_as_link,
        groups=groups,
        kinds=by_kind,
        charts={name: of for name, of in made.items() if any(of.values()) or name == "curves"},
        sections=sections | further,
        notes=notes,
        chosen_on=chosen_on,
        left_out={data: left_out(some) for data, some in by_kind.items()},
        tables=tables,
        runs=runs,
        seeds=sorted({run.seed for run in runs}),
        unfinished=sum(run.summary is None for run in runs),
        sources=[data for data in _distinct(groups, "data") if data not in _distinct(groups, "data_name")],
        stand_ins=_distinct([group for group in groups if not group.is_real], "data"),
        repeated=repeated,
        titles=charts.PROTOCOL_TITLES,
        units=" ".join(dict.fromkeys(tables.units(group) for group in groups)),
    )


def _as_link(chart: Picture) -> str:
    drawn = as_svg(chart)
    return f"data:image/svg+xml;base64,{base64.b64encode(drawn.encode()).decode()}"


def kinds(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Heading -> the groups that stand side by side: on the same data and clients, with the same rounds and score."""
    found: dict[str, list[Group]] = {}
    for group in groups:
        key = [group.data, group.axis, {name: group.setting.get(name) for name in _OF_A_TABLE}]
        found.setdefault(json.dumps(key, default=str), []).append(group)
    return {_heading(some[0], groups): some for some in found.values()}


def _heading(group: Group, groups: Sequence[Group]) -> str:
    """What distinguishes the data and clients of a group from those of others."""
    alike = [one for one in groups if one.data == group.data]
    words = [group.axis] if len({one.axis for one in alike}) > 1 else []
    apart = [name for name in _OF_A_TABLE if len({repr(one.setting.get(name)) for one in alike}) > 1]
    words += [short(name, group.setting[name]) for name in apart if name in group.setting]
    return ", ".join([group.data, *words])


def title(groups: Sequence[Group]) -> str:
    """Title: which methods on which data, up to four names of each."""
    methods, data = _distinct(groups, "method"), _distinct(groups, "data_name")
    named = [
        f"{len(names)} {many}" if len(names) > 4 else listed(names, "and")
        for names, many in ((methods, "methods"), (data, "data sets"))
    ]
    return " on ".join(named)


def _distinct(groups: Sequence[Group], name: str) -> list[str]:
    """Different values of an attribute of the groups, in their order."""
    return list(dict.fromkeys(getattr(group, name) for group in groups))
