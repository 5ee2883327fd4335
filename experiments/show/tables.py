"""Tables of text for the terminal and as Markdown, LaTeX and CSV, and pages from templates with such tables."""

import functools
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import rich.table
from rich import box

from experiments.folder.best_round import best, phase_summary
from experiments.folder.load import coverage_text, protocols_of
from experiments.folder.run_folder import ATTACKERS, HONEST, VALIDATION, Line, score_text
from experiments.folder.stored_runs import NOTHING as NOTHING
from experiments.spec.choices import Protocol
from pfl_jax.atomic_write import write_text
from pfl_jax.tasks import Task

_SHORT = {"macro_f1": "F1", "auc": "AUC"}
"""Score -> head of its column."""


def number(value: float | None, form: str = ".2f") -> str:
    """Number as text; a dash for None."""
    return NOTHING if value is None else f"{value:{form}}"


def score(value: float | None, *, percent: bool) -> str:
    """Score as people read it; a dash for None."""
    return NOTHING if value is None else score_text(value, percent=percent)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] | None = (0,)) -> str:
    """Table in Markdown; columns hold numbers, except columns whose index is in `words` (None: all columns)."""
    under = ["---" if words is None or index in words else "---:" for index in range(len(heads))]
    # Escape bars also within code, where they end a table's cell too.
    cells = ([" ".join(cell.split()).replace("|", r"\|") for cell in row] for row in [heads, under, *rows])
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


