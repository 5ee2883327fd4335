"""Types and ranges of hyper-parameters, the same for the library and for the command line.

A hyper-parameter's type is its annotation in the factory's signature, which also says the range of a number, and with
which values of others it is read:

    def my_method(
        model, training=LocalTraining(), *, mu: NotNegative = 1.0, tau: Annotated[Positive, ReadWith("mu")] = 0.5
    ): ...

Values are checked when a method is built. Traced values, whose numbers are not known then, pass.
"""

import difflib
import math
import numbers
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, Union, get_args, get_origin

import jax
import numpy as np
from jax.core import Tracer

from pfl_jax.errors import InvalidInput


class Range(NamedTuple):
    """Interval of the numbers that a hyper-parameter can be; infinity and NaN are in none.

    Attributes:
      low: smallest value.
      high: largest value.
      above: whether `low` itself is excluded.
      below: whether `high` itself is excluded.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    below: bool = False

    def has(self, value: float) -> bool:
        """Whether a value is in the interval."""
        is_above = value > self.low if self.above else value >= self.low
        is_below = value < self.high if self.below else value <= self.high
        return math.isfinite(value) and is_above and is_below

    def __str__(self) -> str:
        """What a value must do: "be at least 0 and below 1"."""
        if (self.low, self.high) == (0, math.inf):
            return "be positive" if self.above else "not be negative"
        if not self.above and not self.below and math.isfinite(self.low) and math.isfinite(self.high):
            return f"be between {self.low:g} and {self.high:g}"
        ends = [f"{'above' if self.above else 'at least'} {self.low:g}"] if math.isfinite(self.low) else []
        ends += [f"{'below' if self.below else 'at most'} {self.high:g}"] if math.isfinite(self.high) else []
        return f"be {' and '.join(ends) or 'finite'}"


class Words(NamedTuple):
    """Texts that a hyper-parameter can be: names, and names with a number, as in "topk:0.01".

    Attributes:
      plain: names that stand alone.
      numbered: name -> range of the number after it.
      whole: names whose number is an integer.
    """

    plain: tuple[str, ...]
    numbered: Mapping[str, Range]
    whole: tuple[str, ...] = ()

    def __str__(self) -> str:
        """All of them: "none, sign or topk:NUMBER"."""
        return listed([*self.plain, *(f"{name}:NUMBER" for name in self.numbered)])

    def parse(self, text: str, name: str = "it") -> tuple[str, float | None]:
        """Name and number of a text; None for a name alone.

        Args:
          text: the text.
          name: of the hyper-parameter, for the error.

        Raises:
          InvalidInput: the text is none of them.
        """
        word, colon, digits = text.partition(":")
        if not colon and word in self.plain:
            return word, None
        if word not in self.numbered:
            near = hint(word, [*self.plain, *self.numbered])
            raise InvalidInput(f"{name} must be {self}, not {text!r}{near}")
        if not digits:
            raise InvalidInput(f"{name} {word} needs a number, {word}:NUMBER")
        try:
            number = float(int(digits)) if word in self.whole else float(digits)
        except ValueError:
            kind = "a whole number" if word in self.whole else "a number"
            raise InvalidInput(f"{name} {text}: {digits!r} is not {kind}") from None
        if not self.numbered[word].has(number):
            raise InvalidInput(f"{name} {text}: the number must {self.numbered[word]}")
        return word, number


FINITE, POSITIVE, NOT_NEGATIVE = Range(), Range(0, above=True), Range(0)
AT_LEAST_ONE, FRACTION, MOMENTUM = Range(1), Range(0, 1), Range(0, 1, below=True)

NotNegative: TypeAlias = Annotated[float, NOT_NEGATIVE]
"""Type of learning rates and strengths: zero leaves a part as it is, the limit of many methods."""

Positive: TypeAlias = Annotated[float, POSITIVE]
"""Type of temperatures, scales and other divisors."""

Fraction: TypeAlias = Annotated[float, FRACTION]
"""Type of shares."""

Count: TypeAlias = Annotated[int, AT_LEAST_ONE]
"""Type of numbers of things, and of shapes."""

Epochs: TypeAlias = Annotated[int, NOT_NEGATIVE]
"""Type of numbers of epochs or rounds of a phase: zero leaves it out."""


class ReadWith(NamedTuple):
    """Condition under which a hyper-parameter is read.

    Attributes:
      name: another hyper-parameter.
      values: those of its values with which this one is read; none stands for all but zero, False and None.
    """

    name: str
    values: tuple[Any, ...] = ()

    def is_met(self, value: Any) -> bool:
        """Whether the other hyper-parameter has such a value."""
        return value in self.values if self.values else bool(value)


def range_of(kind: Any) -> Range:
    """Range of the numbers of a type; without one in its annotation they are finite.

    Args:
      kind: the type.
    """
    return next((note for note in _notes(kind) if isinstance(note, Range)), FINITE)


def unread(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, str]:
    """Hyper-parameters that are not read with these values -> another one whose value is the reason.

    Args:
      values: name -> value of all hyper-parameters.
      kinds: name -> annotation, with a `ReadWith` where it depends on another hyper-parameter.
    """
    found: dict[str, str] = {}
    for name in values.keys() & kinds.keys():
        for note in _notes(kinds[name]):
            if isinstance(note, ReadWith) and note.name in values and not note.is_met(values[note.name]):
                found.setdefault(name, note.name)
    return found


def check(values: Mapping[str, Any], kinds: Mapping[str, Any], *, say: Callable[[str], str] = str) -> None:
    """Raise InvalidInput for the first value of a wrong type or out of its range.

    Args:
      values: name -> value. Traced values and arrays of several values pass; their type is not checked either.
      kinds: name -> annotation; a value without one passes.
      say: name of a hyper-parameter as the user knows it, for the error.
    """
    for name, value in values.items():
        if name not in kinds or not _is_known(value):
            continue
        is_array = isinstance(value, jax.Array | np.generic | np.ndarray)
        plain = np.asarray(value).item() if is_array else value
        if not (is_array and _takes_arrays(kinds[name])):
            _check_type(say(name), plain, kinds[name])
        for note in _notes(kinds[name]):
            if isinstance(note, Words):
                note.parse(plain, say(name))
        if _is_of(plain, float):
            real(say(name), plain, range_of(kinds[name]))


def _is_known(value: Any) -> bool:
    """Whether a value is not traced, nor an array of several values, nor one of other machines."""
    if isinstance(value, Tracer | jax.ShapeDtypeStruct) or getattr(value, "ndim", 0):
        return False
    return not isinstance(value, jax.Array) or value.is_fully_addressable


def _check_type(name: str, value: Any, kind: Any) -> None:
    """Raise InvalidInput for a Python value that is not of a type."""
    if any(_is_of(value, part) for part in parts(kind)):
        return
    choices = literals(kind)
    if choices and isinstance(value, str):
        raise InvalidInput(unknown(name, value, choices))
    raise InvalidInput(f"{name} must be {describe(kind)}, not {value!r}")


def whole(name: str, value: Any, least: int = 1) -> None:
    """Raise InvalidInput unless a value is an integer of at least `least`.

    Args:
      name: of what has the value.
      value: anything.
      least: smallest value.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InvalidInput(f"{name} must be a whole number of at least {least}, not {value!r}")


