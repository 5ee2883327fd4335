"""Many runs that belong together: each in a folder of its own, run once, and read again ever after.

A cell is one run of the ordinary command line. What is finished is not run again, what was cut off goes on from its
last checkpoint or is run anew, and a folder with the results of anything else is refused. Tables and figures are made
of cells.
"""

import dataclasses
import functools
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from experiments.config.options import PARTITION_OPTIONS, PROCESSES, Options, flag, reads_pixel_normalization
from experiments.config.request import Request, method_config, parse
from experiments.execution import trackers
from experiments.results.load import read_config, read_summary
from experiments.results.run_folder import CONFIG, METRICS, SUMMARY
from experiments.runtime.locks import alone
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints
from pfl_jax.errors import InvalidInput

if TYPE_CHECKING:
    from experiments.execution.run import Observe

State = Literal["absent", "unfinished", "finished"]

WITHOUT_BEARING = {
    *("chunk", "devices", "state_on", "compilation_cache", "out", "data_dir", "eval_protocol", "source"),
    *("checkpoint_every", "keep_checkpoints", "resume", "mesh", "tensorboard", "wandb", "plot"),
    *PROCESSES,
}
"""Options that two runs with the same results may differ in; of the source only what it led to is compared."""


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
      dataset: which experiment, a key of `presets.DEFAULT_PRESET`.
      arguments: its command line, without --seed and --out.
      seed: of the run.
    """

    dataset: str
    arguments: tuple[str, ...]
    seed: int = 0

    def request(self, folder: str | Path | None = None) -> Request:
        """The checked command line.

        Args:
          folder: for the results.

        Raises:
          InvalidInput: the arguments cannot be used.
        """
        parsed = _parsed(self.dataset, self.arguments)
        if parsed.options.distributed:
            raise InvalidInput("--distributed is for single runs: a command of many runs has one process")
        given = {"seed"} if folder is None else {"seed", "out"}
        out = None if folder is None else str(folder)
        options = dataclasses.replace(parsed.options, seed=self.seed, out=out)
        options.check()
        return dataclasses.replace(parsed, options=options, given=parsed.given | given)

    def command(self, folder: str | Path) -> str:
        """The command that makes the same run, for a shell."""
        words = ["python", "-m", f"experiments.{self.dataset}", *self.arguments]
        return shlex.join([*words, "--seed", str(self.seed), "--out", str(folder)])


@functools.lru_cache(maxsize=4096)
def _parsed(dataset: str, arguments: tuple[str, ...]) -> Request:
    """Parsed once for all seeds: a table asks for each cell several times."""
    return parse(dataset, arguments)


def run_cell(cell: Cell, folder: str | Path, console: Console, observe: "Observe | None" = None) -> dict[str, Any]:
    """Runs a cell, unless its folder holds it already.

    Args:
      cell: what to run.
      folder: for its results alone.
      console: for what a run says.
      observe: see `run.run`; not called where nothing is run.

    Returns:
      The content of summary.json.

    Raises:
      InvalidInput: the folder holds something else or cannot be written, or the run is refused.
      KeyboardInterrupt: after SIGINT; the next call goes on from the cell's last checkpoint, if it has one.
    """
    folder = Path(folder)
    state = inspect(cell, folder)
    if state != "finished":
        request = cell.request(folder)
        if state == "unfinished" and observe is None and Checkpoints(folder / FOLDER).rounds():
            from experiments.execution.resume import resumed

            resume = dataclasses.replace(request.options, resume=str(folder))
            request = resumed(dataclasses.replace(request, options=resume, given=frozenset()))
        elif state == "unfinished":
            remove_unfinished(folder)
        # Imported now, so that errors, --help and what is finished do not wait for it.
        import jax

        from experiments.execution import run

        try:
            run.run(request, console, observe)
        finally:
            # The next cell has other functions; nothing of this one's programs is used again but from the disk.
            jax.clear_caches()
    return read_summary(folder)


def inspect(cell: Cell, folder: str | Path) -> State:
    """What a folder holds of a cell.

    Raises:
      InvalidInput: it holds the results of another run, or cannot be read.
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in (CONFIG, METRICS, SUMMARY)):
        return "absent"
    if (folder / CONFIG).exists():
        try:
            differs = difference(cell.request(), read_config(folder))
        except KeyError as error:
            raise InvalidInput(f"{folder / CONFIG} has no {error}: give --out another folder") from None
        if differs:
            raise InvalidInput(
                f"{folder} holds another run ({differs}), which is never overwritten: give --out another"
            )
    elif (folder / SUMMARY).exists():
        raise InvalidInput(f"{folder} holds a {SUMMARY} without its {CONFIG}: give --out another folder")
    return "finished" if (folder / SUMMARY).exists() else "unfinished"


