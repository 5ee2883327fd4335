"""Curves for a column of a paper: one protocol, a band over the seeds, a serif font, no title."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from experiments.choices import Protocol
from experiments.folder import stored_runs
from experiments.folder.stored_runs import Group
from experiments.show.curves import headline
from experiments.show.pictures import COLORS, DASHES, ENDINGS, ROUND, STYLE, save_figure
from pfl_jax.compare import margin
from pfl_jax.errors import InvalidInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Band: TypeAlias = Literal["deviation", "interval", "range"]

PAPER: dict[Any, Any] = STYLE | {
    "font.family": "serif",
    # Times, as matplotlib brings it.
    "font.serif": ["STIXGeneral"],
    "mathtext.fontset": "stix",
    "font.size": 8,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.1,
    # TrueType, as publishers ask for.
    "pdf.fonttype": 42,
}


def plot_curves(
    runs: str | Path | Sequence[str | Path],
    path: str | Path,
    *,
    protocol: Protocol | None = None,
    width: float = 3.3,
    band: Band = "deviation",
    names: Sequence[str] = (),
) -> None:
    """Draw the mean scores of runs over the rounds, a line for each setting, for a column of a paper.

    Args:
      runs: a folder of runs, or several: those of single runs, sweeps or tables, or folders above them.
      path: file to write, .pdf, .svg or .png.
      protocol: of the scores; None is that of most of the runs.
      width: of the picture in inches; 3.3 is a column of most conferences.
      band: over the seeds: the sample standard deviation on both sides of the mean, its 95 % interval (Student's t), or
        from the lowest to the highest run. There is none for a single seed.
      names: short names for methods or settings, "SHORT=NAME" each.

    Raises:
      InvalidInput: a folder has no runs, they have different scores or none, or `path` cannot be written.

    Example:
      plot_curves("runs/first", "curves.pdf", band="interval", names=["Ours=fedpac"])
    """
    folders = [runs] if isinstance(runs, str | Path) else runs
    found = [stored_runs.read(folder) for folder in stored_runs.find([Path(folder) for folder in folders])]
    groups = stored_runs.renamed(stored_runs.group(found)[0], names)
    save_column(groups, Path(path).expanduser(), protocol=protocol, width=width, band=band)


def save_column(
    groups: Sequence[Group],
    path: Path,
    *,
    protocol: Protocol | None = None,
    width: float = 3.3,
    band: Band = "deviation",
) -> None:
    """Draw groups of runs as `plot_curves` does."""
    if path.suffix not in ENDINGS:
        raise InvalidInput(f"{path}: the name ends in {', '.join(ENDINGS)}")
    if len(axes := list(dict.fromkeys(one.axis for one in groups))) > 1:
        raise InvalidInput(f"runs with different scores are not drawn together: {'; '.join(axes)}")
    by = protocol or headline(groups)
    if not any(one.curve(by)[0] for one in groups):
        raise InvalidInput(f"no run has scores by {by}: there is nothing to draw")
    save_figure(_figure(groups, by, width, band), path, style=PAPER)


def _figure(groups: Sequence[Group], protocol: Protocol, width: float, band: Band) -> "Figure":
    # Imported now: it takes seconds.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(PAPER):
        figure = Figure(figsize=(width, 0.68 * width), layout="constrained")
        axes = figure.subplots()
        axes.grid()
        axes.set_prop_cycle(color=COLORS, linestyle=("-", *DASHES[:-1]))
        for one in groups:
            rounds, table = one.curve(protocol)
            if not rounds:
                continue
            mean = table.mean(0)
            (line,) = axes.plot(rounds, mean, label=one.label)
            if len(table) > 1:
                axes.fill_between(rounds, *_edges(table, band), color=line.get_color(), alpha=0.18, linewidth=0)
        axes.set_xlabel(ROUND)
        axes.set_ylabel(groups[0].axis)
        figure.legend(loc="outside upper center", ncols=min(3, len(groups)), frameon=False, handlelength=2.6)
        return figure


def _edges(table: np.ndarray, band: Band) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper edge [R] of the band of runs [S, R]."""
    if band == "range":
        return table.min(0), table.max(0)
    half = table.std(0, ddof=1) if band == "deviation" else np.array([margin(one, len(table)) for one in table.std(0)])
    return table.mean(0) - half, table.mean(0) + half
