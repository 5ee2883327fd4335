"""Folder of a run: configuration, metrics and summary, with digests that show damage and a lock while it is written.

JSON is strict: an accuracy that does not exist is null, never NaN.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from experiments.spec.own_code import read
from pfl_jax.atomic_write import append_line, cannot_write, make_folder, write_text
from pfl_jax.base import Scores
from pfl_jax.engine.checkpoint import FOLDER
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.metrics import summarize
from pfl_jax.tasks import CLASSIFICATION, Score, Task

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"

KEPT = "kept"
"""Subfolder with the checkpoint of the round that --patience keeps."""

ROOT = Path("runs")
"""Folder of runs without --out."""

TENSORBOARD, WANDB, WANDB_ID = "tensorboard", "wandb", "wandb.json"
"""Subfolders of trackers, and the file with the run's id at W&B, under which it is resumed."""

VALIDATION = "validation"
"""Entry of an evaluation with the summaries on validation examples, by protocol."""

HONEST, ATTACKERS = "honest", "attackers"
"""Entries of an evaluation with the summaries of honest clients and of attackers, by protocol."""

TRAINED_BETWEEN = "trained_between"
"""Entry of an evaluation: "round", "mean", "pooled", "clients" by `trained` in each round since the last evaluation."""

DIGESTS = "digests"
"""Entry of the summary: name of a run's file -> its digest, which detects damage but not manipulation."""

MOST_CLIENTS = 10_000
"""Number of clients up to which every line of the metrics log has each client's scores; the last line always does."""

MOST_BYTES = 255
"""Maximum length of a file's name on the usual file systems."""

Line: TypeAlias = dict[str, Any]
"""An evaluation as a line of the metrics log, see `evaluation`."""


class ExampleCounts(NamedTuple):
    """Numbers [N] of examples that clients are scored on; None without validation examples, newcomers or attackers."""

    test: np.ndarray
    validation: np.ndarray | None = None
    newcomers: np.ndarray | None = None
    attackers: np.ndarray | None = None
    task: Task = CLASSIFICATION


def evaluation(
    number: int,
    scores: Mapping[str, Scores],
    counts: ExampleCounts,
    newcomers: Mapping[str, Scores] | None = None,
) -> Line:
    """Evaluation as a line of the metrics log, shares in percent; `scores` and `newcomers` are by protocol."""
    task = counts.task

    def summaries(named: Mapping[str, Scores | None], examples: np.ndarray) -> dict[str, dict[str, float]]:
        found = {}
        for name, some in named.items():
            if some is not None:
                summary = summarize(some, examples, task)
                numbers = summary._asdict() | summary.others
                found[name] = {key: rounded(number) for key, number in numbers.items() if key != "others"}
        return found

    line: Line = {"round": number, **summaries(scores, counts.test)}
    if counts.validation is not None:
        line[VALIDATION] = summaries({name: one.validation for name, one in scores.items()}, counts.validation)
    if counts.attackers is not None:
        for side, rows in ((HONEST, ~counts.attackers), (ATTACKERS, counts.attackers)):
            own = {
                name: Scores({score: np.asarray(values)[rows] for score, values in one.by_name.items()})
                for name, one in scores.items()
            }
            line[side] = summaries(own, counts.test[rows])
    if newcomers is not None and counts.newcomers is not None:
        line["new_clients"] = summaries(newcomers, counts.newcomers)
    for name, one in scores.items():
        for score in task.scores:
            # "received_per_client" for the primary score, otherwise "received_loss_per_client", for example.
            key = "" if score is task.primary else f"{score.name}_"
            line[f"{name}_{key}per_client"] = per_client_values(score, one)
    return strict(line)


def per_client_values(score: Score, scores: Scores) -> list[float]:
    """Values [N] of a score, rounded for files; NaN stays NaN."""
    return [rounded((100 if score.percent else 1) * float(value)) for value in scores[score.name]]


