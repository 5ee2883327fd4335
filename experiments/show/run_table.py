"""Table of a run's results for the terminal."""

import math
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.table import Table

from experiments.cli.measures import Protocol
from experiments.folder.run_folder import Evaluation, best
from pfl_jax.primitives.metrics import Summary
from pfl_jax.tasks import Score, Task

_SHORT = {"macro_f1": "F1", "auc": "AUC"}
"""Score -> head of its column."""


def results_table(
    evaluations: Sequence[Evaluation],
    title: str,
    headline: Protocol,
    paper: str | None = None,
    *,
    paper_is: Literal["last", "best pooled"] = "last",
) -> Table:
    """Content of `Summary` for each protocol, last and best round, and new clients.

    The best round is that with the best mean over clients, on validation examples if there are; where another one has
    the best mean over examples, it has a line of its own.

    Args:
      evaluations: all of the run, at least one.
      title: which method on which data.
      headline: the protocol that comes first.
      paper: the published accuracy for exactly this setting.
      paper_is: which round's accuracy it is, and so stands beside.

    Returns:
      A table for rich.
    """
    task = evaluations[-1].task
    primary, *others = task.scores
    percents = ", ".join(one.name for one in task.scores if one.percent)
    caption = f"mean {primary.name} over clients; pooled: over all their test examples"
    caption += f"; in percent: {percents}" if percents else ""
    validated = evaluations[-1].validation_counts is not None
    if validated:
        caption += f"; val.: {primary.name} on validation examples, by which the best round is chosen"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("protocol")
    table.add_column("round")
    names = ["mean", "pooled", "std", "worst 10%", "Jain", *(_SHORT.get(one.name, one.name) for one in others)]
    names += ["val."] * validated + ["paper"] * (paper is not None)
    for name in names:
        table.add_column(name, justify="right")
    for protocol in sorted(evaluations[-1].protocols, key=lambda name: name != headline):
        shown = {"last": evaluations[-1], "best": best(evaluations, protocol)}
        if (pooled := best(evaluations, protocol, "examples")) is not shown["best"]:
            shown["best pooled"] = pooled
        *_, last_line = shown
        for word, evaluation in shown.items():
            figures = _figures(evaluation.summary(protocol), task)
            if validation := evaluation.validation(protocol):
                figures.append(_figure(validation.mean, _digits(primary)))
            if paper is not None:
                figures.append(paper if word == ("last" if paper_is == "last" else last_line) else "—")
            table.add_row(protocol, f"{word} ({evaluation.round})", *figures, end_section=word == last_line)
    for protocol in evaluations[-1].protocols:
        for side, summary in evaluations[-1].sides(protocol).items():
            figures = _figures(summary, task)
            table.add_row(protocol, side, *figures, *["—"] * (len(names) - len(figures)))
    newcomers = evaluations[-1].newcomers
    for protocol, summary in newcomers.summaries(task).items() if newcomers else ():
        figures = _figures(summary, task)
        table.add_row(protocol, "new clients", *figures, *["—"] * (len(names) - len(figures)))
    return table


def _figures(summary: Summary, task: Task) -> list[str]:
    of_primary = (summary.mean, summary.pooled, summary.std, summary.worst_decile)
    primary, *others = task.scores
    return [
        *(_figure(value, _digits(primary)) for value in of_primary),
        _figure(summary.jain, 3),
        *(_figure(summary.others[one.name], _digits(one)) for one in others),
    ]


def _digits(score: Score) -> int:
    return 2 if score.percent else 3


def _figure(value: float, digits: int = 2) -> str:
    return "—" if math.isnan(value) else f"{value:.{digits}f}"
