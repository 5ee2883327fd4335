"""Trackers that receive a run's evaluations: TensorBoard (--tensorboard), Weights & Biases (--wandb), the user's own
(--tracker)."""

import contextlib
import importlib
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax

from experiments.folder.load import read_config, read_json, read_metrics
from experiments.folder.run_folder import TENSORBOARD, WANDB_ID, Line, RunFolder
from experiments.spec.options import Options
from experiments.spec.own_code import describe_foreign_error, function
from pfl_jax.errors import InvalidInput, describe_value

PROJECT = "pfl_jax"
"""Project at W&B, unless $WANDB_PROJECT names another."""

LONG = ("class_table", "train_examples", "test_examples", "validation_examples", "info")
"""Entries of the configuration that W&B's page and committed results leave out: sizes of single clients, which follow
from options and seed, and the descriptions of Info."""

Track = Callable[[Line], object]


def scalars(line: Line) -> dict[str, float]:
    """Finite numbers of an evaluation by names such as "received/mean" or "seconds", without the round and Info."""
    left_out = {name for name, value in line.items() if isinstance(value, list)} | {"round", "info"}
    leaves = jax.tree.leaves_with_path({name: value for name, value in line.items() if name not in left_out})
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): float(number)
        for path, number in leaves
        if math.isfinite(number)
    }


def _configuration(folder: RunFolder) -> dict[str, Any]:
    return {name: value for name, value in read_config(folder.path).items() if name not in LONG}


@contextlib.contextmanager
def open_trackers(folder: RunFolder, options: Options) -> Iterator[Track]:
    """Context with a function that sends a run's evaluations to all trackers that the options request."""
    opened = [_tensorboard(folder)] if options.tensorboard else []
    opened += [_wandb(folder)] if options.wandb else []
    opened += [_own_tracker(options.tracker, folder)] if options.tracker else []
    with contextlib.ExitStack() as stack:
        tracks = [stack.enter_context(tracker) for tracker in opened]
        yield lambda line: [track(line) for track in tracks]


@contextlib.contextmanager
def _tensorboard(folder: RunFolder) -> Iterator[Track]:
    # Imported only here: protobuf takes its time.
    from tensorboardX import SummaryWriter

    place, past = folder.path / TENSORBOARD, read_metrics(folder.path)
    first = past[-1]["round"] + 1 if past else 1
    try:
        # TensorBoard then hides the old values of rounds that a resumed run does again.
        writer = SummaryWriter(str(place), purge_step=first, filename_suffix=f".{first}")
    except OSError as error:
        raise InvalidInput(f"cannot write {place}: {error.strerror or error}") from None

    def track(line: Line) -> None:
        for name, number in scalars(line).items():
            writer.add_scalar(name, number, line["round"])
        writer.flush()

    with writer:
        yield track


@contextlib.contextmanager
def _own_tracker(name: str, folder: RunFolder) -> Iterator[Track]:
    """Tracker FILE.py:NAME, a function of the configuration and the folder that returns a function (round, scores)."""

    def call(target: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return target(*arguments)
        except Exception as error:
            raise InvalidInput(f"--tracker {name}: {describe_foreign_error(error)}") from error

    receive = call(function("tracker", name), _configuration(folder) | {"folder": str(folder.path)})
    if not callable(receive):
        raise InvalidInput(f"--tracker {name} returns {describe_value(receive)}, not a function (round, scores)")
    yield lambda line: call(receive, line["round"], scalars(line))


@contextlib.contextmanager
def _wandb(folder: RunFolder) -> Iterator[Track]:
    """Run at W&B, configured by W&B's environment variables; steps are rounds, and W&B ignores rounds that it has."""
    # Not among the requirements.
    wandb: Any = importlib.import_module("wandb")
    place = folder.path / WANDB_ID
    known = read_json(place)["id"] if place.exists() else None
    try:
        handle = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", folder.path.resolve().name),
            dir=os.environ.get("WANDB_DIR", str(folder.path)),
            config=_configuration(folder),
            id=known,
            resume="allow",
        )
    except wandb.Error as error:
        reason = str(error).rstrip(".")
        raise InvalidInput(f"W&B: {reason}; set WANDB_MODE=offline to go without its server") from None

    def track(line: Line) -> None:
        handle.log(scalars(line), step=line["round"])

    # The end of this context tells W&B whether the run has failed.
    with handle:
        if known is None:
            folder.write(WANDB_ID, {"id": handle.id})
        yield track
