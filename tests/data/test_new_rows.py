"""Rows of the training file, read in other ways, are prepared as in training, bit for bit, or refused."""

import csv
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pfl_jax import InvalidInput, data, files, models
from pfl_jax.data import Preparation, from_arrays, from_clients, from_file

pandas = pytest.importorskip("pandas")

ROWS = 12
KINDS = {
    "whole": ["0", "7", "-3", "12", "123456789", "2"],
    "real": ["0.1", "2", "-7.25", "1e5", "123456789.0", "3.3333333333333333"],
    "flags": ["True", "False"],
    "odd flags": ["true", "FALSE", "1"],
    "codes": ["1", "2", "x"],
    "long codes": ["01", "1", "2.0", "x", "9007199254740993", "9007199254740992"],
    "words": ["f", "m", "other one", "NA", "None"],
    "gaps": ["1", "2.5", "", "NA", "?"],
    "word gaps": ["f", "m", ""],
    "blanks": [" f", "f", "m "],
}
"""Kind of column -> what its cells may have."""


def read_by_csv(text):
    rows = list(csv.DictReader(io.StringIO(text)))
    return {name: [row[name] for row in rows] for name in rows[0]}


def read_by_pandas(text):
    return pandas.read_csv(io.StringIO(text))


READERS = {
    "csv": read_by_csv,
    "csv, rows by name": lambda text: {name: np.array(column) for name, column in read_by_csv(text).items()},
    "pandas": read_by_pandas,
    "pandas as text": lambda text: pandas.read_csv(io.StringIO(text), dtype=str),
    "pandas, nothing missing": lambda text: pandas.read_csv(io.StringIO(text), keep_default_na=False),
    "pandas, its own types": lambda text: read_by_pandas(text).convert_dtypes(),
    "dicts": lambda text: read_by_pandas(text).to_dict("list"),
    "dicts of objects": lambda text: read_by_pandas(text).astype(object).to_dict("list"),
    "categories": lambda text: read_by_pandas(text).astype("category"),
}


@st.composite
def tables(draw):
    """Name of a column -> its cells, of training rows, and numbers of some of these rows."""
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3))
    cells = {
        f"{kind} {place}": draw(st.lists(st.sampled_from(KINDS[kind]), min_size=ROWS, max_size=ROWS))
        for place, kind in enumerate(kinds)
    }
    return cells, draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS))


@settings(max_examples=40, deadline=None)
@given(
    table=tables(),
    impute=st.sampled_from([None, "mean", "most_frequent"]),
    encode=st.sampled_from(["one_hot", "ordinal"]),
    normalize=st.booleans(),
)
def test_rows_of_the_training_file_are_prepared_as_in_training_or_refused(table, impute, encode, normalize):
    cells, some = table
    names, rows = ["label", *cells], list(zip(["0", "1"] * (ROWS // 2), *cells.values(), strict=True))

    def written(numbers):
        return "".join(f"{','.join(line)}\n" for line in [names, *(rows[number] for number in numbers)])

    with tempfile.TemporaryDirectory() as folder:
        for name, numbers in (("train", range(ROWS)), ("test", range(2))):
            Path(folder, f"{name}.csv").write_text(written(numbers))
        try:
            words = {"impute": impute, "encode": encode, "normalize": normalize}
            # With test rows of its own, training rows keep their order.
            trained = from_file(Path(folder, "train.csv"), test_data=Path(folder, "test.csv"), **words)
        except InvalidInput:
            assume(False)
            raise
        file = Path(folder, "model.safetensors")
        files.save_model(file, {"head": {"bias": np.zeros(2, np.float32)}}, trained)
        prepare = files.load_model(file).inputs
    taken = 0
    for how, read in READERS.items():
        try:
            x = prepare(read(written(some)))
        except InvalidInput:
            continue
        taken += how == "csv"
        want = trained.train_x[some]
        assert (x.dtype, x.tobytes()) == (want.dtype, want.tobytes()), how
    # What the csv module reads is the file's own text; only NA among words may stand for nothing.
    assert taken or any("NA" in cells[name] or "None" in cells[name] for name in cells)


SITES = ["u"] * 12 + ["v"] * 12
USUAL = {"a": np.arange(24.0), "b": np.arange(24) % 5, "flag": ["yes", "no", "1"] * 8}


def trained(encode: Any = "one_hot", **columns: Any):
    table = {"y": [0, 1] * 12, "client": SITES, **columns}
    return from_clients(pandas.DataFrame(table), encode=encode, normalize=True).preparation


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"a": [1.0], "b": [2], "flag": [0]}, "flag has 0 in row 0 (counted from 0), and in training words"),
        ({"a": ["many"], "b": [2], "flag": ["yes"]}, "a has 'many' in row 0 (counted from 0), and in training numbers"),
        ({"a": [1, None], "b": [2, 2], "flag": ["yes"] * 2}, "a has nothing in row 1"),
        ({"a": [[1.0, 2.0]], "b": [2], "flag": ["no"]}, "a has a value of shape [2] in row 0"),
        ({"a": [1.0], "b": [2]}, "the table has no column flag (there are a, b)"),
        ([[1.0, 2, "yes"]], "the table is a list: give a dict of columns by name, or a data frame"),
    ],
)
def test_other_rows_are_refused(rows, said):
    with pytest.raises(InvalidInput) as caught:
        trained(**USUAL)(rows)
    assert said in str(caught.value)


