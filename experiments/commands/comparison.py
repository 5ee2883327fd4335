"""Comparison of finished runs: checks that they can be compared, and their table, notes and picture."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from experiments.folder.load import StoredRun
from experiments.folder.run_folder import VALIDATION, score_text
from experiments.folder.stored_runs import Group, Mean, check_alike, chosen_on, goodness, option_text
from experiments.folder.version import note_on_code
from experiments.papers.settings import Measure
from experiments.show import draw
from experiments.show.pictures import Picture, chart
from experiments.show.tables import NOTHING, Table, markdown, number
from experiments.spec.choices import Protocol
from experiments.spec.hyper_parameters import TRAINING_HYPER_PARAMETERS
from experiments.spec.options import Options
from pfl_jax import compare
from pfl_jax.compare import Difference
from pfl_jax.errors import InvalidInput

BASELINE = "local"
"""Method whose clients train alone."""


class Compared(NamedTuple):
    """Scores of the clients after a round, method by method.

    Attributes:
      data: name of the data.
      axis: name of the score, with its unit.
      higher_is_better: whether larger scores are better.
      round: last common round; None if --patience kept an earlier round of some run.
      scores: rows by seed and client, a column for each method, see `scores_of`.
      notes: remarks on runs that are left out, and on options that differ but are in no name.
      reference: name of the best method on validation examples; None without such examples.
      protocol: evaluation protocol of the scores.
      baseline: name of the method `local`.
    """

    data: str
    axis: str
    higher_is_better: bool
    round: int | None
    scores: pd.DataFrame
    notes: Sequence[str] = ()
    reference: str | None = None
    protocol: Protocol = "received"
    baseline: str = BASELINE

    @property
    def seeds(self) -> list[int]:
        return self.scores.index.unique("seed").tolist()

    @property
    def when(self) -> str:
        return "in the kept rounds" if self.round is None else f"after round {self.round}"

    @property
    def clients(self) -> str:
        """Numbers of clients of the runs: "20", "18 to 20"."""
        sizes: Any = self.scores.groupby("seed").size()
        return " to ".join(map(str, sorted({sizes.min(), sizes.max()})))

    @property
    def means(self) -> pd.DataFrame:
        """Means over clients, rows by seed, the best method first."""
        found: Any = self.scores.groupby("seed").mean()
        return found[found.mean().sort_values(ascending=not self.higher_is_better, kind="stable").index]

    def of_runs(self, name: str) -> list[np.ndarray]:
        """Scores [N] of a method in each run."""
        return [rows.to_numpy() for _, rows in self.scores[name].groupby("seed")]

    def differences(self, reference: str) -> dict[str, Difference]:
        """Difference of each other method to a reference, the best method first."""
        pair = functools.partial(compare.difference, higher_is_better=self.higher_is_better)
        others = [name for name in self.means if name != reference]
        return {name: pair(self.of_runs(name), self.of_runs(reference)) for name in others}


def scores_of(runs: Mapping[str, Sequence[StoredRun]], at: int | None, protocol: Protocol) -> pd.DataFrame:
    """Scores of the clients in the runs of each method after round `at`; None is the round of each run's results.

    Rows are by seed and client, NaN where a client has none."""
    found = {}
    for name, of_seeds in runs.items():
        rows = {
            run.seed: line.get(f"{protocol}_per_client")
            for run in of_seeds
            for line in ([run.final] if at is None else run.lines)
            if at is None or line["round"] == at
        }
        if without := [run for run in of_seeds if rows.get(run.seed) is None]:
            number = without[0].final["round"] if at is None else at
            raise InvalidInput(f"{without[0].path} has no scores of its clients by {protocol} in round {number}")
        series: Any = {seed: pd.Series(row, dtype=float) for seed, row in rows.items()}
        found[name] = pd.concat(series, names=["seed", "client"])
    return pd.DataFrame(found)


def read(groups: Sequence[Group], protocol: Protocol) -> Compared:
    """Scores of groups of runs that can be compared.

    Raises:
      InvalidInput: there are fewer than two groups, or they have different data, or no common seed, round or clients.
    """
    groups = [one for one in groups if one.is_finished]
    left_out = [one.label for one in groups if one.mean("received").value is None]
    groups = [one for one in groups if one.label not in left_out]
    notes = [f"Left out, since a run has no finite mean in the end: {', '.join(left_out)}."] if left_out else []
    if len(groups) < 2:
        raise InvalidInput(" ".join(["a comparison needs finished runs of two settings at least.", *notes]))
    check_alike(groups, "compared")
    runs = {one.label: {run.seed: run for run in one.counted} for one in groups}
    if len(runs) < len(groups):
        raise InvalidInput("several settings have the same name: give --name, or fewer runs")
    seeds = sorted(set.intersection(*map(set, runs.values())))
    if not seeds:
        raise InvalidInput("no seed has a finished run of every setting")
    common = set.intersection(*({line["round"] for line in of[seed].lines} for of in runs.values() for seed in seeds))
    if not common:
        raise InvalidInput("no round was evaluated in all runs: give runs of the same --eval-every")
    for seed in seeds:
        (first, digest), *rest = ((name, of[seed].config.get("partition_digest")) for name, of in runs.items())
        if others := [name for name, other in rest if other != digest]:
            raise InvalidInput(
                f"the clients of {first} and {others[0]} have different examples with seed {seed}: give runs of one "
                "partition"
            )
    at = None if any(one.keeps for one in groups) else max(common)
    scores = scores_of({name: [of[seed] for seed in seeds] for name, of in runs.items()}, at, protocol)
    # Clients that any run does not score, as with --eval-clients, are left out of all.
    unscored: Any = scores.isna().any(axis=1).groupby("seed")
    if unscored.all().any():
        raise InvalidInput(f"no client is scored by all runs of seed {unscored.all().idxmax()}")
    for name, of in runs.items():
        without = [seed for seed in of if seed not in seeds]
        notes += [f"Without {name}, seed {seed}: not all settings have this seed." for seed in without]
    for seed, many in unscored.sum().items():
        notes += [f"Without {many} clients of seed {seed} that some run does not score."] if many else []
    behind = [(f"{one.label}, seed {run.seed}", note_on_code(run.config)) for one in groups for run in one.counted]
    notes += [f"{name}: {note}." for name, note in behind if note]
    if unnamed := _unnamed(groups):
        settings = (
            " ".join([one.label, *(option_text(name, one.first.setting[name]) for name in unnamed)]) for one in groups
        )
        notes.append(f"Settings that the names leave out: {'; '.join(settings)}.")
    best = max(groups, key=lambda one: goodness(one, protocol, VALIDATION)).label
    reference = best if chosen_on(groups) == VALIDATION else None
    first = groups[0].first
    about = first.data_name, first.axis, first.task["higher_is_better"], at
    baselines = [one.label for one in groups if one.method == BASELINE]
    baseline = baselines[0] if len(baselines) == 1 else BASELINE
    return Compared(*about, scores.dropna(), notes, reference, protocol, baseline)


def _unnamed(groups: Sequence[Group]) -> list[str]:
    """Options common to all methods that differ between groups, and are in no group's name."""
    common = {*(field.name for field in dataclasses.fields(Options)), *TRAINING_HYPER_PARAMETERS} - {"method"}
    named = {word.partition("=")[0].removeprefix("no-") for one in groups for word in one.label.split()}
    return sorted(name for name in common - named if len({repr(one.first.setting.get(name)) for one in groups}) > 1)


