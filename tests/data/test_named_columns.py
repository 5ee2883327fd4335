"""Tables of any door: columns by their names, values of unusual types, what is filled in or encoded, rows by time."""

import csv
import datetime
import json
import os
import sys
import tempfile
import types
from pathlib import Path

import client_files
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder
from tables import Frame, Split

from pfl_jax import InvalidInput, data
from pfl_jax.data import Preparation, federate, from_arrays, from_clients, from_file

RNG = np.random.default_rng(0)
NAMES, CLIENTS = ("age", "dose", "pulse"), ("ward", "clinic", "home")
TRAIN, TEST = (
    {
        name: {column: RNG.normal(size=size).tolist() for column in NAMES} | {"label": [0, 1] * (size // 2)}
        for name in CLIENTS
    }
    for size in (4, 2)
)


def rows_of(dataset):
    """Inputs and labels of each client, by its name."""
    federation, found = federate(dataset), {}
    for number, name in enumerate(dataset.client_names):
        for split in ("train", "test"):
            part = data.client_data(federation, number, split)
            real = np.asarray(part.mask)
            found[name, split] = np.asarray(part.x)[real].tobytes(), np.asarray(part.y)[real].tobytes()
    return found


WANTED = {
    (name, split): (
        np.float32(np.stack([part[name][column] for column in NAMES], axis=1)).tobytes(),
        np.int32(part[name]["label"]).tobytes(),
    )
    for name in CLIENTS
    for split, part in (("train", TRAIN), ("test", TEST))
}


def of_dicts(kind, orders, clients, _):
    """A mapping of clients: the first has the usual order of columns, the others any."""
    found = {}
    for client, order in zip(clients, [(*NAMES, "label"), *orders], strict=False):
        named = {name: np.array(TRAIN[client][name]) for name in order}
        found[client] = kind(named | {f"test_{name}": np.array(TEST[client][name]) for name in reversed(order)})
    return from_clients(found, y="label")


def stacked(part, clients, order):
    rows = {name: [value for client in clients for value in part[client][name]] for name in order}
    return rows | {"where": [client for client in clients for _ in part[client]["label"]]}


def of_csv(_, orders, clients, folder):
    """Two files, whose columns and blocks of rows have other orders."""
    for name, part, order, some in (("train", TRAIN, orders[0], clients), ("test", TEST, orders[1], clients[::-1])):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            columns = stacked(part, some, order)
            csv.writer(file).writerows([columns, *zip(*columns.values(), strict=True)])
    words = {"client_column": "where", "inputs": NAMES, "test_data": folder / "test.csv"}
    return from_file(folder / "train.csv", **words)


def of_npz(_, orders, clients, folder):
    train, test = stacked(TRAIN, clients, orders[0]), stacked(TEST, clients[::-1], orders[1])
    np.savez(folder / "rows.npz", **train, **{f"test_{name}": values for name, values in test.items()})
    return from_file(folder / "rows.npz", label="label", client_column="where", inputs=NAMES)


def of_splits(_, orders, clients, folder):
    """Flower's partitions, with a stand-in for Hugging Face's package; partitions are numbered, not named."""
    stored = {}
    for number, (client, order) in enumerate(zip(clients, [(*NAMES, "label"), *orders], strict=False)):
        (folder / f"partition_{number}").mkdir()
        (folder / f"partition_{number}" / "dataset_dict.json").touch()
        splits = {"test": TEST, "train": TRAIN}
        stored[str(folder / f"partition_{number}")] = {
            split: Split({name: np.array(part[client][name]) for name in order}) for split, part in splits.items()
        }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_from_disk=stored.get))
        return from_file(folder, client_column="client")._replace(client_names=tuple(clients))


def of_leaf(_, __, clients, folder):
    """Users in any order, over two files."""
    splits = {
        split: {
            user: (np.stack([part[user][name] for name in NAMES], 1).tolist(), part[user]["label"]) for user in clients
        }
        for split, part in (("train", TRAIN), ("test", TEST))
    }
    client_files.write_leaf(folder, splits)
    return from_file(folder, client_column="client")


DOORS = [(of_dicts, kind) for kind in (dict, Frame)] + [(door, None) for door in (of_csv, of_npz, of_splits, of_leaf)]


