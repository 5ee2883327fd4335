"""Command lines with argparse: a table of options, whose values are converted and checked by their types."""

import argparse
import contextlib
import dataclasses
import hashlib
import inspect
import shutil
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from experiments.cli.docstrings import field_texts
from experiments.cli.options import flag
from experiments.cli.own_code import is_own
from pfl_jax.errors import InvalidInput
from pfl_jax.hyper_parameters import check_value, describe, hint, literals, notes_of, parts, unknown

MAX_COLUMNS = 100
"""Maximum width of the help."""

MAX_METAVAR = 50
"""Characters of a list of choices in the place of a value; longer lists are part of the help text."""

MOST_BYTES = 255
"""Length of a file's name on the usual file systems."""

_Options = TypeVar("_Options")


class Argument(NamedTuple):
    """How a field of a command's dataclass is given, as `Annotated` says it.

    Attributes:
      form: an option that may be given several times and then has all values, a switch without --no-, an argument
        without a name, or a field that is none of the command line's.
      metavar, text: for the help; "" for what type and docstring say.
    """

    form: Literal["option", "repeated", "switch", "positional", "none"] = "option"
    metavar: str = ""
    text: str = ""


Names: TypeAlias = Annotated[tuple[str, ...], Argument("repeated")]
Switch: TypeAlias = Annotated[bool, Argument("switch")]
Folder: TypeAlias = Annotated[Path | None, Argument(metavar="DIR")]
Hidden: TypeAlias = Annotated[_Options, Argument("none")]


class Option(NamedTuple):
    """Option of a command: its name in Python, type with range, default (MISSING if it must be given), and text."""

    name: str
    kind: Any
    default: Any
    text: str = ""
    argument: Argument = Argument()

    @property
    def flag(self) -> str:
        return flag(self.name)

    @property
    def flags(self) -> list[str]:
        """All words that stand for it."""
        if self.argument.form == "positional":
            return []
        is_pair = parts(self.kind) == (bool,) and self.argument.form != "switch"
        return [self.flag, flag(f"no_{self.name}")] if is_pair else [self.flag]


class Group(NamedTuple):
    """Options under one heading of the help."""

    heading: str
    text: str
    options: Mapping[str, Option]


def options_of(kind: type) -> dict[str, Option]:
    """Options of a command: the fields of its dataclass, with the docstrings after them."""
    kinds, texts, found = get_type_hints(kind, include_extras=True), field_texts(kind), {}
    for field in dataclasses.fields(kind):
        notes = [note for note in notes_of(kinds[field.name]) if isinstance(note, Argument)]
        argument = notes[0] if notes else Argument()
        if argument.form != "none":
            text = argument.text or texts.get(field.name, "")
            found[field.name] = Option(field.name, kinds[field.name], field.default, text, argument)
    return found


def parse(
    kind: type[_Options], module: str, description: str | None, words: Sequence[str] | None, *, more: bool = False
) -> tuple[_Options, tuple[str, ...]]:
    """Options of a command by its dataclass, and with `more` the other words; --help prints help and raises
    SystemExit(0)."""
    options = options_of(kind)
    found, rest = split(sys.argv[1:] if words is None else words, [Group("", "", options)], module, description)
    if rest and not more:
        raise InvalidInput(unknown_option(rest[0], options))
    values = converted(found, options)
    if missing := [name for name, option in options.items() if option.default is MISSING and name not in values]:
        raise InvalidInput(f"missing: {', '.join(map(flag, missing))}; see --help")
    return kind(**values), tuple(rest)


