"""Trackers that receive a run's evaluations: TensorBoard (--tensorboard) and Weights & Biases (--wandb)."""

import contextlib
import importlib
import importlib.util
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from experiments.cli.options import Options
from experiments.folder.load import read_json
from experiments.folder.run_folder import Evaluation, RunFolder
from pfl_jax.errors import InvalidInput

TENSORBOARD, WANDB = "tensorboard", "wandb"
"""Folders in that of the run."""
WANDB_ID = "wandb.json"
"""File with the run's id at W&B, under which it is resumed."""
PROJECT = "pfl_jax"
"""Project at W&B, unless $WANDB_PROJECT names another."""

LONG = ("class_table", "train_examples", "test_examples", "validation_examples", "info")
"""Entries of the configuration that W&B's page and committed results leave out: sizes of single clients, which follow
from options and seed, and the descriptions of Info."""

Taker: TypeAlias = Callable[[Evaluation], None]

_EVENTS = "events.out.tfevents.*"
_BINS = np.linspace(0, 100, 41)


def check(options: Options) -> None:
    """Raise InvalidInput if an option needs a package that is not installed."""
    if options.wandb and importlib.util.find_spec("wandb") is None:
        raise InvalidInput("--wandb needs a package that is not installed: pip install wandb")


def scalars(evaluation: Evaluation) -> dict[str, float]:
    """All single numbers of an evaluation's record, as "received/mean" or "seconds"; accuracies in percent.

    Missing values (null, NaN), lists and the round are left out.
    """

    def walk(value: Any, name: str) -> Iterator[tuple[str, float]]:
        if isinstance(value, dict):
            for key, item in value.items():
                yield from walk(item, f"{name}/{key}" if name else key)
        elif isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)

    record = evaluation.record(clients=False)
    # A round's Info differs between methods, and consists mostly of matrices.
    return dict(walk({name: value for name, value in record.items() if name not in ("round", "info")}, ""))


@contextlib.contextmanager
def open_trackers(
    folder: RunFolder, options: Options, configuration: dict[str, Any], past: Sequence[Evaluation]
) -> Iterator[Taker]:
    """Receiver of a run's evaluations beside its log: the trackers that the options ask for.

    Args:
      folder: of the run.
      options: of the run.
      configuration: as config.json has it.
      past: evaluations already in the log of a resumed run.

    Yields:
      Called with each new evaluation.

    Raises:
      InvalidInput: a tracker cannot be opened, or a file cannot be written.
    """
    # The caller's list grows during the run.
    past = tuple(past)
    with contextlib.ExitStack() as stack:
        takers: list[Taker] = []
        if options.tensorboard:
            takers.append(stack.enter_context(_tensorboard(folder.path / TENSORBOARD, past)))
        if options.wandb:
            takers.append(stack.enter_context(_wandb(folder, configuration, past)))

        def take(evaluation: Evaluation) -> None:
            for taker in takers:
                taker(evaluation)

        yield take


def clear(folder: Path) -> None:
    """Remove files of trackers from the folder of a run that is started anew, and nothing else."""
    for path in (folder / TENSORBOARD).glob(_EVENTS):
        path.unlink()
    with contextlib.suppress(OSError):
        (folder / TENSORBOARD).rmdir()
    (folder / WANDB_ID).unlink(missing_ok=True)
    shutil.rmtree(folder / WANDB, ignore_errors=True)


@contextlib.contextmanager
def _tensorboard(folder: Path, past: Sequence[Evaluation]) -> Iterator[Taker]:
    """Event files for TensorBoard, which hides what a resumed run writes a second time."""
    # Imported now: protobuf takes its time.
    from tensorboardX import SummaryWriter

    with contextlib.ExitStack() as stack:
        writer: Any = None

        def write(evaluation: Evaluation) -> None:
            for name, number in scalars(evaluation).items():
                writer.add_scalar(name, number, evaluation.round)
            record = evaluation.record()
            for protocol in evaluation.protocols:
                clients = np.asarray(record[f"{protocol}_per_client"], np.float64)
                if np.isfinite(clients).any():
                    writer.add_histogram(f"{protocol}/per_client", clients[~np.isnan(clients)], evaluation.round, _BINS)

        def take(evaluation: Evaluation) -> None:
            nonlocal writer
            # Created only with the first evaluation: a run without a result leaves no file.
            if writer is None:
                is_new = not any(folder.glob(_EVENTS))
                try:
                    writer = stack.enter_context(
                        SummaryWriter(str(folder), purge_step=evaluation.round, filename_suffix=f".{evaluation.round}")
                    )
                except OSError as error:
                    raise InvalidInput(f"cannot write {folder}: {error.strerror or error}") from None
                for earlier in past if is_new else ():
                    write(earlier)
            write(evaluation)
            writer.flush()

        yield take


@contextlib.contextmanager
def _wandb(folder: RunFolder, configuration: dict[str, Any], past: Sequence[Evaluation]) -> Iterator[Taker]:
    """Run at W&B, configured by W&B's environment variables (WANDB_MODE, WANDB_PROJECT, WANDB_NAME ...).

    Steps are rounds. A resumed run keeps its id at W&B, which ignores steps that it already has.
    """
    # Not among the requirements.
    wandb: Any = importlib.import_module("wandb")
    place = folder.path / WANDB_ID
    known = read_json(place)["id"] if place.exists() else None
    try:
        handle = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", folder.path.resolve().name),
            dir=os.environ.get("WANDB_DIR", str(folder.path)),
            config={name: value for name, value in configuration.items() if name not in LONG},
            id=known,
            resume="allow",
        )
    except wandb.Error as error:
        reason = str(error).rstrip(".")
        raise InvalidInput(f"W&B: {reason}; set WANDB_MODE=offline to go without its server") from None

    def take(evaluation: Evaluation) -> None:
        if not place.exists():
            folder.write(WANDB_ID, {"id": handle.id})
        handle.log(scalars(evaluation), step=evaluation.round)

    try:
        # Leaving it tells W&B whether the run has failed.
        with handle:
            for evaluation in past if known is None else ():
                take(evaluation)
            yield take
    finally:
        if not place.exists():
            # Without a result, the folder stays as it was.
            clear(folder.path)