@pytest.mark.parametrize(("door", "kind"), DOORS, ids=lambda part: getattr(part, "__name__", ""))
@settings(max_examples=8, deadline=None)
@given(
    orders=st.lists(st.permutations([*NAMES, "label"]), min_size=2, max_size=2), clients=st.permutations(list(CLIENTS))
)
def test_columns_clients_and_files_in_any_order_are_the_same_federation(door, kind, orders, clients):
    with tempfile.TemporaryDirectory() as folder:
        assert rows_of(door(kind, orders, clients, Path(folder))) == WANTED


def test_a_data_frame_is_read_by_its_names():
    pandas = pytest.importorskip("pandas")
    frames = {name: pandas.DataFrame(TRAIN[name]) for name in CLIENTS}
    frames["home"] = frames["home"][["label", "pulse", "age", "dose"]]
    want = from_clients(TRAIN, y="label")
    np.testing.assert_array_equal(from_clients(frames, y="label").train_x, want.train_x)
    twice = pandas.concat([frames["ward"], frames["ward"][["age"]]], axis=1)
    with pytest.raises(InvalidInput, match="client ward has two columns of one name: age, dose, pulse, label, age"):
        from_clients({"ward": twice}, y="label")
    frames["ward"]["seen"] = pandas.to_datetime(["2020-01-01"] * 4, utc=True)
    with pytest.raises(InvalidInput, match="client clinic lacks seen, unlike client ward: name the columns alike"):
        from_clients(frames, y="label")
    np.testing.assert_array_equal(from_clients(frames, x=list(NAMES), y="label").train_x, want.train_x)


Y = [0, 1] * 4
GONE = np.ma.masked_array(np.arange(8), np.arange(8) == 2)


@pytest.mark.parametrize(
    ("column", "want"),
    [
        ([True, False] * 4, [1, 0] * 4),
        ([True, None, *[False] * 6], [1, None, *[0] * 6]),
        (np.array([1, None, *range(6)], object), [1, None, *range(6)]),
        (np.ma.masked_array(np.arange(8), False), range(8)),
        (GONE, [0, 1, None, *range(3, 8)]),
        (np.ma.masked_array(np.arange(8.0), np.arange(8) == 2), [0, 1, None, *range(3, 8)]),
        (jnp.arange(8, dtype=jnp.bfloat16), range(8)),
        (np.arange(8).astype(jnp.int4), [*range(8)]),
    ],
    ids=["booleans", "booleans and None", "objects", "unmasked", "masked integers", "masked", "bfloat16", "int4"],
)
def test_columns_of_unusual_types_are_numbers(column, want):
    gone = [row for row, value in enumerate(want) if value is None]
    options = {"test_fraction": 0.1, "num_classes": 0}
    if gone:
        with pytest.raises(InvalidInput, match=rf"a \(nothing in row {gone[0]}\)\. Leave columns out \(--drop\)"):
            from_clients([{"a": column, "b": Y, "y": range(8)}], **options)
        options["impute"] = "most_frequent"
    found = from_clients([{"a": column, "b": Y, "y": range(8)}], **options)
    rows = np.concatenate([found.train_x, found.test_x])[np.argsort(np.concatenate([found.train_y, found.test_y])), 0]
    there = [row for row in range(8) if row not in gone]
    np.testing.assert_array_equal(rows[there], [want[row] for row in there])


def test_a_column_without_any_value_has_the_kind_of_the_others():
    words = {"a": ["x", "y"] * 4, "b": np.arange(8), "y": Y}
    nothing = words | {"a": [None] * 8}
    found = from_clients({"one": nothing, "two": words}, impute="mean", encode="one_hot")
    assert found.preparation.columns[0].words == ("x", "y")
    assert found.input_shape == (3,)
    with pytest.raises(InvalidInput, match="client two has words in a, and client one numbers: give all the same"):
        from_clients({"one": words | {"a": np.arange(8)}, "two": words})


DAYS = [datetime.date(2020, 1, 1 + day) for day in range(8)]


