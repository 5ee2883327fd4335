"""Preparation of a table's columns as a model's inputs: missing values, words and scales, as in the training rows."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from pfl_jax.data import checks, columns
from pfl_jax.data.sources import Dataset
from pfl_jax.data.table import named_columns, odd_value, table
from pfl_jax.errors import InvalidInput, imported

Impute: TypeAlias = Literal["mean", "median", "most_frequent"]
"""Replacement of a missing number, as in scikit-learn's SimpleImputer; for a word, always the most frequent one."""

Encode: TypeAlias = Literal["one_hot", "ordinal"]
"""Conversion of a word: flags of all words, or its place among them in alphabetical order."""


@dataclass(frozen=True)
class InputColumn:
    """A column of inputs.

    Attributes:
      name: name of the column.
      kind: "numbers" or "words".
      fill: replacement of a missing value, a list for an array; None for no replacement.
      words: words of the training rows, sorted.
      shape: shape of a row's value.
    """

    name: str
    kind: str = "numbers"
    fill: Any = None
    words: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()

    def numbers(self, column: np.ndarray, encode: Encode | None) -> np.ndarray:
        """Numbers [P, ...] from a column of this kind; words become flags [P, K] if `encode` says so."""
        if self.fill is not None and (gone := columns.missing(column)).any():
            column = np.where(gone, np.asarray(self.fill), column)
        if self.kind != "words":
            return column
        flags = column[:, None] == np.array(self.words, object)
        if encode == "one_hot":
            return flags.astype(np.int64)
        return np.where(flags.any(axis=1), flags.argmax(axis=1), -1)

    def alike(self, column: np.ndarray) -> np.ndarray:
        """A column of new rows in the form of the training rows, even if another reader gave it another form.

        Texts become numbers as in a .csv file; numbers and True become the only word that reads like them. InvalidInput
        where that is not possible, or where a value is missing without a replacement.
        """
        if column.shape[1:] != self.shape:
            raise self._odd(f"a value of shape {list(column.shape[1:])}", 0, f"one of shape {list(self.shape)}")
        kind = columns.kind(column)
        if {kind, self.kind} == {"words"}:
            texts = ((one, "" if one is None else one.strip()) for one in column)
            column = np.array([one if one in self.words else text or None for one, text in texts], object)
        elif kind == "words":
            column = columns.of_texts(np.array(["" if one is None else one.strip() for one in column]))
        elif kind == "numbers" and self.kind == "words":
            column = self._words(column)
        if columns.kind(column) != self.kind:
            row, found = odd_value(column)
            raise self._odd(found, row, self.kind)
        gone = columns.missing(column)
        if gone.any() and (self.fill is None or any(word.lower() in columns.NOTHING for word in self.words)):
            raise self._odd("nothing", int(gone.argmax()) // gone[0].size, "a value in each row, or the word for none")
        return column

    def _words(self, column: np.ndarray) -> np.ndarray:
        """Words from numbers; NaN is missing."""
        of_number: dict[int | float, list[str]] = {}
        for word in self.words:
            number = columns.of_texts(np.array([{"true": "1", "false": "0"}.get(word.lower(), word)]))
            if number.dtype.kind in "if":
                of_number.setdefault(number[0].item(), []).append(word)
        found: list[str | None] = []
        for row, value in enumerate(column.tolist()):
            match [None] if value != value else of_number.get(value, []):
                case [word]:
                    found.append(word)
                case _:
                    raise self._odd(str(value), row, "words")
        return np.array(found, object)

    def _odd(self, found: str, row: int, wanted: str) -> InvalidInput:
        return InvalidInput(f"{self.name} has {found} in row {row} (counted from 0), and in training {wanted}")


@dataclass(frozen=True)
class Preparation:
    """Preparation of rows with named columns as a model's inputs, as in training; of a data set or an exported model.

    Attributes:
      columns: the columns, in the order of the inputs.
      encode: conversion of words to numbers; a word that no training row has gets no flag, or -1.
      dtype: type of the training rows' inputs before normalization.
      mean, std: mean and deviation of the training rows, for normalization, nested tuples; None for no normalization.

    Example:
      >>> from pfl_jax import data
      >>> rows = {"age": [30, 40, 50, 60, None, 70] * 2, "sex": ["f", "m"] * 6, "y": [0, 1] * 6}
      >>> dataset = data.from_clients({"ward": rows, "clinic": rows}, impute="median", encode="one_hot")
      >>> dataset.preparation({"sex": ["m", "f"], "age": [41, None]}).tolist()
      [[41.0, 0.0, 1.0], [50.0, 1.0, 0.0]]
    """

    columns: tuple[InputColumn, ...]
    encode: Encode | None = None
    dtype: str = "float32"
    mean: Any = None
    std: Any = None

    def __call__(self, rows: Any) -> np.ndarray:
        """Inputs [P, ...] of new rows; a row with the values of a training row gives the same input, bit for bit.

        Args:
          rows: a mapping from names to columns, or a data frame; columns that are not inputs are ignored. Numbers may
            be texts, as from csv.DictReader; words that read as numbers or True may be those values, as from pandas.

        Raises:
          InvalidInput: the rows are something else, a column is missing, or a column differs from the training rows:
            another kind or shape, or a missing value.
        """
        names = {one.name for one in self.columns}
        found = list(named_columns("the table", rows))
        given = table("the table", (pair for pair in found if pair[0] in names)).columns
        if gone := [one.name for one in self.columns if one.name not in given]:
            raise InvalidInput(f"the table has no column {gone[0]} (there are {', '.join(dict(found))})")
        x = self.side_by_side({one.name: one.alike(given[one.name]) for one in self.columns})
        # Whole numbers that were floats in training are floats, and may be larger.
        wide = self.mean is not None and self.dtype != "float32"
        x = checks.inputs(x.astype(np.float64) if "float" in self.dtype else x, "the table", wide=wide)
        with np.errstate(invalid="ignore"):
            whole = x.astype(self.dtype)
        x = whole if np.array_equal(whole, x) else x
        return x if self.mean is None else _scaled(x, np.asarray(self.mean), np.asarray(self.std))

    def side_by_side(self, inputs: Mapping[str, Any]) -> Any:
        """Inputs [P, ...] of the columns `inputs` by name, of the right kinds; not yet normalized."""
        found = [one.numbers(inputs[one.name], self.encode) for one in self.columns]
        if len(found) == 1 and self.columns[0].shape:
            return found[0]
        return np.concatenate([column if column.ndim > 1 else column[:, None] for column in found], axis=1)

    def to_json(self) -> str:
        """The preparation as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Preparation":
        """The preparation from the text that `to_json` wrote."""
        fields = json.loads(text)
        own = [InputColumn(**{key: _tuples(value) for key, value in one.items()}) for one in fields.pop("columns")]
        return cls(tuple(own), **{key: _tuples(value) for key, value in fields.items()})


def _tuples(value: Any) -> Any:
    """Nested lists as tuples, which compare as a whole."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def fit(
    inputs: Mapping[str, Any], train: Any, impute: Impute | None, encode: Encode | None, *, normalize: bool
) -> tuple[Preparation, np.ndarray]:
    """Preparation of the columns `inputs`, fitted to the rows `train`, a slice or numbers; and the inputs of all rows.

    `impute` and `encode` are as in `pfl_jax.data.arrays.from_tables`. Inputs that `normalize` changes next keep their
    digits: rounded to float32 first, times as seconds since 1970 would be equal for minutes.
    """
    prepared = Preparation(tuple(_fitted(name, column, train, impute) for name, column in inputs.items()), encode)
    wide = normalize and any(one.dtype.kind in "fiu" and one.dtype.itemsize > 4 for one in inputs.values())
    x = checks.inputs(prepared.side_by_side(inputs), "x", wide=wide)
    return dataclasses.replace(prepared, dtype=x.dtype.name), x


