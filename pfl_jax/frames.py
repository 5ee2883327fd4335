"""Scores of runs as a pandas DataFrame: one long table, a row for each score of each client in each round; and the
only reader of run folders."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pfl_jax.base import Scores
from pfl_jax.engine.checkpoint import FOLDER
from pfl_jax.errors import InvalidInput, imported

if TYPE_CHECKING:
    from pfl_jax.engine.simulate import RoundResult

Columns: TypeAlias = dict[str, Any]
"""Names of columns -> their values, [rows] or one for all rows."""

PROTOCOLS = ("received", "trained", "before_aggregation")
NEWCOMERS = ("newcomers_received", "newcomers_trained")
CONFIG, METRICS = "config.json", "metrics.jsonl"
"""Files that mark a folder as the folder of a run."""
_NOT_SEARCHED = {FOLDER, "tensorboard", "wandb"}
"""Folders inside a run's folder, which contain no runs."""


def frame(
    results: "Iterable[RoundResult] | str | Path",
    *,
    clients: Sequence[str] = (),
    newcomers: Sequence[str] = (),
    **columns: Any,
) -> Any:
    """Long table of scores: round, client, protocol, split, score, value.

    Shares such as accuracies are in [0, 1], even if they are read from files. A client without a score has no row; in
    files, an infinite error is no score either.

    Args:
      results: all rounds that `pfl_jax.run` or `pfl_jax.sweep.run` yields, or a list of some; or a run's folder, or a
        folder above several runs, such as a sweep's.
      clients: names [N] of the clients that take part, as in a `FederatedData`; () for their numbers.
      newcomers: names of the clients that never take part; () for their numbers, from 0.
      **columns: further columns, each a value for all rows; or, with results of a sweep, a sequence [R] of values, one
        for each run: `frame(results, seed=[0, 1], lr=[0.1, 0.2])`.

    Returns:
      A pandas DataFrame. Results of a sweep have a column "run" with the position of the run. Folders have a column
      "run" with the folder, "method", "seed", and the options that differ between the runs.

    Raises:
      InvalidInput: pandas is missing, a column has a wrong number of values, or a folder has no runs.
    """
    pandas = imported("pandas", "a frame needs a package that is not installed: pip install pandas")
    if isinstance(results, str | Path):
        parts = [found | columns for found in _rows_of_folders(results)]
    else:
        parts = [part for result in results for part in _rows_of_round(result, columns)]
    table = pandas.concat([pandas.DataFrame(part) for part in parts], ignore_index=True)
    if len(clients) or len(newcomers):
        numbers, is_new = table["client"].to_numpy(), table["protocol"].isin(NEWCOMERS).to_numpy()
        named = numbers.astype(object)
        for given, rows in ((clients, ~is_new), (newcomers, is_new)):
            if len(given):
                named[rows] = np.asarray(given)[numbers[rows]]
        table["client"] = named.tolist()
    names = ["round", "client", "protocol", "split", "score", "value"]
    return table[[*(name for name in table.columns if name not in names), *names]]


def mean_scores(result: "RoundResult") -> dict[str, float]:
    """Means over clients of a round's scores, by names such as "received/accuracy", for experiment trackers.

    Args:
      result: a round that `pfl_jax.run` yields; one without an evaluation gives {}.

    Returns:
      Name -> mean over the clients that have the score; shares such as accuracies are in [0, 1]. Means on validation
      examples are "validation/received/accuracy", ... A score that no client has is left out.

    Raises:
      InvalidInput: a round of a sweep, which has several runs.
    """
    found: dict[str, float] = {}
    if np.ndim(result.cohort) == 2:
        raise InvalidInput("mean_scores is for the rounds of one run: frame(results) has the scores of a sweep's runs")
    for part in _rows_of_round(result, {}):
        if np.size(part["value"]):
            split = "" if part["split"] == "test" else f"{part['split']}/"
            found[f"{split}{part['protocol']}/{part['score']}"] = float(np.mean(part["value"]))
    return found


def _rows_of_round(result: "RoundResult", columns: Mapping[str, Any]) -> Iterator[Columns]:
    measured = {name: getattr(result, name) for name in PROTOCOLS}
    if result.newcomers is not None:
        measured |= zip(NEWCOMERS, result.newcomers, strict=True)
    for protocol, scores in measured.items():
        for split, split_scores in (("test", scores), ("validation", scores and scores.validation)):
            for score, values in _named_scores(split_scores):
                table = np.asarray(values)
                # With a single run, there is no axis of runs.
                run, client = np.nonzero(~np.isnan(np.atleast_2d(table)))
                about: Columns = {"run": run} if table.ndim == 2 else {}
                for name, value in columns.items():
                    about[name] = _values_of_runs(name, value, table)[run] if np.ndim(value) else value
                value = np.atleast_2d(table)[run, client]
                found = {"client": client, "protocol": protocol, "split": split, "score": score, "value": value}
                yield about | {"round": result.round} | found


