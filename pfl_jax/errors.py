"""Exceptions of the library, and words of their messages.

`InvalidInput` is the base class of all errors that the user can correct.
"""

import importlib
import traceback
from collections.abc import Collection, Mapping
from typing import Any


class InvalidInput(ValueError):
    """Invalid user input, with a one-line message that says what is wrong and what to do.

    The command line prints the message without a traceback and exits with code 2.
    """


class CannotWrite(InvalidInput):
    """File or folder that cannot be written, for example because the disk is full; its previous content is intact."""


class Diverged(InvalidInput):
    """Model or message that became NaN or infinite.

    Attributes:
      round: number of the round, counted from 1.
      clients: sorted numbers of the clients that diverged; empty if the server's result for finite messages diverged.
    """

    def __init__(self, round: int, clients: list[int]):
        self.round: int = round
        self.clients: list[int] = clients
        what = "what the server computed from finite messages"
        if clients:
            more = f" (and {len(clients) - 1} more)" if len(clients) > 1 else ""
            what = f"the model or message of client {clients[0]}{more}"
        super().__init__(f"round {round}: {what} is NaN or infinite")

    def __reduce__(self) -> tuple[Any, ...]:
        # By default an error is made anew of its message.
        return type(self), (self.round, self.clients), vars(self)


def imported(name: str, missing: str) -> Any:
    """Module of an optional package, imported when it is needed.

    Args:
      name: of the module.
      missing: beginning of the InvalidInput where it cannot be imported: what needs it, and how it is installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidInput(f"{missing} ({one_line(error)})") from error


def shortened(text: str, length: int = 200) -> str:
    """Text that is cut where it is longer than a length.

    Args:
      text: the text.
      length: most characters.
    """
    return text if len(text) <= length else text[: length - 3] + "..."


def first_line(error: object) -> str:
    """First line of what an error says, shortened; "" if it says nothing."""
    return shortened(next(iter(str(error).splitlines()), ""))


def last_frame(error: BaseException, files: Collection[str]) -> traceback.FrameSummary | None:
    """Innermost call that led to an error and stands in one of the files; None if there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return frames[-1] if frames else None


def one_line(error: object, length: int = 300) -> str:
    """All that an error says, in one line and shortened; its type if it says nothing.

    Args:
      error: the error, or a text.
      length: most characters.
    """
    text = f"there is no {error}" if isinstance(error, KeyError) else str(error)
    return shortened(" ".join(text.split()) or type(error).__name__, length)


def describe_value(value: Any) -> str:
    """A value in an error: texts, numbers and None as they are, arrays as "float32 [2]", others by their type."""
    if isinstance(getattr(value, "shape", None), tuple):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, str | int | float | None):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    # Modules have names too.
    is_named = callable(value) and hasattr(value, "__name__")
    return f"the function {value.__name__}" if is_named else f"a {type(value).__name__}"


def first_difference(found: Mapping[str, str], wanted: Mapping[str, str]) -> tuple[str, str, str] | None:
    """First name of which two descriptions of trees, path -> words, do not say the same.

    Args:
      found, wanted: the descriptions.

    Returns:
      The name and what each says of it; None where they are equal.
    """
    for name in {**wanted, **found}:
        here, there = (words.get(name, "nothing") for words in (found, wanted))
        if here != there:
            return name, here, there
    return None


NO_FEATURES = (
    "this method uses the features of a model, and one whose parameters are split by their paths has none: take a "
    "method that only shares and keeps parameters, such as fedper"
)
"""Why a method does not take a model from `pfl_jax.networks.split`."""


SHORT = 10
"""Number of entries up to which a tuple is shown whole."""


def described(fields: Any, about: str = "") -> str:
    """A named tuple in short, a field a line: arrays by shape and type, long values by their number; without Nones.

    Args:
      fields: the named tuple.
      about: what comes first.
    """
    lines = [about] * bool(about)
    for name, value in fields._asdict().items():
        if value is None or (isinstance(value, tuple | str) and not value):
            continue
        text = describe_value(value)
        if isinstance(value, tuple):
            text = str(tuple(value)) if len(value) <= SHORT else f"{len(value)}, the first {value[0]!r}"
        lines.append(f"{name}: {text}")
    return "\n  ".join([f"{type(fields).__name__}:", *lines])
