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
        # By default, unpickling rebuilds an error from its message alone.
        return type(self), (self.round, self.clients), vars(self)


def imported(name: str, missing: str) -> Any:
    """Module of an optional package, imported when it is needed.

    Args:
      name: name of the module.
      missing: beginning of the error message if the import fails: who needs the package, and how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidInput(f"{missing} ({one_line(error)})") from error


def shortened(text: str, length: int = 200) -> str:
    """Text, cut if it is longer than a length.

    Args:
      text: the text.
      length: largest number of characters.
    """
    return text if len(text) <= length else text[: length - 3] + "..."


def first_line(error: object) -> str:
    """First line of an error's message, shortened; "" for an empty message."""
    return shortened(next(iter(str(error).splitlines()), ""))


def last_frame(error: BaseException, files: Collection[str]) -> traceback.FrameSummary | None:
    """Innermost call, in one of the files, that led to an error; None without such a call."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return frames[-1] if frames else None


def one_line(error: object, length: int = 300) -> str:
    """Whole message of an error in one line, shortened; the error's type if the message is empty.

    Args:
      error: the error, or a text.
      length: largest number of characters.
    """
    text = f"there is no {error}" if isinstance(error, KeyError) else str(error)
    return shortened(" ".join(text.split()) or type(error).__name__, length)


def describe_value(value: Any) -> str:
    """A value as errors show it: texts, numbers and None unchanged, arrays as "float32 [2]", others by their type."""
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
    """First name in which two descriptions of trees, path -> words, differ.

    Args:
      found, wanted: the descriptions.

    Returns:
      The name and its description in each; None if the descriptions are equal.
    """
    for name in {**wanted, **found}:
        here, there = (words.get(name, "nothing") for words in (found, wanted))
        if here != there:
            return name, here, there
    return None


NO_FEATURES = (
    "this method uses the features of a model; a model whose parameters are split by paths has none: take a "
    "method that only shares and keeps parameters, such as fedper"
)
"""Why a method does not take a model from `pfl_jax.networks.split`."""


SHORT = 10
"""Largest number of entries of a tuple that is shown whole."""


def described(fields: Any, about: str = "") -> str:
    """Summary of a named tuple, one line per field: shape and type of arrays, length of long values; None is left out.

    Args:
      fields: the named tuple.
      about: text before the fields.
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
