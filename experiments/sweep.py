"""Sweeps: every combination of values and seeds; runs that share a compiled program train together.

    python -m experiments.sweep --dataset digits --method fedpac --seeds 4 --grid lam=0.1,1,10 --grid lr=0.02,0.05

Seeds and real-valued hyper-parameters are inputs of one compiled program. Runs that differ in anything else (method,
epochs, batch size, clients, ...) form groups, which run one after another. Each run has its own folder, as if it had
been started alone. Repeating the command resumes where it stopped: finished runs are kept, and an interrupted group
continues from its last checkpoint (see --checkpoint-every). All options of `python -m experiments.DATASET` can be given
and apply to every run.

With --val-fraction 0.1 the best setting is chosen on validation examples, otherwise on test examples. To tune several
methods fairly and report them on fresh seeds:

    python -m experiments.sweep --dataset digits --val-fraction 0.1 --seeds 3 --grid method=fedpac,fedper \
        --grid lr=0.02,0.05 --grid fedpac.lam=0.1,1 --select validation --select-seeds 5
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias, get_type_hints

from rich.console import Console

from experiments import DATASETS
from experiments.cli.parser import Hidden
from experiments.commands import batch
from experiments.folder.run_folder import slug
from experiments.folder.stored_runs import one_per_method
from experiments.host.exit_codes import exit_process
from experiments.spec.identity import relevant_options
from experiments.spec.option_notes import Argument, NotInSweeps, Trait, flag, label, texts_of, with_note, with_trait
from experiments.spec.options import KINDS, Options
from experiments.spec.presets import DEFAULT_PRESET, preset_of
from experiments.spec.spec import Spec
from pfl_jax.errors import InvalidInput
from pfl_jax.validation import Count, Range

CLAIMS = ".claims"
"""Subfolder with the locks of groups, for --part."""
SELECTED = "selected"
"""Subfolder of the runs of --select."""

Setting: TypeAlias = tuple[tuple[str, str], ...]
"""Options and values of one point of the grid."""


@dataclass(frozen=True, kw_only=True)
class Sweep(batch.Batch):
    """Command line of a sweep."""

    dataset: Annotated[str, Argument(text=", ".join(DATASETS))]
    seeds: Count = 1
    """Number of seeds."""
    first_seed: Annotated[int, Range(0)] = 0
    """First seed."""
    grid: Annotated[tuple[str, ...], Argument("repeated", "NAME=V,V")] = ()
    """Values of an option, or METHOD.NAME=V,V of an option of one method of the grid; may be repeated."""
    select: Literal["validation"] | None = None
    """After the sweep, run the setting of each method that has the best mean on validation examples (needs
    --val-fraction), by --eval-protocol, with new seeds. These runs are in selected/ of the folder."""
    select_seeds: Count = 5
    """Number of new seeds for --select."""
    part: Annotated[str | None, Argument(metavar="I/N")] = None
    """Number I of this process, from 0, of N that share the sweep's groups in one folder, such as the tasks of a Slurm
    array. Each process begins at its own share and takes groups that are free; the last one writes the table."""
    chosen: Hidden[tuple[Setting, ...]] = ()
    """Settings that replace the whole grid."""

    name: ClassVar = "sweep"

    @property
    def claims(self) -> Path | None:
        return None if self.part is None else self.folder / CLAIMS

    def _first_group(self, groups: int) -> int:
        """Group with which this process begins."""
        index, _, number = (self.part or "0/1").partition("/")
        if not (index.isdecimal() and number.isdecimal() and int(index) < int(number)):
            raise InvalidInput(f"--part {self.part}: give this process's number, from 0, and how many, such as 3/16")
        return int(index) * groups // int(number)

    def check(self) -> None:
        self._first_group(0)
        asked, options = {*texts_of(self.words)}, {name.rpartition(".")[2] for name in self.values}
        for name, notes in with_note(KINDS, NotInSweeps).items():
            if name in options | asked:
                raise InvalidInput(f"{flag(name)} cannot be given for a sweep: {notes[0].reason}")
        for name in sorted({*with_trait(KINDS, Trait.CHOOSES)} & options):
            raise InvalidInput(f"{flag(name)} cannot be in the grid: all settings are compared by the same value")
        # Groups ignore these options: runs that differ only in them would all train on the first run's data.
        for name in sorted({*with_trait(KINDS, Trait.NEUTRAL)} & options):
            raise InvalidInput(f"{flag(name)} cannot be in the grid: it is not a setting; start a sweep for each value")
        if twice := sorted(asked & options):
            raise InvalidInput(f"{flag(twice[0])} is in the grid already")
        methods = {*self.values.get("method", ())}
        for name in self.values:
            method, _, option = name.rpartition(".")
            if method and method not in methods:
                raise InvalidInput(f"--grid {name}: {method} is not among the methods of --grid method=...")
            if method and option in self.values:
                raise InvalidInput(f"--grid {name}: {flag(option)} is in the grid for all methods already")
        for setting in self.settings():
            # Computes the digest of the user's own data, so that a missing file is reported before a folder is made.
            spec = self._spec(setting)
            relevant_options(spec)
            if self.select is not None and spec.val_fraction is None:
                raise InvalidInput(
                    "--select validation needs validation examples: give --val-fraction 0.1, for example"
                )

    def default_folder(self) -> Path:
        values = (f"--grid {name}={','.join(values)}" for name, values in self.values.items())
        return Path("runs/sweeps") / slug(" ".join([self.dataset, *self.words, *values]))

    @functools.cached_property
    def values(self) -> dict[str, tuple[str, ...]]:
        """Option -> its values as given; the settings of the sweep are their product."""
        found: dict[str, tuple[str, ...]] = {}
        for text in self.grid:
            name, equals, values = text.partition("=")
            name = name.removeprefix("--").replace("-", "_")
            parts = tuple(dict.fromkeys(filter(None, values.split(","))))
            if not equals or not name or not parts:
                raise InvalidInput(f"--grid {text}: give a name and its values, such as --grid lam=0.1,1,10")
            if name in found:
                raise InvalidInput(f"--grid {name} is given twice: give all its values at once")
            found[name] = parts
        return found

    def settings(self) -> list[Setting]:
        """All combinations of the grid's values; options of one method vary with this method alone."""
        if self.chosen:
            return list(self.chosen)
        found: list[Setting] = []
        shared = {name: values for name, values in self.values.items() if "." not in name}
        for setting in itertools.product(*([(name, value) for value in values] for name, values in shared.items())):
            owned = [name for name in self.values if name.rpartition(".")[0] == dict(setting).get("method", "")]
            axes = [[(name.rpartition(".")[2], value) for value in self.values[name]] for name in owned if "." in name]
            found += [(*setting, *own) for own in itertools.product(*axes)]
        return found

    def title(self, setting: Setting) -> str:
        """Name of a setting: its values and, if the grid has several methods or nothing else, its method."""
        words = [f"{option}={value}" for option, value in setting if option != "method"]
        if not words or "method" in self.values:
            method = self._spec(setting).method
            alike = [name for name in self.values.get("method", ()) if label(name) == label(method)]
            # The folders distinguish files of the same name.
            words.insert(0, method if len(alike) > 1 else label(method))
        return " ".join(words)

    def _spec(self, setting: Setting) -> Spec:
        """Run of a setting with seed 0."""
        own = self._preset | {option: _value(option, text) for option, text in setting}
        return batch.spec_in_batch(self.dataset, own | self.options(self.dataset, **own))

    @functools.cached_property
    def _preset(self) -> dict[str, str]:
        """Common preset of methods whose own presets differ, since these would be compared in different settings."""
        named = {preset_of(self.dataset, method) for method in self.values.get("method", ())}
        is_given = "preset" in self.values or "preset" in texts_of(self.words)
        return {} if is_given or len(named) < 2 else {"preset": DEFAULT_PRESET[self.dataset]}

    def jobs_of(self, setting: Setting) -> list[batch.Job]:
        folder = self.folder / slug(" ".join(f"{option}={value}" for option, value in setting) or "runs")
        return batch.jobs_of_seeds(self._spec(setting), self.seeds, folder, self.title(setting), self.first_seed)

    def jobs(self, console: Console) -> list[batch.Job]:
        return list(itertools.chain.from_iterable(map(self.jobs_of, self.settings())))

    def groups(self, jobs: Sequence[batch.Job]) -> list[list[batch.Job]]:
        groups = batch.by_program(jobs)
        first = self._first_group(len(groups))
        return [*groups[first:], *groups[:first]]

    def run(self, jobs: Sequence[batch.Job], console: Console) -> None:
        # Imported only here, so that errors and --help do not wait for it.
        from experiments.run.run import run_together

        run_together([job.spec.in_folder(job.folder) for job in jobs], console)

    def finish(self, console: Console) -> None:
        from experiments.commands.sweep_results import save

        named = {self.title(setting): setting for setting in self.settings()}
        groups = save({title: self.jobs_of(setting) for title, setting in named.items()}, self.folder, console)
        if self.select is not None:
            best = one_per_method(groups, groups[0].first.headline)
            again = {"chosen": tuple(named[group.label] for group in best), "select": None, "seeds": self.select_seeds}
            again |= {"first_seed": self.first_seed + self.seeds, "out": self.folder / SELECTED}
            batch.drive(dataclasses.replace(self, **again), console)


def _value(option: str, text: str) -> str | bool:
    """Value of the grid for `Spec.of`: True or False for a switch, otherwise the text."""
    # Among the methods' own options, only switches are true or false.
    is_switch = get_type_hints(Options).get(option, bool) is bool and text in ("True", "False")
    return text == "True" if is_switch else text


def main(arguments: Sequence[str] | None = None) -> int:
    return batch.command(Sweep, arguments)


if __name__ == "__main__":
    exit_process(main())
