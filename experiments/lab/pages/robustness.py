"""Tables and picture of docs/robustness.md: accuracies with compression and under attack."""

from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.cli.measures import ALWAYS
from experiments.folder.load import Result
from experiments.folder.run_folder import HONEST
from experiments.lab.pages.parts import FIGURES, Made, accuracies, filled
from experiments.lab.queue.jobs import COMPRESSIONS, ROBUST_METHODS, SERVER_MEANS, robust_cell
from experiments.run.committed import ROOT, Library
from experiments.show.pictures import Picture
from experiments.show.tables import NOTHING, markdown


def measured(library: Library) -> str:
    """The tables; a dash for a run that is not finished.

    Args:
      library: the committed results.
    """
    plain = [library.find(robust_cell(method, "compression", "none")) for method in ROBUST_METHODS]
    return "\n".join(
        [
            "Accuracy with compressed messages:\n",
            _table("compression", COMPRESSIONS, _accuracies, library),
            "Kilobytes that a client sends in a round:\n",
            _table("compression", COMPRESSIONS, _kilobytes, library),
            "Accuracy of the honest clients, with a fifth of the clients flipping the signs of their updates, for each "
            "mean of the server; the first column has all clients without attackers:\n",
            _table("attacks", SERVER_MEANS, _honest, library, plain),
        ]
    )


def _table(
    block: str,
    settings: Sequence[str],
    words: Callable[[Result], str],
    library: Library,
    plain: Sequence[Result | None] = (),
) -> str:
    """Table of a block: a row for each method, a column for each setting, and before them one of plain runs."""
    rows = []
    for index, method in enumerate(ROBUST_METHODS):
        found = [library.find(robust_cell(method, block, setting)) for setting in settings]
        first = [plain[index]] if plain else []
        cells = [_accuracies(one) if one else NOTHING for one in first]
        rows.append([f"`{method}`", *cells, *(words(one) if one else NOTHING for one in found)])
    return markdown(["method", *(["no attack"] if plain else []), *(f"`{setting}`" for setting in settings)], rows)


def _accuracies(result: Result) -> str:
    return " / ".join(f"{result.summary[protocol]['mean']:.1f}" for protocol in ALWAYS)


def _honest(result: Result) -> str:
    return " / ".join(f"{result.summary[HONEST][protocol]['mean']:.1f}" for protocol in ALWAYS)


def _kilobytes(result: Result) -> str:
    return f"{result.config['bytes_per_client_and_round']['up'] / 1000:,.0f}"


def drawn(library: Library) -> Picture:
    """Figure of the accuracies of what clients deploy after aggregation, as in the tables.

    Args:
      library: the committed results.
    """

    def results(block: str, settings: Sequence[str]) -> dict[str, dict[str, Result | None]]:
        return {
            method: {setting: library.find(robust_cell(method, block, setting)) for setting in settings}
            for method in ROBUST_METHODS
        }

    compressed, attacked = results("compression", COMPRESSIONS), results("attacks", SERVER_MEANS)
    panels = [
        accuracies("compression", "--compress", compressed, lambda run: run.accuracy("received") or 0.0),
        accuracies(
            "a fifth flip signs: honest clients",
            "--server-mean",
            attacked,
            lambda run: run.summary[HONEST]["received"]["mean"],
        ),
    ]
    caption = "Mean accuracy over clients (received) after round 30, settings as on the page; no point: not finished."
    return Picture("Accuracy with compression, and under attack, Fashion-MNIST", caption, panels, 2)


def made(root: Path) -> Made:
    """Part and picture of the page of a checkout; InvalidInput if a result is damaged, or a mark is missing."""
    library, page = Library(root / ROOT.name), root / "docs/robustness.md"
    picture = root / FIGURES / "robustness.svg"
    return Made({page: filled(page, {"robustness": measured(library)})}, {picture: drawn(library)})