def test_every_column_that_is_not_numeric_is_named_with_a_sample():
    columns = {
        "age": np.arange(8),
        "sex": ["f", "m"] * 4,
        "seen": DAYS,
        "dose": [1.0, 2.0, None, *range(5)],
        "wave": np.ones(8) * 1j,
        "any": [{"a": 1}, 2] * 4,
        "rows": [[1], [1, 2]] * 4,
        "y": Y,
    }
    with pytest.raises(InvalidInput) as error:
        from_clients([columns], x=[name for name in columns if name != "y"])
    for sample in ("sex ('f' in row 0)", "seen (2020-01-01 in row 0)", "dose (nothing in row 2)", "wave (1j in row 0)"):
        assert sample in str(error.value)
    assert "any ({'a': 1} in row 0), rows (rows of different shapes in row 0). Leave columns out (--drop)" in str(
        error.value
    )
    assert "\n" not in str(error.value)
    found = from_clients([columns], drop=["sex", "seen", "dose", "wave", "any", "rows"])
    assert found.input_shape == (1,)


def test_what_is_filled_in_and_encoded_is_that_of_the_training_rows():
    columns = {
        "age": [30.0, None, 50, 60, 90, 40, None, 20],
        "town": ["Rome", "Oslo", None, "Rome", "Oslo", "Rome", "Oslo", "Rome"],
        "y": Y,
    }
    test = {f"test_{name}": values[:2] for name, values in columns.items()} | {"test_town": ["Bonn", None]}
    flags = np.array(columns["town"], object)[:, None]
    flags = SimpleImputer(missing_values=None, strategy="most_frequent").fit_transform(flags)
    for impute in ("mean", "median", "most_frequent"):
        found = from_clients([columns | test], impute=impute, encode="one_hot")
        ages = np.array(columns["age"], float)[:, None]
        filled = SimpleImputer(strategy=impute).fit(ages)
        np.testing.assert_array_equal(found.train_x[:, :1], filled.transform(ages).astype(np.float32))
        np.testing.assert_array_equal(found.test_x[:, 0], filled.transform(ages[:2])[:, 0].astype(np.float32))
        np.testing.assert_array_equal(found.train_x[:, 1:3], OneHotEncoder().fit_transform(flags).toarray())
        # A word that no training row has is no flag.
        assert found.test_x[:, 1:3].tolist() == [[0, 0], [0, 1]]
    found = from_clients([columns | test], impute="mean", encode="ordinal", normalize=True)
    codes = OrdinalEncoder().fit_transform(flags)[:, 0]
    np.testing.assert_allclose(found.train_x[:, 1], (codes - codes.mean()) / codes.std(), rtol=1e-6)
    # An unknown word is -1, and a missing one the most frequent.
    np.testing.assert_allclose(found.test_x[:, 1], (np.array([-1, 1]) - codes.mean()) / codes.std(), rtol=1e-6)
    # The same of new rows, after a way through a file.
    again = Preparation.from_json(found.preparation.to_json())
    assert again == found.preparation
    np.testing.assert_array_equal(again(dict(reversed(columns.items()))), found.train_x)
    with pytest.raises(InvalidInput, match=r"the table has no column town \(there are age\)"):
        again({"age": [1.0]})
    # Nothing is the mean of the ages.
    new = again({"age": [None], "town": ["Rome"]})
    np.testing.assert_allclose(new[0], [0, (1 - codes.mean()) / codes.std()], atol=1e-6)


def test_booleans_and_pixels_are_filled_in_where_they_can_miss():
    found = from_clients([{"ill": [True, False] * 4, "b": [None, *range(7)], "y": Y}], impute="most_frequent")
    assert found.preparation.columns[0].fill in (0, 1)
    assert from_arrays(np.zeros((8, 4, 4, 1), np.uint8), Y, impute="mean").preparation.columns[0].fill is None


def test_features_of_arrays_are_filled_in_each_by_its_own():
    x = RNG.normal(size=(12, 2, 3))
    x[3, 1, 2] = x[4, 0, 0] = np.nan
    found = from_arrays(x, [0, 1] * 6, test_x=x[:2], test_y=[0, 1], impute="mean")
    want = np.where(np.isnan(x), np.nanmean(x, axis=0), x)
    np.testing.assert_allclose(found.train_x, want, rtol=1e-6)
    np.testing.assert_array_equal(found.preparation({"x": x}), found.train_x)
    with pytest.raises(InvalidInput, match=r"x has nan in row 3, place \[1, 2\]"):
        from_arrays(x, [0, 1] * 6)


def test_words_of_each_row_are_not_encoded():
    with pytest.raises(InvalidInput, match=r"id has 6 different words in 6 training rows"):
        from_clients([{"id": list("abcdefgh"), "b": Y, "y": Y}], encode="one_hot")


