"""What a page is made of, and the parts of a page between its marks."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.folder.stored_runs import NOTHING, Mean
from experiments.show.pictures import Picture
from pfl_jax.errors import InvalidInput

FIGURES = Path("docs/figures")

_PART = re.compile(r"(<!-- made: (?P<name>[\w-]+) -->\n).*?(<!-- end of made -->\n)", re.DOTALL)


class Made(NamedTuple):
    """Pages and pictures that committed results give.

    Attributes:
      texts: file -> its text.
      pictures: file -> what it shows.
    """

    texts: dict[Path, str]
    pictures: dict[Path, Picture]


def mean_text(values: Sequence[float]) -> str:
    """Mean of percentages over seeds, followed by "± standard deviation (number of seeds)" if there are several."""
    text = Mean(dict(enumerate(values))).text() or NOTHING
    return f"{text} ({len(values)})" if len(values) > 1 else text


def filled(page: Path, parts: Mapping[str, str]) -> str:
    """Text of a page whose parts are made anew: what stands between `<!-- made: NAME -->` and `<!-- end of made -->`.

    Raises:
      InvalidInput: the page has none of the parts, or another one.
    """
    text = page.read_text()
    named = [found["name"] for found in _PART.finditer(text)]
    if not named or not parts.keys() >= set(named):
        raise InvalidInput(f"{page.name} has the parts {', '.join(named) or 'none'}, of {', '.join(parts)}")
    return _PART.sub(lambda found: f"{found[1]}{parts[found['name']]}{found[3]}", text)
