"""Validation of arguments by their annotations, for library and command line: `check_value` is the one check.

An annotation gives the type, the range of a number (`Range`), the form of a text (`Words`), a further condition
(`Check`), and another hyper-parameter that decides whether this one is read (`ReadWith`). A text in the annotation
replaces the type's name in errors, where that name says too little:

    def my_method(
        model, training=LocalTraining(), *, mu: NotNegative = 1.0, tau: Annotated[Positive, ReadWith("mu")] = 0.5
    ): ...

Settings and the arguments of `pfl_jax.run` are checked in the same way. A traced number passes, since its value is not
known.
"""

import contextlib
import difflib
import functools
import inspect
import math
import numbers
import os
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar, Union, get_args, get_origin

import jax
import numpy as np
from jax.core import Tracer

from pfl_jax.errors import InvalidInput, describe_value

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


LARGEST = 2**63
"""Whole numbers of this size do not fit into an array, and much larger ones not even into a float."""


class Range(NamedTuple):
    """Interval of the values that a hyper-parameter can have; infinity and NaN are never inside.

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

    def __repr__(self) -> str:
        """The text for `help()`: "above 0 and at most 1"."""
        return str(self).replace("not be negative", "be at least 0").removeprefix("be ")

    def __str__(self) -> str:
        """The requirement on a value: "be at least 0 and below 1"."""
        if (self.low, self.high) == (0, math.inf):
            return "be positive" if self.above else "not be negative"
        if not self.above and not self.below and math.isfinite(self.low) and math.isfinite(self.high):
            return f"be between {self.low:g} and {self.high:g}"
        ends = [f"{'above' if self.above else 'at least'} {self.low:g}"] if math.isfinite(self.low) else []
        ends += [f"{'below' if self.below else 'at most'} {self.high:g}"] if math.isfinite(self.high) else []
        return f"be {' and '.join(ends) or 'finite'}"


class Check(NamedTuple):
    """A further check of a value, which raises InvalidInput.

    Attributes:
      check: function of the name and the value.
    """

    check: Callable[[str, Any], None]


class Words(NamedTuple):
    """Texts that a hyper-parameter accepts: names, and names with a number, as in "topk:0.01".

    Attributes:
      plain: names that stand alone.
      numbered: name -> annotation of the number after it.
    """

    plain: tuple[str, ...]
    numbered: Mapping[str, Any]

    def __str__(self) -> str:
        """Enumeration of all texts: "none, sign or topk:NUMBER"."""
        return listed([*self.plain, *(f"{name}:NUMBER" for name in self.numbered)])

    def parse(self, text: Any, name: str) -> tuple[str, float | None]:
        """Name and number (None if absent) of a text; InvalidInput, which mentions `name`, for any other text."""
        head, colon, digits = str(text).partition(":")
        if not colon and head in self.plain:
            return head, None
        if head not in self.numbered:
            raise InvalidInput(f"{name} must be {self}, not {text!r}{hint(head, [*self.plain, *self.numbered])}")
        number: Any = digits
        with contextlib.suppress(ValueError):
            number = int(digits) if int in parts(self.numbered[head]) else float(digits)
        check_value(f"{name} {head}:NUMBER", number, self.numbered[head])
        return head, number


# Learning rates and strengths; zero leaves a part unchanged, the limit of many methods.
NotNegative: TypeAlias = Annotated[float, Range(0)]
# Temperatures, scales and other divisors.
Positive: TypeAlias = Annotated[float, Range(0, above=True)]
# Shares; shares above zero; and shares below one, momentum among them.
Fraction: TypeAlias = Annotated[float, Range(0, 1)]
AboveZero: TypeAlias = Annotated[float, Range(0, 1, above=True)]
BelowOne: TypeAlias = Annotated[float, Range(0, 1, below=True)]
# Numbers of things, and sizes of shapes; and numbers of epochs or rounds of a phase, where zero skips the phase.
Count: TypeAlias = Annotated[int, Range(1)]
Epochs: TypeAlias = Annotated[int, Range(0)]


class ReadWith(NamedTuple):
    """Condition under which a hyper-parameter is read.

    Attributes:
      name: another hyper-parameter.
      values: values of the other with which this one is read; empty for all but zero, False and None.
    """

    name: str
    values: tuple[Any, ...] = ()

    def is_met(self, value: Any) -> bool:
        """Whether the other hyper-parameter has such a value."""
        return value in self.values if self.values else bool(value)


class AtInit(NamedTuple):
    """Note on a hyper-parameter that only a client's first state depends on: it cannot change with the round."""


