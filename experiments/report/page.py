"""Report page: what the template page.html.jinja shows, as one self-contained file."""

import base64
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from experiments.folder.stored_runs import Group, Run
from experiments.report import charts, tables
from experiments.show.curves import chosen_on, left_out
from experiments.show.pictures import as_svg
from experiments.show.tables import page as render
from pfl_jax.hyper_parameters import listed

_HERE = Path(__file__).parent
_CHARTS = {
    "curves": charts.curves,
    "clients": charts.clients,
    "weights": charts.information,
    "partition": charts.partitions,
}


def page(groups: Sequence[Group], repeated: Sequence[Run] = ()) -> str:
    """The whole page; `repeated` are runs that are left out, see `stored_runs.group`."""
    runs = [run for group in groups for run in group.runs]
    by_kind = kinds(groups)
    made = {name: {data: make(some) for data, some in by_kind.items()} for name, make in _CHARTS.items()}
    return render(
        _HERE / "page.html.jinja",
        is_html=True,
        title=title(groups),
        style=Markup((_HERE / "page.css").read_text()),
        source=lambda chart: f"data:image/svg+xml;base64,{base64.b64encode(as_svg(chart.panel).encode()).decode()}",
        groups=groups,
        kinds=by_kind,
        charts={name: of for name, of in made.items() if any(of.values()) or name == "curves"},
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


def kinds(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Heading -> the groups that stand side by side: on the same data, with the same primary score."""
    found: dict[str, dict[str, list[Group]]] = {}
    for group in groups:
        found.setdefault(group.data, {}).setdefault(group.axis, []).append(group)
    return {
        data if len(by_score) == 1 else f"{data}, {axis}": some
        for data, by_score in found.items()
        for axis, some in by_score.items()
    }


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
