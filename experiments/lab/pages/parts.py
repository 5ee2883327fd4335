"""What a page is made of, and the parts of a page between its marks."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from experiments.folder.load import Result
from experiments.show.pictures import ACCURACY, Lines, Picture, Series
from pfl_jax.errors import InvalidInput

FIGURES = Path("docs/figures")

_PART = re.compile(r"(<!-- made: (?P<name>\w+) -->\n).*?(<!-- end of made -->\n)", re.DOTALL)


class Made(NamedTuple):
    """Pages and pictures that committed results give.

    Attributes:
      texts: file -> its text.
      pictures: file -> what it shows.
    """

    texts: dict[Path, str]
    pictures: dict[Path, Picture]


def filled(page: Path, parts: Mapping[str, str]) -> str:
    """Text of a page whose parts are made anew: what stands between `<!-- made: NAME -->` and `<!-- end of made -->`.

    Args:
      page: the file.
      parts: name -> text, which ends with a line break.

    Raises:
      InvalidInput: the page has none of the parts, or another one.
    """
    text = page.read_text()
    named = [found["name"] for found in _PART.finditer(text)]
    if not named or not parts.keys() >= set(named):
        raise InvalidInput(f"{page.name} has the parts {', '.join(named) or 'none'}, of {', '.join(parts)}")
    return _PART.sub(lambda found: f"{found[1]}{parts[found['name']]}{found[3]}", text)


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