def real(name: str, value: Any, allowed: Range) -> None:
    """Raise InvalidInput unless a value is a number in a range.

    Args:
      name: of what has the value.
      value: anything.
      allowed: the range.
    """
    is_number = _is_of(value, float)
    if not (is_number and allowed.has(value)):
        is_unbounded = is_number and not math.isfinite(value) and allowed.high == math.inf
        shown = f"{value:g}" if is_number else repr(value)
        raise InvalidInput(f"{name} must {FINITE if is_unbounded else allowed}, not {shown}")


def choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise InvalidInput unless a value is one of the choices.

    Args:
      name: of what has the value.
      value: anything.
      choices: all of them.
    """
    if value not in (names := list(choices)):
        raise InvalidInput(unknown(name, value, names))


def unknown(name: str, value: Any, choices: Sequence[str]) -> str:
    """Error message for a value that is none of the choices, with the nearest one.

    Args:
      name: of what has the value.
      value: the wrong value.
      choices: all of them.
    """
    return f"unknown {name} {str(value)!r} (there are {', '.join(choices)}){hint(str(value), choices)}"


def hint(word: str, choices: Iterable[str]) -> str:
    """End of an error message that names the one of `choices` nearest to a word; "" if none is near."""
    near = difflib.get_close_matches(word, list(choices), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def parts(kind: Any) -> tuple[Any, ...]:
    """Members of a union type `kind`, or the type itself, without `Annotated`."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(inner for part in get_args(kind) for inner in parts(part))
    return (kind,)


def _takes_arrays(kind: Any) -> bool:
    """Whether `jax.Array` in a type means arrays; beside a number's type it means a number that may be traced."""
    members = parts(kind)
    return jax.Array in members and not any(part in (bool, int, float) for part in members)


def literals(kind: Any) -> list[str]:
    """Words that a value of type `kind` can be."""
    return [str(word) for part in parts(kind) if get_origin(part) is Literal for word in get_args(part)]


def describe(kind: Any) -> str:
    """Description of the values of type `kind`: "a whole number or None"."""
    names: list[str] = []
    for part in parts(kind):
        if get_origin(part) is Literal:
            names += map(str, get_args(part))
        elif get_origin(part) is tuple:
            names.append("one or more of " + describe(get_args(part)[0]))
        elif part is jax.Array:
            names += ["an array"] if _takes_arrays(kind) else []
        else:
            # Beside a Literal, str stands for what is not built in.
            names.append("FILE.py:NAME" if part is str and names else _WORDS.get(part, "a function"))
    return listed(names)


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    types.NoneType: "None",
}


def listed(names: Sequence[str], conjunction: str = "or") -> str:
    """Enumeration "a, b or c" of `names`, with a `conjunction` before the last."""
    return f" {conjunction} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _notes(kind: Any) -> tuple[Any, ...]:
    """What `Annotated` says of a type and of the members of a union."""
    if get_origin(kind) is Annotated:
        inner, *notes = get_args(kind)
        return (*notes, *_notes(inner))
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()
    return tuple(note for member in members for note in _notes(member))


def _is_of(value: Any, part: Any) -> bool:
    """Whether a value is of a type that is no union; of a type that has no name here, every value is."""
    if get_origin(part) is Literal:
        return any(value == word and type(value) is type(word) for word in get_args(part))
    if get_origin(part) is tuple:
        return isinstance(value, tuple | list) and all(_is_of(one, get_args(part)[0]) for one in value)
    if part is bool:
        return isinstance(value, bool | np.bool_)
    if part in (int, float):
        kinds = numbers.Integral if part is int else numbers.Real
        return isinstance(value, kinds) and not isinstance(value, bool | np.bool_)
    if part in (str, types.NoneType):
        return isinstance(value, part)
    if get_origin(part) is Callable:
        return callable(value)
    # Arrays have been converted, see `check`.
    return part is not jax.Array
