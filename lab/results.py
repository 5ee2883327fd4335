"""Committed results, written: the line of a finished run, see `lab.committed`."""

from pathlib import Path

from experiments.folder import load
from experiments.folder.run_folder import DIGESTS
from experiments.folder.version import commit_of, method_version
from experiments.run.data import is_file
from experiments.run.trackers import LONG
from experiments.spec.option_notes import label
from experiments.spec.own_code import OTHER_FILES
from lab import committed
from lab.queue.planned import PlannedRun
from pfl_jax.errors import InvalidInput

LEFT_OUT = ("_per_client", DIGESTS)
"""Ends of the names of what a summary has of single clients, and digests of the run's files."""


def store(run: PlannedRun, record: committed.Record, root: Path = committed.ROOT) -> Path:
    """Store the committed result of a run, from `distill` or `divergence`; return the file.

    Raises:
      InvalidInput: the file is damaged, or cannot be written.
    """
    file = root / "queue" / f"{run.block}.jsonl"
    # Of the project's own files the place in the checkout.
    command = run.spec.command().replace(f"{committed.ROOT.parent}/", "")
    committed.write(file, run.name, {"command": command} | record)
    return file


def distill(folder: Path) -> committed.Record:
    """Committed result of a finished run without its command, see `committed.columns`.

    Raises:
      InvalidInput: its files cannot be read.
    """
    config, summary, lines = load.read_config(folder), load.read_summary(folder), load.read_metrics(folder)
    try:
        options = config["options"] | {"out": None, "resume": None, "method": label(config["options"]["method"])}
        # Of files the name: folders are those of one machine, and their digest is there.
        options |= {
            name: Path(options[name]).name for name in ("data", "test_data", *OTHER_FILES) if is_file(options.get(name))
        }
        return {
            "commit": commit_of(config["versions"]["pfl_jax"]),
            "version": config["method_version"],
            "config": {name: value for name, value in config.items() if name not in LONG} | {"options": options},
            "summary": {name: value for name, value in summary.items() if not name.endswith(LEFT_OUT)},
            "rounds": committed.columns(lines),
        }
    except (KeyError, TypeError, IndexError) as error:
        raise InvalidInput(f"{folder} is not the folder of a finished run: {error!r}") from None


def divergence(run: PlannedRun, reason: str) -> committed.Record:
    """The same of a run all of whose clients diverged, which is its result in a comparison of learning rates."""
    return {"version": method_version(run.spec.method), "error": reason}
