"""Data of other libraries: round trips give identical clients, and damaged files one line."""

import json
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from tables import Split

from pfl_jax.data import Partition, federate, from_arrays, from_file, interchange, load, partition, partition_files
from pfl_jax.errors import InvalidInput

DIGITS = load("digits")
PARTS = partition.dirichlet(DIGITS, 5, beta=0.5, seed=2, train_size=12, test_size=6)
NAMES = [f"user{number}" for number in range(5)]


def clients(data):
    """Inputs and labels of each client, in their order."""
    x, y, found = np.asarray(data.x), np.asarray(data.y), []
    for split in ("train", "test"):
        index, count = (np.asarray(getattr(data, f"{split}_{field}")) for field in ("index", "count"))
        found += [(x[row[:size]], y[row[:size]]) for row, size in zip(index, count, strict=True)]
    return found


def assert_same_clients(dataset):
    """The data set has the five clients of PARTS, and nothing else."""
    for (x, y), (other_x, other_y) in zip(clients(federate(dataset)), clients(federate(DIGITS, PARTS)), strict=True):
        np.testing.assert_array_equal(x, other_x)
        np.testing.assert_array_equal(y, other_y)
    assert dataset.train_x.dtype == DIGITS.train_x.dtype


def test_npz_and_back(tmp_path):
    interchange.write_npz(tmp_path / "rows.npz", DIGITS, PARTS, NAMES)
    found = from_file(tmp_path / "rows.npz", client_column="client")
    assert_same_clients(found)
    assert list(found.client_names) == NAMES


def test_leaf_and_back(tmp_path):
    interchange.write_leaf(tmp_path / "leaf", DIGITS, PARTS, NAMES)
    found = from_file(tmp_path / "leaf", client_column="client")
    assert_same_clients(found)
    assert (found.source, list(found.client_names)) == ("LEAF", NAMES)
    content = json.loads((tmp_path / "leaf" / "test" / "data.json").read_text())
    assert content.keys() == {"users", "num_samples", "user_data"}
    assert content["num_samples"] == [len(rows) for rows in PARTS.test]
    with pytest.raises(InvalidInput, match="is there already"):
        interchange.write_leaf(tmp_path / "leaf", DIGITS, PARTS, NAMES)


def test_leaf_without_a_split_is_divided_here(tmp_path):
    """As in LEAF's all_data: users over several files, floats, a user without samples."""
    for number in range(2):
        users = [f"{name}{number}" for name in "ab"]
        data = {user: {"x": [[0.5, number]] * 8, "y": [0, 1] * 4} for user in users}
        data["none"] = {"x": [], "y": []}
        content = {"users": [*users, "none"], "num_samples": [8, 8, 0], "user_data": data}
        (tmp_path / f"all_data_{number}.json").write_text(json.dumps(content))
    found = from_file(tmp_path, client_column="client")
    assert found.client_names == ("a0", "a1", "b0", "b1")
    assert (found.train_x.shape, found.train_x.dtype, len(found.test_y)) == ((24, 2), np.float32, 8)
    # Without their column the rows are for a partition.
    assert from_file(tmp_path / "all_data_0.json").train_client is None


def test_classes_keep_their_names(tmp_path):
    dataset = from_arrays(np.eye(8), ["no", "yes"] * 4, client=[0] * 4 + [1] * 4)
    interchange.write_leaf(tmp_path / "leaf", dataset, partition.natural(dataset), dataset.client_names)
    assert from_file(tmp_path / "leaf", client_column="client").class_names == ("no", "yes")


def test_flower_and_back(tmp_path, monkeypatch):
    """With a stand-in for Hugging Face's package, which keeps arrays as they are."""
    stored = {}

    def save(splits, path):
        Path(path).mkdir(parents=True)
        (Path(path) / "dataset_dict.json").touch()
        stored[path] = splits

    stand_in = types.ModuleType("datasets")

    def from_dict(columns):
        # Integers come back wider from Arrow's nested lists.
        return Split({name: np.asarray(values, np.int64) for name, values in columns.items()})

    stand_in.Dataset = types.SimpleNamespace(from_dict=from_dict)
    stand_in.DatasetDict = lambda splits: types.SimpleNamespace(save_to_disk=lambda path: save(splits, path))
    stand_in.load_from_disk = lambda path: stored[path]
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    interchange.write_flower(tmp_path / "flower", DIGITS, PARTS)
    assert sorted(path.name for path in (tmp_path / "flower").iterdir()) == [f"partition_{n}" for n in range(5)]
    found = from_file(tmp_path / "flower", client_column="client")
    assert_same_clients(found)
    assert found.source == "Flower"
    stored[str(tmp_path / "flower" / "partition_3")].pop("test")
    with pytest.raises(InvalidInput, match="client 3 has no test rows"):
        from_file(tmp_path / "flower", client_column="client")


