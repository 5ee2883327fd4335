"""Figure of a paper as data: its runs on each dataset, and the picture made of their folders."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from experiments import presets
from experiments.cli.batch import Job, jobs_of_seeds
from experiments.cli.request import RunCommand
from experiments.fields import by_option, given, option_words
from experiments.folder import load
from experiments.folder.run_folder import slug
from experiments.identity import relevant_options
from experiments.options import read_with
from experiments.own_code import label
from experiments.papers import settings
from experiments.papers.settings import PAPERS, Measure
from experiments.show.panels import Panel
from experiments.show.pictures import Picture
from pfl_jax.errors import InvalidInput

Key: TypeAlias = tuple[str, ...]
"""Key of a run of a figure on a dataset, without the seed; also the name of its folder."""

Values: TypeAlias = dict[str, Any]
"""Options of a run by their names in Python."""

_NAMED_ELSEWHERE = {"source", "data_dir", "eval_protocol", "procedure"}
"""Options of the runs that the caption names elsewhere."""


@dataclass(frozen=True)
class Figure:
    """Figure of a paper: its runs on each dataset, and the panels made of their results.

    Attributes:
      variants: options that each run adds to the common `values`, its method included.
      panels: panels from the finished runs on one dataset.
      methods, short_methods: those that are compared, on embedded data if they are fewer.
      short: what is smaller on embedded data.
      note: what the paper leaves open, for the caption.
      fixed: common options on which the panels rely, which cannot be given.
      named: hyper-parameter -> its value -> what it means, for the caption.
      measured: attributes of the paper's `Measure` on which the panels depend.
      procedures: of FedAS that it can follow, the default first.
    """

    paper: str
    number: int
    subject: str
    variants: "Callable[[Runs], dict[Key, Values]]"
    panels: "Callable[[Runs], list[Panel]]"
    preset: str
    datasets: tuple[str, ...] = ("cifar10",)
    methods: tuple[str, ...] = ()
    short_methods: tuple[str, ...] = ()
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    short: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""
    columns: int = 2
    fixed: tuple[str, ...] = ()
    named: Mapping[str, Mapping[Any, str]] = dataclasses.field(default_factory=dict)
    measured: tuple[str, ...] = ("protocol", "average")
    procedures: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Title for people: "FedPAC, Figure 4"."""
        return f"{PAPERS[self.paper]}, Figure {self.number}"


@dataclass(frozen=True)
class Runs:
    """Runs of a figure on one dataset, and their results once they are finished.

    Attributes:
      short: whether they are the smaller ones for embedded data.
      chosen, rounds_asked, procedure: methods, rounds and procedure in place of the figure's.
      words: of the command line, for all runs; they override `values`.
    """

    figure: Figure
    dataset: str
    short: bool
    folder: Path
    measure: Measure
    seeds: int = 1
    chosen: tuple[str, ...] = ()
    rounds_asked: int | None = None
    words: tuple[str, ...] = ()
    procedure: str | None = None

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods that are compared, the figure's own last if it is among them."""
        usual = self.figure.methods
        methods = self.chosen or (self.short and self.figure.short_methods) or usual
        return tuple(sorted(methods, key=lambda method: method == usual[-1])) if usual else ()

    @property
    def values(self) -> Values:
        """Options that all these runs share."""
        rounds = presets.values(self.figure.preset, self.dataset)["rounds"]
        values = {"preset": self.figure.preset, "rounds": rounds, **self.figure.values}
        values |= {"procedure": self.procedure or self.figure.procedures[0]} if self.figure.procedures else {}
        values |= self.figure.short if self.short else {}
        return values if self.rounds_asked is None else values | {"rounds": self.rounds_asked}

    @property
    def variants(self) -> dict[Key, Values]:
        """Key of a run -> options that only it has."""
        return self.figure.variants(self)

    @property
    def varied(self) -> set[str]:
        """Names of the options that the runs differ in, which must not be set otherwise."""
        return {name for own in self.variants.values() for name in own}

    @functools.cached_property
    def jobs(self) -> dict[Key, list[Job]]:
        """Key of a run -> a job for each seed; equal runs have one folder."""
        found, folders = {}, {}
        for key, own in self.variants.items():
            shared = {name: value for name, value in self.values.items() if name not in own}
            arguments = (*option_words(shared), *self.words, *option_words(own))
            command = RunCommand(self.dataset, arguments)
            relevant = json.dumps(relevant_options(command.spec()), sort_keys=True)
            name = folders.setdefault(relevant, slug(" ".join([self.dataset, *key])))
            found[key] = jobs_of_seeds(command, self.seeds, self.folder / name, name)
        return found

    @property
    def data(self) -> str:
        """Dataset and source of the data: "cifar100 (embedded digit pairs)"."""
        return f"{self.dataset} ({self.config(next(iter(self.jobs)))['data']['source']})"

    def config(self, key: Key) -> dict[str, Any]:
        """Configuration of a run, that of its first seed."""
        return load.read_config(self.jobs[key][0].folder)

    def curve(self, key: Key) -> tuple[list[int], list[list[float | None]]]:
        """Rounds [R] of a run's evaluations, and mean accuracy in percent for each seed [R]."""
        runs = [load.read_result(job.folder) for job in self.jobs[key]]
        return runs[0].rounds["round"], [run.curve(self.measure.protocol, self.measure.average) for run in runs]

    def reported(self, key: Key) -> list[float | None]:
        """Mean accuracy in percent in the reported round, for each seed."""
        return [load.read_result(job.folder).accuracy(*self.measure) for job in self.jobs[key]]

    def info(self, key: Key, name: str) -> list[dict[int, np.ndarray]]:
        """Vector or matrix of Info by evaluated round, for each seed, in the order of the clients."""
        found = []
        for job in self.jobs[key]:
            load.read_summary(job.folder)
            found.append({})
            for line in load.read_metrics(job.folder):
                if name not in line.get("info", {}):
                    raise InvalidInput(f"{job.folder} has no {name} of its rounds, which are too many numbers to log")
                values, order = np.asarray(line["info"][name]), np.argsort(line["cohort"])
                found[-1][line["round"]] = values[np.ix_(*[order] * values.ndim)]
        return found


