"""Runs in folders, in groups that differ only in the seed; the results of a group, and the best settings."""

import functools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from experiments.folder.load import StoredRun, coverage_text, protocols_of, read
from experiments.folder.run_folder import VALIDATION, Line, score_text
from experiments.papers import published
from experiments.papers.settings import Measure
from experiments.spec.choices import ALWAYS, PROTOCOLS, Protocol
from experiments.spec.option_notes import label
from pfl_jax.errors import InvalidInput
from pfl_jax.frames import find_runs
from pfl_jax.primitives.metrics import Transfer

if TYPE_CHECKING:
    from pandas import DataFrame

NOTHING = "—"
"""Text in place of a missing number."""


class Mean(NamedTuple):
    """A score of a setting by seed, and its mean over the seeds.

    If a run diverged, its seed has no score, and there is no mean: a mean over the other seeds would flatter the
    setting. The text names the seeds without a score.
    """

    per_seed: dict[int, float | None]

    @property
    def known(self) -> list[float]:
        """Scores of the seeds that have one."""
        return [score for score in self.per_seed.values() if score is not None]

    @property
    def value(self) -> float | None:
        """Mean; None if any seed has no score."""
        return statistics.fmean(self.known) if self.known and len(self.known) == len(self.per_seed) else None

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation; None without a mean, or of a single seed."""
        return statistics.stdev(self.known) if self.value is not None and len(self.known) > 1 else None

    def text(self, *, percent: bool = True) -> str:
        """Mean and deviation: "85.20 ± 0.31", "— (none of seed 1)"; "" where no seed has a score."""
        if self.value is None:
            without = ", ".join(str(seed) for seed, score in self.per_seed.items() if score is None)
            return f"{NOTHING} (none of seed {without})" if self.known else ""
        return " ± ".join(score_text(one, percent=percent) for one in (self.value, self.deviation) if one is not None)


@dataclass(frozen=True)
class Group:
    """Runs of one setting, sorted by seed, with a label that distinguishes it from other groups on the same data."""

    label: str
    runs: tuple[StoredRun, ...]

    @property
    def first(self) -> StoredRun:
        """Run that represents the group where the seed does not matter."""
        return self.runs[0]

    @property
    def method(self) -> str:
        return label(self.first.spec.method)

    @property
    def is_finished(self) -> bool:
        """Whether any run is finished; if so, unfinished ones do not count."""
        return any(run.summary is not None for run in self.runs)

    @property
    def counted(self) -> list[StoredRun]:
        """Runs that the statistics use: the finished ones, or all with an evaluation if none is finished."""
        finished = [run for run in self.runs if run.summary is not None and run.lines]
        return finished or [run for run in self.runs if run.lines]

    @property
    def rounds(self) -> list[int]:
        """Rounds in which every counted run was evaluated."""
        evaluated = [{line["round"] for line in run.lines} for run in self.counted]
        return sorted(set.intersection(*evaluated)) if evaluated else []

    @functools.cached_property
    def published(self) -> published.Published | None:
        """Published accuracy for exactly this setting."""
        return published.find(self.first.spec, is_real=self.first.is_real)

    @property
    def keeps(self) -> bool:
        """Whether --patience kept a round before the last one in any run."""
        return any(run.final is not run.lines[-1] for run in self.counted)

    def lines(self, number: int) -> list[Line]:
        """Evaluation of each counted run in a round."""
        return [line for run in self.counted for line in run.lines if line["round"] == number]

    @property
    def results(self) -> list[Line]:
        """Evaluation of each counted run that holds its results; for unfinished runs, in the last common round."""
        if self.is_finished:
            return [run.final for run in self.counted]
        return self.lines(self.rounds[-1]) if self.rounds else []

    def mean(self, protocol: Protocol, name: str = "mean", on: str = "test") -> Mean:
        """A value of the results by seed, on test or VALIDATION examples."""
        lines = self.results if on == "test" else [line.get(on) or {} for line in self.results]
        found = [(line.get(protocol) or {}).get(name) for line in lines]
        return Mean(dict(zip([run.seed for run in self.counted], found, strict=False)))

    def accuracy(self, measure: Measure) -> Mean:
        """Accuracy by a measure of a paper, see `StoredRun.accuracy`."""
        return Mean({run.seed: run.accuracy(*measure) for run in self.counted})

    def phases(self) -> dict[str, Mean]:
        """Measures by name of runs whose data change, see `best_round.phase_summary`; empty for other runs."""
        found = {run.seed: run.phases for run in self.counted}
        names = Transfer._fields if any(found.values()) else ()
        return {name: Mean({seed: phases.get(name) for seed, phases in found.items()}) for name in names}

    def coverage(self, protocol: Protocol, on: str = "test") -> str:
        """Number of clients behind the results, see `coverage_text`."""
        summaries = [(line if on == "test" else line.get(on) or {}).get(protocol) for line in self.results]
        return coverage_text(filter(None, summaries), self.first.everyone)

    def per_client(self, lines: Sequence[Line], protocol: Protocol) -> list[np.ndarray]:
        """Sorted accuracies in percent of each evaluation; clients without any are left out."""
        rows = [line.get(f"{protocol}_per_client") or [] for line in lines]
        sorted_rows = [np.sort([value for value in row if value is not None]) for row in rows]
        return [row for row in sorted_rows if row.size]

    def curve(self, protocol: Protocol, name: str = "mean") -> tuple[list[int], np.ndarray]:
        """Rounds [R] in which all counted runs have a value, and the values [S, R]."""
        of_runs = [{line["round"]: (line.get(protocol) or {}).get(name) for line in run.lines} for run in self.counted]
        rounds = [number for number in self.rounds if all(values[number] is not None for values in of_runs)]
        table = [[values[number] for number in rounds] for values in of_runs]
        return rounds, np.asarray(table, np.float64).reshape(len(of_runs), len(rounds))


def renamed(groups: Sequence[Group], names: Sequence[str]) -> list[Group]:
    """Groups with other labels: each name is SHORT=NAME of a group or of its method."""
    found = list(groups)
    for text in names:
        short, equals, name = text.partition("=")
        known = {one.label for one in groups} | {one.method for one in groups}
        if not equals or not short or name not in known:
            raise InvalidInput(f"--name {text}: give SHORT=NAME, with a NAME of {', '.join(sorted(known))}")
        found = [
            replace(one, label=short + one.label.removeprefix(name))
            if name == was.label or (name == was.method and was.label.startswith(name))
            else one
            for one, was in zip(found, groups, strict=True)
        ]
    return found


def grouped(*folders: str | Path, main_protocol: Protocol | None = None) -> tuple[list[Group], list[StoredRun]]:
    """Groups of the runs in and below some folders, one for each setting; groups on the same data are adjacent.

    `main_protocol` is reported first. Returns the groups, and the runs that are left out because another
    run of the same setting and seed is as far or further.
    """
    found: dict[str, dict[str, dict[int, StoredRun]]] = {}
    repeated = []
    for run in (read(folder, main_protocol) for folder in find_runs(*folders)):
        setting = json.dumps(run.setting, sort_keys=True, default=str)
        others = found.setdefault(run.data, {}).setdefault(setting, {})
        known = others.get(run.seed)
        if known is None or _progress(run) > _progress(known):
            others[run.seed] = run
        if known is not None:
            repeated.append(known if others[run.seed] is run else run)
    groups = []
    for of_data in found.values():
        members = [tuple(of_seeds[seed] for seed in sorted(of_seeds)) for of_seeds in of_data.values()]
        groups += labelled([Group("", runs) for runs in members])
    return groups, repeated


def labelled(groups: Sequence[Group]) -> list[Group]:
    """Groups with different labels: the method, and the options in which its settings differ."""
    settings, found = [one.first.setting for one in groups], []
    for one, setting in zip(groups, settings, strict=True):
        same = [other for other in settings if other["method"] == setting["method"]]
        apart = [name for name in setting if len({repr(other.get(name)) for other in same}) > 1]
        words = [setting["method"], *(option_text(name, setting[name]) for name in apart)]
        found.append(replace(one, label=" ".join(words)))
    return found


def _progress(run: StoredRun) -> tuple[bool, int]:
    return run.summary is not None, run.round


def option_text(name: str, value: Any) -> str:
    """Option with its value, for a legend."""
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    return f"{name}={'none' if value is None else value_text(value)}"


def value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return " ".join(map(value_text, value))
    return NOTHING if value is None else str(value)


def headline(groups: Sequence[Group]) -> Protocol:
    """Main protocol of most runs."""
    names = [run.headline for group in groups for run in group.runs]
    return max(PROTOCOLS, key=names.count)


def ordered(groups: Sequence[Group]) -> list[Protocol]:
    """Protocols of some groups, the main one first; received and trained are always included."""
    first = headline(groups)
    lines = [line for group in groups for run in group.counted for line in run.lines]
    evaluated: list[Protocol] = [name for name in PROTOCOLS if name in ALWAYS or any(name in line for line in lines)]
    return sorted(evaluated, key=lambda name: name != first)


def chosen_on(groups: Sequence[Group]) -> str:
    """Examples on which the best settings are chosen: validation if all counted runs have some, otherwise test."""
    lines = [run.lines[-1] for group in groups for run in group.counted]
    return VALIDATION if lines and all(VALIDATION in line for line in lines) else "test"


def goodness(one: Group, protocol: Protocol, on: str) -> float:
    """Mean of the results over clients and seeds, negated for errors so that more is better; -inf without a mean."""
    mean = one.mean(protocol, on=on).value
    return -math.inf if mean is None else mean if one.first.task["higher_is_better"] else -mean


def check_alike(groups: Sequence[Group], done: str) -> None:
    """Raise InvalidInput for groups with different data or scores; the message says that they are not `done`."""
    for name, values in (("data", [one.first.data for one in groups]), ("scores", [one.first.axis for one in groups])):
        if len(apart := dict.fromkeys(values)) > 1:
            raise InvalidInput(f"runs with different {name} are not {done}: {'; '.join(apart)}")


def one_per_method(groups: Sequence[Group], protocol: Protocol) -> list[Group]:
    """Best group of each method on validation examples, which all counted runs must have, in the methods' order.

    Raises:
      InvalidInput: a run has no validation examples, or a method has no mean on them.
    """
    if chosen_on(groups) != VALIDATION:
        raise InvalidInput("--select validation needs runs with validation examples, made with --val-fraction")
    # Not by their labels: files in different folders may have the same name.
    methods = dict.fromkeys(one.first.spec.method for one in groups)
    best = [
        max(
            (one for one in groups if one.first.spec.method == method),
            key=lambda one: goodness(one, protocol, VALIDATION),
        )
        for method in methods
    ]
    if none := [one.method for one in best if goodness(one, protocol, VALIDATION) == -math.inf]:
        raise InvalidInput(f"no setting of {none[0]} has a mean on validation examples")
    return best


def best_setting_per_method(groups: Sequence[Group], protocol: Protocol) -> tuple[list[Group], str]:
    """Best finished setting of each method, labelled by the method; and a sentence that lists these settings.

    Raises:
      InvalidInput: see `one_per_method`.
    """
    best = one_per_method([one for one in groups if one.is_finished], protocol)
    words = f"Chosen on validation examples of {len(groups)} settings: {', '.join(one.label for one in best)}."
    names = [one.method for one in best]
    return [
        replace(one, label=name if names.count(name) == 1 else one.first.spec.method)
        for name, one in zip(names, best, strict=True)
    ], words


def load_runs(*folders: str | Path) -> "DataFrame":
    """Table of the runs in folders, one row each.

    A row has the run's folder, data, seed and state ("finished"), every option and hyper-parameter that its results
    depend on, the last evaluated round, and the means over clients of its task's scores under each protocol measured,
    as received_accuracy (in percent), received_loss, ...; with --val-fraction also those on validation examples, as
    validation_received_accuracy, ... The numbers of clients behind the means are in received_clients, ...

    Args:
      *folders: folders of runs, sweeps or tables, or folders above them.

    Raises:
      InvalidInput: a folder is missing or holds no run, or a run cannot be read.
    """
    # Imported only here: most commands do without it.
    import pandas

    return pandas.DataFrame([_row(read(folder)) for folder in find_runs(*folders)])


def _row(run: StoredRun) -> dict[str, Any]:
    row = {"folder": str(run.path), "data": run.data, **run.setting, "seed": run.seed, "state": run.state}
    last = run.final if run.lines else {}
    row["round"] = last.get("round", 0)
    row |= run.phases
    primary, *others = run.task["scores"]
    for prefix, line in (("", last), (f"{VALIDATION}_", last.get(VALIDATION, {}))):
        for protocol in protocols_of(line):
            named = {primary: line[protocol]["mean"]} | {name: line[protocol][name] for name in others}
            named["clients"] = line[protocol].get("clients")
            row |= {f"{prefix}{protocol}_{name}": value for name, value in named.items()}
    return row
