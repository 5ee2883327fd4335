"""Many runs that belong together: each in a folder of its own, run once, and read again ever after.

A cell is one run of the ordinary command line. What is finished is not run again, what was cut off goes on from its
last checkpoint or is run anew, and a folder with the results of anything else is refused. Tables and figures are made
of cells.
"""

import argparse
import dataclasses
import functools
import json
import shlex
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from rich.console import Console

from experiments import tracking
from experiments.cli import exit_code
from experiments.locks import alone, exclusive
from experiments.options import PARTITION_OPTIONS, PROCESSES, Options, flag
from experiments.parsing import Request, method_config, parse
from experiments.signals import interruptible
from pfl_jax.checkpoint import FOLDER, Checkpoints
from pfl_jax.errors import InvalidInput
from pfl_jax.reporting import CONFIG, METRICS, SUMMARY, Protocol

if TYPE_CHECKING:
    from experiments.run import Observe


class _Asked(typing.Protocol):
    """What the words of a command of many runs ask for."""

    @property
    def dry_run(self) -> bool: ...

    @property
    def out(self) -> Path: ...


_Order = TypeVar("_Order", bound=_Asked)

Score = Literal["last", "best"]
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
            from experiments.history import resumed

            resume = dataclasses.replace(request.options, resume=str(folder))
            request = resumed(dataclasses.replace(request, options=resume, given=frozenset()))
        elif state == "unfinished":
            remove_unfinished(folder)
        # Imported now, so that errors, --help and what is finished do not wait for it.
        import jax

        from experiments import run

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
            difference = _difference(cell.request(), read_config(folder))
        except KeyError as error:
            raise InvalidInput(f"{folder / CONFIG} has no {error}: give --out another folder") from None
        if difference:
            raise InvalidInput(
                f"{folder} holds another run ({difference}), which is never overwritten: give --out another"
            )
    elif (folder / SUMMARY).exists():
        raise InvalidInput(f"{folder} holds a {SUMMARY} without its {CONFIG}: give --out another folder")
    return "finished" if (folder / SUMMARY).exists() else "unfinished"


def read_summary(folder: str | Path) -> dict[str, Any]:
    """The summary of a finished run; InvalidInput if it cannot be read."""
    return read_json(Path(folder) / SUMMARY)


def read_config(folder: str | Path) -> dict[str, Any]:
    """The configuration of a run; InvalidInput if it cannot be read."""
    return read_json(Path(folder) / CONFIG)


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The evaluations of a run in their order, see `Evaluation.record`; InvalidInput if they cannot be read.

    Half a last line is left out: of a run that goes on, or was killed while it wrote.
    """
    text = _text(Path(folder) / METRICS)
    lines = text.splitlines()
    if lines and not text.endswith("\n") and not lines[-1].endswith("}"):
        lines.pop()
    return [_parse_json(line, Path(folder) / METRICS) for line in lines]


def read_json(path: str | Path) -> dict[str, Any]:
    """The content of a JSON file; InvalidInput if it cannot be read."""
    return _parse_json(_text(Path(path)), Path(path))


def accuracy(folder: str | Path, protocol: Protocol, score: Score = "last") -> float | None:
    """The mean over clients that a finished run reached, in percent.

    Args:
      folder: of the run.
      protocol: received or trained.
      score: at the last evaluation, or at that with the highest mean.

    Returns:
      None where no client has an accuracy.
    """
    means = [line[protocol]["mean"] for line in read_metrics(folder)]
    if score == "last":
        return means[-1]
    return max((mean for mean in means if mean is not None), default=None)


def bearing(request: Request) -> dict[str, Any]:
    """Everything in a request that its results depend on, by name; seed and data apart.

    What the chosen partition does not read is left out.
    """
    unread = {name for names in PARTITION_OPTIONS.values() for name in names}
    unread -= set(PARTITION_OPTIONS[request.options.partition])
    every = dataclasses.asdict(request.options) | request.hyper_parameters
    return {name: value for name, value in every.items() if name not in WITHOUT_BEARING | unread | {"seed"}}


class Parser(argparse.ArgumentParser):
    """A parser for a command of many runs, whose errors are InvalidInput.

    Args:
      module: the command's, as after `python -m`.
      description: its docstring.
    """

    def __init__(self, module: str, description: str | None):
        super().__init__(
            prog=f"python -m {module}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise InvalidInput(f"{message}; see --help")


def command(
    words: Sequence[str] | None,
    parse: Callable[[Sequence[str]], _Order],
    say: Callable[[_Order, Console], None],
    make: Callable[[_Order, Console], None],
) -> int:
    """A command of many runs.

    Args:
      words: of the command line; None takes those of this process.
      parse: from the words to what is asked for, which has `dry_run` and `out`.
      say: tells what there is to do, for --dry-run.
      make: does it, while no other process is at work in `out`.

    Returns:
      The exit code, see `cli.exit_code`.
    """

    def work() -> None:
        order = parse(sys.argv[1:] if words is None else words)
        console = Console()
        if order.dry_run:
            say(order, console)
        else:
            with interruptible(), exclusive(order.out):
                make(order, console)

    return exit_code(work)


def say_state(cell: Cell, folder: Path, console: Console) -> None:
    """Prints a cell's command and what its folder holds of it."""
    try:
        state: str = inspect(cell, folder)
    except InvalidInput as error:
        state = str(error)
    console.print(f"{cell.command(folder)}  # {state}", soft_wrap=True, highlight=False, markup=False)