def test_words_that_two_numbers_could_mean_are_refused():
    prepare = trained("ordinal", code=["1", "01", "x"] * 8)
    assert prepare({"code": ["01", "1", "x"]}).argsort(axis=0).ravel().tolist() == [0, 1, 2]
    with pytest.raises(InvalidInput, match="code has 1 in row 0"):
        prepare({"code": [1]})
    with pytest.raises(InvalidInput, match="code has nothing in row 1"):
        trained("ordinal", code=["NA", "m", "x"] * 8)({"code": ["m", None]})


def test_a_new_fraction_stays_one_where_training_had_whole_numbers():
    dataset = from_clients(pandas.DataFrame({"a": range(24), "y": [0, 1] * 12, "client": SITES}))
    assert dataset.preparation({"a": [3, 4]}).dtype == np.int32
    assert dataset.preparation({"a": [3.5, 4]}).tolist() == [[3.5], [4.0]]


def test_shapes_of_arrays_are_those_of_training():
    x = np.arange(48.0).reshape(24, 2)
    found = from_arrays(x, [0, 1] * 12, test_x=x[:2], test_y=[0, 1], normalize=True)
    np.testing.assert_array_equal(found.preparation({"x": x}), found.train_x)
    for odd in ([1.0, 2.0], np.ones((2, 1)), np.ones((2, 3)), np.ones((2, 1, 2))):
        with pytest.raises(
            InvalidInput, match=r"x has a value of shape \[.*\] in row 0 .*, and in training one of shape"
        ):
            found.preparation({"x": odd})


def test_names_that_are_numbers_are_texts():
    table = pandas.DataFrame({0: np.arange(24.0), 1: np.arange(24.0) * 2, "y": [0, 1] * 12, "client": SITES})
    found = from_clients(table, normalize=True)
    assert found.preparation(table).shape == (24, 2)


def test_infinite_values_are_refused_where_missing_ones_are_filled_in():
    for x in (np.array([np.inf, np.nan, *range(22)]), np.full((24, 2), np.inf)):
        with pytest.raises(InvalidInput, match="has an infinite value in a training row: leave such rows out"):
            from_arrays(x.reshape(24, -1), [0, 1] * 12, test_x=np.ones((2, x.size // 24)), test_y=[0, 1], impute="mean")


def test_pixels_of_a_table_are_scaled_as_in_training(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (24, 4, 4, 1), np.uint8)
    dataset = from_arrays(pixels, [0, 1] * 12, normalize=True)
    model = models.mlp(dataset.input_shape, 2, hidden=(2,))
    files.save_model(tmp_path / "m.safetensors", model.init(jax.random.key(0)), dataset)
    saved = files.load_model(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(saved.inputs({"x": pixels}), saved.inputs(pixels))
    assert abs(saved.inputs(pixels).mean()) < 0.1
    for odd in (object(), [{"x": 1.0}], ["yes"]):
        with pytest.raises(InvalidInput, match="inputs are arrays of numbers, or rows of a table"):
            saved.inputs(odd)
    with pytest.raises(InvalidInput, match="was not trained on a table"):
        saved._replace(preparation=None).inputs({"x": pixels})


@pytest.mark.parametrize(
    ("arrays", "about"),
    [
        (["a", "a.b"], {}),
        (["head.kernel"], {"class_names": "[1"}),
        (["head.kernel"], {"mean": "a lot", "std": "1"}),
        (["head.kernel"], {"preparation": json.dumps({"columns": [{"nam": "age"}]})}),
        (["head.kernel"], {"preparation": "[" * 100_000}),
    ],
)
def test_a_damaged_model_is_refused_when_it_is_loaded(arrays, about, tmp_path):
    path = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({name: np.zeros(2, np.float32) for name in arrays}, path, about)
    with pytest.raises(InvalidInput, match=r"m\.safetensors is not a model that save_model wrote") as caught:
        files.load_model(path)
    assert "\n" not in str(caught.value)


def test_a_preparation_is_the_same_after_a_way_through_a_file():
    for table in (USUAL, {"a": np.arange(24.0)}):
        prepared = trained(**table)
        assert Preparation.from_json(prepared.to_json()) == prepared
    assert data.load("digits").preparation is None
