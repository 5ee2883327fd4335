"""Reading of a run's files."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.choices import FIELD, PROTOCOLS, WITH_FILES, Average, Protocol, Score
from experiments.folder.run_folder import (
    CONFIG,
    DIGESTS,
    METRICS,
    SUMMARY,
    VALIDATION,
    VIRTUAL,
    digest,
    digest_of_content,
)
from experiments.own_code import read
from pfl_jax.errors import InvalidInput

COUNTERS = ("bytes_up", "bytes_down", "seconds", VIRTUAL)
"""Entries of an evaluation beside its scores."""
CLIENTS = "last_clients"
"""Entry of `Result.rounds` with the scores of the single clients after the last round."""


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


class Result(NamedTuple):
    """Result of a finished run, from its folder or from its committed file.

    Attributes:
      path: file with its evaluations.
      config, summary: content of config.json and summary.json, in a committed file without single clients.
      rounds: "round" -> numbers of the evaluated rounds [R]; each protocol's name -> name -> [R], see
        `pfl_jax.primitives.metrics.Summary`; "validation" -> the same on validation examples, where there are any;
        COUNTERS -> [R]; "last_clients" -> each protocol's name -> the clients' primary score [N] in the last one, None
        for a client without one.
      command, commit, version: of a committed result.
    """

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    rounds: dict[str, Any]
    command: str = ""
    commit: str | None = None
    version: int | None = None

    @property
    def seconds(self) -> float:
        """Run time in seconds; of runs that were trained together, each one's share."""
        return self.summary["seconds"] / self.config.get("runs_together", 1)

    def accuracy(self, protocol: Protocol, score: Score = "last", average: Average = "clients") -> float | None:
        """Mean accuracy in percent, or other primary score, in the last or the best round; None where no client has
        one."""
        means = self.curve(protocol, average)
        known = [mean for mean in means if mean is not None]
        return means[-1] if score == "last" else chosen(self.config, known) if known else None

    def clients(self, protocol: Protocol, score: Score = "last", average: Average = "clients") -> dict[str, int]:
        """Number of the clients of `accuracy`, as "clients"; none where it is not known."""
        means, counts = self.curve(protocol, average), self.rounds[protocol].get("clients", [])
        where = len(means) - 1 if score == "last" else means.index(self.accuracy(protocol, score, average))
        return {"clients": counts[where]} if counts else {}

    def curve(self, protocol: Protocol, average: Average = "clients") -> list[float | None]:
        """Mean accuracies [R] in percent, as in `accuracy`."""
        means = self.rounds.get(protocol, {}).get(FIELD[average])
        if means is None:
            what = f"{protocol}, {FIELD[average]}" if protocol in self.rounds else protocol
            raise InvalidInput(f"{self.path} has no accuracies {what}: remove it, with its folder, and run it again")
        return means

    def validation(self, protocol: Protocol) -> float | None:
        """Mean accuracy over clients on validation examples at the last evaluation; None without such examples."""
        return self.rounds[VALIDATION][protocol]["mean"][-1] if VALIDATION in self.rounds else None

    def at_round(self, number: int, protocol: Protocol) -> float | None:
        """Mean over clients after a round; None if the round was not evaluated."""
        rounds = self.rounds["round"]
        return self.rounds[protocol]["mean"][rounds.index(number)] if number in rounds else None


def read_result(folder: Path) -> Result:
    """Result of a finished run in its folder; InvalidInput if it cannot be read."""
    return Result(folder / METRICS, read_config(folder), read_summary(folder), columns(read_metrics(folder)))


def columns(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Evaluations in the form of `Result.rounds`, with the entries that all of them have."""
    found: dict[str, Any] = {"round": [line["round"] for line in lines], **_summaries(lines)}
    if VALIDATION in lines[-1]:
        found[VALIDATION] = _summaries([line[VALIDATION] for line in lines])
    clients = {protocol: lines[-1].get(f"{protocol}_per_client") for protocol in measured(lines[-1])}
    found[CLIENTS] = {protocol: scores for protocol, scores in clients.items() if scores is not None}
    return found | {name: [line[name] for line in lines] for name in COUNTERS if name in lines[-1]}


def _summaries(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """Protocol -> name -> values of all lines, for names that all of them have."""
    found = {}
    for protocol in measured(lines[-1]):
        names = [name for name in lines[-1][protocol] if all(name in line.get(protocol, {}) for line in lines)]
        found[protocol] = {name: [line[protocol][name] for line in lines] for name in names}
    return found


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
