"""From the columns of a table to a model's inputs: missing values, words and scales, as of the training rows."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from pfl_jax.data import checks, columns
from pfl_jax.data.sources import Dataset
from pfl_jax.data.table import check_numbers, table
from pfl_jax.errors import InvalidInput, imported

Impute: TypeAlias = Literal["mean", "median", "most_frequent"]
"""What takes the place of a missing number, as in scikit-learn's SimpleImputer; of a word, the most frequent one."""

Encode: TypeAlias = Literal["one_hot", "ordinal"]
"""What a word becomes: flags of all words, or its place among them by the alphabet."""


@dataclass(frozen=True)
class InputColumn:
    """A column of inputs.

    Attributes:
      name: its name.
      kind: "numbers" or "words".
      fill: what takes the place of a missing value, a list for an array; None where nothing does.
      words: those of the training rows, sorted.
    """

    name: str
    kind: str = "numbers"
    fill: Any = None
    words: tuple[str, ...] = ()

    def numbers(self, column: np.ndarray, encode: Encode | None) -> np.ndarray:
        """Numbers [P, ...] of a column of its kind; of words, where `encode` has them as flags, [P, K]."""
        if self.fill is not None and (gone := columns.missing(column)).any():
            column = np.where(gone, np.asarray(self.fill), column)
        if self.kind != "words":
            return column
        flags = column[:, None] == np.array(self.words, object)
        if encode == "one_hot":
            return flags.astype(np.int64)
        return np.where(flags.any(axis=1), flags.argmax(axis=1), -1)


@dataclass(frozen=True)
class Preparation:
    """Inputs of a model from rows with named columns, as in training; that of a data set, and of an exported model.

    Attributes:
      columns: the columns, in the order of the inputs.
      encode: how words become numbers; a word that no training row has is no flag, or -1.
      mean, std: of the training rows, which inputs are normalized with, nested tuples; None for none.

    Example:
      >>> from pfl_jax import data
      >>> rows = {"age": [30, 40, 50, 60, None, 70] * 2, "sex": ["f", "m"] * 6, "y": [0, 1] * 6}
      >>> dataset = data.from_clients({"ward": rows, "clinic": rows}, impute="median", encode="one_hot")
      >>> dataset.preparation({"sex": ["m", "f"], "age": [41, None]}).tolist()
      [[41.0, 0.0, 1.0], [50.0, 1.0, 0.0]]
    """

    columns: tuple[InputColumn, ...]
    encode: Encode | None = None
    mean: Any = None
    std: Any = None

    def __call__(self, rows: Any) -> np.ndarray:
        """Inputs [P, ...] of new rows.

        Args:
          rows: a mapping from names to columns, or a data frame; columns that are no inputs are left alone.

        Raises:
          InvalidInput: a column is missing, or has what the training rows did not: words, or nothing.
        """
        named = [(name, rows[name]) for name in map(str, getattr(rows, "columns", rows))]
        given = table("the table", named).columns
        if gone := [one.name for one in self.columns if one.name not in given]:
            raise InvalidInput(f"the table has no column {gone[0]} (there are {', '.join(given)})")
        inputs = {one.name: given[one.name] for one in self.columns}
        impute = all(one.fill is not None for one in self.columns)
        check_numbers("the table", inputs, impute=impute, encode=self.encode is not None)
        x = checks.inputs(self.side_by_side(inputs), "the table")
        return x if self.mean is None else _scaled(x, np.asarray(self.mean), np.asarray(self.std))

    @property
    def is_plain(self) -> bool:
        """Whether inputs are what the only column has."""
        return len(self.columns) == 1 and self.columns[0] == InputColumn(self.columns[0].name) and self.mean is None

    def side_by_side(self, inputs: Mapping[str, Any]) -> Any:
        """Inputs [P, ...] of the columns `inputs` by name, of the right kinds; not yet normalized."""
        found = [one.numbers(inputs[one.name], self.encode) for one in self.columns]
        if len(found) == 1 and inputs[self.columns[0].name].ndim > 1:
            return found[0]
        return np.concatenate([column if column.ndim > 1 else column[:, None] for column in found], axis=1)

    def to_json(self) -> str:
        """The preparation as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Preparation":
        """The preparation that `to_json` wrote."""
        fields = json.loads(text)
        own = [InputColumn(**{key: _tuples(value) for key, value in one.items()}) for one in fields.pop("columns")]
        return cls(tuple(own), **{key: _tuples(value) for key, value in fields.items()})


def _tuples(value: Any) -> Any:
    """Nested lists as tuples, which compare as a whole."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def fit(inputs: Mapping[str, Any], train: Any, impute: Impute | None, encode: Encode | None) -> Preparation:
    """Preparation of the columns `inputs` by the rows `train`, a slice or numbers; `impute`, `encode` as of tables."""
    return Preparation(tuple(_fitted(name, column, train, impute) for name, column in inputs.items()), encode)


