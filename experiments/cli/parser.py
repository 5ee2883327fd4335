"""Command lines with argparse, whose options check their own values (`option_notes.Option`).

Help texts are the docstrings below the fields of a dataclass.
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import shutil
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from experiments import known_help
from experiments.spec.option_notes import Argument, Option, element_of
from pfl_jax.errors import InvalidInput
from pfl_jax.validation import describe, hint, listed, notes_of, parts, unknown

MAX_COLUMNS = 100
"""Maximum width of the help."""

MAX_METAVAR = 50
"""Characters up to which the help shows a list of choices as an option's value; longer lists follow the help text."""

_Options = TypeVar("_Options")


Names: TypeAlias = Annotated[tuple[str, ...], Argument("repeated")]
Folder: TypeAlias = Annotated[Path | None, Argument(metavar="DIR")]
Hidden: TypeAlias = Annotated[_Options, Argument("none")]


class OptionGroup(NamedTuple):
    """Options under one heading of the help."""

    heading: str
    text: str
    options: Mapping[str, Option]


@functools.cache
def options_of(kind: type) -> dict[str, Option]:
    """Options of a command: the fields of its dataclass, with their docstrings."""
    kinds, texts, found = get_type_hints(kind, include_extras=True), field_texts(kind), {}
    for field in dataclasses.fields(kind):
        argument = next((note for note in notes_of(kinds[field.name]) if isinstance(note, Argument)), Argument())
        if argument.form != "none":
            text = argument.text or texts.get(field.name, "")
            found[field.name] = Option(field.name, kinds[field.name], field.default, text, argument)
    return found


def parse(
    kind: type[_Options], module: str, description: str | None, words: Sequence[str] | None, *, more: bool = False
) -> tuple[_Options, tuple[str, ...]]:
    """Parse a command line into a dataclass of its options and, with `more`, the rest; --help raises SystemExit(0)."""
    options = options_of(kind)
    values, rest = split(sys.argv[1:] if words is None else words, [OptionGroup("", "", options)], module, description)
    if rest and not more:
        raise InvalidInput(unknown_option(rest[0], options))
    if missing := [option for name, option in options.items() if option.default is MISSING and name not in values]:
        names = [" ".join(option.flags) or option.argument.metavar for option in missing]
        raise InvalidInput(f"missing: {', '.join(names)}; see --help")
    return kind(**values), tuple(rest)


def split(
    words: Sequence[str], groups: Sequence[OptionGroup], module: str = "", description: str | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Split a command line into values of options and other words; without a description, --help is not an option."""
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
        parser.add_argument("-h", "--help", action="store_true", help="Show this help and exit.")
    for group in groups:
        place = parser.add_argument_group(f"{group.heading} options", _escaped(group.text)) if group.heading else parser
        for name, option in group.options.items():
            place.add_argument(*option.flags[:1] or [name], **_settings(option))
    if description is not None and {"-h", "--help"} & {*words}:
        text = parser.format_help()
        known_help.keep(text)
        print(text, end="")
        raise SystemExit(0)
    known = {name for option in options.values() for name in option.flags}
    try:
        found, rest = parser.parse_known_args([_hyphenated(word, known) for word in words])
    except argparse.ArgumentError as error:
        name = str(error.argument_name).partition("/")[0]
        option = next(option for option in options.values() if name in option.flags)
        if parts(option.kind) == (bool,):
            raise InvalidInput(f"{name} takes no value: give {' or '.join(option.flags)}") from None
        raise InvalidInput(f"{name} needs a value: {describe(option.kind)}") from None
    return {name: options[name].value(text) for name, text in vars(found).items()}, rest


def _settings(option: Option) -> dict[str, Any]:
    """Arguments of argparse's `add_argument` for an option."""
    form, text = option.argument.form, option.text
    if option.default is MISSING:
        default = " (required)"
    elif option.default is None or option.default == () or form == "positional":
        default = ""
    else:
        words = option.default if isinstance(option.default, tuple) else [option.default]
        default = f" (default: {' '.join(map(str, words))})"
    if parts(option.kind) == (bool,):
        return {"action": argparse.BooleanOptionalAction, "help": _escaped(text + default)}
    file = "FILE.json" if option.name == "partition" else "FILE.py:NAME"
    metavar = option.argument.metavar or _metavar(option.kind, file)
    if len(metavar) > MAX_METAVAR:
        *names, last = metavar.split("|")
        text, metavar = f"{text} The names: {', '.join(names)}.", f"NAME|{last}"
    settings: dict[str, Any] = {"metavar": metavar, "help": _escaped(text + default)}
    several = element_of(option.kind) is not None
    if form == "positional":
        return settings | {"nargs": "*" if several else "?"}
    settings |= {"nargs": "+"} if several else {}
    return settings | ({"action": "extend"} if form == "repeated" else {})


def _escaped(text: str) -> str:
    """Text with the percent signs escaped for argparse."""
    return text.replace("%", "%%")


def _metavar(kind: Any, file: str) -> str:
    """Placeholder of a value in the help, such as INT|None; `file` stands for texts that are not choices."""
    names: list[str] = []
    for part in parts(element_of(kind) or kind):
        if get_origin(part) is Literal:
            names += map(str, get_args(part))
        elif part is str and names:
            names.append(file)
        else:
            names.append("None" if part is types.NoneType else part.__name__.upper())
    return "|".join(names)


class _Formatter(argparse.HelpFormatter):
    """Help of at most MAX_COLUMNS, in which texts keep their line breaks."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
        super().__init__(prog, max_help_position=26, width=width)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        # Instead of "INT [INT ...]".
        return f"{action.metavar} ..." if action.nargs == "+" else super()._format_args(action, default_metavar)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def _hyphenated(word: str, known: Iterable[str]) -> str:
    """Word with hyphens instead of underscores in an option's name."""
    head, equals, value = word.partition("=")
    head = head.replace("_", "-")
    return head + equals + value if head in known else word


def unknown_option(word: str, options: Mapping[str, Option]) -> str:
    """Error message for an unknown option, with the nearest known one."""
    known = [name for option in options.values() for name in option.flags]
    head = word.partition("=")[0].replace("_", "-")
    if not head.startswith("-"):
        return f"unexpected word '{word}': options start with --, see --help"
    return f"unknown option {head}{(hint(head, known) if head.startswith('--') else '') or ': see --help'}"


def check_new(option: str, path: Path | None, *endings: str, overwrite: bool | None = None) -> None:
    """Raise InvalidInput if an option names an existing file, or a name with none of the endings.

    `overwrite` is the value of --overwrite, None for commands without this option.
    """
    if path is not None and endings and path.suffix not in endings:
        raise InvalidInput(f"{option} {path}: the name must end in {listed(endings)}")
    if path is not None and path.expanduser().exists() and not overwrite:
        way = "remove it" if overwrite is None else "--overwrite"
        raise InvalidInput(f"{option} {path} exists already: give another name, or {way}")


def choose(name: str, asked: Iterable[str], choices: Iterable[str]) -> None:
    """Raise InvalidInput for the first word that is not a choice; the message lists all choices."""
    if strange := [word for word in asked if word not in choices]:
        raise InvalidInput(unknown(name, strange[0], choices))


def summary(entity: Any) -> str:
    """First line of a docstring; "" without one."""
    return inspect.cleandoc(entity.__doc__ or "").partition("\n")[0]


def field_texts(kind: type) -> dict[str, str]:
    """Name of each field of a class and its bases -> docstring below the field."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        module = sys.modules[base.__module__]
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == base.__name__)
        for field, after in itertools.pairwise(body):
            match field, after:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = " ".join(text.split())
    return found
