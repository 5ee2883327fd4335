"""Tables and pictures of docs/privacy.md and docs/robustness.md, of five methods by setting."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from experiments.choices import ALWAYS, Protocol
from experiments.folder.load import Result
from experiments.folder.run_folder import HONEST
from experiments.lab.pages.parts import FIGURES, Made, filled
from experiments.lab.queue.planned import PRIVACY_NOISE, SHORT, SHORT_METHODS, short_run
from experiments.run.committed import ROOT, Library
from experiments.show.pictures import ACCURACY, Lines, Picture, Series
from experiments.show.tables import NOTHING, markdown

Found: TypeAlias = dict[str, list[Result | None]]
"""Method -> its run by each setting of a block; None for one that is not finished."""


def made(root: Path) -> Made:
    """Parts and pictures of the pages of a checkout; InvalidInput if a result is damaged, or a mark is missing."""
    library = Library(root / ROOT.name)
    every = {block: _found(block, library) for block in SHORT}
    texts, pictures = {}, {}
    for name, (parts, picture) in {"privacy": _privacy(every), "robustness": _robustness(every)}.items():
        page = root / f"docs/{name}.md"
        texts[page], pictures[root / FIGURES / f"{name}.svg"] = filled(page, parts), picture
    return Made(texts, pictures)


def _found(block: str, library: Library) -> Found:
    return {
        method: [library.find(short_run(block, method, setting).cell) for setting in SHORT[block]]
        for method in SHORT_METHODS
    }


def _privacy(every: dict[str, Found]) -> tuple[dict[str, str], Picture]:
    """Tables of methods with differential privacy of single examples, and a picture of the first one."""
    epsilons, found = [setting.replace("=", " ") for setting in SHORT["privacy"]], every["privacy"]
    panels = [_panel(protocol, "privacy of single examples", epsilons, found, protocol) for protocol in ALWAYS]
    title = "Accuracy with differential privacy of single examples, Fashion-MNIST"
    caption = "Mean accuracy over clients after round 30, settings as on the page; no point: not finished."
    tables = {block: _table(epsilons, every[block], lambda run: _accuracies(run, 2)) for block in PRIVACY_NOISE}
    return tables, Picture(title, caption, panels, 2)


def _robustness(every: dict[str, Found]) -> tuple[dict[str, str], Picture]:
    """Tables and picture of methods with compressed messages, and under attack."""
    compressed, attacked = every["compression"], every["attacks"]
    compressions, means = ([f"`{setting}`" for setting in SHORT[block]] for block in ("compression", "attacks"))
    with_plain = {method: [compressed[method][0], *runs] for method, runs in attacked.items()}
    text = "\n".join(
        [
            "Accuracy with compressed messages:\n",
            _table(compressions, compressed, _accuracies),
            "Kilobytes that a client sends in a round:\n",
            _table(compressions, compressed, _kilobytes),
            "Accuracy of the honest clients, with a fifth of the clients flipping the signs of their updates, for each "
            "mean of the server; the first column has all clients without attackers:\n",
            _table(["no attack", *means], with_plain, _accuracies),
        ]
    )
    panels = [
        _panel("compression", "--compress", SHORT["compression"], compressed),
        _panel("a fifth flip signs: honest clients", "--server-mean", SHORT["attacks"], attacked),
    ]
    caption = "Mean accuracy over clients (received) after round 30, settings as on the page; no point: not finished."
    title = "Accuracy with compression, and under attack, Fashion-MNIST"
    return {"robustness": text}, Picture(title, caption, panels, 2)


def _table(heads: Sequence[str], found: Found, text: Callable[[Result], str]) -> str:
    """A row for each method, a column for each setting; a dash for a run that is not finished."""
    rows = [[f"`{method}`", *(text(run) if run else NOTHING for run in runs)] for method, runs in found.items()]
    return markdown(["method", *heads], rows)


def _accuracy(run: Result, protocol: Protocol) -> float:
    """Mean over clients after the last round in percent, over the honest ones where there are others."""
    return run.summary.get(HONEST, run.summary)[protocol]["mean"]


def _accuracies(run: Result, digits: int = 1) -> str:
    return " / ".join(f"{_accuracy(run, protocol):.{digits}f}" for protocol in ALWAYS)


def _kilobytes(run: Result) -> str:
    return f"{run.config['bytes_per_client_and_round']['up'] / 1000:,.0f}"


def _panel(title: str, x_label: str, settings: Sequence[str], found: Found, protocol: Protocol = "received") -> Lines:
    """Accuracies over the settings, a line for each method that has a finished run."""
    series = []
    for method, runs in found.items():
        there = {index: _accuracy(run, protocol) for index, run in enumerate(runs) if run is not None}
        if there:
            series.append(Series(method, list(there), list(there.values())))
    return Lines(title, x_label, ACCURACY, series, list(range(len(settings))), x_names=list(settings))
