"""Figure of a paper as data: its runs on each dataset, and the picture of their results."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from experiments.commands.batch import Job, MeasuredBatch, jobs_of_seeds, read_options, spec_in_batch
from experiments.folder.load import coverage_text, read
from experiments.folder.run_folder import slug
from experiments.folder.stored_runs import Group
from experiments.papers import settings
from experiments.papers.settings import PAPERS, Measure
from experiments.show.draw import lines, over_runs, rows_of
from experiments.show.pictures import Panel, Picture
from experiments.spec import presets
from experiments.spec.choices import FIELD
from experiments.spec.identity import differences, relevant_options
from experiments.spec.option_notes import assignments
from experiments.spec.spec import Spec
from pfl_jax.errors import InvalidInput

Key: TypeAlias = tuple[str, ...]
"""Key of a figure's run on a dataset, without the seed; it also names the run's folder."""

Values: TypeAlias = dict[str, Any]
"""Options of a run by their names in Python."""

SETTING = ("num_clients", "train_size", "rounds", "participation", "partition", "s", "beta")
"""Options that the caption names."""


class Part(NamedTuple):
    """Part of a figure on one dataset: the options of each run beside the common ones, including its method, and the
    panels of the finished runs."""

    variants: "Callable[[Runs], dict[Key, Values]]"
    panels: "Callable[[Runs], list[Panel]]"


@dataclass(frozen=True)
class Figure:
    """Figure of a paper.

    Attributes:
      values: options that all runs share.
      methods: methods that are compared.
      note: sentence of the caption on choices that the paper leaves open.
      fixed: common options that cannot be given, since the panels rely on them.
      measured: attributes of the paper's `Measure` on which the panels depend.
      procedures: procedures of FedAS that the figure can follow, the default first.
    """

    paper: str
    number: int
    subject: str
    parts: tuple[Part, ...]
    datasets: tuple[str, ...] = ("cifar10",)
    methods: tuple[str, ...] = ()
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""
    columns: int = 2
    fixed: tuple[str, ...] = ()
    measured: tuple[str, ...] = ("protocol", "average")
    procedures: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Title for display: "FedPAC, Figure 4"."""
        return f"{PAPERS[self.paper].name}, Figure {self.number}"


@dataclass(frozen=True)
class Runs:
    """Runs of a figure on one dataset, and their results once they are finished.

    Attributes:
      order: command for the figure.
      chosen, given: methods, and values of options, that replace the figure's.
    """

    figure: Figure
    dataset: str
    order: MeasuredBatch
    chosen: tuple[str, ...]
    given: Values

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods that are compared; the paper's own, if among them, comes last."""
        usual = self.figure.methods
        return tuple(sorted(self.chosen or usual, key=lambda method: method == usual[-1])) if usual else ()

    @property
    def usual(self) -> Values:
        """Options that all runs of the figure share."""
        procedure = {"procedure": self.figure.procedures[0]} if self.figure.procedures else {}
        return {"preset": PAPERS[self.figure.paper].preset} | procedure | dict(self.figure.values)

    @property
    def values(self) -> Values:
        """Options that all runs share, including those given by the command."""
        return self.usual | self.given

    @property
    def procedure(self) -> str:
        return self.values.get("procedure", "")

    @property
    def rounds(self) -> int:
        """Number of rounds, unless the words or a variant change it."""
        return self.values.get("rounds") or presets.values(self.values["preset"], self.dataset)["rounds"]

    @functools.cached_property
    def variants(self) -> dict[Key, Values]:
        """Key of a run -> its own options."""
        return {key: own for part in self.figure.parts for key, own in part.variants(self).items()}

    @property
    def varied(self) -> set[str]:
        """Names of the options in which the runs differ; a command cannot set them."""
        return {name for own in self.variants.values() for name in own}

    def measure_in_paper(self, key: Key) -> Measure:
        return settings.measure(self.figure.paper, self.variants[key]["method"], self.procedure)

    def measure_of(self, key: Key) -> Measure:
        """Definition of a run's accuracies, with the changes that the command requests."""
        return self.order.requested(self.measure_in_paper(key))

    @functools.cached_property
    def jobs(self) -> dict[Key, list[Job]]:
        """Key of a run -> a job for each seed; equal commands share a folder."""
        found, folders = {}, {}
        for key, own in self.variants.items():
            spec = self._spec(self.values, own, self.order.all_words)
            name = folders.setdefault(spec.command(), slug(" ".join([self.dataset, *key])))
            found[key] = jobs_of_seeds(spec, self.order.seeds, self.order.folder / name, name)
        return found

    def _spec(self, values: Values, own: Values, words: tuple[str, ...] = ()) -> Spec:
        """Run with seed 0."""
        return spec_in_batch(self.dataset, values | read_options(self.dataset, words, **values | own) | own)

    @functools.cached_property
    def groups(self) -> dict[Key, Group]:
        """Key of a run -> its finished runs."""
        return {key: Group(" ".join(key), tuple(read(job.folder) for job in jobs)) for key, jobs in self.jobs.items()}

    @property
    def data(self) -> str:
        """Name of the data: "cifar10, JPEG copy", "cifar100 (embedded digit pairs)"."""
        return next(iter(self.groups.values())).first.data_name

    def config(self, key: Key) -> dict[str, Any]:
        """Configuration of the first seed of a run."""
        return self.groups[key].first.config

    def curves(self, title: str, labels: Mapping[Key, str], main: Key) -> Panel:
        """Accuracy over rounds, with a labelled line for each run, the main line on top."""
        rows = []
        for key in sorted(labels, key=lambda key: key == main):
            protocol, _, average = self.measure_of(key)
            rows.append(rows_of(labels[key], *self.groups[key].curve(protocol, FIELD[average])))
        title += self.coverage(labels, is_curve=True)
        return Panel(title, functools.partial(lines, main=labels.get(main, "")), over_runs(pd.concat(rows)))

    def coverage(self, keys: Iterable[Key], *, is_curve: bool = False) -> str:
        """Words for a title if means of some runs are not over all clients: "; over 8 to 10 of 10 clients".

        Args:
          keys: keys of the runs.
          is_curve: whether all rounds are shown, not only the last.
        """
        summaries = [
            line[self.measure_of(key).protocol]
            for key in keys
            for run in self.groups[key].runs
            for line in run.lines[0 if is_curve else -1 :]
        ]
        words = coverage_text(summaries, next(iter(self.groups.values())).first.everyone)
        return f"; over {words}" if words else ""

    def over_values(self, name: str, values: Sequence[float], keys: Mapping[str, Sequence[Key]]) -> pd.DataFrame:
        """Rows for `draw.over_runs`: accuracy in the reported round by the values of an option.

        Args:
          name: label of the option's axis.
          values: values of the option.
          keys: label of a line -> the run for each value.
        """
        found = []
        for label, of_values in keys.items():
            means = [self.groups[key].accuracy(self.measure_of(key)) for key in of_values]
            runs = np.array([[*mean.per_seed.values()] for mean in means], np.float64).T
            found.append(rows_of(label, values, runs, x_label=name))
        return pd.concat(found)

    def info(self, key: Key, name: str) -> list[dict[int, np.ndarray]]:
        """Vector or matrix of Info by evaluated round, for each seed, in the order of the clients."""
        found = []
        for run in self.groups[key].runs:
            found.append({})
            for line in run.lines:
                if name not in line.get("info", {}):
                    raise InvalidInput(f"{run.path} has no {name}, which has too many numbers for the log")
                values, order = np.asarray(line["info"][name]), np.argsort(line["cohort"])
                found[-1][line["round"]] = values[np.ix_(*[order] * values.ndim)]
        return found

    @property
    def setting(self) -> str:
        """Options in SETTING that all runs on a dataset share, as text."""
        first = next(iter(self.variants))
        options, relevant = self.config(first)["options"], relevant_options(self.jobs[first][0].spec)
        return assignments({name: options[name] for name in SETTING if name in relevant and name not in self.varied})

    @property
    def deviations(self) -> str:
        """Options that differ from the paper's figure; "" without any."""
        key, own = next(iter(self.variants.items()))
        found = differences(self._spec(self.usual, own), self.config(key))
        others = {} if self.dataset in self.figure.datasets else {"dataset": self.dataset}
        # The frequency of evaluations changes nothing.
        return assignments(others | {name: had for name, (had, _) in found.items() if name != "eval_every"})


