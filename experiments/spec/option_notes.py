"""Options as values: notes beside their types (in `Annotated`), and how they are read and written."""

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
    FILE = "a file by whose content runs are told apart"
    NOT_IN_FILES = "acts on this machine: given by its user alone, never by a file of options"


class NotInSweeps(NamedTuple):
    """Why a sweep does not have an option."""

    reason: str


def flag(name: str) -> str:
    """Option as written on the command line, such as --train-size."""
    return "--" + name.replace("_", "-")


def marked(kinds: dict[str, Any], *marks: Trait) -> tuple[str, ...]:
    """Names of the options of these types that have one of the marks, in their order."""
    return tuple(name for name, found in noted(kinds, Trait).items() if {*marks} & {*found})


def noted(kinds: dict[str, Any], note: type[Note]) -> dict[str, tuple[Note, ...]]:
    """Option -> its notes of a class; options without such a note are left out."""
    found = {name: tuple(one for one in notes_of(kind) if isinstance(one, note)) for name, kind in kinds.items()}
    return {name: notes for name, notes in found.items() if notes}


class Argument(NamedTuple):
    """How the command line gives a field of a command's dataclass, in its `Annotated`.

    `form`: an option; an option that may be repeated, whose values the field collects; an argument without a name; or
    "none", a field that the command line does not give.
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
        """All words that stand for it, such as --train-size; none for an argument without a name."""
        if self.argument.form == "positional":
            return []
        return [flag(self.name), flag(f"no_{self.name}")] if parts(self.kind) == (bool,) else [flag(self.name)]

    def value(self, given: Any) -> Any:
        """Checked value of what is given: a text, several of them, or a value as Python, JSON and TOML have it."""
        element, value = element_of(self.kind), given
        if element is None:
            value = self._one(self.kind, given)
        elif given in (None, "None", ["None"]) and types.NoneType in parts(self.kind):
            value = None
        else:
            several = given if isinstance(given, list | tuple) else [given]
            value = tuple(self._one(element, one) for one in several)
            value = tuple(dict.fromkeys(value)) if self.argument.form == "repeated" else value
        check_value(flag(self.name), value, self.kind)
        return value

    def _one(self, kind: Any, given: Any) -> Any:
        """Value of one text, as a type `kind` has it; of an integer where floats are asked for, the float."""
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
            # Beside choices, a text is the name of something of the user's own.
            elif part is str and (not choices or _OF_OWN.get(self.name, is_own)(given)):
                return given
        if choices and not {int, float, types.NoneType} & {*members}:
            raise InvalidInput(unknown(flag(self.name).removeprefix("--"), given, choices))
        raise InvalidInput(f"{flag(self.name)} must be {describe(self.kind)}, not '{given}'{hint(given, choices)}")


def element_of(kind: Any) -> Any:
    """Type of the values of an option that has several; None for any other option."""
    return next((get_args(part)[0] for part in parts(kind) if get_origin(part) is tuple), None)


def is_own(name: Any) -> TypeGuard[str]:
    """Whether the value of an option names a file of the user's, not something built in, or anything else."""
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
    """Name for people, whatever the folder: "my_method.py:fedavgm", "parts.json"; a built-in one's own."""
    return Path(name).name if is_own(name) or is_partition_file(name) else name


def identifier(name: str) -> str:
    """Name for folders: "fedavgm"."""
    return name.rpartition(":")[2] if is_own(name) else name


_OF_OWN = {"partition": is_partition_file, "model": lambda text: is_own(text) or "," in text}
"""Option -> function that says whether a text names something of the user's, for options where `is_own` does not."""


def option_words(values: Mapping[str, Any]) -> list[str]:
    """Options as command-line arguments: ["--rounds", "30", "--size-choices", "300", "600", "--no-drop-last"]."""
    words = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(flag(name if value else f"no_{name}"))
        elif str(value).startswith("-"):
            # argparse takes such a text, as -1e-05, for an option.
            words.append(f"{flag(name)}={value}")
        else:
            words += [flag(name), *map(str, value if isinstance(value, list | tuple) else [value])]
    return words


def assignments(values: Mapping[str, Any]) -> str:
    """Values as command-line options: "--rounds 30, --train-size 300, --no-drop-last"."""
    return ", ".join(" ".join(option_words({name: value})) for name, value in values.items())


def texts_of(words: Iterable[str]) -> dict[str, Any]:
    """Option -> its text on a command line, several texts, or True or False of a switch."""
    texts: dict[str, list[str]] = {}
    of_option: list[str] = []
    for word in words:
        if word.startswith("--"):
            head, equals, text = word.removeprefix("--").partition("=")
            of_option = texts[head.replace("-", "_")] = [text] * bool(equals)
        else:
            of_option.append(word)
    switches = {name.removeprefix("no_"): not name.startswith("no_") for name, given in texts.items() if not given}
    return switches | {name: given[0] if len(given) == 1 else given for name, given in texts.items() if given}