@pytest.mark.parametrize("form", ["numbers", "dates", "words"])
def test_the_latest_rows_of_each_client_are_its_test_rows(form):
    day = RNG.permutation(np.repeat(np.arange(12), 2))
    dates = np.datetime64("2020-03-01") + day
    time = {"numbers": day, "dates": dates, "words": dates.astype(str)}[form]
    table = {"a": day, "when": time, "y": np.arange(24) % 2, "client": np.repeat(["u", "v"], 12)}
    found = from_clients(
        Frame({name: np.array(column) for name, column in table.items()}), time="when", test_fraction=0.3
    )
    assert found.input_shape == (1,)
    for client in range(2):
        past, future = found.train_x[found.train_client == client], found.test_x[found.test_client == client]
        assert past.max() < future.min()
    assert 6 <= len(found.test_y) <= 10
    with pytest.raises(InvalidInput, match="client u has rows of one time only, 3: nothing is later"):
        from_arrays(np.eye(8), Y, client=["u"] * 4 + ["v"] * 4, time=[3] * 4 + [1, 2, 3, 4])
    for odd, found in ((["soon"] * 8, "'soon' in row 0"), ([0, 1, None, *range(5)], "nan in row 2")):
        with pytest.raises(InvalidInput, match=rf"when is not a column of times \(there is {found}\): write numbers"):
            from_clients([{"a": Y, "when": odd, "y": Y}], time="when")
    with pytest.raises(InvalidInput, match="and a test set cannot both be given"):
        from_arrays(np.eye(8), Y, test_x=np.eye(8), test_y=Y, time=Y)


def test_times_have_a_time_zone_or_none():
    zoned = [f"2020-01-0{day}T12:00+09:00" for day in range(1, 9)]
    assert from_arrays(np.arange(8.0)[:, None], Y, time=zoned).test_x.ravel().tolist() == [6, 7]
    words = [*zoned[:7], "2020-01-08T12:00"]
    for mixed in (words, np.array([datetime.datetime.fromisoformat(one) for one in words], object)):
        with pytest.raises(InvalidInput, match="the data: time has times with and without a time zone: give"):
            from_arrays(np.eye(8), Y, time=mixed)


def test_clients_of_few_rows_are_counted_and_left_out():
    owner = np.array(["big"] * 20 + ["huge"] * 20 + [f"small{number}" for number in range(300)])
    x, y = np.arange(340.0)[:, None], np.arange(340) % 2
    with pytest.raises(InvalidInput, match=r"client small0 has 1 row, .*\(300 of 302 clients\): .*--min-rows 2"):
        from_arrays(x, y, client=owner)
    with pytest.warns(UserWarning, match="300 of 302 clients have fewer than 2 rows, and are left out"):
        found = from_arrays(x, y, client=owner, min_rows=2)
    assert found.client_names == ("big", "huge")
    assert sorted(np.concatenate([found.train_x, found.test_x])[:, 0]) == list(range(40))
    # Of a test set too, and a mapping's clients keep their names.
    rows = {
        name: {"x": np.ones((size, 2)), "y": Y[:size], "test_x": np.ones((3, 2)), "test_y": [0, 1, 0]}
        for name, size in (("b", 4), ("a", 8))
    }
    with pytest.warns(UserWarning, match="1 of 2 clients have fewer than 8 rows"):
        found = from_clients(rows, min_rows=8)
    assert (found.client_names, len(found.train_y), len(found.test_y)) == (("a",), 8, 3)
    with pytest.raises(InvalidInput, match="is for data with clients"):
        from_arrays(x, y, min_rows=2)


def test_a_stream_is_refused_in_one_line():
    stream = types.SimpleNamespace(with_format=lambda kind: None, features={})
    with pytest.raises(InvalidInput, match="the table is a stream: take rows of it"):
        from_clients(stream)


def pictures(folder, *places):
    for number, place in enumerate(places):
        (folder / place).mkdir(parents=True, exist_ok=True)
        for copy in range(2):
            Image.fromarray(np.full((4, 4), 10 * number + copy, np.uint8)).save(folder / place / f"{copy}.png")