def bearing(request: Request) -> dict[str, Any]:
    """Everything in a request that its results depend on, by name; seed and data apart.

    What the dataset or the chosen partition does not read is left out, and None that stands for another value is that.
    """
    unread = {name for names in PARTITION_OPTIONS.values() for name in names}
    unread -= set(PARTITION_OPTIONS[request.options.partition])
    if not reads_pixel_normalization(request.dataset):
        unread.add("pixel_normalization")
    every = filled(dataclasses.asdict(request.options) | request.hyper_parameters)
    return {name: value for name, value in every.items() if name not in WITHOUT_BEARING | unread | {"seed"}}


def filled(values: dict[str, Any]) -> dict[str, Any]:
    """Options and hyper-parameters, with the epochs of fine-tuning where None says that they are those of training."""
    if "finetune_epochs" in values and values["finetune_epochs"] is None:
        return values | {"finetune_epochs": values["epochs"]}
    return values


def say_state(cell: Cell, folder: Path, console: Console, kept: Path | None = None) -> None:
    """Prints a cell's command and what its folder holds of it, or where else its result is kept."""
    try:
        state: str = inspect(cell, folder)
        if kept is not None and state != "finished":
            state = f"in {kept}"
    except InvalidInput as error:
        state = str(error)
    console.print(f"{cell.command(folder)}  # {state}", soft_wrap=True, highlight=False, markup=False)


def difference(request: Request, config: dict[str, Any]) -> str:
    """The first thing in which a stored configuration is not the requested one, in words; "" where they agree.

    Args:
      request: what is asked for.
      config: content of a run's config.json, of this version or an earlier one.
    """
    is_real = bool(config["data"]["is_real"])
    source = request.options.source
    if source != "auto" and is_real == (source == "embedded"):
        return f"on {config['data']['description']}, not --source {source}"
    if not is_real:
        request, _ = request.on_embedded_data()
    if config["dataset"] != request.dataset:
        return f"on {config['dataset']}, not {request.dataset}"
    wanted = bearing(request) | {"seed": request.options.seed}
    stored = filled(config["options"] | config["hyper_parameters"])
    usual = _defaults(request.options.method)
    for name, value in wanted.items():
        # As JSON: tuples come back as lists.
        found = stored.get(name, json.loads(json.dumps(usual[name], default=str)))
        if found != json.loads(json.dumps(value)):
            return f"{flag(name)} {found}, not {value}"
    gone = sorted(set(config["hyper_parameters"]) - set(request.hyper_parameters))
    return f"{flag(gone[0])} {stored[gone[0]]}, which {request.options.method} no longer has" if gone else ""


@functools.cache
def _defaults(method: str) -> dict[str, Any]:
    """What an option that did not exist yet when a run was made had."""
    return {field.name: field.default for field in dataclasses.fields(Options)} | vars(method_config(method)())


def remove_unfinished(folder: Path) -> None:
    """Clears away a run that was cut off, and nothing else; a folder that is not there is no error.

    Raises:
      InvalidInput: a process is at work in the folder, or it cannot be cleared.
    """
    if not folder.exists():
        return
    try:
        with alone(folder / METRICS):
            Checkpoints(folder / FOLDER).clear()
            trackers.clear(folder)
            for path in folder.iterdir():
                if path.name in (CONFIG, METRICS) or path.name.startswith((f".{CONFIG}.", f".{SUMMARY}.")):
                    path.unlink()
    except OSError as error:
        raise InvalidInput(f"cannot clear {folder}: {error.strerror or error}") from None
