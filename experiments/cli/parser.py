"""Command lines of all commands except single runs: tyro fills in a dataclass whose fields are the options."""

import contextlib
import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import tyro

from experiments.cli.help import limited_columns
from experiments.cli.identity import RESULT_NEUTRAL
from experiments.cli.options import flag
from pfl_jax.errors import InvalidInput

MOST_BYTES = 255
"""Length of a file's name on the usual file systems."""

_Options = TypeVar("_Options")

Names: TypeAlias = tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]]
"""Type of an option that may be repeated and takes one or more words; `flat` returns all of them."""

Switch: TypeAlias = tyro.conf.FlagCreatePairsOff[bool]
Folder: TypeAlias = Annotated[Path | None, tyro.conf.arg(metavar="DIR")]
Number: TypeAlias = Annotated[int | None, tyro.conf.arg(metavar="INT")]


def parse(
    kind: type[_Options], module: str, description: str | None, words: Sequence[str] | None, *, more: bool = False
) -> tuple[_Options, tuple[str, ...]]:
    """Options of a command; prints help and raises SystemExit(0) for --help.

    Args:
      kind: dataclass of the options.
      module: module of the command, as after `python -m`.
      description: docstring of the command.
      words: command-line arguments; None for those of this process.
      more: whether other arguments are allowed, for the runs.

    Returns:
      The options, and the other arguments.

    Raises:
      InvalidInput: a missing or unknown option, or a value of the wrong kind.
    """
    errors = io.StringIO()
    prog, text = f"python -m {module}", description or ""
    try:
        with contextlib.redirect_stderr(errors), limited_columns():
            options, rest = tyro.cli(
                kind, args=None if words is None else list(words), prog=prog, description=text, return_unknown_args=True
            )
    except SystemExit as ending:
        if not ending.code:
            raise
        raise InvalidInput(f"{_one_line(errors.getvalue())}; see --help") from None
    if rest and not more:
        raise InvalidInput(f"unrecognized arguments: {' '.join(rest)}; see --help")
    return options, tuple(rest)


def _one_line(box: str) -> str:
    """Error message of tyro in one line, from its box of several lines."""
    # Borders are lines or blanks, depending on the terminal.
    missing = re.findall(r"^[^\w-]*(--(?!help)[a-z]\S*)", box, re.MULTILINE)
    if "Missing from" in box:
        return f"missing: {', '.join(missing)}"
    text = " ".join(" ".join(line.strip("│ ") for line in box.splitlines()[1:-1]).split())
    if found := re.search(r"Missing value for argument '(--[^']+)'", text):
        return f"{found[1]} needs a value"
    # All other values are texts.
    if found := re.search(r"Error parsing (--\S+):[^']*'([^']*)'", text):
        return f"{found[1]} must be a whole number, not '{found[2]}'"
    return text


def flat(names: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """All words of an option, each once."""
    return tuple(dict.fromkeys(name for of in names for name in of))


def choose(name: str, asked: Iterable[str], choices: Iterable[str], where: str = "") -> None:
    """Raise InvalidInput for the first word that is not a choice, with all choices."""
    choices = list(choices)
    for word in asked:
        if word not in choices:
            raise InvalidInput(f"unknown {name} '{word}'{where} (there are {', '.join(choices)})")


def at_least_one(**values: int | None) -> None:
    """Raise InvalidInput for the first number below 1."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise InvalidInput(f"{flag(name)} must be at least 1, not {value}")


def slug(text: str) -> str:
    """Text as a file name: letters, digits, "=", "+" and "." as they are, the rest as single hyphens.

    A name that is too long for file systems ends in a digest of the text.
    """
    kept = "".join(character if character.isalnum() or character in "=._+" else "-" for character in text)
    name = "-".join(filter(None, kept.split("-"))).encode()
    if len(name) <= MOST_BYTES:
        return name.decode()
    end = f"-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return name[: MOST_BYTES - len(end)].decode(errors="ignore") + end


def given(words: Iterable[str]) -> set[str]:
    """Names of the options among the words; switches by the name of what they switch."""
    heads = (word.partition("=")[0] for word in words if word.startswith("--"))
    return {head.removeprefix("--").replace("-", "_").removeprefix("no_") for head in heads}


def parts(words: Iterable[str]) -> list[list[str]]:
    """Words of each option, its name first."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([])
        found[-1].append(word)
    return found


def folder_name(name: str, number: Any, words: Sequence[str]) -> str:
    """Folder for each set of options that affect results, so that a trial run does not block the full one."""
    without = RESULT_NEUTRAL - {"source"}
    # One protocol of evaluation is measured by request only.
    relevant = sorted(
        " ".join(part) for part in parts(words) if not given(part) & without or "before_aggregation" in " ".join(part)
    )
    return slug(" ".join([f"{name}-{number}", *relevant]))
