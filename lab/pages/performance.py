"""Tables of docs/performance.md: measurements in results/benchmark.jsonl, and sizes of methods."""

from collections.abc import Mapping
from pathlib import Path

from experiments.show.tables import markdown
from lab.benchmark.records import Section, stored
from lab.committed import ROOT
from lab.pages.parts import filled
from lab.pages.sizes import each_method


def texts(root: Path) -> dict[Path, str]:
    """The page of a checkout, with its tables; InvalidInput if a measurement is missing."""
    sections = stored(root / ROOT.name / "benchmark.jsonl")
    parts = {name: part(section) for name, section in sections.items()}
    parts |= {"gpu": gpu(sections), "sizes": each_method()}
    page = root / "docs/performance.md"
    return {page: filled(page, parts)}


def gpu(sections: Mapping[str, Section]) -> str:
    """Tables of `lab.gpu`, or that there are none."""
    tables = [f"{one.title}:\n\n{part(one)}" for name, one in sections.items() if name.startswith("gpu-")]
    return "\n".join(tables) or UNTESTED


UNTESTED = (
    "No GPU has been measured yet: the form of the convolutions, the chunk and the precision that a GPU gets are "
    "untested choices.\n"
)


def part(section: Section) -> str:
    """Table of a section, its settings, and the machine with its peaks."""
    machine, peaks = section.machine or {}, []
    if "peak" in machine:
        peaks.append(f"{machine['peak']['peak'] / 1e9:.0f} GFLOP/s in matrix products")
    cores = f"{machine['cores']} cores of {machine['cpu']}"
    about = [machine["devices"] if machine["backend"] == "gpu" else cores, *peaks, f"jax {machine['versions']['jax']}"]
    settings = f"{section.note[0].upper()}{section.note[1:]}. " if section.note else ""
    measured = f"Measured {machine['date'][:10]} on {', '.join(about)}."
    return f"{markdown(section.headings, section.cells, None)}\n{settings}{measured}\n"
