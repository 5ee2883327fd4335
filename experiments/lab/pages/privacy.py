"""Table and picture of docs/privacy.md: accuracy of methods with differential privacy."""

from pathlib import Path

from experiments.cli.measures import ALWAYS
from experiments.lab.pages.parts import FIGURES, Made, accuracies, filled
from experiments.lab.queue.jobs import PRIVACY_METHODS, PRIVACY_NOISE, privacy_cell
from experiments.run.committed import ROOT, Library
from experiments.show.pictures import Picture
from experiments.show.tables import NOTHING, markdown


def measured(library: Library) -> str:
    """Table of the mean accuracies after the last round, received / trained, in percent; a dash for no finished run.

    Args:
      library: the committed results.
    """
    rows = []
    for method in PRIVACY_METHODS:
        found = [library.find(privacy_cell(method, epsilon)) for epsilon in (None, *PRIVACY_NOISE)]
        cells = [
            NOTHING if one is None else " / ".join(f"{one.at_round(30, protocol):.2f}" for protocol in ALWAYS)
            for one in found
        ]
        rows.append([f"`{method}`", *cells])
    heads = ["method", "none", *(f"epsilon {epsilon}" for epsilon in PRIVACY_NOISE)]
    return markdown(heads, rows)


def drawn(library: Library) -> Picture:
    """Figure of the same accuracies.

    Args:
      library: the committed results.
    """
    settings = {"none": None, **{f"epsilon {epsilon}": epsilon for epsilon in PRIVACY_NOISE}}
    results = {
        method: {name: library.find(privacy_cell(method, epsilon)) for name, epsilon in settings.items()}
        for method in PRIVACY_METHODS
    }
    panels = [
        accuracies(protocol, "privacy of single examples", results, lambda run, of=protocol: run.accuracy(of) or 0.0)
        for protocol in ALWAYS
    ]
    caption = "Mean accuracy over clients after round 30, settings as on the page; no point: not finished."
    return Picture("Accuracy with differential privacy of single examples, Fashion-MNIST", caption, panels, 2)


def made(root: Path) -> Made:
    """Part and picture of the page of a checkout; InvalidInput if a result is damaged, or a mark is missing."""
    library, page = Library(root / ROOT.name), root / "docs/privacy.md"
    picture = root / FIGURES / "privacy.svg"
    return Made({page: filled(page, {"privacy": measured(library)})}, {picture: drawn(library)})
