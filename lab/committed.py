"""Committed results: lines of JSON, one for each run, in place of its folder.

results/queue/BLOCK.jsonl has the runs of a block of the laboratory's queue by name, "COLUMN/METHOD/seed-N": command,
commit, version of the method, configuration, summary, and means over clients of every evaluation; of a run that
diverged its "error". A line counts as the finished run with the same dataset, options, seed and version of the method;
its name only helps people to find it. `lab` writes these files.
"""

import fcntl
import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from experiments.folder.load import StoredRun
from experiments.folder.run_folder import TRAINED_BETWEEN, VALIDATION, Line
from experiments.folder.version import method_version
from experiments.spec.choices import PROTOCOLS, Protocol
from experiments.spec.identity import difference
from experiments.spec.option_notes import label
from experiments.spec.spec import Spec
from pfl_jax.atomic_write import make_folder, write_text
from pfl_jax.errors import InvalidInput

ROOT = Path(__file__).parents[1] / "results"
"""Folder of the committed results in the checkout."""

FIELDS = ("command", "commit", "version", "config", "summary", "rounds")
"""Entries of a finished run."""

COLUMNS = ("round", *PROTOCOLS, VALIDATION, "bytes_up", "bytes_down", "seconds")
"""Entries of an evaluation that are stored."""
CLIENTS = "last_clients"
"""Entry of the rounds with the primary scores of the single clients after the last one, by protocol."""

Record: TypeAlias = dict[str, Any]


def read(file: Path) -> dict[str, Record]:
    """Records of a file by their names; none of a missing one."""
    if not file.exists():
        return {}
    state = file.stat()
    return _read(file, (state.st_ino, state.st_size, state.st_mtime_ns))


@functools.lru_cache(maxsize=64)
def _read(file: Path, state: tuple[int, ...]) -> dict[str, Record]:
    """Records of a file in one state: a queue asks for them before each of hundreds of runs."""
    lines = file.read_text().splitlines()
    try:
        records = {record.pop("run"): record for record in map(json.loads, lines)}
    except (ValueError, KeyError, TypeError, AttributeError):
        records = {}
    if len(records) < len(lines):
        raise InvalidInput(f"{file} is damaged: it has lines without a name of their own, or that are no JSON")
    return records


def write(file: Path, name: str, record: Record) -> None:
    """Store a record in a file, in place of that of the same name."""
    make_folder(file.parent)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        # Another process may add a line to the file that this one has read.
        fcntl.flock(folder, fcntl.LOCK_EX)
        records = read(file) | {name: record}
        lines = [json.dumps({"run": name} | records[name], allow_nan=False) for name in sorted(records)]
        write_text(file, "".join(f"{line}\n" for line in lines))
    finally:
        os.close(folder)


def columns(lines: Sequence[Line]) -> dict[str, Any]:
    """Evaluations by columns: those of COLUMNS that all have, name -> value of each, and CLIENTS."""
    clients = {name: lines[-1].get(f"{name}_per_client") for name in PROTOCOLS}
    tables = [line[TRAINED_BETWEEN] for line in lines if TRAINED_BETWEEN in line]
    between = {name: [value for one in tables for value in one[name]] for name in (tables[0] if tables else ())}
    return _columns([{name: line[name] for name in COLUMNS if name in line} for line in lines]) | {
        CLIENTS: {name: scores for name, scores in clients.items() if scores is not None},
        **({TRAINED_BETWEEN: between} if between else {}),
    }


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name in rows[-1] if all(name in row for row in rows)]
    table = {name: [row[name] for row in rows] for name in names}
    return {name: _columns(column) if isinstance(column[-1], dict) else column for name, column in table.items()}


def lines_of(rounds: Mapping[str, Any]) -> list[Line]:
    """Evaluations of `columns`."""
    table = {name: column for name, column in rounds.items() if name not in (CLIENTS, TRAINED_BETWEEN)}
    lines = [_row(table, index) for index in range(len(rounds["round"]))]
    # All on the last line: each has its own round.
    lines[-1] |= {TRAINED_BETWEEN: rounds[TRAINED_BETWEEN]} if TRAINED_BETWEEN in rounds else {}
    lines[-1] |= {f"{protocol}_per_client": scores for protocol, scores in rounds.get(CLIENTS, {}).items()}
    return lines


def _row(table: Mapping[str, Any], index: int) -> dict[str, Any]:
    return {name: _row(column, index) if isinstance(column, dict) else column[index] for name, column in table.items()}


@dataclass(frozen=True)
class CommittedRun(StoredRun):
    """A committed result: its path is the file, and only the last line has the scores of single clients."""

    commit: str | None = None

    def validation(self, protocol: Protocol) -> float | None:
        """Mean accuracy over clients on validation examples at the last evaluation; None without such examples."""
        return self.lines[-1][VALIDATION][protocol]["mean"] if VALIDATION in self.lines[-1] else None


class ResultStore:
    """Committed results of a folder, those of today's versions of their methods, by name.

    Attributes:
      named: name -> the finished run.
      diverged: name -> version of the method, of runs that diverged, see `has_diverged`.
    """

    def __init__(self, root: Path = ROOT):
        self.root = root
        self.named: dict[str, CommittedRun] = {}
        self.diverged: dict[str, int] = {}
        self._by_kind: dict[tuple[Any, ...], list[CommittedRun]] = {}
        for file in sorted(root.glob("queue/*.jsonl")):
            for name, record in read(file).items():
                if "error" in record:
                    self.diverged[name] = record["version"]
                else:
                    self._add(name, record, file)

    def _add(self, name: str, record: Record, file: Path) -> None:
        if missing := [field for field in FIELDS if field not in record]:
            raise InvalidInput(f"{file}: {name} has no '{missing[0]}': remove its line, and run it again")
        config = record["config"]
        if record["version"] == method_version(config["options"]["method"]):
            lines = lines_of(record["rounds"])
            run = CommittedRun(file, config, lines, record["summary"], commit=record["commit"])
            self.named[name] = run
            self._by_kind.setdefault(_kind(config["dataset"], config["options"]), []).append(run)

    def has_diverged(self, name: str, spec: Spec) -> bool:
        """Whether a run of this name, with today's version of its method, ended because all clients diverged."""
        version = self.diverged.get(name)
        return version is not None and version == method_version(spec.method)

    def find(self, spec: Spec) -> CommittedRun | None:
        """Result of a run; None if there is none."""
        there = self._by_kind.get(_kind(spec.dataset, spec.options), [])
        return next((one for one in there if not difference(spec, one.config)), None)


def _kind(dataset: str, options: dict[str, Any]) -> tuple[Any, ...]:
    """Key that is compared first, because it is quick to compare."""
    return dataset, label(options["method"]), options["num_clients"], options["seed"]
