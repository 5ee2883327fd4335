"""Shared parts of the commands of many runs: parsers, folder names, start and end."""

import argparse
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from rich.console import Console

from experiments.config.exit_codes import exit_code
from experiments.config.request import RESULT_NEUTRAL
from experiments.runtime.locks import lock_folder
from experiments.runtime.signals import interruptible
from pfl_jax.errors import InvalidInput


class _BatchRequest(typing.Protocol):
    """Parsed arguments of a command of many runs."""

    @property
    def dry_run(self) -> bool: ...

    @property
    def out(self) -> Path: ...


_Request = TypeVar("_Request", bound=_BatchRequest)


class Parser(argparse.ArgumentParser):
    """Argument parser of a command of many runs, whose errors are InvalidInput.

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
    parse: Callable[[Sequence[str]], _Request],
    say: Callable[[_Request, Console], None],
    make: Callable[[_Request, Console], None],
) -> int:
    """Run a command of many runs.

    Args:
      words: command-line arguments; None takes those of this process.
      parse: turns the arguments into a request with `dry_run` and `out`.
      say: prints the commands, for --dry-run.
      make: does it, while no other process is at work in `out`.

    Returns:
      The exit code, see `exit_codes.exit_code`.
    """

    def work() -> None:
        request = parse(sys.argv[1:] if words is None else words)
        console = Console()
        if request.dry_run:
            say(request, console)
        else:
            with interruptible(), lock_folder(request.out):
                make(request, console)

    return exit_code(work)


def slug(text: str) -> str:
    """Text as a file name: letters, digits, "=" and "." as they are, the rest as single hyphens."""
    kept = "".join(character if character.isalnum() or character in "=._" else "-" for character in text)
    return "-".join(filter(None, kept.split("-")))


def given(words: Iterable[str]) -> set[str]:
    """Names of the options among the arguments; switches by the name of what they switch."""
    heads = (word.partition("=")[0] for word in words if word.startswith("--"))
    return {head.removeprefix("--").replace("-", "_").removeprefix("no_") for head in heads}


def folder_name(name: str, number: int, words: Sequence[str]) -> str:
    """Folder for each set of options that affect results, so that a trial run does not block the full one."""
    parts: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not parts:
            parts.append([])
        parts[-1].append(word)
    without = RESULT_NEUTRAL - {"source"}
    # One protocol of evaluation is measured by request only.
    relevant = sorted(
        " ".join(part) for part in parts if not given(part) & without or "before_aggregation" in " ".join(part)
    )
    return slug(" ".join([f"{name}-{number}", *relevant]))


def choose(name: str, asked: Iterable[str], choices: Iterable[str], where: str = "") -> None:
    """Raise InvalidInput for the first word that is not a choice, with all choices."""
    choices = list(choices)
    for word in asked:
        if word not in choices:
            raise InvalidInput(f"unknown {name} '{word}'{where} (there are {', '.join(choices)})")
