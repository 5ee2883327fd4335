"""Comparison of finished runs, without its command line: which can be compared, a table of them, its files."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from experiments.choices import Protocol
from experiments.folder import load
from experiments.folder.load import Run
from experiments.folder.run_folder import VALIDATION, VIRTUAL, score_text
from experiments.folder.stored_runs import Group, short
from experiments.host.console import duration
from experiments.hyper_parameters import TRAINING_HYPER_PARAMETERS
from experiments.options import Options
from experiments.papers.settings import Measure
from experiments.show.curves import chosen_on, goodness
from experiments.show.draw import ranks as draw_ranks
from experiments.show.pictures import Panel, Picture
from experiments.show.tables import NOTHING, Table, markdown, number, with_deviation
from pfl_jax.compare import (
    FEWEST_RUNS,
    Difference,
    critical_difference,
    difference,
    holm,
    mean_ranks,
    share_worse,
)
from pfl_jax.errors import InvalidInput

BASELINE = "local"
"""Method whose clients gain nothing from others."""
TO_TARGET = ("rounds", "time")
"""Beginnings of the heads of columns on a target."""


class Compared(NamedTuple):
    """Scores of the clients after a round, method by method.

    Attributes:
      data: what they were trained on.
      axis: name of the score, with its unit.
      seeds: of the runs that all methods have.
      higher_is_better: whether larger scores are better.
      round: the last round that all have.
      scores: name of a method -> scores [N] in the runs of these seeds; the best mean first.
      reference: name of the best method on validation examples; None without such examples.
      notes: on runs that are left out, and options that differ and are in no name.
      protocol: evaluation protocol of the scores.
    """

    data: str
    axis: str
    higher_is_better: bool
    seeds: list[int]
    round: int
    scores: dict[str, list[np.ndarray]]
    notes: Sequence[str] = ()
    reference: str | None = None
    protocol: Protocol = "received"

    @property
    def clients(self) -> str:
        """Numbers of clients of the runs: "20", "18 to 20"."""
        sizes = {len(row) for rows in self.scores.values() for row in rows}
        return " to ".join(map(str, sorted({min(sizes), max(sizes)})))

    def differences(self, reference: str) -> dict[str, Difference]:
        """Difference of each other method to a reference."""
        return {
            name: difference(rows, self.scores[reference], higher_is_better=self.higher_is_better)
            for name, rows in self.scores.items()
            if name != reference
        }

    def mean(self, name: str) -> float:
        """Mean over runs of the mean over clients."""
        return float(np.mean([row.mean() for row in self.scores[name]]))


def read(groups: Sequence[Group], protocol: Protocol) -> Compared:
    """Scores of groups of runs that can be compared.

    Raises:
      InvalidInput: there are fewer than two groups, they are of several kinds of data, or have no common seed, round or
        clients.
    """
    groups = [one for one in groups if one.is_finished]
    left_out = [one.label for one in groups if any(run.lines[-1]["received"]["mean"] is None for run in one.counted)]
    groups = [one for one in groups if one.label not in left_out]
    notes = [f"Left out, since a run has no finite mean in the end: {', '.join(left_out)}."] if left_out else []
    if len(groups) < 2:
        raise InvalidInput(" ".join(["a comparison needs finished runs of two settings at least.", *notes]))
    if len(data := list(dict.fromkeys(one.data for one in groups))) > 1:
        raise InvalidInput(f"runs on different data are not compared: {'; '.join(data)}")
    if len(axes := list(dict.fromkeys(one.axis for one in groups))) > 1:
        raise InvalidInput(f"runs with different scores are not compared: {'; '.join(axes)}")
    runs = {one.label: {run.seed: run for run in one.counted} for one in groups}
    seeds = sorted(set.intersection(*(set(of_seeds) for of_seeds in runs.values())))
    if not seeds:
        raise InvalidInput("there is no seed with a finished run of every setting")
    common = set.intersection(*({line["round"] for line in runs[name][seed].lines} for name in runs for seed in seeds))
    if not common:
        raise InvalidInput("there is no round in which all runs were evaluated: give runs of the same --eval-every")
    last = max(common)
    found = {name: [_row(of_seeds[seed], last, protocol) for seed in seeds] for name, of_seeds in runs.items()}
    for position, seed in enumerate(seeds):
        (first, config), *configs = ((name, runs[name][seed].config) for name in runs)
        if others := [name for name, other in configs if not _have_same_clients(config, other)]:
            raise InvalidInput(
                f"the clients of {first} and {others[0]} have other examples with seed {seed}: give runs of one "
                "partition"
            )
        # Clients that one method does not score, as with --eval-clients, count in none.
        scored = np.all([np.isfinite(rows[position]) for rows in found.values()], axis=0)
        for rows in found.values():
            rows[position] = rows[position][scored]
        if not scored.any():
            raise InvalidInput(f"no client is scored by all runs of seed {seed}")
        if unscored := int(np.sum(~scored)):
            notes.append(f"Without {unscored} clients of seed {seed} that some run does not score.")
    if unnamed := _unnamed(groups):
        settings = (" ".join([one.label, *(short(name, one.setting[name]) for name in unnamed)]) for one in groups)
        notes.append(f"Settings that the names leave out: {'; '.join(settings)}.")
    larger = load.task_of(groups[0].runs[0].config)["higher_is_better"]
    compared = Compared(groups[0].data_name, groups[0].axis, larger, seeds, last, found, notes)
    ordered = sorted(found, key=compared.mean, reverse=larger)
    on = chosen_on(groups)
    best = max(groups, key=lambda one: goodness(one, protocol, on)).label if on == VALIDATION else None
    scores = {name: found[name] for name in ordered}
    return compared._replace(scores=scores, reference=best, protocol=protocol)


def reference_of(compared: Compared, asked: str | None) -> str:
    """Method with which all are compared: the one asked for, the best one on validation examples, or the best one.

    Raises:
      InvalidInput: there is no such method.
    """
    names = list(compared.scores)
    if asked is not None and asked not in names:
        raise InvalidInput(f"--reference {asked} is none of {', '.join(names)}")
    return asked or compared.reference or names[0]


def for_paper(table: Table, compared: Compared, reference: str) -> Table:
    """Three columns of a comparison, and those of a target, under a caption of one sentence; the rest are notes.

    The best mean is bold if its interval leaves out 0 beside all others, a dagger marks differences to the reference
    whose interval contains 0.
    """
    best = next(iter(compared.scores))
    score, apart = compared.axis.removesuffix(" in %"), compared.differences(reference)
    is_bold = all(one.is_clear for one in compared.differences(best).values())
    rows, columns = [], [place for place, head in enumerate(table.heads) if head.partition(" to ")[0] in TO_TARGET]
    for row in table.rows:
        name, mean = row[0], f"**{row[1]}**" if is_bold and row[0] == best else row[1]
        minus = row[table.heads.index(f"minus {reference}")]
        marked = f"{minus}†" if name in apart and not apart[name].is_clear else minus
        rows.append([name, mean, marked, *(row[place] for place in columns)])
    heads = ["method", score, "difference", *(table.heads[place] for place in columns)]
    details = [table.title, *markdown(table.heads, table.rows).splitlines(), *table.notes]
    return Table(_caption(compared, reference, apart), heads, rows, details)


def _caption(compared: Compared, reference: str, apart: Mapping[str, Difference]) -> str:
    """Sentence with score, data set, round, clients, protocol, seeds and reference."""
    where = Measure(compared.protocol, "last", "clients").in_words(["protocol"])
    seeds, several = f"seed{'s' * (len(compared.seeds) > 1)} {_numbers(compared.seeds)}", len(compared.seeds) > 1
    mean = f"mean over clients ± standard deviation over {seeds}" if several else f"mean over clients, {seeds}"
    dagger = "" if all(one.is_clear for one in apart.values()) else " (†: its 95 % interval contains 0)"
    what = f"{compared.axis[0].upper()}{compared.axis[1:]} on {compared.data} after round {compared.round}"
    return f"{what}, {compared.clients} clients, {where}: {mean}, and difference to {reference}{dagger}"


def _numbers(seeds: Sequence[int]) -> str:
    """Seeds in words: "2 to 6", "0, 2"."""
    together = list(seeds) == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]} to {seeds[-1]}" if together and len(seeds) > 1 else ", ".join(map(str, seeds))


def _row(run: Run, number: int, protocol: Protocol) -> np.ndarray:
    """Scores of the clients of a run after a round; NaN for a client without one."""
    (line,) = (line for line in run.lines if line["round"] == number)
    row = line.get(f"{protocol}_per_client")
    if row is None:
        raise InvalidInput(f"{run.path} has no scores of its clients by {protocol} in round {number}")
    return np.array(row, np.float64)


def _have_same_clients(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the clients of two configurations have the same examples: by digest, or in older runs without one by the
    numbers of their examples and classes."""
    digest, numbers = ["partition_digest"], ["train_examples", "test_examples", "class_table"]
    compared = digest if all("partition_digest" in config for config in (one, other)) else numbers
    return all(one.get(name) == other.get(name) for name in compared)