def _named_scores(scores: Scores | None) -> Iterable[tuple[str, Any]]:
    return () if scores is None else scores.by_name.items()


def _values_of_runs(name: str, values: Any, table: np.ndarray) -> np.ndarray:
    runs = len(table) if table.ndim == 2 else 0
    if np.shape(values) != (runs,):
        raise InvalidInput(f"{name} has {len(values)} values, and the results are of {runs or 1} runs")
    return np.asarray(values)


def find_runs(*paths: str | Path) -> list[Path]:
    """Folders of runs, each once: the given folders and those below them that hold a run.

    Args:
      *paths: folders of runs, or above them.

    Raises:
      InvalidInput: a given folder has no run.
    """
    found: dict[Path, Path] = {}
    for path in (Path(path).expanduser() for path in paths):
        if not path.is_dir():
            raise InvalidInput(f"{path} is not a folder: give folders of runs, or one above them")
        here = []
        for folder, below, files in os.walk(path):
            below[:] = sorted(name for name in below if name not in _NOT_SEARCHED)
            if CONFIG in files and METRICS in files:
                here.append(Path(folder))
        if not here:
            raise InvalidInput(f"there is no run in {path}: a run's folder holds {CONFIG} and {METRICS}")
        found |= {folder.resolve(): folder for folder in here if folder.resolve() not in found}
    return list(found.values())


def read_json(path: str | Path) -> dict[str, Any]:
    """Content of a JSON file.

    Args:
      path: path of the file.

    Raises:
      InvalidInput: the file cannot be read.
    """
    return _parsed(_text(Path(path)), Path(path))


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Evaluations of a run in order, a dictionary for each line of its metrics log (docs/run-folder.md).

    An incomplete last line is left out: the run is still writing it, or was killed while it wrote.

    Raises:
      InvalidInput: the log cannot be read.
    """
    path = Path(folder) / METRICS
    text = _text(path)
    return [_parsed(line, path) for line in text[: text.rfind("\n") + 1].splitlines()]


def task_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Scores of a run, the primary one first; which of them are in percent; whether higher primary scores are better.

    Args:
      config: content of the run's config.json.
    """
    usual = {"scores": ["accuracy", "loss", "macro_f1", "auc"], "in_percent": ["accuracy", "macro_f1", "auc"]}
    return usual | {"higher_is_better": True} | config.get("task", {})


def _rows_of_folders(root: str | Path) -> list[Columns]:
    """Rows of all runs at or below a folder."""
    folders = find_runs(root)
    configs = [read_json(folder / CONFIG) for folder in folders]
    options = [config["options"] | config["hyper_parameters"] for config in configs]
    apart = [
        name
        for name in dict.fromkeys(name for values in options for name in values)
        if name not in ("method", "seed", "out", "resume") and len({repr(values.get(name)) for values in options}) > 1
    ]
    found = []
    for folder, config, one in zip(folders, configs, options, strict=True):
        values = {name: str(one.get(name)) if isinstance(one.get(name), list) else one.get(name) for name in apart}
        about = {"run": str(folder), "method": one["method"], "seed": one["seed"], **values}
        found += [about | rows for line in read_metrics(folder) for rows in _rows_of_line(line, task_of(config))]
    return found


def _rows_of_line(line: dict[str, Any], task: Mapping[str, Any]) -> Iterator[Columns]:
    for name, values in line.items():
        protocol = next((one for one in PROTOCOLS if name.startswith(f"{one}_") and name.endswith("_per_client")), None)
        if protocol is None:
            continue
        score = name.removeprefix(f"{protocol}_").removesuffix("per_client").removesuffix("_") or task["scores"][0]
        array = np.array(values, np.float64) / (100 if score in task["in_percent"] else 1)
        (client,) = np.nonzero(np.isfinite(array))
        found = {"round": line["round"], "client": client, "protocol": protocol, "split": "test", "score": score}
        yield found | {"value": array[client]}


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise _damaged(path) from None


def _parsed(text: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise _damaged(path)
    return content


def _damaged(path: Path) -> InvalidInput:
    return InvalidInput(f"{path} is damaged: remove it, with its folder if it is a run's, and it is made again")