BROKEN = {
    "other counts": (
        '{"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[1], [2]], "y": [1]}}}',
        "user a has 2 x and 1 y",
    ),
    "text": (
        '{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": ["To be"], "y": [" "]}}}',
        "experiments.shakespeare",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_of_leaf_is_one_line(what, tmp_path):
    text, message = BROKEN[what]
    (tmp_path / "train.json").write_text(text)
    with pytest.raises(InvalidInput, match=message) as error:
        from_file(tmp_path / "train.json", client_column="client")
    assert "\n" not in str(error.value)


def test_pfllibs_pickles_are_converted_in_a_process_of_their_own(tmp_path):
    """Its files as it writes them: a dict in an array without axes, images with channels first."""
    for split in ("train", "test"):
        (tmp_path / "digits" / split).mkdir(parents=True)
        for number, rows in enumerate(getattr(PARTS, split)):
            x, y = (np.concatenate([getattr(DIGITS, f"{one}_{part}") for one in ("train", "test")]) for part in "xy")
            data = {"x": np.moveaxis(x[rows], -1, 1), "y": y[rows].astype(np.int64)}
            np.savez_compressed(tmp_path / "digits" / split / f"{number}.npz", data=data)
    script = Path(__file__).parents[2] / "lab" / "pfllib.py"
    words = [sys.executable, "-I", str(script), str(tmp_path / "digits"), str(tmp_path / "out.npz")]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert done.stdout.startswith("5 clients")
    assert_same_clients(from_file(tmp_path / "out.npz", client_column="client"))
    # Nothing is overwritten, and what is wrong is one line.
    again = subprocess.run(words, check=False, capture_output=True, text=True)
    assert again.returncode == 1
    assert again.stderr.count("\n") == 1
    # pfl_jax itself refuses the pickles.
    with pytest.raises(InvalidInput, match=r"never read|no array x"):
        from_file(tmp_path / "digits" / "train" / "0.npz")


# Partitions as files: the same clients come back, and a file that does not fit is refused in one line


SMALL = from_arrays(
    np.arange(12.0).reshape(6, 2), [0, 1] * 3, test_x=np.arange(8.0).reshape(4, 2), test_y=[0, 1] * 2, name="small"
)


def same(parts, others):
    for split in ("train", "test", "validation"):
        rows, back = getattr(parts, split), getattr(others, split)
        assert (rows is None) == (back is None)
        for row, other in zip(rows or (), back or (), strict=True):
            np.testing.assert_array_equal(row, other)


@pytest.mark.parametrize("validation", [False, True])
@pytest.mark.parametrize("name", ["dirichlet", "grouped"])
def test_the_clients_come_back(name, validation, tmp_path):
    options = {"beta": 0.3} if name == "dirichlet" else {"train_size": 30, "test_size": 10}
    parts = partition.make(name, DIGITS, 8, seed=4, **options)
    parts = partition.with_validation(parts, 0.2) if validation else parts
    partition_files.save(tmp_path / "parts.json", parts, DIGITS)
    same(partition_files.load(tmp_path / "parts.json", DIGITS), parts)
    same(partition_files.load(tmp_path / "parts.json", None), parts)


def test_rows_of_each_set_are_counted_through_both(tmp_path):
    partition_files.save(tmp_path / "parts.json", Partition([[0], [5, 1]], [[3], [0]]), SMALL)
    content = json.loads((tmp_path / "parts.json").read_text())
    assert content["clients"] == [{"train": [0], "test": [9]}, {"train": [5, 1], "test": [6]}]
    data = federate(SMALL, partition_files.load(tmp_path / "parts.json", SMALL))
    np.testing.assert_array_equal(data.x[data.train_index[1]], SMALL.train_x[[5, 1]])
    np.testing.assert_array_equal(data.x[data.test_index[0, :1]], SMALL.test_x[[3]])


def test_the_digest_is_that_of_the_examples_in_their_order():
    found = partition_files.digest(SMALL)
    assert partition_files.digest(SMALL._replace(name="renamed")) == found
    for field in ("train_x", "train_y", "test_x", "test_y"):
        assert partition_files.digest(SMALL._replace(**{field: getattr(SMALL, field)[::-1]})) != found


CHANGES = {
    "is of other data": (lambda file: file.update(digest="0" * 16), "with the digest 0000000000000000, not small"),
    "a row twice": (lambda file: file["clients"][1]["train"].append(5), "client 1 has example 5 twice"),
    "no rows but a text": (lambda file: file["clients"][0].update(train="all"), "client 0 has training indices"),
    "another split": (lambda file: file["clients"][0].update(dev=[1]), "it has rows for dev, and rows are for train"),
    "no digest": (lambda file: file.pop("digest"), "cannot be read as a partition: there is no 'digest'"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_wrong_file_is_one_line(what, tmp_path):
    path, (change, message) = tmp_path / "parts.json", CHANGES[what]
    partition_files.save(path, Partition([[0], [5, 1]], [[3], [0]]), SMALL)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match=message) as error:
        partition_files.load(path, SMALL)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