_LATEX = {
    **{character: rf"\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
    "\N{MINUS SIGN}": "$-$",
}
"""Character -> its LaTeX code."""


def _latex(text: str) -> str:
    """Text as LaTeX code, with **bold** as bold, and minus signs before numbers that stand alone."""
    # Two hyphens, as before an option, would be a dash.
    escaped = "".join(_LATEX.get(character, character) for character in text).replace("--", "-{}-")
    escaped = re.sub(r"(?<!\S)-(?=\d)", "$-$", escaped).replace("—", "--").replace(r" \%", r"~\%")
    bold = re.sub(r"^\*\*(.*)\*\*$", r"\\textbf{\1}", escaped)
    # After the end of a row, LaTeX would read these as its own syntax.
    return f"{{}}{bold}" if bold.startswith(("[", "*")) else bold


class Table(NamedTuple):
    """Table of texts: words in the first column, numbers in the others; `notes` are sentences below it, `strong` the
    numbers of rows that stand out on a page."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str] = ()
    strong: Sequence[int] = ()

    @classmethod
    def of(cls, title: str, rows: Sequence[Mapping[str, str | None]], strong: Sequence[int] = ()) -> "Table":
        """Table of rows, which map the head of a column to a text; columns without any content are left out."""
        names = dict.fromkeys(itertools.chain.from_iterable(rows))
        heads = [name for name in names if any(row.get(name) for row in rows)]
        return cls(title, heads, [[row.get(name) or NOTHING for name in heads] for row in rows], strong=strong)

    @property
    def has_numbers(self) -> list[bool]:
        """Whether each column holds numbers; its texts may be HTML."""
        number = re.compile(r"(<.*?>)?[-\d+\N{MINUS SIGN}—]|$")
        return [all(number.match(row[index]) for row in self.rows) for index in range(len(self.heads))]

    def terminal(self, ends: Collection[int] = (), **options: Any) -> rich.table.Table:
        """Table for rich, with rich's `options`, without notes, and with lines below the rows `ends`."""
        table = rich.table.Table(title=self.title, **options)
        for head, has_numbers in zip(self.heads, self.has_numbers, strict=True):
            widest = max((len(word) for word in head.split()), default=0)
            table.add_column(head, justify="right" if has_numbers else "left", overflow="fold", min_width=widest)
        for place, row in enumerate(self.rows):
            table.add_row(*row, end_section=place in ends)
        return table

    def text(self, ending: str) -> str:
        """Content of a file: .md, .csv, or .tex for the package booktabs, with the notes as comments."""
        # Imported only here: the table at the end of a run does without it.
        import pandas as pd

        if ending == ".csv":
            return pd.DataFrame(self.rows, columns=[*self.heads], dtype=object).to_csv(index=False)
        if ending == ".md":
            notes = "".join(f"- {note}\n" for note in self.notes)
            return f"**{self.title}**\n\n{markdown(self.heads, self.rows)}\n{notes}"
        heads, *rows = ([*map(_latex, row)] for row in [self.heads, *self.rows])
        form: Any = {"hrules": True, "position_float": "centering", "column_format": f"l{'r' * (len(heads) - 1)}"}
        table = (
            pd.DataFrame(rows, columns=heads)
            .style.hide(axis="index")
            .to_latex(caption=f"{_latex(self.title)}.", **form)
        )
        return "".join(f"% {note}\n" for note in ["needs \\usepackage{booktabs}", *self.notes]) + table

    def save(self, *paths: Path) -> None:
        """Write files, each atomically; see `text`."""
        for path in paths:
            write_text(path, self.text(path.suffix))


def results_table(
    lines: Sequence[Line],
    task: Task,
    title: str,
    headline: Protocol,
    paper: str | None = None,
    *,
    paper_is: Literal["last", "best pooled"] = "last",
    paper_by: Protocol = "received",
) -> rich.table.Table:
    """Content of `Summary` for each protocol, last and best round, and new clients, as a table for rich.

    The best round has the best mean over clients, on validation examples if there are any. If another round has the
    best mean over examples, it gets its own line. `paper` is the published accuracy for exactly this setting, by the
    protocol `paper_by`.
    """
    last, primary = lines[-1], task.primary
    is_high, everyone = primary.higher_is_better, len(last["received_per_client"])
    rows, ends, is_partial = list[dict[str, str]](), set[int](), False
    text = functools.partial(score, percent=primary.percent)
    for protocol in sorted(protocols_of(last), key=lambda name: name != headline):
        found = {"last": last, "best": best(lines, protocol, higher_is_better=is_high)}
        if (pooled := best(lines, protocol, "examples", higher_is_better=is_high)) is not found["best"]:
            found["best pooled"] = pooled
        of_paper = "last" if paper_is == "last" else [*found][-1]
        for word, line in found.items():
            row = {"protocol": protocol, "round": f"{word} ({line['round']})"} | _figures(line[protocol], task)
            if VALIDATION in last:
                row["val."] = text(line[VALIDATION][protocol]["mean"])
            if (protocol, word) == ("received", "last"):
                row |= {name: text(value) for name, value in phase_summary(lines, higher_is_better=is_high).items()}
            row["paper"] = (paper or "") if (protocol, word) == (paper_by, of_paper) else ""
            over = coverage_text([line[protocol]], everyone).removesuffix(" clients")
            is_partial |= bool(over)
            rows.append(row | {"clients": over or str(everyone)})
        ends.add(len(rows) - 1)
    for side, name in ((HONEST, HONEST), (ATTACKERS, ATTACKERS), ("new_clients", "new clients")):
        for protocol, summary in last.get(side, {}).items():
            row = {"protocol": protocol, "round": name} | _figures(summary, task)
            rows.append(row | {"clients": str(summary["clients"])})
    for row in () if is_partial else rows:
        del row["clients"]
    percents = ", ".join(one.name for one in task.scores if one.percent)
    caption = f"mean {primary.name} over clients; pooled: weighted by their test examples"
    caption += f"; in percent: {percents}" if percents else ""
    if VALIDATION in last:
        caption += f"; val.: {primary.name} on validation examples, by which the best round is chosen"
    caption += "; clients: those that have a score" * is_partial
    form: Any = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False}
    return Table.of(title, rows).terminal(ends, caption=caption, **form)


def _figures(summary: dict[str, Any], task: Task) -> dict[str, str]:
    """Head of a column -> value of a summary over clients; a round between evaluations has only means."""
    primary, *others = task.scores
    named = {"mean": "mean", "pooled": "pooled", "std": "std", "worst 10%": "worst_decile"}
    figures = {head: score(summary.get(name), percent=primary.percent) for head, name in named.items()}
    figures["Jain"] = number(summary.get("jain"), ".3f")
    return figures | {
        _SHORT.get(one.name, one.name): score(summary.get(one.name), percent=one.percent) for one in others
    }


def page(template: Path, *, is_html: bool = False, **values: Any) -> str:
    """Text of a jinja2 template, which can call `table(heads, rows, words)` and `number(value, form)`.

    Blanks at the ends of lines and repeated blank lines are removed.
    """
    # Imported only here: the table at the end of a run does without it.
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
