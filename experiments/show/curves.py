"""Curves of the scores of runs: as panels of a report, as a picture, and for a column of a paper."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.folder import load, stored_runs
from experiments.folder.load import read
from experiments.folder.run_folder import VALIDATION
from experiments.folder.stored_runs import Group, group
from experiments.show.panels import ROUND, Band, Lines, Series, over_seeds
from experiments.show.pictures import ENDINGS, PAPER, STYLE, Picture, save
from experiments.spec.choices import ALWAYS, PROTOCOLS, Protocol
from pfl_jax.errors import InvalidInput

NAME = "curves.png"
SPREAD = (10, 90)
"""Percentiles over clients that limit the band of a single run."""
MOST_LINES = 8
"""Maximum number of settings in a chart, the best ones."""


def save_curves(folder: Path) -> None:
    """Draw the curves of a run into curves.png in its folder; InvalidInput if it cannot be written."""
    groups, _ = group([read(folder)])
    save(picture(groups), folder / NAME)


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
    folders, path = [runs] if isinstance(runs, str | Path) else runs, Path(path).expanduser()
    if path.suffix not in ENDINGS:
        raise InvalidInput(f"{path}: the name ends in {', '.join(ENDINGS)}")
    found = [read(folder) for folder in stored_runs.find([Path(folder) for folder in folders])]
    save_picture(stored_runs.renamed(group(found)[0], names), path, protocol=protocol, width=width, band=band)


def save_picture(
    groups: Sequence[Group],
    path: Path,
    *,
    protocol: Protocol | None = None,
    width: float | None = None,
    band: Band = "deviation",
) -> None:
    """Draw curves of groups of runs: as `picture` or, with a width, as `plot_curves` for a column of a paper."""
    if len(axes := list(dict.fromkeys(one.axis for one in groups))) > 1:
        raise InvalidInput(f"runs with different scores are not drawn together: {'; '.join(axes)}")
    by = protocol or headline(groups)
    if not any(one.curve(by)[0] for one in groups):
        raise InvalidInput(f"no run has been evaluated yet by {by}: there is nothing to draw")
    if width is None:
        save(picture(groups), path, style=STYLE)
        return
    series = [over_seeds(one.label, *one.curve(by), band=band) for one in groups if one.curve(by)[0]]
    save(Picture("", "", [Lines("", ROUND, axes[0], series, inches=(width, 0.68 * width))]), path, style=PAPER)


def headline(groups: Sequence[Group]) -> Protocol:
    """Main protocol of most runs."""
    names = [run.headline for group in groups for run in group.runs]
    return max(PROTOCOLS, key=names.count)


def ordered(groups: Sequence[Group]) -> list[Protocol]:
    """Protocols of some groups, the main one first; received and trained are always among them."""
    first = headline(groups)
    lines = [line for group in groups for run in group.counted for line in run.lines]
    there: list[Protocol] = [name for name in PROTOCOLS if name in ALWAYS or any(name in line for line in lines)]
    return sorted(there, key=lambda name: name != first)


def chosen_on(groups: Sequence[Group]) -> str:
    """Examples on which the best settings are chosen: validation, where all counted runs have some, or test."""
    lines = [run.lines[-1] for group in groups for run in group.counted]
    return VALIDATION if lines and all(VALIDATION in line for line in lines) else "test"


def goodness(one: Group, protocol: Protocol, on: str) -> float:
    """Mean over clients and seeds after the last round, of errors minus it; a setting without it is the worst."""
    values = one.values(one.rounds[-1], protocol, on=on) if one.rounds else []
    if not values or len(values) < len(one.counted):
        return -math.inf
    mean = float(np.mean(values))
    return -math.inf if math.isnan(mean) else mean * (1 if load.task_of(one.runs[0].config)["higher_is_better"] else -1)


def one_per_method(groups: Sequence[Group], protocol: Protocol) -> list[Group]:
    """The best group of each method on validation examples, which all counted runs must have, in the methods' order.

    Raises:
      InvalidInput: a run has no validation examples, or a method no mean on them.
    """
    if chosen_on(groups) != VALIDATION:
        raise InvalidInput("--select validation needs runs with validation examples, made with --val-fraction")
    methods = dict.fromkeys(one.method for one in groups)
    best = [
        max((one for one in groups if one.method == method), key=lambda one: goodness(one, protocol, VALIDATION))
        for method in methods
    ]
    if none := [one.method for one in best if goodness(one, protocol, VALIDATION) == -math.inf]:
        raise InvalidInput(f"no setting of {none[0]} has a mean on validation examples")
    return best


def chosen(groups: Sequence[Group], protocol: Protocol) -> tuple[list[Group], str]:
    """The best finished setting of each method, see `one_per_method`, named by it; and which they are, in words.

    Raises:
      InvalidInput: see `one_per_method`.
    """
    best = one_per_method([one for one in groups if one.is_finished], protocol)
    words = f"Chosen on validation examples of {len(groups)} settings: {', '.join(one.label for one in best)}."
    return [dataclasses.replace(one, label=one.method) for one in best], words


def shown(groups: Sequence[Group]) -> list[Group]:
    """Groups that a chart shows, in their order: the best ones."""
    there = [one for one in groups if one.rounds]
    first, on = headline(groups), chosen_on(there)
    best = sorted(there, key=lambda one: goodness(one, first, on), reverse=True)[:MOST_LINES]
    return [one for one in there if one in best]


def left_out(groups: Sequence[Group]) -> str:
    """Remark on the groups that a chart does not show; "" if it shows all."""
    there = [one for one in groups if one.rounds]
    if len(there) <= MOST_LINES:
        return ""
    return f"The best {MOST_LINES} of {len(there)} settings on {chosen_on(there)} examples, by {headline(groups)}."


def curves(groups: Sequence[Group], main: Group | None = None) -> list[Lines]:
    """Curves of each protocol over the rounds, the paper's result at their ends if there is one.

    A single run has a band for the spread over clients. Several settings have a line each, with the range over seeds;
    that of `main` stands out.
    """
    some, panels = shown(groups), []
    for protocol in ordered(groups):
        # One without values keeps its place, so that the others keep their colors.
        series = [_curve(one, protocol, is_main=one is main, is_alone=len(some) == 1) for one in some]
        if some and (not panels or any(line.x for line in series)):
            panels.append(Lines(protocol, ROUND, some[0].axis, series))
    return panels


def picture(groups: Sequence[Group], main: Group | None = None) -> Picture:
    """Picture of the curves, see `curves`; at least one group has an evaluation."""
    some = shown(groups)
    is_single = len(some) == len(some[0].counted) == 1
    title = f"{some[0].method} on {some[0].data}" if is_single else some[0].data
    bands = f"the middle {SPREAD[1] - SPREAD[0]} % of them" if is_single else "the range over seeds"
    sentences = [f"Means over clients; bands are {bands}.", left_out(groups)]
    papers = {f"{one.source} ({one.accuracy_percent:.2f})" for group in some if (one := group.published)}
    sentences += [f"Points at the ends: {', '.join(sorted(papers))}."] if papers else []
    unfinished = [f"{one.label} (round {one.rounds[-1]})" for one in some if not one.is_finished]
    sentences += [f"Unfinished: {', '.join(unfinished)}."] if unfinished else []
    return Picture(title, " ".join(filter(None, sentences)), curves(groups, main), 2)


def _curve(one: Group, protocol: Protocol, *, is_main: bool, is_alone: bool) -> Series:
    rounds, table = one.curve(protocol)
    if not rounds:
        return Series(one.label, [], [])
    line = over_seeds(one.label, rounds, table, is_main=is_main or is_alone)
    # Runs of very many clients have no scores of each.
    clients = [values for number in rounds for values in one.per_client(number, protocol)]
    if is_alone and len(one.counted) == 1 and len(clients) == len(rounds):
        low, high = np.transpose([np.percentile(values, SPREAD) for values in clients]).tolist()
        line = dataclasses.replace(line, low=low, high=high)
    published = one.published
    mark = None if published is None else (rounds[-1], published.accuracy_percent)
    return dataclasses.replace(line, mark=mark)
