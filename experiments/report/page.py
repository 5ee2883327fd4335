"""Report page: the order of its parts, in one self-contained file."""

from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template

from experiments.plots.palette import COLOURS, DASHES, on_dark
from experiments.plots.selection import shown
from experiments.report import charts, tables
from experiments.report.markup import Content, Markup, join, tag
from experiments.results.gather import Group, Run

_TEMPLATE = Template(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
$style
</style>
</head>
<body>
$body
</body>
</html>
"""
)
_STYLE = Path(__file__).with_name("page.css")


def page(groups: Sequence[Group], repeated: Sequence[Run] = ()) -> str:
    """The whole page.

    Args:
      groups: at least one.
      repeated: runs that are left out, see `gather.group`.
    """
    sections = [
        ("results", "Results", _results(groups)),
        ("curves", "Curves", _by_data(groups, _curves)),
        ("clients", "Clients", _by_data(groups, _clients)),
        ("weights", "Weights", _by_data(groups, _weights)),
        ("partition", "Partition", _by_data(groups, _partitions)),
        ("configuration", "Configuration", _configuration(groups)),
        ("runs", "Runs and timings", _runs(groups, repeated)),
        ("versions", "Versions", tables.versions(groups)),
    ]
    there = [section for section in sections if section[2]]
    links = [tag("a", name, href=f"#{anchor}") for anchor, name, _ in there]
    body = join(
        _header(groups),
        tag("nav", links, aria_label="sections"),
        tag("main", [tag("section", tag("h2", name), content, id=anchor) for anchor, name, content in there]),
    )
    return _TEMPLATE.substitute(title=join(title(groups)), style=_style(), body=body)


def title(groups: Sequence[Group]) -> str:
    """Title: which methods on which data."""
    methods, data = [group.method for group in groups], [group.data_name for group in groups]
    return f"{_listed(methods, 'methods')} on {_listed(data, 'data sets')}"


def _listed(names: Sequence[str], many: str) -> str:
    """Up to four different names, or their number."""
    names = list(dict.fromkeys(names))
    if len(names) > 4:
        return f"{len(names)} {many}"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _style() -> str:
    """Style sheet, with the colours of the lines for light and dark backgrounds."""
    light = " ".join(f"--s{number}: {colour};" for number, colour in enumerate(COLOURS))
    dark = " ".join(f"--s{number}: {on_dark(colour)};" for number, colour in enumerate(COLOURS))
    rules = []
    for number, dashes in enumerate(DASHES):
        # Of a line two units wide; the first one is solid here, where there is no black one beside it.
        pattern = " ".join(f"{2 * length:g}" for length in dashes) if number and dashes else "none"
        rules.append(f".s{number} {{ stroke: var(--s{number}); stroke-dasharray: {pattern}; }}")
        rules.append(f".f{number} {{ fill: var(--s{number}); }}")
    sheet = _STYLE.read_text().replace("/* series: light */", light).replace("/* series: dark */", dark)
    return sheet + "\n".join(rules)


def _header(groups: Sequence[Group]) -> Markup:
    runs = [run for group in groups for run in group.runs]
    seeds = sorted({run.seed for run in runs})
    open_runs = tables.unfinished(runs)
    facts = [_count(len(runs), "run"), _count(len(groups), "setting"), f"{_span(seeds)}"]
    facts.append("all finished" if not open_runs else f"{open_runs} unfinished")
    data = dict.fromkeys(group.data for group in groups if group.data != group.data_name)
    stand_ins = dict.fromkeys(group.data for group in groups if not group.is_real)
    notes = [
        tag(
            "p",
            tag("strong", "Stand-in data. "),
            f"{data} has the shape of the data set, not its pictures: no figure of a paper belongs beside it.",
            class_="stand-in",
        )
        for data in stand_ins
    ]
    return tag(
        "header",
        tag("p", "pfl_jax · report", class_="over"),
        tag("h1", title(groups)),
        tag("p", " · ".join(facts), class_="facts"),
        tag("p", " · ".join(data), class_="facts") if data else None,
        notes,
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


def _span(seeds: Sequence[int]) -> str:
    """ "seed 0", "seeds 0 to 2" or "seeds 1, 4"."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    whole = list(seeds) == list(range(seeds[0], seeds[-1] + 1)) and len(seeds) > 2
    return f"seeds {seeds[0]} to {seeds[-1]}" if whole else f"seeds {', '.join(map(str, seeds))}"


def _by_data(groups: Sequence[Group], make: Callable[[Sequence[Group]], Markup | None]) -> Markup:
    """Parts made for each kind of data, under its name if there are several."""
    kinds = tables.distinct(groups)
    parts: list[Content] = []
    for data, some in kinds:
        content = make(some)
        if content:
            parts += [tag("h3", data) if len(kinds) > 1 else None, content]
    return join(parts)


def _results(groups: Sequence[Group]) -> Markup:
    several = any(len(group.counted) > 1 for group in groups)
    words = ["Accuracy, F1 and AUC in percent, means over clients after the last round"]
    words.append(" and over seeds, ± the standard deviation over seeds. " if several else ". ")
    words.append("Pooled accuracies are over the test examples of all clients, each counting the same. ")
    if any(not group.is_finished for group in groups):
        words.append("What is not finished stands as far as it got. ")
    if not any(group.published for group in groups):
        words.append("No published figure is for exactly one of these settings.")
    elif any(group.published is None for group in groups):
        words.append("A paper's figure stands beside runs of exactly its setting only.")
    return join(tag("p", "".join(words), class_="note"), _by_data(groups, lambda some: join(tables.results(some))))


def _curves(groups: Sequence[Group]) -> Markup | None:
    made = charts.curves(groups)
    if not made:
        return tag("p", "No run has been evaluated yet.", class_="note")
    several = any(len(group.counted) > 1 for group in groups)
    words = ["Means over clients" + (" and seeds; bands are the range over seeds." if several else ".")]
    if any(group.published for _, group in shown(groups)):
        words.append("Triangles at the right edge are the papers' figures.")
    words += _left_out(groups)
    return join(tag("p", " ".join(words), class_="note"), charts.legend(groups), _grid(made))


def _left_out(groups: Sequence[Group]) -> list[str]:
    some, there = len(shown(groups)), sum(bool(group.rounds) for group in groups)
    return [f"The best {some} of {there} settings."] if some < there else []


def _clients(groups: Sequence[Group]) -> Markup | None:
    made = charts.clients(groups)
    if not made:
        return None
    words = " ".join(["Every client's accuracy after the last round.", *_left_out(groups)])
    return join(tag("p", words, class_="note"), charts.legend(groups), _grid(made))


def _weights(groups: Sequence[Group]) -> Markup | None:
    made = charts.information(groups)
    return _grid(made) if made else None


def _partitions(groups: Sequence[Group]) -> Markup | None:
    pictures, more = charts.partitions(groups)
    if not pictures:
        return None
    return join(_grid(pictures), tag("p", f"{more} more partitions are not shown.", class_="note") if more else None)


def _grid(made: Sequence[Markup]) -> Markup:
    return tag("div", made, class_="charts")


def _configuration(groups: Sequence[Group]) -> Markup:
    apart, own = tables.differences(groups), tables.own_options(groups)
    parts: list[Content] = []
    if apart is not None:
        parts += [tag("h3", "What differs"), apart]
    if own is not None:
        parts += [tag("h3", "Options that only some have"), own]
    parts += [tag("h3", "What is the same everywhere" if len(groups) > 1 else "Options"), tables.common(groups)]
    parts += [tag("h3", "Commands"), tables.commands(groups)]
    return join(parts)


def _runs(groups: Sequence[Group], repeated: Sequence[Run]) -> Markup:
    words = (
        "Time is that of the whole run, evaluations included; a round's pace is the median after the first evaluation, "
        "and the start what came before and beside it: data, and compilation. Wasted steps are those of clients that "
        "had finished."
    )
    again = [str(run.folder) for run in repeated]
    more = f"Left out, since the same setting and seed is there already: {', '.join(again)}." if again else None
    return join(tag("p", words, class_="note"), tables.timings(groups), tag("p", more, class_="note") if more else None)