def table(
    compared: Compared, reference: str | None = None, reached: Mapping[str, Mapping[str, str]] | None = None
) -> Table:
    """Table of a comparison with a reference, by default the best method (on validation examples if there are any).

    `reached` holds further columns: head -> method -> text.

    Raises:
      InvalidInput: the reference is not among the methods.
    """
    names, is_own = list(compared.means), reference is None
    reference = reference or compared.reference or names[0]
    if reference not in names:
        raise InvalidInput(f"--reference {reference} is not among {', '.join(names)}")
    rest, sign = compared.differences(reference), 1 if compared.higher_is_better else -1
    tests = {name: one.p_value for name, one in rest.items() if one.p_value is not None}
    adjusted = dict(zip(tests, compare.holm(list(tests.values())), strict=True))
    percent, seeds = compared.axis.endswith("%"), len(compared.seeds)
    text = functools.partial(score_text, percent=percent)
    signed = functools.partial(text, sign="+")
    by_seed, means = compared.scores.groupby("seed"), compared.means
    worst: Any = by_seed.agg(lambda row: sign * np.sort(sign * row)[: max(1, round(len(row) / 10))].mean()).mean()
    spread: Any = by_seed.std(ddof=0).mean()
    rows = []
    for name in names:
        apart = rest.get(name)
        row = {
            "method": name,
            "mean": Mean(means[name].to_dict()).text(percent=percent),
            "worst tenth": text(worst[name]),
            "spread": text(spread[name]),
            f"minus {reference}": apart and signed(apart.mean),
            "95 % interval": apart and f"{signed(apart.low)} to {signed(apart.high)}",
        }
        if 1 < seeds < compare.MANY_RUNS:
            row["each seed"] = apart and " ".join(map(signed, apart.runs))
        if seeds >= compare.FEWEST_PAIRS:
            # It holds where some seeds fail, too.
            row["95 % interval of the median"] = apart and f"{signed(apart.median_low)} to {signed(apart.median_high)}"
        row |= {
            **({"p (Holm)": number(adjusted.get(name), ".3f")} if tests else {}),
            f"worse than {reference}": apart and f"{100 * apart.worse:.0f} %",
        }
        if (baseline := compared.baseline) in names and reference != baseline:
            pair = compared.of_runs(name), compared.of_runs(baseline)
            share = compare.share_worse(*pair, higher_is_better=compared.higher_is_better)
            row[f"worse than {baseline}"] = NOTHING if name == baseline else f"{100 * share:.0f} %"
        rows.append(row | {head: texts[name] for head, texts in (reached or {}).items()})
    notes = _notes(compared, reference, rest)
    if is_own and compared.reference is None:
        notes.append(
            f"{reference} was chosen by test accuracy: give --reference, or compare runs that all have --val-fraction."
        )
    elif is_own:
        notes.append(f"{reference}, the best on validation examples, is the reference; --reference names another.")
    return Table.of(f"{compared.data}, {compared.axis} {compared.when}", rows)._replace(notes=notes)


