"""Folder of a run: configuration, metrics and summary.

Files are complete or absent, see `pfl_jax.atomic_write`, and so are lines of the metrics log. JSON is strict: an
accuracy that does not exist is null, never NaN.
"""

import contextlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.cli.measures import FIELD, PROTOCOLS, Average, Protocol
from experiments.folder.intact import DIGESTS, digest_of_content, digest_of_file
from pfl_jax.atomic_write import append_line, cannot_write, write_text
from pfl_jax.base import Scores
from pfl_jax.engine import disk_state
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.metrics import Summary, summarize
from pfl_jax.tasks import CLASSIFICATION, Score, Task

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"

VALIDATION = "validation"
"""Entry of an evaluation with the summaries on validation examples, by protocol."""


HONEST, ATTACKERS = "honest", "attackers"
"""Entries of an evaluation with the summaries of honest clients and of attackers, by protocol."""


MOST_CLIENTS = 10_000
"""Number of clients up to which every line of the metrics log has the scores of each; the summary always has them."""


class Counts(NamedTuple):
    """Numbers of examples that clients are scored on.

    Attributes:
      test: [N], test examples of the clients that take part.
      validation: [N], their validation examples; None without --val-fraction.
      newcomers: [N'], test examples of the clients that never take part; None where all do.
      attackers: [N], bool; None where nobody attacks.
      task: says what the scores are.
    """

    test: np.ndarray
    validation: np.ndarray | None = None
    newcomers: np.ndarray | None = None
    attackers: np.ndarray | None = None
    task: Task = CLASSIFICATION


class Newcomers(NamedTuple):
    """Evaluation of the clients that never take part in training.

    Attributes:
      received, trained: Scores [N'], see `pfl_jax.simulate.RoundResult`.
      test_counts: [N'], their test examples.
    """

    received: Scores
    trained: Scores
    test_counts: np.ndarray

    def summaries(self, task: Task = CLASSIFICATION) -> dict[Protocol, Summary]:
        """Summaries of the scores, which are those of the task, by protocol."""
        return {
            "received": summarize(self.received, self.test_counts, task),
            "trained": summarize(self.trained, self.test_counts, task),
        }


class Evaluation(NamedTuple):
    """One evaluation of a federation.

    Attributes:
      round: number of the round, counted from 1.
      received: Scores [N] of what every client would deploy now.
      trained: Scores [N] of every client's model right after its own last training, NaN before the first.
      test_counts: [N], test examples of each client.
      seconds: since the run began, compilation included.
      examples_per_second: training examples visited per second in the rounds since the previous evaluation.
      bytes_up, bytes_down: what all clients together have sent and been sent since the first round.
      newcomers: scores of clients that never took part; None if none is held out.
      before_aggregation: Scores [N] of what every client held in the middle of the round; None where not measured.
      validation_counts: [N], validation examples of each client; None where none are set apart.
      attackers: [N], bool; None where nobody attacks.
      task: says what the scores are.
    """

    round: int
    received: Scores
    trained: Scores
    test_counts: np.ndarray
    seconds: float
    examples_per_second: float
    bytes_up: int = 0
    bytes_down: int = 0
    newcomers: Newcomers | None = None
    before_aggregation: Scores | None = None
    validation_counts: np.ndarray | None = None
    attackers: np.ndarray | None = None
    task: Task = CLASSIFICATION

    @property
    def protocols(self) -> list[Protocol]:
        """Protocols of the evaluation."""
        return [protocol for protocol in PROTOCOLS if getattr(self, protocol) is not None]

    def summary(self, protocol: Protocol) -> Summary:
        """Summary of all clients' scores on test examples."""
        return summarize(getattr(self, protocol), self.test_counts, self.task)

    def validation(self, protocol: Protocol) -> Summary | None:
        """Summary of all clients' scores on validation examples; None where none are set apart."""
        if self.validation_counts is None:
            return None
        return summarize(getattr(self, protocol).validation, self.validation_counts, self.task)

    def sides(self, protocol: Protocol) -> dict[str, Summary]:
        """Summaries of honest clients and of attackers by themselves; empty where nobody attacks."""
        if self.attackers is None:
            return {}
        sides = {HONEST: ~self.attackers, ATTACKERS: self.attackers}
        by_name, found = getattr(self, protocol).by_name, {}
        for side, rows in sides.items():
            own = Scores({name: np.asarray(values)[rows] for name, values in by_name.items()})
            found[side] = summarize(own, self.test_counts[rows], self.task)
        return found

    def record(self, *, clients: bool = True) -> dict[str, Any]:
        """Evaluation as a line of the metrics log; shares in percent. `clients` adds those of each."""
        line: dict[str, Any] = {"round": self.round}
        for protocol in self.protocols:
            line[protocol] = summary_record(self.summary(protocol))
        validation = {name: summary for name in self.protocols if (summary := self.validation(name)) is not None}
        if validation:
            line[VALIDATION] = {name: summary_record(summary) for name, summary in validation.items()}
        for protocol in self.protocols:
            for name, summary in self.sides(protocol).items():
                line.setdefault(name, {})[protocol] = summary_record(summary)
        if self.newcomers is not None:
            line["new_clients"] = {name: summary_record(of) for name, of in self.newcomers.summaries(self.task).items()}
        for protocol in self.protocols if clients else ():
            line |= per_client(protocol, getattr(self, protocol), self.task)
        return line | {
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "seconds": round(self.seconds, 3),
            "examples_per_second": rounded(self.examples_per_second),
        }


