"""Table of a run's results for the terminal."""

import math
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.table import Table

from experiments.cli.measures import Protocol
from experiments.folder.run_folder import Evaluation, best
from pfl_jax.primitives.metrics import Summary


def results_table(
    evaluations: Sequence[Evaluation],
    title: str,
    headline: Protocol,
    paper: str | None = None,
    *,
    paper_is: Literal["last", "best pooled"] = "last",
) -> Table:
    """Content of `Summary` for each protocol, last and best round, and new clients.

    The best round is that with the highest mean over clients, on validation examples if there are; where another one
    has the highest mean over examples, it has a line of its own.

    Args:
      evaluations: all of the run, at least one.
      title: which method on which data.
      headline: the protocol that comes first.
      paper: the published accuracy for exactly this setting.
      paper_is: which round's accuracy it is, and so stands beside.

    Returns:
      A table for rich.
    """
    caption = "accuracy, macro-F1 and AUC in percent, means over clients; pooled: over all their test examples"
    validated = evaluations[-1].validation_counts is not None
    if validated:
        caption += "; val.: accuracy on validation examples, by which the best round is chosen"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("protocol")
    table.add_column("round")
    names = ["mean", "pooled", "std", "worst 10%", "Jain", "loss", "F1", "AUC"]
    names += ["val."] * validated + ["paper"] * (paper is not None)
    for name in names:
        table.add_column(name, justify="right")
    for protocol in sorted(evaluations[-1].protocols, key=lambda name: name != headline):
        shown = {"last": evaluations[-1], "best": best(evaluations, protocol)}
        if (pooled := best(evaluations, protocol, "examples")) is not shown["best"]:
            shown["best pooled"] = pooled
        *_, last_line = shown
        for word, evaluation in shown.items():
            figures = _figures(evaluation.summary(protocol))
            if validation := evaluation.validation(protocol):
                figures.append(_figure(validation.mean))
            if paper is not None:
                figures.append(paper if word == ("last" if paper_is == "last" else last_line) else "—")
            table.add_row(protocol, f"{word} ({evaluation.round})", *figures, end_section=word == last_line)
    for protocol in evaluations[-1].protocols:
        for side, summary in evaluations[-1].sides(protocol).items():
            figures = _figures(summary)
            table.add_row(protocol, side, *figures, *["—"] * (len(names) - len(figures)))
    newcomers = evaluations[-1].newcomers
    for protocol, summary in newcomers.summaries().items() if newcomers else ():
        figures = _figures(summary)
        table.add_row(protocol, "new clients", *figures, *["—"] * (len(names) - len(figures)))
    return table


def _figures(summary: Summary) -> list[str]:
    percents = [_figure(value) for value in (summary.mean, summary.pooled, summary.std, summary.worst_decile)]
    fractions = [_figure(value, 3) for value in (summary.jain, summary.loss)]
    return [*percents, *fractions, _figure(summary.macro_f1), _figure(summary.auc)]


def _figure(value: float, digits: int = 2) -> str:
    return "—" if math.isnan(value) else f"{value:.{digits}f}"