def _notes(compared: Compared, reference: str, found: Mapping[str, Difference]) -> list[str]:
    many = len(compared.seeds)
    seeds = f"seed{'s' * (many > 1)} {', '.join(map(str, compared.seeds))}"
    notes = [
        f"Scores of {compared.clients} clients, {seeds}; worst tenth and spread (standard deviation) over the clients "
        "of a run; worse: share of the clients."
    ]
    if alike := [name for name, one in found.items() if not one.is_clear]:
        notes.append(f"Cannot be told apart from {reference}: {', '.join(alike)} (the interval contains 0).")
    notes += compared.notes
    if many == 1:
        notes.append("One seed: the intervals are over clients alone, and other seeds may differ more.")
    elif many < compare.FEWEST_RUNS:
        notes.append(
            f"{many} seeds show only large differences: an interval that contains 0 does not mean that methods are "
            f"alike; run {compare.FEWEST_RUNS} seeds or more."
        )
    return notes


def rounds_to(target: float, groups: Sequence[Group], compared: Compared) -> dict[str, dict[str, str]]:
    """Column of a table: rounds until the mean over clients first reaches a target, averaged over the runs; a dash if a
    run does not reach the target."""
    sign, found = 1 if compared.higher_is_better else -1, {}
    for group in groups:
        first = {}
        for run in group.counted:
            means = {line["round"]: line.get(compared.protocol, {}).get("mean") for line in run.lines}
            reached = (at for at, mean in means.items() if mean is not None and sign * (mean - target) >= 0)
            if run.seed in compared.seeds:
                first[run.seed] = next(reached, None)
        mean = Mean(first).value
        found[group.label] = NOTHING if mean is None else f"{mean:.1f}"
    return {f"rounds to {target:g}": found}


def for_paper(table: Table, compared: Compared) -> Table:
    """Three columns of a comparison, and the target's column, under a caption of one sentence; the rest become notes.

    The best mean is bold if the intervals of its differences to all others leave out 0. A dagger marks differences to
    the reference whose interval contains 0.
    """
    place = next(place for place, head in enumerate(table.heads) if head.startswith("minus "))
    reference = table.heads[place].removeprefix("minus ")
    best, apart = next(iter(compared.means)), compared.differences(reference)
    is_bold, rows = all(one.is_clear for one in compared.differences(best).values()), []
    more = [at for at, head in enumerate(table.heads) if head.startswith("rounds to ")]
    for name, mean, *others in table.rows:
        mean = f"**{mean}**" if is_bold and name == best else mean
        dagger = "†" * (name in apart and not apart[name].is_clear)
        rows.append([name, mean, others[place - 2] + dagger, *(others[at - 2] for at in more)])
    heads = ["method", compared.axis.removesuffix(" in %"), "difference", *(table.heads[at] for at in more)]
    details = [table.title, *markdown(table.heads, table.rows).splitlines(), *table.notes]
    return Table(_caption(compared, reference, apart), heads, rows, details)


def _caption(compared: Compared, reference: str, apart: Mapping[str, Difference]) -> str:
    """Sentence with score, data set, round, clients, protocol, seeds and reference."""
    where, seeds = Measure(compared.protocol, "last", "clients").in_words(["protocol"]), compared.seeds
    together = len(seeds) > 1 and seeds == list(range(seeds[0], seeds[-1] + 1))
    words = f"{seeds[0]} to {seeds[-1]}" if together else ", ".join(map(str, seeds))
    mean = f"± standard deviation over seeds {words}" if len(seeds) > 1 else f"of seed {words}"
    dagger = "" if all(one.is_clear for one in apart.values()) else " (†: its 95 % interval contains 0)"
    about = f"{compared.axis[0].upper()}{compared.axis[1:]} on {compared.data} {compared.when}, "
    about += f"{compared.clients} clients, {where}"
    return f"{about}: mean over clients {mean}, and difference to {reference}{dagger}"


def ranks(compared: Compared) -> Picture:
    """Picture of the mean ranks over the runs; a bar joins methods that differ by less than the critical difference.

    Args:
      compared: at least two runs of every method.

    Raises:
      InvalidInput: there is only one run of each method.
    """
    means = compared.means
    if len(means) < 2:
        raise InvalidInput("--plot needs runs of two seeds at least: ranks are compared over runs")
    found = pd.Series(compare.mean_ranks(means.to_numpy(), higher_is_better=compared.higher_is_better), means.columns)
    least = compare.critical_difference(len(found), len(means))
    caption = f"Grey bars reach to the methods that cannot be told apart: critical difference {least:.2f} at 5 %."
    frame = found.sort_values(kind="stable").to_frame(f"mean rank over {len(means)} runs")
    size = 5.2, 0.9 + 0.22 * len(found)
    return chart("", caption, draw.ranks, frame, least=least, inches=size)._replace(title=compared.data)
