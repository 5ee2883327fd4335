"""docs/results.md, README's table and docs/figures/results.svg and .png, from the committed results.

    python -m experiments.results_page           # writes them again
    python -m experiments.results_page --check   # exit code 2 where they are not what the results give

In README the lines between <!-- results:start --> and <!-- results:end --> are replaced.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from experiments.commands import batch
from experiments.commands.main import exit_code
from experiments.execution import committed
from experiments.execution.committed import Library
from experiments.results_page import places
from experiments.results_page.page import Content, page, readme_table
from experiments.results_page.picture import digest, picture
from pfl_jax.atomic_write import write_whole
from pfl_jax.errors import InvalidInput

ROOT = committed.ROOT.parent
START, END = "<!-- results:start -->\n", "<!-- results:end -->\n"


class Files(NamedTuple):
    """Generated files, below a root."""

    page: Path
    readme: Path
    figures: tuple[Path, Path]

    @classmethod
    def below(cls, root: Path) -> "Files":
        """Their paths in a checkout."""
        figures = root / "docs" / "figures"
        return cls(root / "docs" / "results.md", root / "README.md", (figures / "results.svg", figures / "results.png"))


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write the page, or check it.

    Args:
      arguments: command-line arguments; by default those of this process.
      root: of the checkout.

    Returns:
      The exit code, see `main.exit_code`.
    """

    def work() -> None:
        parser = batch.Parser("experiments.results_page", __doc__)
        parser.add_argument("--check", action="store_true", help="write nothing, and say what is not up to date")
        own = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
        if own.check:
            outdated = differing(root)
            if outdated:
                names = ", ".join(str(path.relative_to(root)) for path in outdated)
                raise InvalidInput(f"not what {committed.ROOT.name}/ gives: {names}; run experiments.results_page")
        else:
            write(root, Console().print)

    return exit_code(work)


def write(root: Path, say: Callable[[str], object]) -> None:
    """Write all files.

    Args:
      root: of the checkout.
      say: receives the names of the written files.

    Raises:
      InvalidInput: a result is damaged, or a file cannot be written.
    """
    # Imported now: matplotlib takes seconds.
    from experiments.plots.drawing import save_as

    files, library, content = _gather(root)
    shown = picture(library)
    files.figures[0].parent.mkdir(parents=True, exist_ok=True)
    save_as(shown, *files.figures, description=digest(shown))
    write_whole(files.page, page(content))
    write_whole(files.readme, with_table(files.readme.read_text(), readme_table(content)))
    for path in (files.page, files.readme, *files.figures):
        say(str(path.relative_to(root)))


def differing(root: Path) -> list[Path]:
    """Files that differ from what the committed results give.

    A drawing counts by the digest of what it shows, since versions of matplotlib draw differently.

    Args:
      root: of the checkout.

    Raises:
      InvalidInput: a result is damaged.
    """
    files, library, content = _gather(root)
    readme, mark = files.readme.read_text(), digest(picture(library)).encode()
    right = {
        files.page: files.page.is_file() and files.page.read_text() == page(content),
        files.readme: readme == with_table(readme, readme_table(content)),
        **{path: path.is_file() and mark in path.read_bytes() for path in files.figures},
    }
    return [path for path, is_right in right.items() if not is_right]


def with_table(readme: str, table: str) -> str:
    """README with the table between its two marks; InvalidInput if it has not got them."""
    before, start, rest = readme.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise InvalidInput(f"README.md has no lines {START.strip()} and {END.strip()}")
    return f"{before}{start}\n{table}\n{end}{after}"


def _gather(root: Path) -> tuple[Files, Library, Content]:
    kept = root / committed.ROOT.name
    library = Library(kept)
    return Files.below(root), library, Content(library, places.load_causes(kept), places.load_released(kept))


if __name__ == "__main__":
    sys.exit(main())
