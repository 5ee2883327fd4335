"""What a run leaves behind: a folder with its configuration, metrics and summary, and a table for people.

Files are complete or absent: whole files are written beside their place and moved there, lines of the metrics log are
written and flushed one by one. JSON is strict: an accuracy that does not exist is null, never NaN.
"""

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.table import Table

from pfl_jax.errors import InvalidInput
from pfl_jax.evaluation import Summary, summarize

Protocol = Literal["received", "trained"]
PROTOCOLS: tuple[Protocol, ...] = ("received", "trained")

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"


class Evaluation(NamedTuple):
    """One evaluation of a federation.

    Attributes:
      round: number of the round, counted from 1.
      received: [N] accuracies in [0, 1] of what every client would deploy now.
      trained: [N] accuracies of every client's model right after its own last training, NaN before the first.
      seconds: since the run began, compilation included.
      examples_per_second: training examples visited per second in the rounds since the previous evaluation.
    """

    round: int
    received: np.ndarray
    trained: np.ndarray
    seconds: float
    examples_per_second: float

    def summary(self, protocol: Protocol) -> Summary:
        """Mean, standard deviation and worst decile in percent."""
        return summarize(getattr(self, protocol))

    def record(self) -> dict[str, Any]:
        """The evaluation as a line of the metrics log; accuracies in percent."""
        line: dict[str, Any] = {"round": self.round}
        for protocol in PROTOCOLS:
            line[protocol] = {name: rounded(value) for name, value in self.summary(protocol)._asdict().items()}
        for protocol in PROTOCOLS:
            line[f"{protocol}_per_client"] = percentages(getattr(self, protocol))
        return line | {
            "seconds": round(self.seconds, 3),
            "examples_per_second": rounded(self.examples_per_second),
        }


def best(evaluations: Sequence[Evaluation], protocol: Protocol) -> Evaluation:
    """The first evaluation with the highest mean accuracy."""
    return max(evaluations, key=lambda evaluation: _or_lowest(evaluation.summary(protocol).mean))


def percentages(per_client: np.ndarray) -> list[float]:
    """Accuracies [N] in [0, 1] as percentages; NaN stays NaN."""
    return [rounded(100 * float(value)) for value in per_client]


def results_table(evaluations: Sequence[Evaluation], title: str, headline: Protocol, paper: str | None = None) -> Table:
    """Mean, standard deviation and worst decile over clients, for both protocols, last and best round.

    Args:
      evaluations: all of the run, at least one.
      title: which method on which data.
      headline: the protocol that comes first.
      paper: the published figure for exactly this setting; it stands beside the last round.

    Returns:
      A table for rich.
    """
    table = Table(title=title, caption="accuracy in percent over clients")
    table.add_column("protocol")
    table.add_column("round")
    for name in ("mean", "std", "worst decile", "paper"):
        table.add_column(name, justify="right")
    for protocol in sorted(PROTOCOLS, key=lambda name: name != headline):
        for word, evaluation in (("last", evaluations[-1]), ("best", best(evaluations, protocol))):
            summary = evaluation.summary(protocol)
            figures = (_figure(value) for value in (summary.mean, summary.std, summary.worst_decile))
            beside = paper if paper is not None and word == "last" else "—"
            table.add_row(protocol, f"{word} ({evaluation.round})", *figures, beside, end_section=word == "best")
    return table


class RunFolder:
    """A new folder that one run alone writes into."""

    def __init__(self, path: Path, created: list[Path]):
        self.path = path
        self._created = created

    @classmethod
    def claim(cls, path: str | Path | None, name: str, root: str | Path = "runs") -> "RunFolder":
        """Takes possession of a folder; no other run can have it afterwards.

        Args:
          path: the folder, new or empty; None takes the first free of root/name-001, root/name-002, ...
          name: of the run, for a folder that is numbered.
          root: where numbered folders are.

        Raises:
          InvalidInput: the folder holds a run or other files, or cannot be written.
        """
        if path is None:
            number = 1
            while True:
                try:
                    return cls._take(Path(root) / f"{name}-{number:03d}", empty_will_do=False)
                except FileExistsError:
                    number += 1
        path = Path(path).expanduser()
        _refuse_used(path)
        try:
            return cls._take(path, empty_will_do=True)
        except FileExistsError:
            raise _holds_a_run(path) from None

    @classmethod
    def _take(cls, path: Path, *, empty_will_do: bool) -> "RunFolder":
        """Makes the folder, or takes an empty one; FileExistsError if somebody else was first."""
        created: list[Path] = []
        try:
            missing = [parent for parent in path.parents if not parent.exists()]
            for parent in reversed(missing):
                parent.mkdir(exist_ok=True)
                created.append(parent)
            try:
                path.mkdir()
                created.append(path)
            except FileExistsError:
                if not empty_will_do:
                    raise
            # Creating the log is what claims the folder: of two runs only one can do it.
            (path / METRICS).open("x").close()
        except FileExistsError:
            raise
        except OSError as error:
            _remove_empty(created)
            raise _unwritable(path, error) from None
        return cls(path, created)

    @classmethod
    def reopen(cls, path: str | Path) -> "RunFolder":
        """The folder of a run that goes on."""
        return cls(Path(path).expanduser(), [])

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Writes a JSON file whole."""
        write_whole(self.path / name, strict_json(content))

    def log(self, evaluation: Evaluation) -> None:
        """Adds a line to the metrics log."""
        line = json.dumps(_strict(evaluation.record()), allow_nan=False) + "\n"
        try:
            with (self.path / METRICS).open("a") as file:
                file.write(line)
        except OSError as error:
            raise _unwritable(self.path / METRICS, error) from None

    def discard(self) -> None:
        """Gives the folder back, unless there is an evaluation in it: for a run that ended before it had a result."""
        log = self.path / METRICS
        if log.stat().st_size == 0:
            (self.path / CONFIG).unlink(missing_ok=True)
            log.unlink()
            _remove_empty(self._created)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is never there in part: beside its place, then moved; InvalidInput if it cannot be."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _unwritable(path, error) from None


def strict_json(content: Any) -> str:
    """Indented JSON, lists of numbers on one line, with null for every number that JSON has not got."""
    text = json.dumps(_strict(content), indent=2, allow_nan=False)
    # Strings have no line breaks in JSON, and no list with a string in it is meant.
    return re.sub(r'\[\n([^"\[\]{}]*)\]', lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def _refuse_used(path: Path) -> None:
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unwritable(path, error) from None
    if names & {CONFIG, METRICS, SUMMARY}:
        raise _holds_a_run(path)
    if names:
        raise InvalidInput(f"the folder {path} is not empty: give --out a new one")


def _holds_a_run(path: Path) -> InvalidInput:
    return InvalidInput(f"the folder {path} holds a run already, which is never overwritten: give --out a new one")


def _unwritable(path: Path, error: OSError) -> InvalidInput:
    return InvalidInput(f"cannot write {path}: {error.strerror or error}; give --out a folder that can be written")


def _remove_empty(folders: Sequence[Path]) -> None:
    """Removes folders, innermost first, up to the first that somebody has used since."""
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except OSError:
            return


def _strict(value: Any) -> Any:
    """The value with null for every number that JSON has not got."""
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def rounded(value: float) -> float:
    """To four decimals: float32 accuracies have no more digits that mean something. Whole numbers stay as they are."""
    return round(value, 4)


def _or_lowest(value: float) -> float:
    """NaN, the mean of no clients, compares below everything."""
    return -math.inf if math.isnan(value) else value


def _figure(value: float) -> str:
    return "—" if math.isnan(value) else f"{value:.2f}"
