"""Committed results, written: the line of a finished run, see `experiments.run.committed`."""

import shlex
from pathlib import Path
from typing import Any

from experiments.cli.effects import result_neutral
from experiments.cli.options import option_words
from experiments.cli.own_data import is_file
from experiments.folder import load
from experiments.folder.intact import DIGESTS
from experiments.folder.version import commit_of, method_version
from experiments.lab.queue.planned import PlannedRun
from experiments.run import committed
from experiments.run.trackers import LONG
from pfl_jax.errors import InvalidInput


def store(folder: Path, run: PlannedRun, root: Path = committed.ROOT) -> Path:
    """Store the committed result of a finished run's folder.

    Args:
      folder: folder of the run.
      run: which one it is.
      root: folder of the committed results.

    Returns:
      The file.

    Raises:
      InvalidInput: the folder cannot be read, or the file cannot be written.
    """
    return _write(run, distill(folder), root)


def store_divergence(run: PlannedRun, reason: str, root: Path = committed.ROOT) -> Path:
    """Store that a run diverged, which is its result in a comparison of learning rates.

    Args:
      run, root: see `store`.
      reason: how it ended.

    Returns:
      The file.

    Raises:
      InvalidInput: the file cannot be written.
    """
    version = method_version(run.cell.request().options.method)
    return _write(run, {"command": run.cell.command(), "version": version, "error": reason}, root)


def _write(run: PlannedRun, record: committed.Record, root: Path) -> Path:
    file = root / "queue" / f"{run.block}.jsonl"
    committed.write(file, run.name, record)
    return file


def distill(folder: Path) -> dict[str, Any]:
    """Committed result of a finished run, see `load.Result`.

    Raises:
      InvalidInput: its files cannot be read.
    """
    config, summary, lines = load.read_config(folder), load.read_summary(folder), load.read_metrics(folder)
    try:
        options = config["options"] | {"out": None, "resume": None}
        # Of files the name: folders are those of one machine, and their digest is there.
        options |= {name: Path(options[name]).name for name in ("data", "test_data") if is_file(options.get(name))}
        return {
            "command": command(config | {"options": options}),
            "commit": commit_of(config["versions"]["pfl_jax"]),
            "version": config["method_version"],
            "config": {name: value for name, value in config.items() if name not in LONG} | {"options": options},
            "summary": {name: value for name, value in summary.items() if not _is_of_clients(name) and name != DIGESTS},
            "rounds": load.columns(lines),
        }
    except (KeyError, TypeError, IndexError) as error:
        raise InvalidInput(f"{folder} is not the folder of a finished run: {error!r}") from None


def command(config: dict[str, Any]) -> str:
    """Command line of a stored run, without the options that do not affect its results."""
    values = config["options"] | config["hyper_parameters"]
    # One protocol of evaluation is measured by request only.
    silent = result_neutral(values) - {name for name in ("eval_protocol",) if values.get(name) == "before_aggregation"}
    given = [name for name in values if name in config["given"] and name not in silent]
    words = ["python", "-m", f"experiments.{config['dataset']}", *option_words({name: values[name] for name in given})]
    return shlex.join(words)


def _is_of_clients(name: str) -> bool:
    return name.endswith(("_per_client", "per_client_accuracy"))
