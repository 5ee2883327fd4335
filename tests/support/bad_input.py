"""Bad input of every kind, and what a command says of it; the other files `bad_*` have the cases.

Nothing here trains: all of it is refused before that. Values that the annotation of a hyper-parameter excludes are in
`tests/experiments/test_both_doors.py`.
"""

import contextlib
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scores import scores_of

RUN = "--method local --rounds 3 --num-clients 4 --train-size 20 --test-size 10 --no-compilation-cache"
"""The run whose folder `run` is, cut off after a round."""

Prepare = Callable[[Path], object]


class Case(NamedTuple):
    """A command, the state of the files it meets in words, part of the message, and what makes that state.

    It is made beside a copy of `run`.
    """

    command: str
    what: str = ""
    message: str = ""
    prepare: Prepare | None = None

    def __str__(self) -> str:
        """Command and state."""
        return f"{self.command} [{self.what}]" if self.what else self.command


class Evil:
    """What a malicious pickle is made of: unpickled, it leaves a file behind."""

    def __reduce__(self):
        return os.mkdir, ("pickles-are-executed",)


def evil_pickle() -> bytes:
    """A pickle that must not be read."""
    return pickle.dumps(Evil())


def write(path: Path, content: bytes = b"nothing of use") -> None:
    """Write a file, and the folders that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def file(name: str, content: bytes = b"nothing of use") -> Prepare:
    """Writes a file."""
    return lambda here: write(here / name, content)


def folder(name: str) -> Prepare:
    """Makes an empty folder."""
    return lambda here: (here / name).mkdir()


HELD: list[io.IOBase] = []
"""Files that are locked until the answer."""


def experiment_of(run: Path):
    """The run's experiment, and a state of it after a round; nothing is trained."""
    import jax
    from rich.console import Console

    from experiments.cli.command import parse
    from experiments.run import build

    experiment = build.build_experiment(parse("digits", [*RUN.split(), "--out", str(run)]), Console(file=io.StringIO()))
    shapes = experiment.state_shapes()
    plain = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes._replace(key=()))
    return experiment, plain._replace(key=jax.random.key(0), round=np.int32(1))


def untrained(made, happens=None):
    """Stands in for `simulate.run`: rounds with results but without training. happens[n]() comes before round n."""
    from pfl_jax import simulate

    def rounds(method, data, settings, key, *, state=None, **others):
        for number in range(1 if state is None else int(state.round) + 1, settings.rounds + 1):
            (happens or {}).get(number, lambda: None)()
            scores, everyone = scores_of(*np.full((4, 4), 0.25 + number / 100, np.float32)), np.arange(4)
            after = made._replace(round=np.int32(number))
            yield simulate.RoundResult(
                *(number, after, {}, everyone, everyone >= 0, everyone >= 0, scores, scores, None, 80, 1.0)
            )

    return rounds


def save_checkpoint(experiment, state, run: Path) -> None:
    """Writes the run's only checkpoint."""
    from experiments.folder.run_folder import RunFolder
    from experiments.run.rounds import ActiveRun, Totals
    from pfl_jax.engine.checkpoint import Checkpoints

    record = ActiveRun(experiment, RunFolder(run), Totals(round=1)).record()
    Checkpoints(run / "checkpoints").save(state, record)


def make_run(run: Path) -> None:
    """The folder of a run that was cut off after a round."""
    from experiments.run.records import configuration

    run.mkdir()
    experiment, state = experiment_of(run)
    (run / "config.json").write_text(json.dumps(configuration(experiment)))
    (run / "metrics.jsonl").write_text('{"round": 1}\n')
    save_checkpoint(experiment, state, run)


# What is said


def answer(case: Case, run: Path, here: Path) -> tuple[int, str]:
    """Exit code and stderr, with paths from there, in an empty folder with a copy of `run`."""
    from experiments import compare, export, figures, partition, report, sweep, tables
    from experiments.cli import command as cli
    from pfl_jax.data import idx_and_cifar, tfds

    modules = (compare, export, figures, partition, report, sweep, tables)
    commands = {module.__name__.rpartition(".")[2]: module.main for module in modules}
    shutil.copytree(run, here / "run")
    if case.prepare is not None:
        case.prepare(here)
    name, *words = case.command.split()
    error, before = io.StringIO(), Path.cwd()
    usual = tfds._unreachable, idx_and_cifar.SYSTEM_FOLDERS
    try:
        os.chdir(here)
        tfds._unreachable, idx_and_cifar.SYSTEM_FOLDERS = (lambda url: "the host did not answer"), ()
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            code = commands[name](words) if name in commands else cli.main(name, words)
    finally:
        tfds._unreachable, idx_and_cifar.SYSTEM_FOLDERS = usual
        os.chdir(before)
        while HELD:
            HELD.pop().close()
    return code, error.getvalue().replace(f"{here.resolve()}/", "").replace(f"{here}/", "")