def compose(every: Sequence[Runs]) -> Picture:
    """Picture of a figure from its finished runs on each dataset."""
    figure = every[0].figure
    panels: list[Panel] = []
    for runs in every:
        for panel in itertools.chain.from_iterable(part.panels(runs) for part in figure.parts):
            several = len(every) > 1 and runs.data not in panel.title
            panels.append(panel._replace(title=f"{panel.title}, {runs.data}") if several else panel)
    where = f" on {every[0].data}" if len(every) == 1 else ""
    return Picture(f"{figure.title}: {figure.subject}{where}", _caption(every), panels, figure.columns)


def _caption(every: Sequence[Runs]) -> str:
    runs, figure, sentences = every[0], every[0].figure, []
    if figure.measured:
        ours, paper = _measures(runs, runs.measure_of), _measures(runs, runs.measure_in_paper)
        paper_is = "" if ours == paper else f"; in the paper {paper}"
        sentences.append(f"Accuracy in percent {ours}{paper_is}.")
    if name := runs.procedure:
        sentences.append(f"Procedure {name}, {presets.PROCEDURES[name].title}.")
    names = {method: settings.method_name(method, runs.procedure) for method in runs.methods}
    if replaced := [f"{name} in place of {method}" for method, name in names.items() if name != method]:
        sentences.append(f"As released: {', '.join(replaced)}.")
    sentences += [f"{one.data}: {one.setting}." for one in every]
    over = f"Means over seeds 0 to {runs.order.seeds - 1}; bands are their range."
    sentences.append("Seed 0." if runs.order.seeds == 1 else over)
    sentences += [
        f"Not the paper's setting, but {words}." for words in dict.fromkeys(one.deviations for one in every) if words
    ]
    return " ".join([*sentences, figure.note]).strip()


def _measures(runs: Runs, measure_of: Callable[[Key], Measure]) -> str:
    """Words for the definitions of the accuracies, in which only the protocol differs between methods."""
    found: dict[Measure, dict[str, None]] = {}
    for key in runs.variants:
        found.setdefault(measure_of(key), {})[key[-1]] = None
    first, *others = found
    names = [name for name in runs.figure.measured if not (others and name == "protocol")]
    own = [f"{measure.in_words(['protocol'])}: {', '.join(methods)}" for measure, methods in found.items()]
    return "; ".join([first.in_words(names), *(own if others else ())])
