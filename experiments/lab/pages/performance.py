"""Tables of docs/performance.md and docs/distributed.md from the figures in results/benchmark."""

import json
from pathlib import Path
from typing import Any

from experiments.lab.benchmark.records import Section
from experiments.lab.pages.parts import Made, filled
from experiments.run.committed import ROOT
from experiments.show.tables import markdown
from pfl_jax.errors import InvalidInput

PAGES = ("performance.md", "distributed.md")


def sections(folder: Path) -> dict[str, str]:
    """Parts of the page by their names: those of the benchmark's sections.

    Args:
      folder: of what `python -m experiments.lab.benchmark --out` wrote.

    Raises:
      InvalidInput: two files have the same section.
    """
    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.json")):
        figures = json.loads(file.read_text())
        machine = figures.pop("machine")
        if twice := found.keys() & figures.keys():
            raise InvalidInput(f"two files of {folder} have the section {min(twice)}: keep one")
        found |= {name: _part(Section(**section), machine, file.name) for name, section in figures.items()}
    return found


def made(root: Path) -> Made:
    """The pages of a checkout, with all tables; InvalidInput if a section is missing, or in several files."""
    parts = sections(root / ROOT.name / "benchmark")
    return Made({page: filled(page, parts) for name in PAGES if (page := root / "docs" / name)}, {})


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