def compose(every: Sequence[Runs]) -> Picture:
    """Picture of a figure from its finished runs on each dataset."""
    figure = every[0].figure
    panels: list[Panel] = []
    for runs in every:
        for panel in figure.panels(runs):
            several = len(every) > 1 and panel.title != runs.data
            panels.append(dataclasses.replace(panel, title=f"{panel.title}, {runs.data}") if several else panel)
    where = f" on {every[0].data}" if len(every) == 1 else ""
    shortened = " (shortened)" if any(map(_shortening, every)) else ""
    return Picture(f"{figure.title}: {figure.subject}{where}{shortened}", _caption(every), panels, figure.columns)


def _caption(every: Sequence[Runs]) -> str:
    runs, figure = every[0], every[0].figure
    usual, sentences = settings.MEASURES[figure.paper], []
    if names := figure.measured:
        paper_is = "" if runs.measure == usual else f"; in the paper {usual.in_words(names)}"
        sentences.append(f"Accuracy in percent {runs.measure.in_words(names)}{paper_is}.")
    if name := runs.values.get("procedure"):
        sentences.append(f"Procedure {name}, {presets.PROCEDURES[name].title}.")
    sentences += [f"{one.data}: {_setting(one)}." for one in every]
    over = f"Means over seeds 0 to {runs.seeds - 1}; bands are their range."
    sentences.append("Seed 0." if runs.seeds == 1 else over)
    sentences += [f"Not the paper's setting, but {words}." for words in dict.fromkeys(map(_shortening, every)) if words]
    hyper_parameters = runs.config(next(iter(runs.jobs)))["hyper_parameters"]
    sentences += [meanings[hyper_parameters[name]] for name, meanings in figure.named.items()]
    return " ".join([*sentences, figure.note]).strip()


def _setting(runs: Runs) -> str:
    """Configuration that all runs on a dataset share."""
    config, varied = runs.config(next(iter(runs.jobs))), runs.varied
    options: dict[str, Any] = config["options"]
    parts = [f"{options['num_clients']} clients"]
    if "train_size" not in varied:
        least, most = min(config["train_examples"]), max(config["train_examples"])
        parts.append(f"{least} training examples each" if least == most else f"{least} to {most} training examples")
    if "rounds" not in varied:
        parts.append(f"{options['rounds']} rounds")
    if "participation" in runs.values or "participation" not in varied:
        parts.append(f"participation {runs.values.get('participation', options['participation']):g}")
    words = label(options["partition"])
    for spread in {"s", "beta"} & {*read_with("partition", options["partition"])} - varied:
        words += f" {spread} = {options[spread]:g}"
    return ", ".join([*parts, words])


def _shortening(runs: Runs) -> str:
    """Options that deviate from the figure's own, as words; "" if none does."""
    figure = runs.figure
    usual = {**presets.values(figure.preset, runs.dataset), **figure.values, "preset": figure.preset}
    # Words count more than values; how often a run is evaluated changes nothing; the data is named elsewhere.
    silent = given(runs.words) | {"eval_every", "procedure"}
    changed = {name: value for name, value in runs.values.items() if usual.get(name) != value and name not in silent}
    named = _NAMED_ELSEWHERE | figure.named.keys()
    words = [" ".join(part) for part in by_option(runs.words) if not given(part) & named]
    return " ".join([*option_words(changed), *words])
