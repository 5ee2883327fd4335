"""Figure of a paper as data: runs on each dataset, and the panels made of their results."""

import dataclasses
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from experiments.cli import presets
from experiments.cli.options import option_words
from experiments.cli.run_command import RunCommand
from experiments.folder import load
from experiments.papers.settings import PAPERS, Measure
from experiments.show.pictures import Panel
from pfl_jax.errors import InvalidInput
from pfl_jax.safe_read import open_npz

if TYPE_CHECKING:
    from experiments.run.build import Experiment
    from pfl_jax.engine.simulate import RoundResult

Key: TypeAlias = tuple[str, ...]
"""Key of a run of a figure on a dataset, without the seed; also the name of its folder."""


Keep: TypeAlias = "Callable[[Experiment, RoundResult], dict[str, np.ndarray]]"
"""Arrays to keep of a round, by name."""

Values: TypeAlias = dict[str, Any]
"""Options of a run by their names in Python."""


@dataclass(frozen=True)
class Figure:
    """Figure of a paper: its runs on each dataset, and the panels made of their results.

    Attributes:
      paper: fedpac, fedas or fedpac_replication.
      number: of the figure.
      subject: what it shows.
      variants: options that each run adds to the common ones, its method included.
      panels: panels from the results on one dataset.
      preset: whose settings are the runs' defaults.
      datasets: by default.
      methods: that are compared by default; empty if the figure compares none.
      short_methods: those of the shorter runs, if they are fewer.
      values: options of all runs beyond the preset.
      short: what is smaller on embedded data.
      note: what the paper leaves open, for the caption.
      columns: panels side by side.
      observe: arrays to keep of each round; None where accuracies suffice.
      fixed: common options on which the panels rely.
      named: hyper-parameter -> its value -> what it means, for the caption.
      measured: attributes of the paper's `Measure` on which the panels depend.
    """

    paper: str
    number: int
    subject: str
    variants: "Callable[[Runs], dict[Key, Values]]"
    panels: "Callable[[Results], list[Panel]]"
    preset: str
    datasets: tuple[str, ...] = ("cifar10",)
    methods: tuple[str, ...] = ()
    short_methods: tuple[str, ...] = ()
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    short: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""
    columns: int = 2
    observe: "Keep | None" = None
    fixed: tuple[str, ...] = ()
    named: Mapping[str, Mapping[Any, str]] = dataclasses.field(default_factory=dict)
    measured: tuple[str, ...] = ("protocol", "average")

    @property
    def title(self) -> str:
        """Title for people: "FedPAC, Figure 4"."""
        return f"{PAPERS[self.paper]}, Figure {self.number}"

    def runs(
        self,
        dataset: str,
        *,
        short: bool,
        seeds: int = 1,
        methods: Sequence[str] = (),
        rounds: int | None = None,
        words: Sequence[str] = (),
    ) -> "Runs":
        """Runs on one dataset.

        Args:
          dataset: its name.
          short: whether they are the smaller ones for embedded data.
          seeds: number of seeds.
          methods: in place of the figure's; its own method stays last if it is among them.
          rounds: in place of the figure's.
          words: further options of all runs, as on a command line.
        """
        values = {"preset": self.preset, "rounds": presets.values(self.preset, dataset)["rounds"], **self.values}
        values |= self.short if short else {}
        values |= {} if rounds is None else {"rounds": rounds}
        chosen = methods or (short and self.short_methods) or self.methods
        own = [method for method in chosen if self.methods and method == self.methods[-1]]
        ordered = tuple([method for method in chosen if method not in own] + own)
        return Runs(self, dataset, short, ordered, seeds, values, tuple(words))


@dataclass(frozen=True)
class Runs:
    """Runs of a figure on one dataset.

    Attributes:
      figure: which figure.
      dataset: its name.
      short: whether they are the smaller ones for embedded data.
      methods: that are compared, the figure's own last; empty where it compares none.
      seeds: number of seeds, from 0.
      values: options that all these runs share.
      words: of the command line, for all runs; they override `values`.
    """

    figure: Figure
    dataset: str
    short: bool
    methods: tuple[str, ...]
    seeds: int
    values: Mapping[str, Any]
    words: tuple[str, ...] = ()

    @property
    def rounds(self) -> int:
        """Rounds of a run that does not set them itself."""
        return self.values["rounds"]

    @property
    def variants(self) -> dict[Key, Values]:
        """Key of a run -> options that only it has."""
        return self.figure.variants(self)

    @property
    def varied(self) -> set[str]:
        """Names of the options that the runs differ in, which must not be set otherwise."""
        return {name for own in self.variants.values() for name in own}

    def cells(self) -> dict[Key, list[RunCommand]]:
        """Key of a run -> a cell for each seed."""
        cells = {}
        for key, own in self.variants.items():
            shared = {name: value for name, value in self.values.items() if name not in own}
            arguments = (*option_words(shared), *self.words, *option_words(own))
            cells[key] = [RunCommand(self.dataset, arguments, seed) for seed in range(self.seeds)]
        return cells


class Results:
    """Results of a figure's runs on one dataset.

    Args:
      runs: the runs.
      folders: for each key, the folder of each seed's run; arrays lie beside it, see `arrays_path`.
      measure: definition of the accuracy.
    """

    def __init__(self, runs: Runs, folders: Mapping[Key, Sequence[Path]], measure: Measure):
        self.runs, self.measure = runs, measure
        self._folders = folders

    @property
    def keys(self) -> list[Key]:
        """Keys of all runs."""
        return list(self._folders)

    @property
    def data(self) -> str:
        """Dataset and source of the data: "cifar100 (embedded digit pairs)"."""
        record = self.config(self.keys[0])["data"]
        return f"{self.runs.dataset} ({record['source']})"

    def config(self, key: Key) -> dict[str, Any]:
        """Configuration of a run, that of its first seed."""
        return load.read_config(self._folders[key][0])

    def curve(self, key: Key) -> tuple[list[int], list[list[float | None]]]:
        """Rounds [R] of a run's evaluations, and mean accuracy in percent for each seed [R]."""
        runs = [load.read_result(folder) for folder in self._folders[key]]
        return runs[0].rounds["round"], [run.curve(self.measure.protocol, self.measure.average) for run in runs]

    def reported(self, key: Key) -> list[float | None]:
        """Mean accuracy in percent in the reported round, for each seed."""
        return [load.read_result(folder).accuracy(*self.measure) for folder in self._folders[key]]

    def arrays(self, key: Key) -> list[dict[str, np.ndarray]]:
        """Stored arrays of each seed's rounds."""
        found = []
        for folder in self._folders[key]:
            path = arrays_path(folder)
            try:
                with open_npz(path) as content:
                    found.append(dict(content))
            except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
                raise InvalidInput(
                    f"{path} is damaged: remove it and its run {folder}, and they are made again"
                ) from None
        return found


def arrays_path(folder: Path) -> Path:
    """File of a run's arrays: beside the run's folder, which no other program may write into."""
    return folder.with_name(folder.name + ".npz")