def split(
    words: Iterable[str], groups: Sequence[Group], module: str = "", description: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Texts of the options on a command line by name, and the words that belong to none; without description no --help."""
    options = {name: option for group in groups for name, option in group.options.items()}
    without_name = [option.argument.metavar for option in options.values() if option.argument.form == "positional"]
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        usage=" ".join(["%(prog)s [OPTIONS]", *without_name]),
        description=description and _escaped(inspect.cleandoc(description)),
        formatter_class=_Formatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
        exit_on_error=False,
    )
    if description is not None:
        parser.add_argument("-h", "--help", action="help", help="Show this help and exit.")
    for group in groups:
        place = parser.add_argument_group(f"{group.heading} options", _escaped(group.text)) if group.heading else parser
        for option in group.options.values():
            name = option.name if option.argument.form == "positional" else option.flag
            place.add_argument(name, **_settings(option))
    known = {name for option in options.values() for name in option.flags}
    try:
        found, rest = parser.parse_known_args([_hyphenated(word, known) for word in words])
    except argparse.ArgumentError as error:
        name = str(error.argument_name).partition("/")[0]
        option = next((option for option in options.values() if option.flag == name), None)
        if option is None:
            raise InvalidInput(f"{error}; see --help") from None
        if parts(option.kind) == (bool,):
            raise InvalidInput(f"{name} takes no value: give {' or '.join(option.flags)}") from None
        raise InvalidInput(f"{name} needs a value: {describe(option.kind)}") from None
    return vars(found), rest


def _settings(option: Option) -> dict[str, Any]:
    """How argparse takes an option."""
    if parts(option.kind) == (bool,):
        is_switch = option.argument.form == "switch"
        return {"action": "store_true" if is_switch else argparse.BooleanOptionalAction, "help": _help(option)}
    metavar, text = option.argument.metavar or _metavar(option.kind), option
    if len(metavar) > MAX_METAVAR:
        *names, last = metavar.split("|")
        text = option._replace(text=f"{option.text} The names: {', '.join(names)}.")
        metavar = f"NAME|{last}"
    settings: dict[str, Any] = {"metavar": metavar, "help": _help(text)}
    several = _element(option.kind) is not None
    if option.argument.form == "positional":
        return settings | {"nargs": "*" if several else "?"}
    settings |= {"nargs": "+"} if several else {}
    return settings | ({"action": "extend"} if option.argument.form == "repeated" else {})


def _help(option: Option) -> str:
    """Text of an option in the help, with its default."""
    default = option.default
    if default is MISSING:
        after = " (required)"
    elif default is None or default == () or option.argument.form in ("switch", "positional"):
        after = ""
    else:
        after = f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
    return _escaped(option.text + after)


def _escaped(text: str) -> str:
    """Text that argparse prints as it is."""
    return text.replace("%", "%%")


def _metavar(kind: Any) -> str:
    """Placeholder of a value in the help, such as INT|None."""
    names: list[str] = []
    for part in parts(_element(kind) or kind):
        if get_origin(part) is Literal:
            names += map(str, get_args(part))
        elif part is str and names:
            names.append("FILE.py:NAME")
        else:
            names.append("None" if part is types.NoneType else part.__name__.upper())
    return "|".join(names)


class _Formatter(argparse.HelpFormatter):
    """Help of at most MAX_COLUMNS, in which texts of several lines keep them."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
        super().__init__(prog, max_help_position=26, width=width)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        # In place of "INT [INT ...]".
        return f"{action.metavar} ..." if action.nargs == "+" else super()._format_args(action, default_metavar)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def _hyphenated(word: str, known: Iterable[str]) -> str:
    """Word, with hyphens where an option was written with underscores."""
    head, equals, value = word.partition("=")
    head = head.replace("_", "-")
    return head + equals + value if head in known else word


def converted(texts: Mapping[str, Any], options: Mapping[str, Option]) -> dict[str, Any]:
    """Values of the texts of `split`, checked."""
    found = {}
    for name, text in texts.items():
        option = options[name]
        element = _element(option.kind)
        if isinstance(text, bool):
            found[name] = text
        elif element is None:
            found[name] = _value(option, option.kind, text)
        elif text == ["None"] and types.NoneType in parts(option.kind):
            found[name] = None
        else:
            found[name] = tuple(_value(option, element, one) for one in text)
        if option.argument.form == "repeated":
            found[name] = tuple(dict.fromkeys(found[name]))
        check_value(option.flag, found[name], option.kind)
    return found


def _element(kind: Any) -> Any:
    """Type of the values of an option that has several; None for any other option."""
    return next((get_args(part)[0] for part in parts(kind) if get_origin(part) is tuple), None)


def _value(option: Option, kind: Any, text: str) -> Any:
    """Value of one text, as a type `kind` has it."""
    members, choices = parts(kind), literals(kind)
    if text in choices:
        return next(word for part in members for word in get_args(part) if str(word) == text)
    if text == "None" and types.NoneType in members:
        return None
    for part in members:
        if part in (int, float, Path):
            with contextlib.suppress(ValueError):
                return part(text)
        # Beside choices, a text is the name of something of the user's own.
        elif part is str and (is_own(text) or not choices):
            return text
    if choices and not {int, float, types.NoneType} & {*members}:
        raise InvalidInput(unknown(option.flag.removeprefix("--"), text, choices))
    raise InvalidInput(f"{option.flag} must be {describe(option.kind)}, not '{text}'{hint(text, choices)}")


def unknown_option(word: str, options: Mapping[str, Option]) -> str:
    """Error message for a word that is no option, with the nearest of those that there are."""
    known = [name for option in options.values() for name in option.flags]
    head = word.partition("=")[0].replace("_", "-")
    if not head.startswith("-"):
        return f"unexpected word '{word}': options start with --, see --help"
    return f"unknown option {head}{(hint(head, known) if head.startswith('--') else '') or ': see --help'}"


def choose(name: str, asked: Iterable[str], choices: Iterable[str], where: str = "") -> None:
    """Raise InvalidInput for the first word that is not a choice, with all choices."""
    choices = list(choices)
    for word in asked:
        if word not in choices:
            near = "" if word.isdecimal() else hint(word, choices)
            raise InvalidInput(f"unknown {name} '{word}'{where} (there are {', '.join(choices)}){near}")


def at_least_one(**values: int | None) -> None:
    """Raise InvalidInput for the first number below 1."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise InvalidInput(f"{flag(name)} must be at least 1, not {value}")


def slug(text: str) -> str:
    """Text as a file name: letters, digits, "=", "+", "." and hyphens; if too long, it ends in a digest of the text."""
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


def by_option(words: Iterable[str]) -> list[list[str]]:
    """Words of each option, its name first."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([])
        found[-1].append(word)
    return found
