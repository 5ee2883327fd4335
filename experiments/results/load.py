"""Reading of a run's files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.config.measures import FIELD, PROTOCOLS, Average, Protocol, Score
from experiments.results.run_folder import CONFIG, METRICS, SUMMARY, rounded
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.metrics import pooled


def read_summary(folder: str | Path) -> dict[str, Any]:
    """Summary of a finished run; InvalidInput if it cannot be read."""
    return read_json(Path(folder) / SUMMARY)


def read_config(folder: str | Path) -> dict[str, Any]:
    """Configuration of a run; InvalidInput if it cannot be read."""
    return read_json(Path(folder) / CONFIG)


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Evaluations of a run in order, see `Evaluation.record`; InvalidInput if they cannot be read.

    An incomplete last line is left out: the run continues, or was killed while it wrote.
    """
    text = _text(Path(folder) / METRICS)
    lines = text.splitlines()
    if lines and not text.endswith("\n") and not lines[-1].endswith("}"):
        lines.pop()
    return [_parse_json(line, Path(folder) / METRICS) for line in lines]


def read_evaluations(folder: str | Path) -> list[dict[str, Any]]:
    """Evaluations of a run as in `read_metrics`; pooled accuracies are added to those of older versions.

    They are computed from the clients' accuracies and their numbers of test examples, and missing where the
    configuration has no such numbers.
    """
    lines = read_metrics(folder)
    if any("pooled" not in line[protocol] for line in lines for protocol in measured(line)):
        counts = read_config(folder).get("test_examples")
        for line in lines:
            for protocol in measured(line):
                values = line.get(f"{protocol}_per_client")
                if "pooled" in line[protocol] or counts is None or values is None or len(values) != len(counts):
                    continue
                mean = rounded(pooled(np.array(values, np.float64), np.array(counts)))
                line[protocol]["pooled"] = None if np.isnan(mean) else mean
    return lines


def measured(line: dict[str, Any]) -> list[Protocol]:
    """Protocols of an evaluation."""
    return [protocol for protocol in PROTOCOLS if isinstance(line.get(protocol), dict)]


def read_json(path: str | Path) -> dict[str, Any]:
    """Content of a JSON file; InvalidInput if it cannot be read."""
    return _parse_json(_text(Path(path)), Path(path))


def accuracy(
    folder: str | Path, protocol: Protocol, score: Score = "last", average: Average = "clients"
) -> float | None:
    """Mean accuracy of a finished run, in percent.

    Args:
      folder: of the run.
      protocol: one that the run was evaluated by.
      score: at the last evaluation, or at that with the highest mean.
      average: over clients, or over their test examples.

    Returns:
      None where no client has an accuracy.

    Raises:
      InvalidInput: the run was not evaluated so.
    """
    name, lines = FIELD[average], read_evaluations(folder)
    if not all(name in line.get(protocol, {}) for line in lines):
        what = f"{protocol}, {name}" if all(protocol in line for line in lines) else protocol
        raise InvalidInput(f"{Path(folder) / METRICS} has no accuracies {what}: remove the folder, and run it anew")
    means = [line[protocol][name] for line in lines]
    if score == "last":
        return means[-1]
    return max((mean for mean in means if mean is not None), default=None)


def curves(folders: Sequence[Path], protocol: Protocol) -> tuple[list[int], list[list[float]]]:
    """Rounds [R] of the evaluations of some seeds, and for each its accuracies [R] in percent, means over clients."""
    metrics = [read_metrics(folder) for folder in folders]
    return [line["round"] for line in metrics[0]], [[line[protocol]["mean"] for line in run] for run in metrics]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise _damaged(path) from None


def _parse_json(text: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        content = None
    if not isinstance(content, dict):
        raise _damaged(path)
    return content


def _damaged(path: Path) -> InvalidInput:
    return InvalidInput(f"{path} is damaged: remove it, with its folder if it is a run's, and it is made again")
