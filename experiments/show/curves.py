"""Curves of settings' scores: in a report, as a picture, and for a column of a paper."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.folder import stored_runs
from experiments.folder.stored_runs import Group, check_alike, chosen_on, goodness, headline, ordered
from experiments.show.draw import ROUND, Band, lines, over_runs, rows_of
from experiments.show.pictures import ENDINGS, PAPER, Panel, Picture, chart, save
from experiments.spec.choices import Protocol
from pfl_jax.errors import InvalidInput

NAME = "curves.png"
SPREAD = (10, 90)
"""Percentiles over clients that limit the band of a single run."""
MOST_LINES = 8
"""Maximum number of settings in a chart, the best ones."""


def save_curves(folder: Path) -> None:
    """Draw the curves of a run into curves.png in its folder; InvalidInput if it cannot be written."""
    save(picture(stored_runs.grouped(folder)[0]), folder / NAME)


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
      runs: a folder of runs, or several: folders of single runs, sweeps or tables, or folders above them.
      path: file to write, .pdf, .svg or .png.
      protocol: evaluation protocol of the scores; None for the one that most of the runs report.
      width: width of the picture in inches; 3.3 is a column of most conferences.
      band: band over the seeds: the sample standard deviation on both sides of the mean, its 95 % interval (Student's
        t), or from the lowest to the highest run. A single seed has no band.
      names: short names for methods or settings, "SHORT=NAME" each.

    Raises:
      InvalidInput: a folder has no runs, the runs differ in data or scores or have none, or `path` cannot be written.

    Example:
      plot_curves("runs/first", "curves.pdf", band="interval", names=["Ours=fedpac"])
    """
    folders, path = [runs] if isinstance(runs, str | Path) else runs, Path(path).expanduser()
    if path.suffix not in ENDINGS:
        raise InvalidInput(f"{path}: the name must end in {', '.join(ENDINGS)}")
    groups, _ = stored_runs.grouped(*folders)
    save_picture(stored_runs.renamed(groups, names), path, protocol=protocol, width=width, band=band)


def save_picture(
    groups: Sequence[Group],
    path: Path,
    *,
    protocol: Protocol | None = None,
    width: float | None = None,
    band: Band = "deviation",
) -> None:
    """Draw curves of groups of runs: as `picture` or, with a width, as `plot_curves` for a column of a paper."""
    check_alike(groups, "drawn together")
    if len({one.label for one in groups}) < len(groups):
        raise InvalidInput("several settings have the same name: give --name, or fewer runs")
    by = protocol or headline(groups)
    evaluated = [one for one in groups if one.curve(by)[0]]
    if not evaluated:
        raise InvalidInput(f"no run has been evaluated yet by {by}: there is nothing to draw")
    if width is None:
        save(picture(groups), path)
    else:
        frame = over_runs(
            pd.concat([rows_of(one.label, *one.curve(by), y_label=one.first.axis) for one in evaluated]), band
        )
        save(chart("", "", lines, frame, inches=(width, 0.68 * width)), path, style=PAPER)


def shown_groups(groups: Sequence[Group]) -> list[Group]:
    """Groups that a chart shows: the best ones, in the order of `groups`."""
    evaluated = [one for one in groups if one.rounds]
    first, on = headline(groups), chosen_on(evaluated)
    best = sorted(evaluated, key=lambda one: goodness(one, first, on), reverse=True)[:MOST_LINES]
    return [one for one in evaluated if one in best]


def left_out(groups: Sequence[Group]) -> str:
    """Remark on the groups that a chart does not show; "" if it shows all."""
    every = [one for one in groups if one.rounds]
    if len(every) <= MOST_LINES:
        return ""
    return f"The best {MOST_LINES} of {len(every)} settings on {chosen_on(every)} examples, by {headline(groups)}."


def over_rounds(groups: Sequence[Group], protocol: Protocol) -> pd.DataFrame:
    """Frame of the curves of some groups for `draw.lines`; a group without values keeps its color.

    Lines are means over clients and seeds. A single run has a band for the spread over its clients; several seeds have
    a band from the lowest to the highest.
    """
    tables = [rows_of(one.label, *one.curve(protocol), y_label=one.first.axis) for one in groups]
    rows = pd.concat([table for table in tables if len(table)] or tables[:1])
    frame = over_runs(rows.assign(line=pd.Categorical(rows.line, [one.label for one in groups])))
    if is_single(groups):
        # Runs of very many clients do not store each client's scores.
        (group,) = groups
        clients = [values for number in frame[ROUND] for values in group.per_client(group.lines(number), protocol)]
        if len(clients) == len(frame):
            frame["low"], frame["high"] = np.transpose([np.percentile(values, SPREAD) for values in clients])
    return frame


def is_single(groups: Sequence[Group]) -> bool:
    """Whether there is one run in all."""
    return len(groups) == 1 and len(groups[0].counted) == 1


def explained_band(groups: Sequence[Group]) -> str:
    """Sentence on the bands of `over_rounds`; "" where there are none."""
    if is_single(groups):
        return f"Band: the middle {SPREAD[1] - SPREAD[0]} % of the clients."
    several = any(len(one.counted) > 1 for one in groups)
    return "Bands: from the lowest to the highest seed." if several else ""


def curves(groups: Sequence[Group], main: Group | None = None) -> list[Panel]:
    """Curves of each protocol over the rounds, with the paper's results, if any, at their ends; `main` stands out."""
    some, panels = shown_groups(groups), []
    stands_out = some[0] if len(some) == 1 else main
    for protocol in ordered(groups) if some else ():
        frame = over_rounds(some, protocol)
        ends: Any = frame.groupby("line", observed=True)[ROUND].max()
        points = {
            one.label: (int(ends[one.label]), one.published.accuracy_percent)
            for one in some
            if one.published is not None and one.label in ends
        }
        draw = functools.partial(lines, main=stands_out.label if stands_out else "", points=points)
        if len(frame) or not panels:
            panels.append(Panel(protocol, draw, frame))
    return panels


def picture(groups: Sequence[Group], main: Group | None = None) -> Picture:
    """Picture of the curves, see `curves`; at least one group has an evaluation."""
    some = shown_groups(groups)
    title = f"{some[0].method} on {some[0].first.data}" if is_single(some) else some[0].first.data
    sentences = ["Means over clients.", explained_band(some), left_out(groups)]
    papers = {f"{one.source} ({one.accuracy_percent:.2f})" for group in some if (one := group.published)}
    sentences += [f"Points at the ends: {', '.join(sorted(papers))}."] if papers else []
    unfinished = [f"{one.label} (round {one.rounds[-1]})" for one in some if not one.is_finished]
    sentences += [f"Unfinished: {', '.join(unfinished)}."] if unfinished else []
    return Picture(title, " ".join(filter(None, sentences)), curves(groups, main), 2)