def range_of(kind: Any) -> Range:
    """Range of the numbers of a type `kind`; any finite number if its annotation has no range."""
    return next((note for note in notes_of(kind) if isinstance(note, Range)), Range())


def check_arguments(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function so that it first checks its arguments by their annotations, see `check_value`."""
    signature, kinds = inspect.signature(function), inspect.get_annotations(function, eval_str=True)

    @functools.wraps(function)
    def with_checks(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        check_values(signature.bind(*args, **kwargs).arguments, kinds)
        return function(*args, **kwargs)

    return with_checks


def check_values(values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Check values by name, as far as `kinds` has an annotation for the name, see `check_value`."""
    for name, value in values.items():
        if name in kinds:
            check_value(name, value, kinds[name])


def check_value(name: str, value: Any, kind: Any) -> None:
    """Raise InvalidInput unless a value has the right type and, if it is a number, is in its range.

    Args:
      name: name of the value as the user knows it, for the error.
      value: the value. Where a number is allowed, a traced number and an array of several are allowed too.
      kind: annotation, such as `Count`, `Literal["a", "b"] | None` or a class.
    """
    # JAX's random keys have their own type.
    is_array = isinstance(getattr(value, "dtype", None), np.dtype)
    plain = np.asarray(value).item() if is_array and not _is_unknown(value) else value
    notes = notes_of(kind)
    if not any(_is_of(one, part) for part in parts(kind) for one in (value, plain)):
        choices = literals(kind)
        if choices and isinstance(value, str):
            raise InvalidInput(unknown(name, value, choices))
        wanted = next((note for note in notes if isinstance(note, str)), describe(kind))
        raise InvalidInput(f"{name} must be {wanted}, not {describe_value(plain)}")
    for note in notes:
        if isinstance(note, Words) and value is not None:
            note.parse(plain, name)
        elif isinstance(note, Check):
            note.check(name, value)
    limits = range_of(kind)
    if _is_number(plain) and isinstance(plain, int) and abs(plain) >= LARGEST:
        raise InvalidInput(f"{name} must be a number of at most 64 bits")
    if _is_number(plain) and not limits.has(plain):
        is_unbounded = not math.isfinite(plain) and limits.high == math.inf
        raise InvalidInput(f"{name} must {Range() if is_unbounded else limits}, not {plain:g}")


def check_shapes(**given: tuple[Any, str]) -> None:
    """Raise InvalidInput unless arrays have these axes; axes with the same letter need equal sizes.

    Args:
      **given: name -> array, and a letter for each of its axes, such as features=(features, "nd").
    """
    sizes: dict[str, int] = {}
    for array, axes in given.values():
        shape = np.shape(array)
        if len(shape) != len(axes) or any(sizes.setdefault(*one) != one[1] for one in zip(axes, shape, strict=True)):
            shapes = ", ".join(f"{name} {list(np.shape(array))}" for name, (array, _) in given.items())
            wanted = ", ".join(f"{name} [{', '.join(axes)}]" for name, (_, axes) in given.items())
            raise InvalidInput(f"shapes {shapes} do not fit each other: give {wanted}")


def _is_unknown(value: Any) -> bool:
    """Whether a value is traced, an array of several numbers, or held by another machine."""
    if isinstance(value, Tracer | jax.ShapeDtypeStruct) or getattr(value, "ndim", 0):
        return True
    return isinstance(value, jax.Array) and not value.is_fully_addressable


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_)