def _fitted(name: str, column: Any, train: Any, impute: Impute | None) -> InputColumn:
    kind = columns.kind(column)
    if kind == "numbers" and (impute is None or (column.ndim > 1 and column.dtype.kind != "f")):
        return InputColumn(name)
    there = np.asarray(column[train])
    fill = None if impute is None else _fill(name, there, impute if kind != "words" else "most_frequent")
    if kind != "words":
        return InputColumn(name, kind, fill)
    words = tuple(np.unique(there[~columns.missing(there)].astype(str)).tolist())
    if 2 * len(words) > len(there):
        raise InvalidInput(
            f"{name} has {len(words)} different words in {len(there)} training rows: leave it out (--drop)"
        )
    return InputColumn(name, kind, fill, words)


def _fill(name: str, there: np.ndarray, strategy: str) -> Any:
    """What takes the place of missing values: a word, a number, or lists of numbers for an array."""
    impute = imported("sklearn.impute", "missing values need scikit-learn: pip install scikit-learn")
    flat = there.astype(object if there.dtype.kind in "UO" else np.float64).reshape(len(there), -1)
    if columns.missing(there).reshape(flat.shape).all(axis=0).any():
        raise InvalidInput(f"{name} has no value in any training row: leave it out (--drop)")
    nothing = None if flat.dtype.kind == "O" else np.nan
    found = impute.SimpleImputer(missing_values=nothing, strategy=strategy).fit(flat).statistics_
    return _tuples(found.reshape(there.shape[1:]).tolist())


def normalized(made: Dataset, prepared: Preparation) -> tuple[Dataset, Preparation]:
    """The data set `made`, normalized by its training rows, and the preparation `prepared` that does so too.

    uint8 images stay as they are, and the data set has the mean and deviation of pixels / 255.
    """
    train_x = made.train_x
    axes = (0, 1, 2) if train_x.ndim == 4 else (0,)
    size = int(np.prod([train_x.shape[axis] for axis in axes], dtype=np.int64))
    # Parts of at most 64 MiB: their squares have eight bytes for each pixel.
    parts = np.array_split(train_x, 1 + train_x.nbytes // 2**26)
    mean: Any = sum(part.sum(axes, np.float64) for part in parts) / size
    std = np.sqrt(sum(np.square(part - mean).sum(axes, np.float64) for part in parts) / size)
    lowest = train_x.min(axes)
    constant = lowest == train_x.max(axes)
    # Rounding would leave a constant a mean and a deviation that are nearly, and not exactly, its own and 0.
    mean, std = np.where(constant, lowest, mean), np.where(constant, 1.0, std)
    if train_x.dtype == np.uint8 and train_x.ndim == 4:
        std = np.where(constant, 1.0, std / 255)
        return made._replace(mean=tuple((mean / 255).tolist()), std=tuple(std.tolist())), prepared
    found = [_scaled(part, mean, std) for part in (train_x, made.test_x)]
    scale = _tuples(mean.tolist()), _tuples(std.tolist())
    return made._replace(train_x=found[0], test_x=found[1]), dataclasses.replace(prepared, mean=scale[0], std=scale[1])


def _scaled(x: np.ndarray, mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    return ((x - mean) / std).astype(np.float32)