def best(evaluations: Sequence[Evaluation], protocol: Protocol, average: Average = "clients") -> Evaluation:
    """First evaluation with the best mean score over clients or examples, on validation examples if there are."""

    def goodness(one: Evaluation) -> float:
        # As in the files, so that a tie is a tie for everything that reads them.
        mean = rounded(getattr(one.validation(protocol) or one.summary(protocol), FIELD[average]))
        return or_lowest(mean if one.task.primary.higher_is_better else -mean)

    return max(evaluations, key=goodness)


def summary_record(summary: Summary) -> dict[str, float]:
    """Summary for JSON."""
    values = summary._asdict()
    # The number of clients comes last.
    others, clients = values.pop("others"), values.pop("clients")
    return {name: rounded(value) for name, value in (values | others).items()} | {"clients": clients}


def per_client(protocol: Protocol, scores: Scores, task: Task) -> dict[str, list[float]]:
    """Scores of every client, for JSON: primary ones as "received_per_client", others as "received_loss_per_client"."""
    primary, *others = task.scores
    return {f"{protocol}_per_client": shown(primary, scores)} | {
        f"{protocol}_{one.name}_per_client": shown(one, scores) for one in others
    }


def shown(score: Score, scores: Scores) -> list[float]:
    """Values [N] of a score as files have them; NaN stays NaN."""
    return [rounded((100 if score.percent else 1) * float(value)) for value in scores[score.name]]


class RunFolder:
    """Folder that exactly one run writes into."""

    def __init__(self, path: Path, created: list[Path]):
        self.path = path
        self._created = created

    @classmethod
    def claim(cls, path: str | Path | None, name: str, root: str | Path = "runs") -> "RunFolder":
        """Take possession of a folder; no other run can have it afterwards.

        Args:
          path: new or empty folder; None for the first free one of root/name-001, root/name-002, ...
          name: name of the run in a numbered folder.
          root: folder of numbered folders.

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
        """Create the folder, or take an empty one; FileExistsError if another process was first."""
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
            raise cannot_write(path, error) from None
        return cls(path, created)

    @classmethod
    def reopen(cls, path: str | Path) -> "RunFolder":
        """Folder of a run that is resumed."""
        return cls(Path(path).expanduser(), [])

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file atomically."""
        write_text(self.path / name, strict_json(content))

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary of a finished run, with the digests of its files."""
        files = [self.path / name for name in (CONFIG, METRICS)]
        digests = {path.name: digest_of_file(path) for path in files if path.exists()}
        digests[SUMMARY] = digest_of_content(_strict(summary))
        self.write(SUMMARY, summary | {DIGESTS: digests})

    def log(self, evaluation: Evaluation, **further: Any) -> None:
        """Append a line to the metrics log.

        Args:
          evaluation: evaluation of the round.
          **further: other entries of the line, for JSON.
        """
        record = evaluation.record(clients=len(evaluation.test_counts) <= MOST_CLIENTS)
        append_line(self.path / METRICS, json.dumps(_strict(record | further), allow_nan=False))

    def tidy(self) -> None:
        """Remove what a killed process had written of a file, before its rename."""
        for name in (CONFIG, SUMMARY):
            for path in self.path.glob(f".{name}.*"):
                # What cannot be removed does no harm.
                with contextlib.suppress(OSError):
                    path.unlink()

    def discard_rows(self) -> None:
        """Remove the states of clients on disk, which nothing refers to any more."""
        # What cannot be removed does no harm.
        with contextlib.suppress(OSError):
            (self.path / disk_state.NAME).unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the folder unless it contains an evaluation: for a run that ended before it had a result."""
        log = self.path / METRICS
        if log.is_file() and log.stat().st_size == 0:
            (self.path / CONFIG).unlink(missing_ok=True)
            log.unlink()
            _remove_empty(self._created)


def strict_json(content: Any) -> str:
    """Indented JSON, lists of numbers on one line, with null for numbers that JSON lacks."""
    text = json.dumps(_strict(content), indent=2, allow_nan=False)
    # JSON strings have no line breaks; lists with strings are left as they are.
    return re.sub(r'\[\n([^"\[\]{}]*)\]', lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def _refuse_used(path: Path) -> None:
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise cannot_write(path, error) from None
    if names & {CONFIG, METRICS, SUMMARY}:
        raise _holds_a_run(path)
    if names:
        raise InvalidInput(f"the folder {path} is not empty: give --out a new one")


def _holds_a_run(path: Path) -> InvalidInput:
    return InvalidInput(f"the folder {path} holds a run already, which is never overwritten: give --out a new one")


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders, innermost first, up to the first that is not empty."""
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except OSError:
            return


def _strict(value: Any) -> Any:
    """Value with null for numbers that JSON lacks."""
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
    """Round to four decimals: float32 accuracies have no further meaningful digits. Integers stay as they are."""
    return round(value, 4)


def or_lowest(value: float) -> float:
    """The value, or minus infinity for NaN, the mean of no clients."""
    return -math.inf if math.isnan(value) else value
