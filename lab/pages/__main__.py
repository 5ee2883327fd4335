"""Everything in README and docs/ that is made from the committed results in results/.

    python -m lab.pages           # makes it anew
    python -m lab.pages --check   # exit code 2 where it is not what the results give

docs/results.md as a whole, with its template beside this file; the parts between <!-- made: NAME --> and
<!-- end of made --> of README and of the pages performance, natural, fairness and distributed of docs/; and their
pictures in docs/figures/.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from experiments.cli.parser import parse
from experiments.host.console import print_line
from experiments.host.exit_codes import exit_code, exit_process
from experiments.show.pictures import save
from lab import committed
from lab.pages import fairness, natural, performance, results, sizes
from lab.pages.parts import Made
from pfl_jax.atomic_write import make_folder, write_text
from pfl_jax.errors import InvalidInput

ROOT = committed.ROOT.parent


@dataclass(frozen=True)
class Options:
    """Command line."""

    check: bool = False
    """Write nothing, and say what is not up to date."""


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Make the pages of the checkout at root, or check them, by default with this process's arguments; return the exit
    code."""

    def work() -> None:
        own, _ = parse(Options, "lab.pages", __doc__, arguments)
        if not own.check:
            write(root, Console())
        elif names := ", ".join(str(path.relative_to(root)) for path in differing(root)):
            raise InvalidInput(f"not what {committed.ROOT.name}/ gives: {names}; run lab.pages")

    return exit_code(work)


def made(root: Path) -> Made:
    """All that the committed results of a checkout give.

    Raises:
      InvalidInput: a result is damaged, or a page lacks its marks.
    """
    found = results.made(root)
    parts = (performance, natural, fairness, sizes)
    return found._replace(texts=functools.reduce(operator.or_, (one.texts(root) for one in parts), found.texts))


def write(root: Path, console: Console) -> None:
    """Write all files; InvalidInput if one cannot be made or written."""
    texts, pictures = made(root)
    for path, picture in pictures.items():
        make_folder(path.parent)
        save(picture, path)
    for path, text in texts.items():
        write_text(path, text)
    for path in (*texts, *pictures):
        print_line(console, str(path.relative_to(root)))


def differing(root: Path) -> list[Path]:
    """Files that differ from what the committed results give; InvalidInput if a result is damaged.

    A drawing counts by the digest of what it shows, since versions of matplotlib draw differently.
    """
    texts, pictures = made(root)

    def there(path: Path) -> str:
        return path.read_text() if path.is_file() else ""

    return [path for path, text in texts.items() if there(path) != text] + [
        path for path, picture in pictures.items() if picture.digest() not in there(path)
    ]


if __name__ == "__main__":
    exit_process(main())
