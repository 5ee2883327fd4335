"""Pages of docs/ with tables and a figure made from the committed results, and the command that makes them anew."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.cli.exit_codes import exit_code
from experiments.cli.parser import Switch, parse
from experiments.folder.load import Result
from experiments.run.committed import ROOT, Library
from experiments.show.pictures import ACCURACY, Lines, Picture, Series
from pfl_jax.atomic_write import write_text
from pfl_jax.errors import InvalidInput

DOCS = ROOT.parent / "docs"
MARKS = "<!-- measured -->\n", "<!-- end of measured -->\n"
"""Lines before and after the part."""


def replaced(page: str, part: str, name: str = "the page", marks: tuple[str, str] = MARKS) -> str:
    """The page's text with another part.

    Args:
      page: text with both marks.
      part: what stands between them afterwards, and a line break.
      name: of the page, for the error.
      marks: lines before and after the part.

    Raises:
      InvalidInput: a mark is not there.
    """
    start, end = marks
    before, _, rest = page.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise InvalidInput(f"{name} has no lines {start.strip()} and {end.strip()}")
    return f"{before}{start}{part}\n{end}{after}"


@dataclass(frozen=True)
class Options:
    """Command line."""

    check: Switch = False
    """Write nothing, and say whether the page is up to date."""


def figure_file(page: Path) -> Path:
    """File of the page's figure."""
    return page.parent / "figures" / f"{page.stem}.svg"


def accuracies(
    title: str, x_label: str, results: Mapping[str, Mapping[str, Result | None]], accuracy: Callable[[Result], float]
) -> Lines:
    """Mean accuracies in percent over settings, a line for each method.

    Args:
      title: of the panel.
      x_label: what the settings are.
      results: method -> setting -> its run; None for one that is not finished.
      accuracy: of a run.
    """
    names = list(dict.fromkeys(name for runs in results.values() for name in runs))
    series = []
    for method, runs in results.items():
        found = {names.index(name): accuracy(run) for name, run in runs.items() if run is not None}
        if found:
            series.append(Series(method, list(found), list(found.values())))
    return Lines(title, x_label, ACCURACY, series, list(range(len(names))), x_names=names)


def command(
    name: str,
    doc: str,
    page: Path,
    measured: Callable[[Library], str],
    drawn: Callable[[Library], Picture],
    arguments: Sequence[str] | None,
) -> int:
    """Write a page's measured part and its figure, or check them; return the exit code.

    Args:
      name: of the command after `python -m experiments.`
      doc: its documentation.
      page: the file.
      measured: committed results -> the part.
      drawn: committed results -> the figure.
      arguments: of the command; None for this process's.
    """

    def work() -> None:
        own, _ = parse(Options, f"experiments.{name}", doc, arguments)
        before, library, file = page.read_text(), Library(), figure_file(page)
        text, figure = replaced(before, measured(library), page.name), drawn(library)
        if own.check:
            if text != before or not file.is_file() or figure.digest() not in file.read_text():
                raise InvalidInput(f"{page.name} or its figure is not what results/ gives: run experiments.{name}")
            return
        # Imported now: matplotlib takes seconds.
        from experiments.show.drawing import save_as

        file.parent.mkdir(exist_ok=True)
        save_as(figure, file, description=figure.digest())
        write_text(page, text)

    return exit_code(work)