def _is_of(value: Any, part: Any) -> bool:
    """Whether a value is of a type; the type is not a union."""
    base = get_origin(part) or part
    if base is Literal:
        return any(value == one and type(value) is type(one) for one in get_args(part))
    if get_origin(part) is tuple:
        return isinstance(value, tuple | list) and all(_is_of(one, get_args(part)[0]) for one in value)
    if base is float:
        return _is_unknown(value) or _is_number(value)
    if base is int:
        return _is_unknown(value) or (_is_number(value) and isinstance(value, numbers.Integral))
    if base in (bool, jax.Array):
        return isinstance(value, bool | np.bool_ if base is bool else jax.Array | np.ndarray | np.generic)
    return base is Any or not isinstance(base, type) or isinstance(value, base)


def unknown(name: str, value: Any, choices: Iterable[str]) -> str:
    """Error message for a `value` of `name` that is not among the `choices`; suggests the nearest ones."""
    choices = list(choices)
    if len(choices) > MOST_NAMED and (near := _nearest(str(value), choices)):
        return f"unknown {name} {str(value)!r}; did you mean {listed(near[:3])}?"
    return f"unknown {name} {str(value)!r} (there are {', '.join(choices)}){hint(str(value), choices)}"


def hint(word: str, choices: Iterable[str]) -> str:
    """End of an error message that suggests the nearest of `choices` to a word; "" if none is near."""
    near = _nearest(word, [*choices])
    return f"; did you mean {near[0]}?" if near else ""


MOST_NAMED = 12
"""Number of choices up to which an error names all of them."""


def _nearest(word: str, choices: Sequence[str]) -> list[str]:
    """Choices near to a word, the nearest first; equally near ones by the length of the common beginning."""

    def nearness(choice: str) -> tuple[float, int]:
        return difflib.SequenceMatcher(None, choice, word).ratio(), len(os.path.commonprefix([choice, word]))

    near = difflib.get_close_matches(word, choices, n=max(len(choices), 1))
    return sorted(near, key=nearness, reverse=True)


def parts(kind: Any) -> tuple[Any, ...]:
    """Members of a union type `kind`, or the type itself, without `Annotated`."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(inner for part in get_args(kind) for inner in parts(part))
    return (kind,)


def literals(kind: Any) -> list[str]:
    """Words that a value of type `kind` may be."""
    return [str(word) for part in parts(kind) if get_origin(part) is Literal for word in get_args(part)]


def describe(kind: Any) -> str:
    """Description of the values of type `kind`: "a whole number or None"."""
    names: list[str] = []
    for part in parts(kind):
        base = get_origin(part) or part
        if base is Literal:
            names += map(str, get_args(part))
        elif get_origin(part) is tuple:
            names.append("one or more of " + describe(get_args(part)[0]))
        elif base is str and names:
            # Beside a Literal, str stands for values that are not built in.
            names.append("FILE.py:NAME")
        elif base is not jax.Array or not {int, float} & {*parts(kind)}:
            name = getattr(base, "__name__", str(base))
            names.append(_WORDS.get(base, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"))
    return listed(list(dict.fromkeys(names)))


_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    types.NoneType: "None",
    jax.Array: "an array",
    np.ndarray: "an array",
    Callable: "a function",
    Mapping: "a dictionary",
    Sequence: "a list",
}


def listed(names: Sequence[str], conjunction: str = "or") -> str:
    """Enumeration "a, b or c" of `names`, with a `conjunction` before the last."""
    return f" {conjunction} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def notes_of(kind: Any) -> tuple[Any, ...]:
    """Notes in the `Annotated` of a type `kind` and of the members of a union."""
    if get_origin(kind) is Annotated:
        inner, *notes = get_args(kind)
        return (*notes, *notes_of(inner))
    members = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()
    return tuple(note for member in members for note in notes_of(member))
