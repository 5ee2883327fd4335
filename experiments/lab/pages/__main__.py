"""docs/results.md, README's table and docs/figures/results.svg and .png, from the committed results.

    python -m experiments.lab.pages           # writes them again
    python -m experiments.lab.pages --check   # exit code 2 where they are not what the results give

In README the lines between <!-- results:start --> and <!-- results:end --> are replaced.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from experiments.cli.exit_codes import exit_code, leave
from experiments.cli.parser import Switch, parse
from experiments.host.console import print_line
from experiments.lab import causes
from experiments.lab.pages import places
from experiments.lab.pages.marks import replaced
from experiments.lab.pages.picture import picture
from experiments.lab.pages.results import Content, page, readme_table
from experiments.lab.queue.jobs import DATASET
from experiments.run import committed
from experiments.run.committed import Library
from experiments.show.pictures import Picture
from pfl_jax.atomic_write import write_text
from pfl_jax.errors import InvalidInput

ROOT = committed.ROOT.parent
MARKS = "<!-- results:start -->\n", "<!-- results:end -->\n"
"""Lines of README before and after its table."""
FIGURES = tuple(Path("docs/figures") / name for name in ("results.svg", "results.png"))


@dataclass(frozen=True)
class Options:
    """Command line."""

    check: Switch = False
    """Write nothing, and say what is not up to date."""


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write the page of the checkout at root, or check it, by default with this process's arguments; return the exit
    code."""

    def work() -> None:
        own, _ = parse(Options, "experiments.lab.pages", __doc__, arguments)
        if not own.check:
            write(root, Console())
        elif names := ", ".join(str(path.relative_to(root)) for path in differing(root)):
            raise InvalidInput(f"not what {committed.ROOT.name}/ gives: {names}; run experiments.lab.pages")

    return exit_code(work)


def made(root: Path) -> tuple[dict[Path, str], Picture]:
    """Texts and figure that the committed results of a checkout give.

    Raises:
      InvalidInput: a result is damaged, or README has no marks.
    """
    kept, readme = root / committed.ROOT.name, root / "README.md"
    content = Content(Library(kept), causes.load(DATASET), places.load_released(kept))
    text = replaced(readme.read_text(), f"\n{readme_table(content)}", readme.name, MARKS)
    return {root / "docs/results.md": page(content), readme: text}, picture(content.library)


def write(root: Path, console: Console) -> None:
    """Write all files; InvalidInput if one cannot be made or written."""
    # Imported now: matplotlib takes seconds.
    from experiments.show.drawing import save_as

    texts, shown = made(root)
    figures = [root / path for path in FIGURES]
    figures[0].parent.mkdir(parents=True, exist_ok=True)
    save_as(shown, *figures, description=shown.digest())
    for path, text in texts.items():
        write_text(path, text)
    for path in (*texts, *figures):
        print_line(console, str(path.relative_to(root)))


def differing(root: Path) -> list[Path]:
    """Files that differ from what the committed results give; InvalidInput if a result is damaged.

    A drawing counts by the digest of what it shows, since versions of matplotlib draw differently.
    """
    texts, shown = made(root)
    mark, figures = shown.digest().encode(), [root / path for path in FIGURES]
    other = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
    return other + [path for path in figures if not path.is_file() or mark not in path.read_bytes()]


if __name__ == "__main__":
    leave(main())
