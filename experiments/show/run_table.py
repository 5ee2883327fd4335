"""Table of a run's results for the terminal."""

from collections.abc import Sequence
from typing import Any, Literal

from rich import box
from rich.table import Table

from experiments.cli.options import Protocol
from experiments.folder.load import measured
from experiments.folder.run_folder import ATTACKERS, HONEST, VALIDATION, Line, best
from experiments.show.tables import NOTHING, number
from pfl_jax.tasks import Score, Task

_SHORT = {"macro_f1": "F1", "auc": "AUC"}
"""Score -> head of its column."""


def results_table(
    lines: Sequence[Line],
    task: Task,
    title: str,
    headline: Protocol,
    paper: str | None = None,
    *,
    paper_is: Literal["last", "best pooled"] = "last",
) -> Table:
    """Content of `Summary` for each protocol, last and best round, and new clients, as a table for rich.

    The best round is that with the best mean over clients, on validation examples if there are; where another one has
    the best mean over examples, it has a line of its own. `paper` is the published accuracy for exactly this setting.
    """
    last, (primary, *others) = lines[-1], task.scores
    is_high = primary.higher_is_better
    percents = ", ".join(one.name for one in task.scores if one.percent)
    caption = f"mean {primary.name} over clients; pooled: over all their test examples"
    caption += f"; in percent: {percents}" if percents else ""
    validated = VALIDATION in last
    if validated:
        caption += f"; val.: {primary.name} on validation examples, by which the best round is chosen"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("protocol")
    table.add_column("round")
    names = ["mean", "pooled", "std", "worst 10%", "Jain", *(_SHORT.get(one.name, one.name) for one in others)]
    names += ["val."] * validated + ["paper"] * (paper is not None)
    for name in names:
        table.add_column(name, justify="right")
    for protocol in sorted(measured(last), key=lambda name: name != headline):
        shown = {"last": last, "best": best(lines, protocol, higher_is_better=is_high)}
        if (pooled := best(lines, protocol, "examples", higher_is_better=is_high)) is not shown["best"]:
            shown["best pooled"] = pooled
        *_, last_word = shown
        for word, line in shown.items():
            figures = _figures(line[protocol], task)
            if validated:
                figures.append(number(line[VALIDATION][protocol]["mean"], _form(primary)))
            if paper is not None:
                figures.append(paper if word == ("last" if paper_is == "last" else last_word) else NOTHING)
            table.add_row(protocol, f"{word} ({line['round']})", *figures, end_section=word == last_word)
    for side, name in ((HONEST, HONEST), (ATTACKERS, ATTACKERS), ("new_clients", "new clients")):
        for protocol, summary in last.get(side, {}).items():
            figures = _figures(summary, task)
            table.add_row(protocol, name, *figures, *[NOTHING] * (len(names) - len(figures)))
    return table


def _figures(summary: dict[str, Any], task: Task) -> list[str]:
    primary, *others = task.scores
    return [
        *(number(summary[name], _form(primary)) for name in ("mean", "pooled", "std", "worst_decile")),
        number(summary["jain"], ".3f"),
        *(number(summary[one.name], _form(one)) for one in others),
    ]


def _form(score: Score) -> str:
    return ".2f" if score.percent else ".3f"
