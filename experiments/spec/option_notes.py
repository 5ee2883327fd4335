"""Options as values, with notes beside their types (in `Annotated`), read from command lines and written to them."""

import contextlib
import enum
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard, TypeVar, get_args, get_origin

from pfl_jax.errors import InvalidInput
from pfl_jax.validation import LARGEST, Words, check_value, describe, hint, literals, notes_of, parts, unknown

Note = TypeVar("Note")


class Trait(enum.Enum):
    """Roles of an option in a run."""

    NEUTRAL = "results do not depend on it"
    BY_DIGEST = "results depend on it through the data's digest alone"
    OWN_DATA = "for the user's own data"
    FILES = "for data in files that --data names"
    CHOOSES = "decides which setting of a sweep is the best"
    CODE = "may be FILE.py:NAME"
    FILE = "a file whose content is part of a run's identity"
    NOT_IN_FILES = "acts on this machine: only its user may give it, not a file of options"


class NotInSweeps(NamedTuple):
    """Note that a sweep does not accept an option, with the reason."""

    reason: str


def flag(name: str) -> str:
    """Option as on the command line, such as --train-size."""
    return "--" + name.replace("_", "-")


def with_trait(kinds: dict[str, Any], *traits: Trait) -> tuple[str, ...]:
    """Names of the options with any of the traits, in the order of `kinds` (option -> type)."""
    return tuple(name for name, found in with_note(kinds, Trait).items() if {*traits} & {*found})


def with_note(kinds: dict[str, Any], note: type[Note]) -> dict[str, tuple[Note, ...]]:
    """Option -> its notes of class `note`; options without such a note are left out."""
    found = {name: tuple(one for one in notes_of(kind) if isinstance(one, note)) for name, kind in kinds.items()}
    return {name: notes for name, notes in found.items() if notes}


class Argument(NamedTuple):
    """Note on a field of a command's dataclass: its form on the command line.

    `form`: an option; an option that may be repeated, whose values the field collects; an argument without a name
    ("positional"); or a field that is not on the command line ("none").
    """

    form: Literal["option", "repeated", "positional", "none"] = "option"
    metavar: str = ""
    text: str = ""


class Option(NamedTuple):
    """Option of a command: its name in Python, type with range, default (MISSING if it must be given), and text."""

    name: str
    kind: Any
    default: Any = MISSING
    text: str = ""
    argument: Argument = Argument()

    @property
    def flags(self) -> list[str]:
        """All words for the option, such as --train-size; none for an argument without a name."""
        if self.argument.form == "positional":
            return []
        return [flag(self.name), flag(f"no_{self.name}")] if parts(self.kind) == (bool,) else [flag(self.name)]

    def value(self, given: Any) -> Any:
        """Checked value from a given text, several texts, or a value of Python, JSON or TOML."""
        element, value = element_of(self.kind), given
        if element is None:
            value = self._parse(self.kind, given)
        elif given in (None, "None", ["None"]) and types.NoneType in parts(self.kind):
            value = None
        else:
            several = given if isinstance(given, list | tuple) else [given]
            value = tuple(self._parse(element, text) for text in several)
            value = tuple(dict.fromkeys(value)) if self.argument.form == "repeated" else value
        check_value(flag(self.name), value, self.kind)
        return value

    def _parse(self, kind: Any, given: Any) -> Any:
        """Value of a text in a type `kind`; an integer becomes a float if `kind` has only floats."""
        members, choices = parts(kind), literals(kind)
        if not isinstance(given, str):
            is_whole = type(given) is int and float in members and int not in members
            return float(given) if is_whole and abs(given) < LARGEST else given
        if given in choices:
            return next(word for part in members for word in get_args(part) if str(word) == given)
        if given == "None" and types.NoneType in members:
            return None
        for part in members:
            if part in (int, float, Path):
                with contextlib.suppress(ValueError):
                    return part(given)
            # If there are choices, any other text has to name the user's own code or file.
            elif part is str and (not choices or _IS_OWN.get(self.name, is_own)(given)):
                return given
        if choices and not {int, float, types.NoneType} & {*members}:
            raise InvalidInput(unknown(flag(self.name).removeprefix("--"), given, choices))
        raise InvalidInput(f"{flag(self.name)} must be {describe(self.kind)}, not '{given}'{hint(given, choices)}")


def element_of(kind: Any) -> Any:
    """Type of the values of an option that has several; None for any other option."""
    return next((get_args(part)[0] for part in parts(kind) if get_origin(part) is tuple), None)


def is_own(name: Any) -> TypeGuard[str]:
    """Whether the value of an option names code in a user's file, and nothing built in."""
    return isinstance(name, str) and (name.endswith(".py") or ".py:" in name)


class WordsOrOwnCode(Words):
    """Texts that an option accepts, or FILE.py:NAME."""

    def parse(self, text: Any, name: str) -> tuple[str, float | None]:
        return (text, None) if is_own(text) else super().parse(text, name)

    def __str__(self) -> str:
        return f"{super().__str__()}, or FILE.py:NAME"


def is_partition_file(name: str) -> bool:
    """Whether a value of --partition names a file."""
    return name.endswith(".json")


def label(name: str) -> str:
    """Name for display, without a file's folder: "my_method.py:fedavgm", "parts.json"; built-in names are unchanged."""
    return Path(name).name if is_own(name) or is_partition_file(name) else name


def identifier(name: str) -> str:
    """Name for folders: "fedavgm"."""
    return name.rpartition(":")[2] if is_own(name) else name


_IS_OWN = {"partition": is_partition_file, "model": lambda text: is_own(text) or "," in text}
"""Option -> test whether a text names the user's own code or file, for options with another test than `is_own`."""


def option_words(values: Mapping[str, Any]) -> list[str]:
    """Options as command-line arguments: ["--rounds", "30", "--size-choices", "300", "600", "--no-drop-last"]."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        elif str(value).startswith("-"):
            # argparse mistakes such a text, for example -1e-05, for an option.
            words.append(f"{flag(name)}={value}")
        else:
            words += [flag(name), *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


def assignments(values: Mapping[str, Any]) -> str:
    """Values as command-line options: "--rounds 30, --train-size 300, --no-drop-last"."""
    return ", ".join(" ".join(option_words({name: value})) for name, value in values.items())


def texts_of(words: Iterable[str]) -> dict[str, Any]:
    """Option -> its text on a command line, a list of texts, or True or False for a switch."""
    texts: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words:
        if word.startswith("--"):
            head, equals, text = word.removeprefix("--").partition("=")
            current = texts[head.replace("-", "_")] = [text] * bool(equals)
        else:
            current.append(word)
    switches = {name.removeprefix("no_"): not name.startswith("no_") for name, given in texts.items() if not given}
    return switches | {name: given[0] if len(given) == 1 else given for name, given in texts.items() if given}