def slug(text: str) -> str:
    """The text as a file name: letters, digits, "=" and "." as they are, the rest as single hyphens."""
    kept = "".join(character if character.isalnum() or character in "=._" else "-" for character in text)
    return "-".join(filter(None, kept.split("-")))


def given(words: Iterable[str]) -> set[str]:
    """Names of the options among words, switches by the name of what they switch."""
    heads = (word.partition("=")[0] for word in words if word.startswith("--"))
    return {head.removeprefix("--").replace("-", "_").removeprefix("no_") for head in heads}


def folder_name(name: str, number: int, words: Sequence[str]) -> str:
    """A folder for each set of options that bear on results: a trial does not stand in the way of the whole."""
    parts: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not parts:
            parts.append([])
        parts[-1].append(word)
    without = WITHOUT_BEARING - {"source"}
    bearing = sorted(" ".join(part) for part in parts if not given(part) & without)
    return slug(" ".join([f"{name}-{number}", *bearing]))


def choose(name: str, asked: Iterable[str], choices: Iterable[str], where: str = "") -> None:
    """Raises InvalidInput for the first word that is no choice, with all that are."""
    choices = list(choices)
    for word in asked:
        if word not in choices:
            raise InvalidInput(f"unknown {name} '{word}'{where} (there are {', '.join(choices)})")


def _difference(request: Request, config: dict[str, Any]) -> str:
    """The first thing in which a stored configuration is not the requested one, in words; "" where they agree."""
    is_real = bool(config["data"]["is_real"])
    source = request.options.source
    if source != "auto" and is_real == (source == "embedded"):
        return f"on {config['data']['description']}, not --source {source}"
    if not is_real:
        request, _ = request.on_embedded_data()
    if config["dataset"] != request.dataset:
        return f"on {config['dataset']}, not {request.dataset}"
    wanted = bearing(request) | {"seed": request.options.seed}
    stored = config["options"] | config["hyper_parameters"]
    # What was no option yet when the run was made had its default.
    usual = {field.name: field.default for field in dataclasses.fields(Options)}
    usual |= vars(method_config(request.options.method)())
    for name, value in wanted.items():
        # As JSON: tuples come back as lists.
        found = stored.get(name, json.loads(json.dumps(usual[name], default=str)))
        if found != json.loads(json.dumps(value)):
            return f"{flag(name)} {found}, not {value}"
    return ""


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
            tracking.clear(folder)
            for path in folder.iterdir():
                if path.name in (CONFIG, METRICS) or path.name.startswith((f".{CONFIG}.", f".{SUMMARY}.")):
                    path.unlink()
    except OSError as error:
        raise InvalidInput(f"cannot clear {folder}: {error.strerror or error}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise _damaged(path) from None


def _parse_json(text: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        content = None
    if not isinstance(content, dict):
        raise _damaged(path)
    return content


def _damaged(path: Path) -> InvalidInput:
    return InvalidInput(f"{path} is damaged: remove it, with its folder if it is a run's, and it is made again")
