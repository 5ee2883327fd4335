"""Cached runs: each has its own folder, and is run once unless it is interrupted or of other code."""

import dataclasses
import functools
import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from experiments.cli.effects import RESULT_NEUTRAL, relevant_options, resolve_defaults
from experiments.cli.exit_codes import INTERRUPTED
from experiments.cli.hyper_parameters import defaults
from experiments.cli.options import Options
from experiments.cli.own_code import FILES, by_content
from experiments.cli.parser import flag
from experiments.cli.request import Request, RunCommand
from experiments.folder.load import read_config, read_summary
from experiments.folder.run_folder import CONFIG, METRICS, SUMMARY, RunFolder, lock_run
from experiments.folder.version import OTHER_CODE, Trust, by_other_code
from experiments.host.signals import wait
from pfl_jax.atomic_write import make_folder
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints
from pfl_jax.errors import InvalidInput

State = Literal["absent", "unfinished", "finished", "of other code"]


def run_cell(cell: RunCommand, folder: str | Path, console: Console, trust: Trust = "sources") -> dict[str, Any]:
    """Run a cell unless its folder already holds the finished run; return the content of summary.json.

    Raises:
      InvalidInput: the folder holds something else or cannot be written, or the run is refused.
      KeyboardInterrupt: after SIGINT; the next call resumes from the cell's last checkpoint, if it has one.
    """
    folder = Path(folder)
    state = inspect(cell, folder, trust)
    if state == "of other code":
        raise InvalidInput(f"{folder} holds the run, made by other code: give --out another folder")
    if state == "finished":
        return read_summary(folder)
    request = cell.request(folder)
    if state == "unfinished" and not cell.procedure and Checkpoints(folder / FOLDER).rounds():
        from experiments.run.resume import CONTINUING, resumed

        # `inspect` has compared everything else.
        given = request.given & (RESULT_NEUTRAL | CONTINUING) - {"out", "resume"}
        resume = dataclasses.replace(request.options, resume=str(folder), accept_other_code=True)
        request = resumed(dataclasses.replace(request, options=resume, given=given))
    elif state == "unfinished":
        remove_unfinished(folder)
    if cell.procedure:
        run_as_command(cell, folder)
        return read_summary(folder)
    # Imported now, so that errors, --help and what is finished do not wait for it.
    import jax

    from experiments.run import run

    try:
        run.run(request, console)
    finally:
        # The next cell has other functions; nothing of this one's programs is used again but from the disk.
        jax.clear_caches()
    return read_summary(folder)


def run_as_command(cell: RunCommand, folder: Path) -> None:
    """Run a cell in a process of its own, which prints its own errors: its rounds are another program's."""
    _, *words = shlex.split(cell.command(folder))
    code = wait(subprocess.Popen([sys.executable, *words], process_group=0))
    if code == INTERRUPTED:
        raise KeyboardInterrupt("interrupted")
    if code:
        raise InvalidInput(f"the run was refused, see above: {cell.command(folder)}")


def inspect(cell: RunCommand, folder: str | Path, trust: Trust = "sources") -> State:
    """Content of a folder with respect to a cell; InvalidInput if it holds another run, or cannot be read."""
    folder = Path(folder)
    is_finished = (folder / SUMMARY).exists()
    if not (folder / CONFIG).exists() and not is_finished:
        return "unfinished" if (folder / METRICS).exists() else "absent"
    config = read_config(folder)
    try:
        differs = difference(cell.request(), config, finished=is_finished)
    except KeyError as error:
        raise InvalidInput(f"{folder / CONFIG} has no {error}: give --out another folder") from None
    if differs:
        raise InvalidInput(f"{folder} holds another run ({differs}), which is never overwritten: give --out another")
    if by_other_code(config, trust):
        return "of other code"
    return "finished" if is_finished else "unfinished"


def set_aside(files: Sequence[Path], root: Path) -> None:
    """Move a run that other code made, its folder first, into a subfolder of its command's folder."""
    moves = {path: path.relative_to(root) for path in files if path.exists()}
    places = (root / OTHER_CODE / str(number) for number in itertools.count(1))
    place = next(place for place in places if not any((place / path).exists() for path in moves.values()))
    try:
        with lock_run(files[0]):
            for path, target in moves.items():
                make_folder((place / target).parent)
                path.rename(place / target)
    except OSError as error:
        raise InvalidInput(f"cannot move {files[0]}: {error.strerror or error}") from None


def difference(request: Request, config: dict[str, Any], *, finished: bool = True) -> str:
    """First difference between a stored and a requested configuration, in words; "" if they agree.

    Only the protocol before_aggregation is not always measured. A finished run that has it serves the others too; one
    that goes on must be measured alike to its end.
    """
    is_real = bool(config["data"]["is_real"])
    source = request.options.source
    if source != "auto" and is_real == (source == "embedded"):
        return f"on {config['data']['description']}, not --source {source}"
    if not is_real:
        request, _ = request.on_embedded_data()
    if config["dataset"] != request.dataset:
        return f"on {config['dataset']}, not {request.dataset}"
    if config.get("procedure", "") != request.procedure:
        return f"{config.get('procedure') or 'usual rounds'}, not {request.procedure or 'usual rounds'}"
    for name, (found, value) in differences(request, config).items():
        if name == "data_digest":
            return f"on data with the digest {found}, and that of {request.options.data} is {value}"
        kind = name.removesuffix("_digest")
        if kind in FILES and name not in FILES:
            return f"made with another text of {Path(getattr(request.options, kind)).name}"
        return f"{flag(name)} {found}, not {value}"
    if gone := sorted(set(config["hyper_parameters"]) - set(request.hyper_parameters)):
        return f"{flag(gone[0])} {config['hyper_parameters'][gone[0]]}, which {request.options.method} no longer has"
    optional, asked = "before_aggregation", request.options.eval_protocol
    there = config["options"].get("eval_protocol", Options.eval_protocol)
    if there != asked and (asked == optional or (there == optional and not finished)):
        return f"{flag('eval_protocol')} {there}, not {asked}"
    return ""


def differences(request: Request, config: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Options on which results depend -> their values in a stored and a requested configuration, where they differ."""
    stored = resolve_defaults(config["options"] | config["hyper_parameters"])
    stored |= by_content(stored, config.get("own_code", {}))
    usual = _defaults(request.options.method)
    found = {}
    for name, value in (relevant_options(request) | {"seed": request.options.seed}).items():
        # As JSON: tuples come back as lists.
        had = stored.get(name, json.loads(json.dumps(usual.get(name), default=str)))
        if had != json.loads(json.dumps(value)):
            found[name] = had, value
    return found


@functools.cache
def _defaults(method: str) -> dict[str, Any]:
    """Values of options that did not exist yet when a run was made."""
    return {field.name: field.default for field in dataclasses.fields(Options)} | defaults(method)


def remove_unfinished(folder: Path) -> None:
    """Remove the files of an interrupted run, and nothing else; a missing folder is no error."""
    if not folder.exists():
        return
    try:
        with lock_run(folder):
            RunFolder(folder).clear()
    except OSError as error:
        raise InvalidInput(f"cannot clear {folder}: {error.strerror or error}") from None
