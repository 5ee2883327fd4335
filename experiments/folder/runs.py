"""Table of the settings and scores of many runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.cli.options import PROTOCOLS
from experiments.folder import stored_runs
from experiments.folder.run_folder import VALIDATION


def load_runs(*folders: str | Path) -> Any:
    """Table of the runs in folders, one row each: a pandas DataFrame where pandas is installed, else a list of rows.

    A row has the run's folder, data, seed and state ("finished"), every option and hyper-parameter that its results
    depend on, the last evaluated round, and its mean accuracy, loss, macro-F1 and AUC under each protocol measured, as
    received_accuracy, received_loss, ...; with --val-fraction also those on validation examples, as
    validation_received_accuracy, ... Accuracies, macro-F1 and AUC are in percent.

    Args:
      *folders: folders of runs, sweeps or tables, or folders above them.

    Raises:
      InvalidInput: a folder is missing or holds no run, or a run cannot be read.
    """
    rows = [_row(stored_runs.read(folder)) for folder in stored_runs.find([Path(folder) for folder in folders])]
    return as_table(rows)


def as_table(rows: Sequence[dict[str, Any]]) -> Any:
    """A DataFrame of rows, or the rows themselves without pandas.

    Args:
      rows: name -> value.
    """
    try:
        import pandas  # pyright: ignore[reportMissingImports]
    except ImportError:
        return list(rows)
    return pandas.DataFrame(list(rows))


def _row(run: stored_runs.Run) -> dict[str, Any]:
    row = {"folder": str(run.folder), "data": run.data, **run.setting, "seed": run.seed, "state": run.state}
    row["round"] = run.round
    last = run.lines[-1] if run.lines else {}
    for prefix, line in (("", last), (f"{VALIDATION}_", last.get(VALIDATION, {}))):
        for protocol in PROTOCOLS:
            scores = line.get(protocol) or {}
            for name, stored in (("accuracy", "mean"), ("loss", "loss"), ("macro_f1", "macro_f1"), ("auc", "auc")):
                if stored in scores:
                    row[f"{prefix}{protocol}_{name}"] = scores[stored]
    return row
