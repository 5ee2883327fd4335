"""Columns of users' tables as plain arrays: one rule for lists, objects, missing values, dates and unusual types.

A column is numbers [P, ...] in which NaN is missing, dates [P] in which NaT is, or words [P] in which None is.
"""

import datetime
import numbers
from contextlib import suppress
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from pfl_jax.data import pictures
from pfl_jax.data.rows import LazyArray
from pfl_jax.errors import InvalidInput

Kind = Literal["numbers", "dates", "words", "values of several types"]

NO_VALUE = ("", "na", "n/a", "nan", "null", "none", "?")
"""Texts, in lower case, that stand for a missing number."""


def plain(values: Any, what: str = "a column") -> Any:
    """A column as an array of its kind; objects of several types stay what they are, a kind of its own.

    Args:
      values: the column; pictures become arrays as of `pictures.stack`.
      what: its name, for errors.
    """
    if isinstance(values, LazyArray):
        return values
    if isinstance(values, np.ma.MaskedArray):
        if not np.ma.getmaskarray(values).any():
            values = values.data
        elif values.dtype.kind in "biuf":
            values = np.ma.filled(values.astype(np.float64), np.nan)
        else:
            values = np.ma.filled(values.astype(object), None)
    try:
        array = pictures.as_array(values, what)
    except InvalidInput:
        raise
    except ValueError:
        # Rows of different lengths.
        array = np.empty(len(values), object)
        array[:] = values
    if array.dtype.kind == "V" and jnp.issubdtype(array.dtype, np.number):
        # bfloat16, float8 and int4, which NumPy does not know.
        return array.astype(np.float32 if jnp.issubdtype(array.dtype, np.floating) else np.int8)
    if array.dtype.kind == "S":
        return np.char.decode(array, "utf-8", "replace")
    return _of_objects(array) if array.dtype.kind == "O" else array


def _of_objects(array: np.ndarray) -> np.ndarray:
    """Numbers, dates or words of objects, if all of them are of one kind or missing; rows of arrays as one array."""
    values = array.ravel().tolist()
    gone = np.array([_is_nothing(value) for value in values], bool)
    there = [value for value, is_gone in zip(values, gone, strict=True) if not is_gone]

    def are(*types: type) -> bool:
        return all(isinstance(value, types) for value in there)

    if not there:
        return np.full(array.shape, np.nan)
    if are(list, tuple, np.ndarray):
        rows = [plain(value) for value in there]
        alike = not gone.any() and len({(row.shape, row.dtype.kind) for row in rows}) == 1
        return plain(np.stack(rows)) if alike and rows[0].dtype.kind != "O" else array
    if are(numbers.Number, np.bool_):
        found, nothing = np.array(there), np.nan
        if found.dtype.kind == "O" or (gone.any() and found.dtype.kind != "c"):
            found = found.astype(np.float64)
    elif are(str, bytes):
        texts = [value.decode("utf-8", "replace") if isinstance(value, bytes) else value for value in there]
        found, nothing = np.array(texts, object if gone.any() else str), None
    elif are(datetime.date):
        # JAX and NumPy have no time zones: all times are those of Greenwich.
        found = np.array([_without_zone(value) for value in there], "datetime64[us]")
        nothing = np.datetime64("NaT", "us")
    else:
        return array
    whole = np.full(len(values), nothing, found.dtype) if gone.any() else found
    whole[~gone] = found
    return whole.reshape(array.shape)


def _is_nothing(value: Any) -> bool:
    """Whether this is None, NaN, NaT or pandas' NA."""
    if value is None or type(value).__name__ == "NAType":
        return True
    return isinstance(value, numbers.Number | datetime.date | np.datetime64) and bool(value != value)


def _without_zone(value: datetime.date) -> datetime.date:
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone(datetime.UTC).replace(tzinfo=None)
    return value


def kind(column: Any) -> Kind:
    """What a column holds."""
    if column.dtype.kind in "biuf":
        return "numbers"
    if column.ndim > 1:
        return "values of several types"
    if column.dtype.kind == "M":
        return "dates"
    is_words = column.dtype.kind == "U" or (
        column.dtype.kind == "O" and all(value is None or isinstance(value, str) for value in column)
    )
    return "words" if is_words else "values of several types"


def missing(column: np.ndarray) -> np.ndarray:
    """Whether a value is missing, [P, ...]."""
    if column.dtype.kind == "O":
        return np.array([value is None for value in column], bool)
    return np.isnat(column) if column.dtype.kind == "M" else column != column


def is_nothing(column: Any) -> bool:
    """Whether a column [P] has no value at all."""
    is_plain = isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind == "f"
    return is_plain and bool(np.isnan(column).all())


def nothing_like(some: np.ndarray, size: int) -> np.ndarray:
    """Column [P] of missing values of the kind of another one."""
    nothing: dict[Kind, Any] = {"words": None, "dates": np.datetime64("NaT", "us")}
    return np.full(size, nothing.get(kind(some), np.nan))


def of_texts(texts: np.ndarray) -> np.ndarray:
    """Texts as whole numbers, as numbers, or as words, the first of these that all of them are."""
    # To Python 1_0 is a ten.
    if not np.any(np.char.find(texts, "_") >= 0):
        for wanted in (np.int64, np.float64):
            with suppress(ValueError, OverflowError):
                return texts.astype(wanted)
        with suppress(ValueError):
            return np.where(np.isin(np.char.lower(texts), NO_VALUE), "nan", texts).astype(np.float64)
    if not np.any(texts == ""):
        return texts
    words = texts.astype(object)
    words[texts == ""] = None
    return words


def dated(words: np.ndarray) -> np.ndarray:
    """Words as dates if all of them are those of ISO 8601, 2020-01-31 or 2020-01-31T12:00; otherwise as they are."""
    with suppress(ValueError):
        return plain(np.array([value and datetime.datetime.fromisoformat(value) for value in words], object))
    return words