class RunFolder:
    """Folder that exactly one run writes into."""

    def __init__(self, path: str | Path):
        self.path = Path(path).expanduser()

    @classmethod
    def claim(cls, path: str | Path | None, name: str, root: Path = ROOT) -> "RunFolder":
        """Take possession of a new or empty folder; None takes the first free one of root/name-001, root/name-002, ...

        InvalidInput if the folder holds a run or other files, or cannot be written. No other run can claim it later.
        """
        if path is None:
            for number in itertools.count(1):
                with contextlib.suppress(FileExistsError):
                    return cls._take(root / f"{name}-{number:03d}", empty_will_do=False)
        path = Path(str(path)).expanduser()
        try:
            names = {entry.name for entry in path.iterdir()}
        except FileNotFoundError:
            names = set()
        except OSError as error:
            raise cannot_write(path, error) from None
        if names and not names & {CONFIG, METRICS, SUMMARY}:
            raise InvalidInput(f"the folder {path} is not empty: give --out a new one")
        with contextlib.suppress(FileExistsError):
            if not names:
                return cls._take(path, empty_will_do=True)
        raise InvalidInput(f"the folder {path} holds a run already, which is never overwritten: give --out a new one")

    @classmethod
    def _take(cls, path: Path, *, empty_will_do: bool) -> "RunFolder":
        """Create the folder, or take an empty one; FileExistsError if another process was first."""
        try:
            path.mkdir(parents=True, exist_ok=empty_will_do)
            # Creating the log claims the folder: of two runs, only one can create it.
            (path / METRICS).open("x").close()
        except FileExistsError:
            raise
        except OSError as error:
            raise cannot_write(path, error) from None
        return cls(path)

    def write(self, name: str, content: dict[str, Any]) -> None:
        write_text(self.path / name, strict_json(content))

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Write the summary of a finished run, with the digests of its files; return the written summary."""
        digests = {name: digest(read(self.path / name)) for name in (CONFIG, METRICS)}
        digests[SUMMARY] = digest_of_content(strict(summary))
        summary |= {DIGESTS: digests}
        self.write(SUMMARY, summary)
        return summary

    def log(self, line: Line, *, is_last: bool = False) -> None:
        """Append a line to the metrics log; with very many clients, only the last line has each client's scores."""
        is_whole = is_last or all(len(v) <= MOST_CLIENTS for k, v in line.items() if k.endswith("_per_client"))
        kept = {name: value for name, value in line.items() if is_whole or not name.endswith("_per_client")}
        append_line(self.path / METRICS, json.dumps(kept, allow_nan=False))

    def tidy(self) -> None:
        """Remove half-written files of a killed process."""
        for name in (CONFIG, SUMMARY):
            for path in self.path.glob(f".{name}.*"):
                # A file that cannot be removed does no harm.
                with contextlib.suppress(OSError):
                    path.unlink()

    def discard(self) -> None:
        """Remove the folder unless it contains an evaluation: for a run that ended before it had a result."""
        log = self.path / METRICS
        if log.is_file() and log.stat().st_size == 0:
            self.clear()
            with contextlib.suppress(OSError):
                self.path.rmdir()
                if self.path.parent == ROOT:
                    ROOT.rmdir()

    def clear(self) -> None:
        """Remove all files of an unfinished run, and nothing else."""
        self.tidy()
        for name in (FOLDER, KEPT, TENSORBOARD, WANDB):
            shutil.rmtree(self.path / name, ignore_errors=True)
        # Remove the log last, since it marks the folder of a run.
        for name in (WANDB_ID, CONFIG, METRICS):
            (self.path / name).unlink(missing_ok=True)


def slug(text: str) -> str:
    """Text as a file name: letters, digits, "=", "+", "." and hyphens; a long name ends in a digest of the text."""
    kept = "".join(character if character.isalnum() or character in "=._+" else "-" for character in text)
    name = "-".join(filter(None, kept.split("-"))).encode()
    if len(name) <= MOST_BYTES:
        return name.decode()
    end = f"-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return name[: MOST_BYTES - len(end)].decode(errors="ignore") + end


def digest(content: bytes) -> str:
    """Digest of a file's content, 16 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()[:16]


def digest_of_content(summary: Mapping[str, Any]) -> str:
    """Digest of a summary as JSON, without its entry of digests."""
    return digest(json.dumps({k: v for k, v in summary.items() if k != DIGESTS}, sort_keys=True).encode())


def lock_run(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Lock a run while this process works on it: no other process can write into its folder or remove it."""
    return _locked(folder / METRICS, f"another process is at work in {folder}: wait for it")


def lock_folder(folder: str | Path, *, shared: bool = False) -> contextlib.AbstractContextManager[None]:
    """Lock a folder of several runs for this process; the folder is created if it does not exist.

    An interrupted and a running run have the same files, so only the process with the lock may start a run again.
    Several processes can hold a `shared` lock together; each then has to claim the runs that it does.
    """
    folder = Path(folder).expanduser()
    make_folder(folder)
    if any((folder / name).exists() for name in (CONFIG, METRICS)):
        raise InvalidInput(f"{folder} is the folder of a single run: give --out another folder")
    busy = f"another process is at work in {folder}: wait for it, or give --out another folder"
    return _locked(folder / ".lock", busy, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


@contextlib.contextmanager
def _locked(path: Path, refusal: str, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Lock a file; InvalidInput with this refusal if another process has the lock."""
    with claimed(path, kind) as is_mine:
        if not is_mine:
            raise InvalidInput(refusal)
        yield


@contextlib.contextmanager
def claimed(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[bool]:
    """Context with the lock of a file, until the context or the process ends; False if another process has the lock."""
    try:
        file = path.open("ab")
    except OSError as error:
        raise cannot_write(path, error) from None
    with file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            # The previous process may have removed the file, and then the lock has no effect.
            is_mine = path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_mine = False
        except OSError as error:
            raise InvalidInput(
                f"cannot lock {path}: {error.strerror or error}; give --out a folder on another file system"
            ) from None
        yield is_mine


def strict_json(content: Any) -> str:
    """Indented JSON, lists of numbers on one line, with null for numbers that JSON lacks."""
    text = json.dumps(strict(content), indent=2, allow_nan=False)
    # JSON strings have no line breaks; lists with strings are not changed.
    return re.sub(r'\[\n([^"\[\]{}]*)\]', lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


def strict(value: Any) -> Any:
    """Value for JSON, with null for numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def rounded(value: float) -> float:
    """Round to six digits: float32 has hardly more. Integers are unchanged."""
    return value if isinstance(value, int | np.integer) else float(f"{value:.6g}")


def score_text(value: float, *, percent: bool, sign: str = "") -> str:
    """Score for display: a percentage with two decimals, others with three, or with three to six digits."""
    size = abs(value)
    form = ".2f" if percent else ".3g" if 0 < size < 0.1 else ".3f" if size < 1000 else ".6g"
    return f"{value:{sign}{form}}"