def _unnamed(groups: Sequence[Group]) -> list[str]:
    """Options of all runs that differ between groups, and are in no group's name."""
    common = {*(field.name for field in dataclasses.fields(Options)), *TRAINING_HYPER_PARAMETERS} - {"method"}
    named = {word.partition("=")[0].removeprefix("no-") for one in groups for word in one.label.split()}
    apart = [name for name in common - named if len({repr(one.setting.get(name)) for one in groups}) > 1]
    return sorted(apart)


def table(compared: Compared, reference: str | None = None) -> Table:
    """Table of a comparison with one method, by default the best.

    Raises:
      InvalidInput: there is no such method.
    """
    is_own, reference = reference is None, reference_of(compared, reference)
    rest, better = compared.differences(reference), {"higher_is_better": compared.higher_is_better}
    tests = {name: one.p_value for name, one in rest.items() if one.p_value is not None}
    adjusted = dict(zip(tests, holm(list(tests.values())), strict=True))
    text = functools.partial(score_text, percent=compared.axis.endswith("%"))
    rows = []
    for name, runs in compared.scores.items():
        # The worst first.
        ranked = [np.sort(row) if compared.higher_is_better else -np.sort(-row) for row in runs]
        tenth = float(np.mean([row[: max(1, round(len(row) / 10))].mean() for row in ranked]))
        means = [float(row.mean()) for row in runs]
        deviation = float(np.std(means, ddof=1)) if len(means) > 1 else None
        row = {
            "method": name,
            "mean": with_deviation(compared.mean(name), deviation, percent=compared.axis.endswith("%")),
            "worst tenth": text(tenth),
            "spread": text(float(np.mean([scores.std() for scores in runs]))),
            **dict.fromkeys([f"minus {reference}", "95 % interval"], NOTHING),
            **({"p (Holm)": number(adjusted.get(name), ".3f")} if tests else {}),
            f"worse than {reference}": NOTHING,
        }
        if (apart := rest.get(name)) is not None:
            row[f"minus {reference}"] = text(apart.mean, sign="+")
            row["95 % interval"] = f"{text(apart.low, sign='+')} to {text(apart.high, sign='+')}"
            row[f"worse than {reference}"] = f"{100 * apart.worse:.0f} %"
        if BASELINE in compared.scores and reference != BASELINE:
            share = share_worse(runs, compared.scores[BASELINE], **better)
            row[f"worse than {BASELINE}"] = NOTHING if name == BASELINE else f"{100 * share:.0f} %"
        rows.append(row)
    notes = _notes(compared, reference, rest)
    if is_own and compared.reference is None:
        notes.append(
            f"{reference} was chosen on test examples: give --reference, or make the runs with --val-fraction."
        )
    elif is_own:
        notes.append(f"{reference} is the reference, as the best on validation examples; --reference names another.")
    title = f"{compared.data}, {compared.axis} after round {compared.round}"
    return Table(title, list(rows[0]), [list(row.values()) for row in rows], notes)


