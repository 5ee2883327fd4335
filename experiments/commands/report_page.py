"""Report page: values for the template page.html.jinja, and the text of one self-contained file."""

import base64
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from markupsafe import Markup

from experiments.commands import report_charts as charts
from experiments.commands import report_tables as tables
from experiments.folder.load import StoredRun
from experiments.folder.run_folder import slug
from experiments.folder.stored_runs import Group, short
from experiments.host.console import duration
from experiments.show.curves import chosen_on, left_out
from experiments.show.pictures import Panel, Picture, as_svg
from experiments.show.tables import page as render
from experiments.spec.groups import Data, Federation, Robustness
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
        tables=tables,
        runs=[run for group in groups for run in group.runs],
        repeated=repeated,
        titles=charts.PROTOCOL_TITLES,
        units=" ".join(dict.fromkeys(map(tables.units, groups))),
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
