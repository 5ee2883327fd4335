"""Partitions as files: the same clients come back, and a file that does not fit is refused in one line."""

import json

import numpy as np
import pytest

from pfl_jax.data import Partition, federate, from_arrays, load, partition, partition_files
from pfl_jax.data.rows import as_rows
from pfl_jax.errors import InvalidInput

DIGITS = load("digits")
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
    same(partition_files.rows_of(tmp_path / "parts.json"), parts)


def test_rows_of_each_set_are_counted_through_both(tmp_path):
    partition_files.save(tmp_path / "parts.json", Partition([[0], [5, 1]], [[3], [0]]), SMALL)
    content = json.loads((tmp_path / "parts.json").read_text())
    assert content["clients"] == [{"train": [0], "test": [9]}, {"train": [5, 1], "test": [6]}]
    data = federate(SMALL, partition_files.load(tmp_path / "parts.json", SMALL))
    np.testing.assert_array_equal(data.x[data.train_index[1]], SMALL.train_x[[5, 1]])
    np.testing.assert_array_equal(data.x[data.test_index[0, :1]], SMALL.test_x[[3]])


def test_the_digest_is_that_of_the_examples_in_their_order():
    found = partition_files.digest(SMALL)
    assert partition_files.digest(SMALL._replace(name="renamed", train_x=as_rows(SMALL.train_x))) == found
    for field in ("train_x", "train_y", "test_x", "test_y"):
        assert partition_files.digest(SMALL._replace(**{field: getattr(SMALL, field)[::-1]})) != found


CHANGES = {
    "is of other data": (lambda file: file.update(digest="0" * 16), "with the digest 0000000000000000, not small"),
    "a row that is not there": (lambda file: file["clients"][0]["test"].append(10), "example 10, and there are 0 to 9"),
    "a row twice": (lambda file: file["clients"][1]["train"].append(5), "client 1 has example 5 twice"),
    "a row for both": (lambda file: file["clients"][0]["test"].append(0), "example 0 for training and for test"),
    "another's test row": (lambda file: file["clients"][0]["test"].append(1), "example 1 is a test example and one"),
    "no test rows": (lambda file: file["clients"][0].update(test=[]), "client 0 has no test examples"),
    "no rows but a text": (lambda file: file["clients"][0].update(train="all"), "client 0 has training indices"),
    "another split": (lambda file: file["clients"][0].update(dev=[1]), "client 0 has no rows by the names"),
    "no clients": (lambda file: file.update(clients=[]), "tables of 0 clients"),
    "no digest": (lambda file: file.pop("digest"), "cannot be read as a partition: it has no digest"),
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