def with_target(table: Table, groups: Sequence[Group], compared: Compared, protocol: Protocol, target: float) -> Table:
    """A table with the rounds, and of runs with --device-trace the virtual time, until the mean over clients first
    reaches a target: means over the runs, a dash where one does not reach it."""
    named, rounds, times = {one.label: one for one in groups}, [], []
    sign = 1 if compared.higher_is_better else -1
    for name, *_ in table.rows:
        runs = [run for run in named[name].counted if run.seed in compared.seeds]
        known = [[line for line in run.lines if (line.get(protocol) or {}).get("mean") is not None] for run in runs]
        good = [[line for line in lines if sign * (line[protocol]["mean"] - target) >= 0] for lines in known]
        first = [lines[0] for lines in good] if all(good) else []
        rounds.append(f"{np.mean([line['round'] for line in first]):.1f}" if first else NOTHING)
        timed = first and all(VIRTUAL in line for line in first)
        times.append(duration(float(np.mean([line[VIRTUAL] for line in first]))) if timed else NOTHING)
    columns = {f"{TO_TARGET[0]} to {target:g}": rounds}
    columns |= {f"{TO_TARGET[1]} to {target:g}": times} if {*times} > {NOTHING} else {}
    rows = [[*row, *more] for row, *more in zip(table.rows, *columns.values(), strict=True)]
    return table._replace(heads=[*table.heads, *columns], rows=rows)


