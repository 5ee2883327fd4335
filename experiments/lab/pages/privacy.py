"""Table and figure of docs/privacy.md: accuracy of methods with differential privacy, from the committed results.

python -m experiments.lab.queue --only privacy   # runs what is missing
python -m experiments.lab.pages.privacy           # makes the table and the figure anew
"""

from collections.abc import Sequence

from experiments.cli.exit_codes import leave
from experiments.cli.measures import ALWAYS
from experiments.lab.pages.marks import DOCS, accuracies, command
from experiments.lab.queue.jobs import PRIVACY_METHODS, PRIVACY_NOISE, privacy_cell
from experiments.run.committed import Library
from experiments.show.pictures import Picture
from experiments.show.tables import NOTHING, markdown

PAGE = DOCS / "privacy.md"


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or check it, by default with this process's arguments; return the exit code."""
    return command("lab.pages.privacy", __doc__ or "", PAGE, measured, drawn, arguments)


if __name__ == "__main__":
    leave(main())
