"""Columns of users' tables as plain arrays: one rule for lists, objects, missing values, dates and unusual types.

A column is numbers [P, ...], dates [P] or words [P]; a missing value is NaN, NaT or None, respectively.
"""

import datetime
import numbers
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from pfl_jax.data import pictures
from pfl_jax.errors import InvalidInput, shortened

Kind = Literal["numbers", "dates", "words", "values of several types"]

NO_VALUE = ("", "na", "n/a", "nan", "null", "none", "?")
"""Texts, in lower case, that stand for a missing number."""

NOTHING = (*NO_VALUE, "#n/a", "#n/a n/a", "#na", "-nan", "<na>", "1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan")
"""Texts, in lower case, that pandas or another reader takes for a missing value."""


def plain(values: Any, what: str = "a column") -> np.ndarray:
    """A column as an array of its kind, pictures as in `pictures.stack`; objects of several types stay unchanged."""
    if isinstance(values, np.ma.MaskedArray):
        gone = np.ma.getmaskarray(values)
        values = without(values.data, gone) if gone.any() else values.data
    try:
        array = pictures.as_array(values, what)
    except InvalidInput:
        raise
    except ValueError:
        # Rows of different lengths.
        array = np.empty(len(values), object)
        array[:] = values
    if array.dtype.kind in "US" and not hasattr(values, "dtype"):
        # NumPy turns everything beside a text into text, even NaN.
        array = np.array(values, object)
    if array.dtype.kind == "V" and array.dtype.names is None:
        # bfloat16, float8 and int4, which NumPy lacks.
        return array.astype(np.float32)
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
    elif are(datetime.date) and not mixes_zones(array):
        # JAX and NumPy have no time zones: all times are converted to UTC.
        found = np.array([_without_zone(value) for value in there], "datetime64[us]")
        nothing = np.datetime64("NaT", "us")
    else:
        return array
    whole = np.full(len(values), nothing, found.dtype) if gone.any() else found
    whole[~gone] = found
    return whole.reshape(array.shape)


def _is_nothing(value: Any) -> bool:
    """Whether a value is None, NaN, NaT or pandas' NA."""
    if value is None or type(value).__name__ == "NAType":
        return True
    return isinstance(value, numbers.Number | datetime.date | np.datetime64) and bool(value != value)


def _without_zone(value: datetime.date) -> datetime.date:
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone(datetime.UTC).replace(tzinfo=None)
    return value


def mixes_zones(column: np.ndarray) -> bool:
    """Whether some times among objects have a time zone and others none, so that nothing says which is later."""
    dates = (value for value in column.ravel() if isinstance(value, datetime.date) and not _is_nothing(value))
    return len({getattr(value, "tzinfo", None) is None for value in dates}) > 1


def kind(column: Any) -> Kind:
    """Kind of the values in a column."""
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


def sample(column: np.ndarray, row: int) -> str:
    """Value in a row, for errors."""
    value = column[row]
    if isinstance(value, np.datetime64):
        return str(value.astype("datetime64[s]")).removesuffix("T00:00:00")
    return shortened(repr(value.item() if isinstance(value, np.generic) else value), 40)


def without(column: np.ndarray, gone: np.ndarray) -> np.ndarray:
    """Objects [P, ...] with None where a value is `gone`."""
    found = column.astype(object)
    found[gone] = None
    return found


def alike(name: str, parts: Sequence[tuple[str, Any]]) -> list[Any]:
    """Parts of the column `name`, each with its source, as arrays of one type; gray pictures beside color become RGB.

    A part without any value takes the kind of the others. InvalidInput for parts of several kinds or shapes, or for
    pixels beside other images.
    """
    arrays = pictures.alike([part for _, part in parts])
    is_empty = [one.ndim == 1 and one.dtype.kind == "f" and bool(np.isnan(one).all()) for one in arrays]
    usual = is_empty.index(False) if False in is_empty else 0
    nothing: dict[Kind, Any] = {"words": None, "dates": np.datetime64("NaT", "us")}
    for place, one in enumerate(arrays):
        if is_empty[place]:
            arrays[place] = one = np.full(len(one), nothing.get(kind(arrays[usual]), np.nan))
        if (found := _form(one)) != (wanted := _form(arrays[usual])):
            raise InvalidInput(
                f"{parts[place][0]} has {found} in {name}, and {parts[usual][0]} {wanted}: give all the same"
            )
    common = np.result_type(*(one.dtype for one in arrays))
    return [one.astype(common, copy=False) for one in arrays]


def _form(column: Any) -> str:
    """Kind and shape that all parts of a column must share."""
    what = str(column.dtype) if column.ndim == 4 else kind(column)
    return f"{what} {list(column.shape[1:])}" if column.ndim > 1 else what


def of_texts(texts: np.ndarray, form: re.Pattern[str] | None = None) -> np.ndarray:
    """Texts str [P] as whole numbers, as numbers, or as words: the first of these that fits all.

    `form` is the allowed form of numbers; None for any form. Among numbers, a text in NO_VALUE is a missing one.
    """
    forms = () if form is None else (form.fullmatch(text) or text.lower() in NO_VALUE for text in texts.tolist())
    # Python reads 1_0 as ten.
    if not np.any(np.char.find(texts, "_") >= 0) and all(forms):
        for wanted in (np.int64, np.float64):
            with suppress(ValueError, OverflowError):
                return texts.astype(wanted)
        with suppress(ValueError):
            return np.where(np.isin(np.char.lower(texts), NO_VALUE), "nan", texts).astype(np.float64)
    return without(texts, texts == "") if np.any(texts == "") else texts


def dated(words: np.ndarray) -> np.ndarray:
    """Words as dates if all are ISO 8601 dates, 2020-01-31 or 2020-01-31T12:00; otherwise unchanged."""
    with suppress(ValueError):
        return plain(np.array([value and datetime.datetime.fromisoformat(value) for value in words], object))
    return words
