"""Runs found in folders, grouped by setting: runs of a group differ only in their seed; the best settings."""

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.folder import load
from experiments.folder.best_round import phase_summary
from experiments.folder.load import StoredRun, read
from experiments.folder.run_folder import VALIDATION
from experiments.papers import published
from experiments.spec.choices import ALWAYS, PROTOCOLS, Protocol
from experiments.spec.hyper_parameters import defaults
from experiments.spec.option_notes import label
from experiments.spec.options import Options
from pfl_jax.errors import InvalidInput
from pfl_jax.frames import find_runs
from pfl_jax.methods import METHODS

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Group:
    """Runs of one setting, sorted by seed, with a label that distinguishes it from other groups on the same data."""

    label: str
    runs: tuple[StoredRun, ...]

    @property
    def setting(self) -> dict[str, Any]:
        return self.runs[0].setting

    @property
    def data(self) -> str:
        return self.runs[0].data

    @property
    def is_real(self) -> bool:
        return self.runs[0].is_real

    @property
    def data_name(self) -> str:
        return load.data_name(self.runs[0].config)

    @property
    def method(self) -> str:
        return label(self.runs[0].spec.method)

    @property
    def axis(self) -> str:
        """Name of the score that counts, with its unit."""
        return load.axis(self.runs[0].config)

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
        return published.find(self.runs[0].spec, is_real=self.is_real)

    @property
    def keeps(self) -> bool:
        """Whether a run's results are of the round that --patience kept, which need not be the last one."""
        return any(run.final is not run.lines[-1] for run in self.counted)

    def lines(self, number: int | None) -> list[dict[str, Any]]:
        """Evaluation of each counted run in a round; None for that of its results, see `StoredRun.final`."""
        if number is None and self.keeps:
            return [run.final for run in self.counted]
        number = self.rounds[-1] if number is None and self.rounds else number
        return [line for run in self.counted for line in run.lines if line["round"] == number]

    def values(self, number: int | None, protocol: Protocol, name: str = "mean", on: str = "test") -> list[float]:
        """Value of each counted run in a round, see `lines`, on test or VALIDATION examples; those without are left
        out."""
        lines = self.lines(number) if on == "test" else [line.get(on, {}) for line in self.lines(number)]
        found = [line.get(protocol, {}).get(name) for line in lines]
        return [value for value in found if value is not None]

    def per_client(self, number: int | None, protocol: Protocol) -> list[np.ndarray]:
        """Sorted accuracies in percent of each counted run; clients without any are left out."""
        rows = [line.get(f"{protocol}_per_client") or [] for line in self.lines(number)]
        sorted_rows = [np.sort([value for value in row if value is not None]) for row in rows]
        return [row for row in sorted_rows if row.size]

    def curve(self, protocol: Protocol, name: str = "mean") -> tuple[list[int], np.ndarray]:
        """Rounds [R] and the runs' values [S, R] in them; rounds without a value are left out."""
        runs = self.counted
        kept = [number for number in self.rounds if len(self.values(number, protocol, name)) == len(runs)]
        table = [self.values(number, protocol, name) for number in kept]
        return kept, np.asarray(table, np.float64).reshape(len(kept), len(runs)).T

    def command(self) -> str:
        """Command line of the first run, without its folder."""
        return self.runs[0].spec.command()


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


def grouped(*folders: str | Path, asked: Protocol | None = None) -> tuple[list[Group], list[StoredRun]]:
    """Groups of the runs in and below some folders, see `group`; `asked` is the protocol that is reported first."""
    return group([read(folder, asked) for folder in find_runs(*folders)])


def group(runs: Sequence[StoredRun]) -> tuple[list[Group], list[StoredRun]]:
    """Group runs of one setting; groups on the same data stand together.

    Returns the groups, and the runs that are left out: another one of the same setting and seed is as far or further.
    """
    by_key: dict[str, dict[int, StoredRun]] = {}
    repeated = []
    for run in runs:
        others = by_key.setdefault(json.dumps([run.data, run.setting], sort_keys=True, default=str), {})
        known = others.get(run.seed)
        if known is None or _progress(run) > _progress(known):
            others[run.seed] = run
        if known is not None:
            repeated.append(known if others[run.seed] is run else run)
    by_data: dict[str, list[tuple[StoredRun, ...]]] = {}
    for of_seeds in by_key.values():
        members = tuple(of_seeds[seed] for seed in sorted(of_seeds))
        by_data.setdefault(members[0].data, []).append(members)
    groups = []
    for here in by_data.values():
        groups += labelled([Group("", members) for members in here])
    return groups, repeated