def _notes(compared: Compared, reference: str, found: dict[str, Difference]) -> list[str]:
    seeds = f"seed{'s' * (len(compared.seeds) > 1)} {', '.join(map(str, compared.seeds))}"
    notes = [
        f"Scores of {compared.clients} clients, {seeds}; worst tenth and spread "
        "(standard deviation) over the clients of a run; worse: share of the clients."
    ]
    if alike := [name for name, one in found.items() if not one.is_clear]:
        notes.append(f"Cannot be told apart from {reference}: {', '.join(alike)} (the interval contains 0).")
    notes += compared.notes
    if len(compared.seeds) == 1:
        notes.append("One seed: the intervals are over clients alone, and say nothing of other seeds.")
    elif len(compared.seeds) < FEWEST_RUNS:
        notes.append(
            f"{len(compared.seeds)} seeds: an interval that contains 0 is no sign that methods are alike, since so few "
            f"find only large differences; run {FEWEST_RUNS} or more."
        )
    return notes


def ranks(compared: Compared) -> Picture:
    """Picture of the mean ranks over the runs; a bar joins methods that differ by less than the critical difference.

    Args:
      compared: at least two runs of every method.

    Raises:
      InvalidInput: there is one run of each method.
    """
    if len(compared.seeds) < 2:
        raise InvalidInput("--plot needs runs of two seeds at least: ranks are compared over runs")
    names = list(compared.scores)
    scores = np.array([[compared.scores[name][run].mean() for name in names] for run in range(len(compared.seeds))])
    found = mean_ranks(scores, higher_is_better=compared.higher_is_better)
    least = critical_difference(len(names), len(scores))
    order = np.argsort(found, kind="stable").tolist()
    caption = f"Grey bars reach to the methods that cannot be told apart: critical difference {least:.2f} at 5 %."
    frame = pd.DataFrame({f"mean rank over {len(scores)} runs": found}, names).iloc[order]
    draw = functools.partial(draw_ranks, least=least)
    return Picture(compared.data, caption, [Panel("", draw, frame, (5.2, 0.9 + 0.22 * len(names)))])
