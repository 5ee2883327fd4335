"""Tables of text in Markdown, CSV and for the terminal, and pages from templates with such tables."""

import csv
import io
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.table import Table

from experiments.choices import Protocol
from experiments.folder import load
from experiments.folder.load import measured
from experiments.folder.run_folder import ATTACKERS, HONEST, VALIDATION, Line, best, score_text
from pfl_jax.tasks import Task

NOTHING = "—"
"""Text in place of a missing number."""


_SHORT = {"macro_f1": "F1", "auc": "AUC"}
"""Score -> head of its column."""


def number(value: float | None, form: str = ".2f") -> str:
    """Number as text; a dash for None."""
    return NOTHING if value is None else f"{value:{form}}"


def with_deviation(mean: float | None, deviation: float | None, *, percent: bool = True) -> str:
    """Mean of a score over seeds as text, followed by "± standard deviation" if there is one."""
    texts = [NOTHING if one is None else score_text(one, percent=percent) for one in (mean, deviation)]
    return texts[0] if deviation is None else " ± ".join(texts)


def mean_text(values: Sequence[float], *, percent: bool = True) -> str:
    """Mean over seeds as text, followed by "± standard deviation (number of seeds)" if there are several."""
    several = len(values) > 1
    mean, deviation = statistics.fmean(values) if values else None, statistics.stdev(values) if several else None
    text = with_deviation(mean, deviation, percent=percent)
    return f"{text} ({len(values)})" if several else text


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] | None = (0,)) -> str:
    """Table in Markdown, with numbers in all columns but those numbered in `words`, None for all."""
    under = ["---" if words is None or index in words else "---:" for index in range(len(heads))]
    # Also within code, where a table's cell ends at a bar all the same.
    cells = ([" ".join(cell.split()).replace("|", r"\|") for cell in row] for row in [heads, under, *rows])
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


_LATEX = {
    **{character: rf"\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "—": "--",
    "\N{MINUS SIGN}": "$-$",
}
"""Character -> how LaTeX has it."""


def latex_escaped(text: str) -> str:
    """Text that LaTeX prints as it is, with minus signs before numbers that stand alone."""
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"(?<!\S)-(?=\d)", "$-$", escaped)


def latex_of_text(heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """`latex` of a table of text."""
    return latex([*map(latex_escaped, heads)], [[*map(latex_escaped, row)] for row in rows], latex_escaped(caption))


def latex(heads: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """Table for LaTeX with the package booktabs, of cells that are LaTeX: words in the first column, then numbers."""
    lines = [" & ".join(row) + r" \\" for row in [heads, *rows]]
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def comma_separated(records: Sequence[Mapping[str, Any]]) -> str:
    """Records of the same fields as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def terminal(heads: Sequence[Any], rows: Iterable[Sequence[str]], **options: Any) -> Table:
    """Table for rich: the first column has words, the others numbers; `options` are those of `rich.table.Table`."""
    table = Table(**options)
    for index, head in enumerate(heads):
        widest = max((len(word) for word in str(head).split()), default=0)
        table.add_column(head, justify="right" if index else "left", overflow="fold", min_width=widest)
    for row in rows:
        table.add_row(*row)
    return table


def results_table(
    lines: Sequence[Line],
    task: Task,
    title: str,
    headline: Protocol,
    paper: str | None = None,
    *,
    paper_is: Literal["last", "best pooled"] = "last",
    paper_by: Protocol = "received",
) -> Table:
    """Content of `Summary` for each protocol, last and best round, and new clients, as a table for rich.

    The best round is that with the best mean over clients, on validation examples if there are; where another one has
    the best mean over examples, it has a line of its own. `paper` is the published accuracy for exactly this setting,
    by the protocol `paper_by`.
    """
    last, (primary, *others) = lines[-1], task.scores
    is_high, everyone = primary.higher_is_better, len(last["received_per_client"])
    percents = ", ".join(one.name for one in task.scores if one.percent)
    caption = f"mean {primary.name} over clients; pooled: weighted by their test examples"
    caption += f"; in percent: {percents}" if percents else ""
    validated = VALIDATION in last
    if validated:
        caption += f"; val.: {primary.name} on validation examples, by which the best round is chosen"
    shown: dict[Protocol, dict[str, Line]] = {}
    for protocol in sorted(measured(last), key=lambda name: name != headline):
        shown[protocol] = {"last": last, "best": best(lines, protocol, higher_is_better=is_high)}
        if (pooled := best(lines, protocol, "examples", higher_is_better=is_high)) is not shown[protocol]["best"]:
            shown[protocol]["best pooled"] = pooled
    is_partial = any(load.over([line[name]], everyone) for name, of in shown.items() for line in of.values())
    caption += "; clients: those that have a score" * is_partial
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("protocol", overflow="fold")
    table.add_column("round", overflow="fold")
    names = ["mean", "pooled", "std", "worst 10%", "Jain", *(_SHORT.get(one.name, one.name) for one in others)]
    names += ["val."] * validated + ["paper"] * (paper is not None) + ["clients"] * is_partial
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for protocol, of_words in shown.items():
        *_, last_word = of_words
        for word, line in of_words.items():
            figures = _figures(line[protocol], task)
            if validated:
                figures.append(with_deviation(line[VALIDATION][protocol]["mean"], None, percent=primary.percent))
            if paper is not None:
                is_there = protocol == paper_by and word == ("last" if paper_is == "last" else last_word)
                figures.append(paper if is_there else NOTHING)
            if is_partial:
                figures.append(load.over([line[protocol]], everyone).removesuffix(" clients") or str(everyone))
            table.add_row(protocol, f"{word} ({line['round']})", *figures, end_section=word == last_word)
    for side, name in ((HONEST, HONEST), (ATTACKERS, ATTACKERS), ("new_clients", "new clients")):
        for protocol, summary in last.get(side, {}).items():
            figures, count = _figures(summary, task), [str(summary["clients"])] * is_partial
            table.add_row(protocol, name, *figures, *[NOTHING] * (len(names) - len(figures) - len(count)), *count)
    return table


def _figures(summary: dict[str, Any], task: Task) -> list[str]:
    primary, *others = task.scores
    return [
        *(
            with_deviation(summary[name], None, percent=primary.percent)
            for name in ("mean", "pooled", "std", "worst_decile")
        ),
        number(summary["jain"], ".3f"),
        *(with_deviation(summary[one.name], None, percent=one.percent) for one in others),
    ]


def page(template: Path, *, is_html: bool = False, **values: Any) -> str:
    """Text of a jinja2 template, which can call `table(heads, rows, words)` and `number(value, form)`.

    Blanks at the ends of lines and repeated blank lines are removed.
    """
    # Imported now: the table at the end of a run does without it.
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        autoescape=is_html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=is_html,
    )
    text = environment.get_template(template.name).render(table=markdown, number=number, **values)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r" +$", "", text, flags=re.MULTILINE)).strip() + "\n"
