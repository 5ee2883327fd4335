"""The files of a run, read again."""

import json
from pathlib import Path
from typing import Any, Literal, TypeAlias

from experiments.results.run_folder import CONFIG, METRICS, SUMMARY, Protocol
from pfl_jax.errors import InvalidInput

Score: TypeAlias = Literal["last", "best"]


def read_summary(folder: str | Path) -> dict[str, Any]:
    """The summary of a finished run; InvalidInput if it cannot be read."""
    return read_json(Path(folder) / SUMMARY)


def read_config(folder: str | Path) -> dict[str, Any]:
    """The configuration of a run; InvalidInput if it cannot be read."""
    return read_json(Path(folder) / CONFIG)


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The evaluations of a run in their order, see `Evaluation.record`; InvalidInput if they cannot be read.

    Half a last line is left out: of a run that goes on, or was killed while it wrote.
    """
    text = _text(Path(folder) / METRICS)
    lines = text.splitlines()
    if lines and not text.endswith("\n") and not lines[-1].endswith("}"):
        lines.pop()
    return [_parse_json(line, Path(folder) / METRICS) for line in lines]


def read_json(path: str | Path) -> dict[str, Any]:
    """The content of a JSON file; InvalidInput if it cannot be read."""
    return _parse_json(_text(Path(path)), Path(path))


def accuracy(folder: str | Path, protocol: Protocol, score: Score = "last") -> float | None:
    """The mean over clients that a finished run reached, in percent.

    Args:
      folder: of the run.
      protocol: received or trained.
      score: at the last evaluation, or at that with the highest mean.

    Returns:
      None where no client has an accuracy.
    """
    means = [line[protocol]["mean"] for line in read_metrics(folder)]
    if score == "last":
        return means[-1]
    return max((mean for mean in means if mean is not None), default=None)


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