def test_folders_of_splits_clients_and_classes(tmp_path):
    pictures(
        tmp_path / "split", "train/cat", "train/dog", "Test/cat", "Test/dog", "train/.ipynb_checkpoints", "train/cat/.x"
    )
    (tmp_path / "split" / "train" / "cat" / "notes.txt").write_text("no image")
    found = from_file(tmp_path / "split")
    assert (found.source, found.mean) == ("image folder", None)
    assert (found.class_names, found.train_y.tolist(), found.test_y.tolist()) == (
        ("cat", "dog"),
        [0, 0, 1, 1],
        [0, 0, 1, 1],
    )
    assert found.test_x[:, 0, 0, 0].tolist() == [20, 21, 30, 31]
    pictures(tmp_path / "val", "train/cat", "train/dog", "val/cat", "val/dog", "test/cat", "test/dog")
    with pytest.warns(UserWarning, match="val: the rows of val are left out"):
        found = from_file(tmp_path / "val")
    assert found.test_x[:, 0, 0, 0].tolist() == [40, 41, 50, 51]
    pictures(tmp_path / "own", "ann/cat", "ann/dog", "bob/cat", "bob/dog")
    found = from_file(tmp_path / "own", client_column="client")
    assert (found.client_names, found.class_names) == (("ann", "bob"), ("cat", "dog"))
    assert found.train_client.tolist() == [0, 0, 0, 1, 1, 1]
    assert from_file(tmp_path / "own", label="class").class_names == ("ann", "bob")
    with pytest.raises(InvalidInput, match=r"two levels of folders \(ann/cat, ann/dog, .*--client-column client, or"):
        from_file(tmp_path / "own")
    pictures(tmp_path / "both", "train/ann/cat", "train/ann/dog", "test/ann/dog", "test/ann/cat")
    assert from_file(tmp_path / "both", client_column="who").client_names == ("ann",)
    # A folder of this name without classes is a class itself, among others.
    pictures(tmp_path / "rail", "train", "tram")
    assert from_file(tmp_path / "rail").class_names == ("train", "tram")


@pytest.mark.parametrize(
    ("places", "odd"),
    [
        (["train/cat", "train/dog", "test"], "test/0.png"),
        (["train", "train/cat", "train/dog", "test/cat", "test/dog"], "train/0.png"),
        (["train/cat", "train/dog", "test/cat", "holdout/cat"], "holdout/cat/0.png"),
        (["train", "test"], "test/0.png"),
    ],
    ids=["Kaggle's", "a stray one", "another split", "no classes"],
)
def test_splits_are_not_taken_for_classes(tmp_path, places, odd):
    pictures(tmp_path / "my", *places)
    for words in ({}, {"label": "class"}):
        with pytest.raises(InvalidInput, match=f"my has a split train, and {odd} is in no folder such as train/CLASS"):
            from_file(tmp_path / "my", **words)


def test_pipes_and_names_that_are_no_text_are_refused_or_skipped(tmp_path):
    pictures(tmp_path / "pets", "cat", "dog")
    before = data.own_files.digest(tmp_path / "pets")
    os.mkfifo(tmp_path / "pets" / "cat" / "2.png")
    (tmp_path / "pets" / "cat" / "loop").symlink_to(tmp_path / "pets")
    assert len(from_file(tmp_path / "pets", test_fraction=0.5).train_y) == 2
    assert data.own_files.digest(tmp_path / "pets") == before
    os.mkfifo(tmp_path / "my.csv")
    with pytest.raises(InvalidInput, match="is a pipe or a device, not a file"):
        from_file(tmp_path / "my.csv")
    os.mkdir(os.fsencode(tmp_path / "pets") + b"/caf\xe9")
    (tmp_path / "pets" / "cat" / "0.png").rename(os.fsdecode(os.fsencode(tmp_path / "pets") + b"/caf\xe9/0.png"))
    with pytest.raises(InvalidInput, match=r"pets is damaged, of another format, .*can't encode"):
        from_file(tmp_path / "pets")


def test_a_user_of_leaf_is_listed_once(tmp_path):
    rows = {"x": [[1.0], [2.0]], "y": [0, 1]}
    for users, what in ((["a", "a"], "user a is there twice, in 0.json"), ("a", "the users of 0.json are not a list")):
        (tmp_path / "0.json").write_text(json.dumps({"users": users, "user_data": {"a": rows}}))
        with pytest.raises(InvalidInput, match=what):
            from_file(tmp_path / "0.json", client_column="client")
