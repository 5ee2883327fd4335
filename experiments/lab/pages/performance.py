"""Tables of docs/performance.md from the figures in results/benchmark: python -m experiments.lab.pages.performance."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.cli.exit_codes import exit_code, leave
from experiments.cli.parser import parse
from experiments.lab.benchmark.records import Section
from experiments.lab.pages.marks import DOCS, MARKS, Options
from experiments.run.committed import ROOT
from experiments.show.tables import markdown
from pfl_jax.atomic_write import write_text
from pfl_jax.errors import InvalidInput

PAGE = DOCS / "performance.md"
FIGURES = ROOT / "benchmark"
_PART = re.compile(rf"(<!-- measured: (?P<name>\w+) -->\n).*?({MARKS[1]})", re.DOTALL)


def rendered(page: str, folder: Path) -> str:
    """The page's text with every measured part made from the files of a folder.

    Args:
      page: text whose measured parts name a section of the benchmark.
      folder: of what `python -m experiments.lab.benchmark --out` wrote.

    Raises:
      InvalidInput: a section is in no file, or in several.
    """
    found: dict[str, list[str]] = {}
    for file in sorted(folder.glob("*.json")):
        figures = json.loads(file.read_text())
        machine = figures.pop("machine")
        for name, section in figures.items():
            found.setdefault(name, []).append(_part(Section(**section), machine, file.name))

    def replace(match: re.Match[str]) -> str:
        texts = found.get(match["name"], [])
        if len(texts) != 1:
            raise InvalidInput(f"{len(texts)} files of {folder} have the section {match['name']}: keep one")
        return f"{match[1]}{texts[0]}{match[3]}"

    return _PART.sub(replace, page)


def _part(section: Section, machine: dict[str, Any], file: str) -> str:
    """Table of a section, its settings, and the machine with its peaks."""
    peaks = []
    if "peak" in machine:
        peaks.append(f"{machine['peak']['peak'] / 1e9:.0f} GFLOP/s in matrix products")
    if "memory" in machine.get("peak", {}):
        peaks.append(f"{machine['peak']['memory'] / 1e9:.1f} GB/s in copies by one core")
    about = [f"{machine['cores']} cores of {machine['cpu']}", *peaks, f"jax {machine['versions']['jax']}"]
    settings = f"{section.note[0].upper()}{section.note[1:]}. " if section.note else ""
    source = f"`results/benchmark/{file}`, {machine['date'][:10]}: {', '.join(about)}."
    return f"{markdown(section.headings, section.cells, None)}\n{settings}From {source}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
      arguments: of the command; None for this process's.

    Returns:
      The exit code, see `exit_codes.exit_code`.
    """

    def work() -> None:
        own, _ = parse(Options, "experiments.lab.pages.performance", __doc__, arguments)
        before = PAGE.read_text()
        after = rendered(before, FIGURES)
        if own.check and after != before:
            raise InvalidInput(f"{PAGE.name} is not what {FIGURES.name}/ gives: run experiments.lab.pages.performance")
        if not own.check:
            write_text(PAGE, after)

    return exit_code(work)


if __name__ == "__main__":
    leave(main())