def _fitted(name: str, column: Any, train: Any, impute: Impute | None) -> InputColumn:
    kind, shape = columns.kind(column), column.shape[1:]
    if kind == "numbers" and (impute is None or (shape and column.dtype.kind != "f")):
        return InputColumn(name, shape=shape)
    there = np.asarray(column[train])
    fill = None if impute is None else _fill(name, there, impute if kind != "words" else "most_frequent")
    if kind != "words":
        return InputColumn(name, kind, fill, shape=shape)
    words = tuple(np.unique(there[~columns.missing(there)].astype(str)).tolist())
    if 2 * len(words) > len(there):
        raise InvalidInput(
            f"{name} has {len(words)} different words in {len(there)} training rows: leave it out (--drop)"
        )
    return InputColumn(name, kind, fill, words)


def _fill(name: str, there: np.ndarray, strategy: str) -> Any:
    """Replacement of missing values: a word, a number, or lists of numbers for an array."""
    impute = imported("sklearn.impute", "missing values need scikit-learn: pip install scikit-learn")
    flat = there.astype(object if there.dtype.kind in "UO" else np.float64).reshape(len(there), -1)
    if columns.missing(there).reshape(flat.shape).all(axis=0).any():
        raise InvalidInput(f"{name} has no value in any training row: leave it out (--drop)")
    nothing = None if flat.dtype.kind == "O" else np.nan
    if nothing is not None and np.isinf(flat).any():
        raise InvalidInput(f"{name} has an infinite value in a training row: leave such rows out")
    found = impute.SimpleImputer(missing_values=nothing, strategy=strategy).fit(flat).statistics_
    return _tuples(found.reshape(there.shape[1:]).tolist())


def normalized(made: Dataset, prepared: Preparation) -> tuple[Dataset, Preparation]:
    """The data set `made`, normalized by its training rows, and the preparation `prepared` with that normalization.

    uint8 images stay unchanged, and the data set has the mean and deviation of pixels / 255.
    """
    train_x = made.train_x
    axes = (0, 1, 2) if train_x.ndim == 4 else (0,)
    size = int(np.prod([train_x.shape[axis] for axis in axes], dtype=np.int64))
    # Parts of at most 64 MiB: their squares have eight bytes for each pixel.
    parts = np.array_split(train_x, 1 + train_x.nbytes // 2**26)
    mean: Any = sum(part.sum(axes, np.float64) for part in parts) / size
    std = np.sqrt(sum(np.square(part - mean).sum(axes, np.float64) for part in parts) / size)
    lowest, highest = (limit(axes).astype(np.float64) for limit in (train_x.min, train_x.max))
    # By rounding, the mean and deviation of a constant would be only nearly its value and 0, and so may its values be.
    constant = highest - lowest <= 1e-13 * np.maximum(abs(lowest), abs(highest))
    mean, std = np.where(constant, lowest, mean), np.where(constant, 1.0, std)
    if train_x.dtype == np.uint8 and train_x.ndim == 4:
        std = np.where(constant, 1.0, std / 255)
        return made._replace(mean=tuple((mean / 255).tolist()), std=tuple(std.tolist())), prepared
    found = [_scaled(part, mean, std) for part in (train_x, made.test_x)]
    scale = _tuples(mean.tolist()), _tuples(std.tolist())
    return made._replace(train_x=found[0], test_x=found[1]), dataclasses.replace(prepared, mean=scale[0], std=scale[1])


def _scaled(x: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    return ((x - mean) / std).astype(np.float32)
