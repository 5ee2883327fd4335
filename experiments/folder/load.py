"""Reading of a run's files."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.choices import PROTOCOLS, WITH_FILES, Protocol
from experiments.folder.run_folder import (
    CONFIG,
    DIGESTS,
    METRICS,
    SUMMARY,
    digest,
    digest_of_content,
)
from experiments.own_code import read
from pfl_jax.errors import InvalidInput


def read_summary(folder: str | Path) -> dict[str, Any]:
    """Summary of a finished run; InvalidInput if it cannot be read, or a file of the run is not as it was written."""
    folder = Path(folder)
    summary = read_json(folder / SUMMARY)
    digests = summary.get(DIGESTS, {})
    # A summary that was written by hand has none, and nothing is checked.
    for name in (SUMMARY, CONFIG, METRICS) if digests else ():
        found = digest_of_content(summary) if name == SUMMARY else digest(read(folder / name))
        if not isinstance(digests, dict) or found != digests.get(name):
            raise InvalidInput(
                f"{folder / name} is not as it was written: remove its folder, and the run is made again"
            )
    return summary


def read_config(folder: str | Path) -> dict[str, Any]:
    """Configuration of a run; InvalidInput if it cannot be read."""
    return read_json(Path(folder) / CONFIG)


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """Evaluations of a run in order, see `Evaluation.record`; InvalidInput if they cannot be read.

    An incomplete last line is left out: the run continues, or was killed while it wrote.
    """
    text = _text(Path(folder) / METRICS)
    lines = text.splitlines()
    if lines and not text.endswith("\n"):
        lines.pop()
    return [_parse_json(line, Path(folder) / METRICS) for line in lines]


def measured(line: dict[str, Any]) -> list[Protocol]:
    """Protocols of an evaluation."""
    return [protocol for protocol in PROTOCOLS if isinstance(line.get(protocol), dict)]


def read_json(path: str | Path) -> dict[str, Any]:
    """Content of a JSON file; InvalidInput if it cannot be read."""
    return _parse_json(_text(Path(path)), Path(path))


def task_of(config: dict[str, Any]) -> dict[str, Any]:
    """Scores of a run, the primary one first, those in percent, and whether high values of the primary one are good."""
    usual = {"scores": ["accuracy", "loss", "macro_f1", "auc"], "in_percent": ["accuracy", "macro_f1", "auc"]}
    return usual | {"higher_is_better": True} | config.get("task", {})


def data_name(config: dict[str, Any]) -> str:
    """Name of a run's data: "cifar10", "cifar10, JPEG copy"; the description of a stand-in or of a user's own."""
    data = config["data"]
    if not data["is_real"] or config["dataset"] in WITH_FILES:
        return data["description"]
    return ", ".join(filter(None, (config["dataset"], data.get("note"))))


def number_of_clients(config: dict[str, Any]) -> int:
    """Number of a run's clients, without those that are held out."""
    options = config["options"]
    return len(config.get("train_examples", ())) or options["num_clients"] - options.get("held_out_clients", 0)


def over(summaries: Iterable[Mapping[str, Any]], everyone: int) -> str:
    """Over how many of all clients the means of some evaluations are, "5 of 8 clients"; "" where over all."""
    # Over none there is no mean.
    counts = [one["clients"] for one in summaries if one.get("clients")]
    if all(count == everyone for count in counts):
        return ""
    return f"{' to '.join(map(str, sorted({min(counts), max(counts)})))} of {everyone} clients"


def axis(config: dict[str, Any]) -> str:
    """Name of the primary score with its unit: "accuracy in %", "mse"."""
    name, *_ = task_of(config)["scores"]
    return f"{name} in %" if name in task_of(config)["in_percent"] else name


def chosen(config: dict[str, Any], means: Iterable[float]) -> float:
    """Best of some means of the primary score."""
    return max(means) if task_of(config)["higher_is_better"] else min(means)


def _text(path: Path) -> str:
    try:
        return read(path).decode()
    except UnicodeDecodeError:
        raise _damaged(path) from None


def _parse_json(text: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise _damaged(path)
    return content


def _damaged(path: Path) -> InvalidInput:
    return InvalidInput(f"{path} is damaged: remove it, with its folder if it is a run's, and it is made again")