def labelled(groups: Sequence[Group]) -> list[Group]:
    """Groups with labels that tell them from each other."""
    names = _labels([one.setting for one in groups])
    return [replace(one, label=name) for one, name in zip(groups, names, strict=True)]


def _progress(run: StoredRun) -> tuple[bool, int]:
    return run.summary is not None, run.round


def _labels(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Name of each group: the method, and the options in which it differs from others with the same method."""
    whole, brief = [], []
    for setting in settings:
        same = [other for other in settings if other["method"] == setting["method"]]
        apart = [name for name in setting if len({repr(other.get(name)) for other in same}) > 1]
        whole.append(" ".join([setting["method"], *(short(name, setting[name]) for name in apart)]))
        named = [name for name in apart if not _omitted_from_label(name, setting)]
        brief.append(" ".join([setting["method"], *(short(name, setting[name]) for name in named)]))
    return [full if brief.count(name) > 1 else name for full, name in zip(whole, brief, strict=True)]


def _omitted_from_label(name: str, setting: dict[str, Any]) -> bool:
    """Whether an option is left out of a label: off, at its default, or about evaluation only."""
    if name in ("preset", "eval_every"):
        return True
    value = setting[name]
    if not isinstance(value, bool):
        return value == "none"
    usual = {field.name: field.default for field in dataclasses.fields(Options)}
    if setting["method"] in METHODS:
        usual |= defaults(setting["method"])
    return value == usual.get(name)


def short(name: str, value: Any) -> str:
    """Option with its value, for a legend."""
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    return f"{name}={'none' if value is None else plain(value)}"


def plain(value: Any) -> str:
    """Value as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return " ".join(map(plain, value))
    return "—" if value is None else str(value)


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
    values = one.values(None, protocol, on=on) if one.rounds else []
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


def best_setting_per_method(groups: Sequence[Group], protocol: Protocol) -> tuple[list[Group], str]:
    """The best finished setting of each method, see `one_per_method`, named by it; and a sentence that names all.

    Raises:
      InvalidInput: see `one_per_method`.
    """
    best = one_per_method([one for one in groups if one.is_finished], protocol)
    words = f"Chosen on validation examples of {len(groups)} settings: {', '.join(one.label for one in best)}."
    return [replace(one, label=one.method) for one in best], words


def load_runs(*folders: str | Path) -> "DataFrame":
    """Table of the runs in folders, one row each.

    A row has the run's folder, data, seed and state ("finished"), every option and hyper-parameter that its results
    depend on, the last evaluated round, and the means over clients of its task's scores under each protocol measured,
    as received_accuracy (in percent), received_loss, ...; with --val-fraction also those on validation examples, as
    validation_received_accuracy, ... Over how many clients the means are is received_clients, ...

    Args:
      *folders: folders of runs, sweeps or tables, or folders above them.

    Raises:
      InvalidInput: a folder is missing or holds no run, or a run cannot be read.
    """
    # Imported now: most commands do without it.
    import pandas

    return pandas.DataFrame([_row(read(folder)) for folder in find_runs(*folders)])


def _row(run: StoredRun) -> dict[str, Any]:
    row = {"folder": str(run.path), "data": run.data, **run.setting, "seed": run.seed, "state": run.state}
    last = run.final if run.lines else {}
    row["round"] = last.get("round", 0)
    row |= phase_summary(run.lines, higher_is_better=load.task_of(run.config)["higher_is_better"])
    primary, *others = load.task_of(run.config)["scores"]
    for prefix, line in (("", last), (f"{VALIDATION}_", last.get(VALIDATION, {}))):
        for protocol in load.measured(line):
            named = {primary: line[protocol]["mean"]} | {name: line[protocol][name] for name in others}
            named["clients"] = line[protocol].get("clients")
            row |= {f"{prefix}{protocol}_{name}": value for name, value in named.items()}
    return row
