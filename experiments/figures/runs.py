"""Availability of real data, and storage of arrays of a run's rounds."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from experiments.cli.run_command import RunCommand
from experiments.figures.figure import Keep, arrays_path
from experiments.folder.version import Trust
from experiments.run import cached_runs
from pfl_jax.atomic_write import write_binary
from pfl_jax.data.specs import SPECS

if TYPE_CHECKING:
    from experiments.run.build import Experiment
    from pfl_jax.engine.simulate import RoundResult


def is_real(
    dataset: str, source: str, data_dir: str | None, notify: Callable[[str], None], *, download: bool = True
) -> bool:
    """Whether a run on this dataset would use the real data instead of embedded data.

    Args:
      dataset: its name.
      source, data_dir: as `python -m experiments.DATASET` has them.
      notify: receives the source that "auto" selected.
      download: whether "auto" may try to download; otherwise only local data counts.

    Raises:
      InvalidInput: there is data, but it cannot be used.
    """
    # Imported now: tensorflow-datasets takes its time.
    from pfl_jax.data import files, sources, tfds

    spec = SPECS[dataset]
    if spec.tfds_name is None or source in ("tfds", "files"):
        return True
    if source == "embedded":
        return False
    if download:
        return sources.load(dataset, "auto", data_dir, notify=notify).is_real
    folder = None if data_dir is None else Path(data_dir).expanduser()
    if files.find(spec, folder) or tfds.find(spec, folder, notify) is not None:
        return True
    notify(f"{dataset} is not there: without a download these are the runs on embedded data")
    return False


def run_with_arrays(cell: RunCommand, folder: Path, console: Console, keep: "Keep | None", trust: Trust) -> None:
    """Run a cell, and store arrays of its rounds in the file `arrays_path(folder)`.

    Args:
      cell: what to run.
      folder: for its results.
      console: for the run's output.
      keep: arrays of one round by name, different names in different rounds; None keeps nothing.
      trust: code whose runs are read or resumed.

    Raises:
      InvalidInput, KeyboardInterrupt: see `cached_runs.run_cell`.
    """
    if keep is None:
        # Without an observer an interrupted run goes on from its checkpoint.
        cached_runs.run_cell(cell, folder, console, trust=trust)
        return
    arrays: dict[str, Any] = {}

    def observe(experiment: "Experiment", result: "RoundResult") -> None:
        arrays.update(keep(experiment, result))
        # Before the summary, which makes the run a finished one.
        if result.round == experiment.settings.rounds:
            write_binary(arrays_path(folder), lambda file: np.savez_compressed(file, **arrays))

    cached_runs.run_cell(cell, folder, console, observe, trust)
