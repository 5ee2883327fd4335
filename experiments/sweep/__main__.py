"""Sweeps: every combination of values and seeds, trained together where their programs have one shape.

    python -m experiments.sweep --dataset digits --method fedpac --seeds 4 --grid lam=0.1,1,10 --grid lr=0.02,0.05

Seeds and real-valued hyper-parameters are inputs of one compiled program. Runs that differ in anything else (method,
epochs, batch size, clients, ...) form groups, which run one after another. Each run has its own folder, as if it had
been started alone. Repeating the command resumes where it stopped: finished runs are kept, and an interrupted group
continues from its last checkpoint (see --checkpoint-every). All other options are those of
`python -m experiments.DATASET` and apply to every run.

With --val-fraction 0.1 the best setting is chosen on validation examples, otherwise on test examples.
"""

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, get_type_hints

from rich.console import Console

from experiments import DATASETS
from experiments.cli import parser
from experiments.cli.effects import relevant_options
from experiments.cli.exit_codes import leave
from experiments.cli.own_code import label
from experiments.cli.parser import Argument, option_words
from experiments.cli.request import RunCommand
from experiments.fields import Mark, NotInSweeps, flag, marked, noted
from experiments.folder.run_folder import slug
from experiments.run import batch
from experiments.spec import KINDS, Options
from pfl_jax.errors import InvalidInput
from pfl_jax.hyper_parameters import Count

GROUPS = "groups"
"""Subfolder of the groups' checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Sweep(batch.Batch):
    """Command line of a sweep."""

    dataset: Annotated[str, Argument(text=", ".join(DATASETS))]
    seeds: Count = 1
    """Number of seeds, from 0."""
    grid: Annotated[tuple[str, ...], Argument("repeated", "NAME=V,V")] = ()
    """Values of an option; may be repeated."""

    name: ClassVar = "sweep"

    def check(self) -> None:
        asked = parser.given(self.words)
        for name, notes in noted(KINDS, NotInSweeps).items():
            if name in self.values or name in asked:
                raise InvalidInput(f"{flag(name)} cannot be given for a sweep: {notes[0].reason}")
        for name in sorted({*marked(KINDS, Mark.CHOOSES)} & self.values.keys()):
            raise InvalidInput(f"{flag(name)} cannot be in the grid: all settings are compared by the same one")
        # Runs that differ only in these are one run to the groups, which would train all on the first one's data.
        for name in sorted({*marked(KINDS, Mark.NEUTRAL)} & self.values.keys()):
            raise InvalidInput(f"{flag(name)} cannot be in the grid: it is no setting; start a sweep for each value")
        if twice := sorted(asked & set(self.values)):
            raise InvalidInput(f"{flag(twice[0])} is in the grid already")
        for setting in self.settings():
            # Includes the digest of the user's own data, so that a missing file is reported before anything is made.
            relevant_options(self._command(setting).request())

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
                raise InvalidInput(f"--grid {name} is there twice: give all its values at once")
            found[name] = parts
        return found

    def settings(self) -> list[tuple[str, ...]]:
        """All combinations of the grid's values."""
        return list(itertools.product(*self.values.values()))

    def title(self, setting: tuple[str, ...]) -> str:
        """Name of a setting: its method, where the grid has several or nothing else, and its values."""
        pairs = list(zip(self.values, setting, strict=True))
        words = [f"{option}={value}" for option, value in pairs if option != "method"]
        if not words or "method" in self.values:
            method = self._command(setting).request().options.method
            alike = [name for name in self.values.get("method", ()) if label(name) == label(method)]
            # Files of the same name in several folders are told apart by their folders.
            words.insert(0, method if len(alike) > 1 else label(method))
        return " ".join(words)

    def _command(self, setting: tuple[str, ...]) -> RunCommand:
        words = itertools.chain.from_iterable(map(_words, self.values, setting))
        return RunCommand(self.dataset, (*self.words, *words))

    def jobs_of(self, setting: tuple[str, ...]) -> list[batch.Job]:
        """Runs of a setting, one for each seed."""
        name = " ".join(f"{option}={value}" for option, value in zip(self.values, setting, strict=True))
        folder = self.folder / slug(name or "runs")
        return batch.jobs_of_seeds(self._command(setting), self.seeds, folder, self.title(setting))

    def jobs(self, console: Console) -> list[batch.Job]:
        return list(itertools.chain.from_iterable(map(self.jobs_of, self.settings())))

    def groups(self, jobs: Sequence[batch.Job]) -> list[list[batch.Job]]:
        # One program: runs that differ only in the seed and in the method's real-valued hyper-parameters.
        found: dict[str, list[batch.Job]] = {}
        for job in jobs:
            request = job.cell.request()
            real, relevant = request.real_numbers(), relevant_options(request)
            fixed = {name: value for name, value in relevant.items() if name not in real}
            if request.options.device_trace is not None:
                # Each seed has a timetable of its own.
                fixed["seed"] = request.options.seed
            found.setdefault(json.dumps(fixed, sort_keys=True), []).append(job)
        return list(found.values())

    def run(self, jobs: Sequence[batch.Job], console: Console) -> None:
        # Imported now, so that errors and --help do not wait for it.
        from experiments.sweep import execute

        group = next(group for group in self.groups(self.jobs(console)) if jobs[0] in group)
        execute.run(group, jobs, self.folder / GROUPS, console)

    def finish(self, console: Console) -> None:
        from experiments.sweep.results import save

        save({self.title(setting): self.jobs_of(setting) for setting in self.settings()}, self.folder, console)


def _words(option: str, value: str) -> list[str]:
    """Value of the grid as command-line arguments: True and False of a switch are --drop-last and --no-drop-last."""
    # Of the methods' own options, only switches are true or false.
    is_switch = get_type_hints(Options).get(option, bool) is bool and value in ("True", "False")
    return option_words({option: value == "True" if is_switch else value})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sweep with command-line arguments, by default those of this process; return the exit code."""
    return batch.command(Sweep, arguments)


if __name__ == "__main__":
    leave(main())
