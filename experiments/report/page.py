"""Report page: what the template page.html.jinja shows, as one self-contained file."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from experiments.folder.stored_runs import Group, Run
from experiments.report import charts, tables
from experiments.show.inline import inline
from experiments.show.palette import COLORS, DASHES, on_dark
from experiments.show.selection import shown

_HERE = Path(__file__).parent
_CHARTS = {
    "curves": charts.curves,
    "clients": charts.clients,
    "weights": charts.information,
    "partition": charts.partitions,
}


def page(groups: Sequence[Group], repeated: Sequence[Run] = ()) -> str:
    """The whole page.

    Args:
      groups: at least one.
      repeated: runs that are left out, see `stored_runs.group`.
    """
    runs, numbers = [run for group in groups for run in group.runs], itertools.count()

    def drawn(chart: charts.Chart) -> Markup:
        about = f"{chart.panel.y_label} by {chart.panel.x_label}. {chart.caption} The values stand below."
        return Markup(inline(chart.panel, f"chart{next(numbers)}", chart.panel.title, about))

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    kinds = {data: [group for group in groups if group.data == data] for data in _distinct(groups, "data")}
    made = {name: {data: make(some) for data, some in kinds.items()} for name, make in _CHARTS.items()}
    whole = environment.get_template("page.html.jinja").render(
        title=title(groups),
        style=Markup(_style()),
        drawn=drawn,
        groups=groups,
        kinds=kinds,
        charts={name: of for name, of in made.items() if any(of.values()) or name == "curves"},
        styles={data: _styles(some) for data, some in kinds.items()},
        left_out={data: _left_out(some) for data, some in kinds.items()},
        tables=tables,
        runs=runs,
        seeds=_span(sorted({run.seed for run in runs})),
        unfinished=sum(run.summary is None for run in runs),
        sources=[data for data in kinds if data not in _distinct(groups, "data_name")],
        stand_ins=_distinct([group for group in groups if not group.is_real], "data"),
        repeated=repeated,
        more_partitions={data: charts.more_partitions(some) for data, some in kinds.items()},
        titles=charts.PROTOCOL_TITLES,
        units=" ".join(dict.fromkeys(tables.units(group) for group in groups)),
    )
    # Definitions leave empty lines.
    return whole.lstrip()


def _styles(groups: Sequence[Group]) -> dict[str, int]:
    """Label -> number of a line's color and dashes, where charts show several."""
    return {group.label: style for style, group in shown(groups) if len(shown(groups)) > 1}


def _left_out(groups: Sequence[Group]) -> str:
    some, there = len(shown(groups)), sum(bool(group.rounds) for group in groups)
    return f"The best {some} of {there} settings." if some < there else ""


def title(groups: Sequence[Group]) -> str:
    """Title: which methods on which data."""
    methods, data = _distinct(groups, "method"), _distinct(groups, "data_name")
    return f"{_listed(methods, 'methods')} on {_listed(data, 'data sets')}"


def _distinct(groups: Sequence[Group], name: str) -> list[str]:
    """Different values of an attribute of the groups, in their order."""
    return list(dict.fromkeys(getattr(group, name) for group in groups))


def _listed(names: Sequence[str], many: str) -> str:
    """Up to four names, or their number."""
    if len(names) > 4:
        return f"{len(names)} {many}"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _span(seeds: Sequence[int]) -> str:
    """ "seed 0", "seeds 0 to 2" or "seeds 1, 4"."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    whole = list(seeds) == list(range(seeds[0], seeds[-1] + 1)) and len(seeds) > 2
    return f"seeds {seeds[0]} to {seeds[-1]}" if whole else f"seeds {', '.join(map(str, seeds))}"


def _style() -> str:
    """Style sheet, with the colors of the lines for light and dark backgrounds, and their dashes for the keys."""
    light = " ".join(f"--s{number}: {color};" for number, color in enumerate(COLORS))
    dark = " ".join(f"--s{number}: {on_dark(color)};" for number, color in enumerate(COLORS))
    keys = []
    for number, dashes in enumerate(DASHES):
        # Of a line two units wide.
        pattern = " ".join(f"{2 * length:g}" for length in dashes) or "none"
        keys.append(f".k{number} {{ stroke: var(--s{number}); stroke-dasharray: {pattern}; }}")
    sheet = (_HERE / "page.css").read_text().replace("/* series: light */", light)
    return "\n".join([sheet.replace("/* series: dark */", dark), *keys])
