"""Natural federations from small files of the true formats of LEAF and TFF."""

import gzip
import lzma
import sqlite3

import client_files
import numpy as np
import pytest

from pfl_jax.data import federate, tff
from pfl_jax.data.natural import CHARACTERS, LENGTH, Limits, femnist, shakespeare, stackoverflow_tags
from pfl_jax.errors import InvalidInput

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (4, 6, 784))
"""Of four writers six images."""


def images(writer, rows):
    return [[float(np.float32(value / 255)) for value in PIXELS[writer, row]] for row in rows]


def labels(writer, rows):
    return [(10 * writer + row) % 62 for row in rows]


def leaf_femnist(folder, train, test):
    sets = {"train": train, "test": test}
    client_files.write_leaf(
        folder,
        {
            split: {f"f{writer}": (images(writer, rows), labels(writer, rows)) for writer, rows in writers.items()}
            for split, writers in sets.items()
        },
    )
    return folder


def sql_femnist(path, train, test):
    def of(writers):
        return {
            f"f{writer}": [
                {"pixels": one, "label": label}
                for one, label in zip(images(writer, rows), labels(writer, rows), strict=True)
            ]
            for writer, rows in writers.items()
        }

    client_files.write_sqlite(path, {"all_train": of(train), "all_test": of(test), "digits_only_train": of({3: [0]})})
    return path


SPLIT = {2: [0, 2, 4], 0: [1, 2, 3], 1: [5]}, {0: [0], 1: [3, 4], 2: [1], 3: [0]}
"""Rows of each writer for training and testing; writer 3 has test rows alone."""


def assert_femnist(dataset, split=SPLIT, writers=(0, 1, 2)):
    assert dataset.client_names == tuple(f"f{writer}" for writer in writers)
    assert (dataset.train_x.dtype, dataset.mean, dataset.num_classes) == (np.uint8, (0.0,), 62)
    sides = (
        (dataset.train_x, dataset.train_y, dataset.train_client),
        (dataset.test_x, dataset.test_y, dataset.test_client),
    )
    for (x, y, owners), rows in zip(sides, split, strict=True):
        for number, writer in enumerate(writers):
            np.testing.assert_array_equal(x[owners == number].reshape(-1, 784), PIXELS[writer, rows[writer]])
            np.testing.assert_array_equal(y[owners == number], labels(writer, rows[writer]))
    assert federate(dataset).num_clients == len(writers)


def test_femnist_of_leaf_and_tff_is_the_same(tmp_path):
    of_leaf = femnist(leaf_femnist(tmp_path / "leaf", *SPLIT))
    of_tff = femnist(sql_femnist(tmp_path / "all.sqlite", *SPLIT))
    for found in (of_leaf, of_tff):
        assert_femnist(found)
    assert (of_leaf.source, of_tff.source) == ("LEAF", "TFF")
    assert of_leaf.origin != of_tff.origin


@pytest.mark.parametrize(("ending", "opened"), [(".lzma", lzma.open), (".xz", lzma.open), (".gz", gzip.open)])
def test_a_compressed_file_is_unpacked_once(ending, opened, tmp_path):
    plain = sql_femnist(tmp_path / "all.sqlite", *SPLIT).read_bytes()
    (tmp_path / "all.sqlite").unlink()
    packed = tmp_path / f"all.sqlite{ending}"
    with opened(packed, "wb", **({"format": lzma.FORMAT_ALONE} if ending == ".lzma" else {})) as file:
        file.write(plain)
    assert_femnist(femnist(packed))
    assert (tmp_path / "all.sqlite").read_bytes() == plain
    assert_femnist(femnist(packed))


def test_the_first_clients_and_rows_are_read(tmp_path):
    path = sql_femnist(tmp_path / "all.sqlite", *SPLIT)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE INDEX by_client ON examples (client_id)")
    connection.close()
    # No other clients come into memory.
    sides = [rows for _, *rows in tff.read(path, ("all_train", "all_test"), ("label",), 2)]
    assert [[len(*features) for features in side] for side in sides] == [[3, 1], [1, 2]]
    fewer = {0: [1, 2], 1: [5]}, {0: [0], 1: [3]}
    for source in (path, leaf_femnist(tmp_path / "leaf", *SPLIT)):
        assert_femnist(femnist(source, Limits(2, 2, 1)), fewer, (0, 1))
        with pytest.raises(InvalidInput, match="has 3 clients with training and test rows, not 5"):
            femnist(source, Limits(5))


def test_a_split_by_user_has_its_test_users_last(tmp_path):
    folder = leaf_femnist(tmp_path / "leaf", {3: [0, 1, 2, 3], 0: [0, 1]}, {1: [0, 1, 2, 3]})
    divided = {0: [0], 3: [0, 1, 2], 1: [0, 1, 2]}, {0: [1], 3: [3], 1: [3]}
    assert_femnist(femnist(folder), divided, (0, 3, 1))
    assert_femnist(femnist(folder, Limits(2)), divided, (0, 1))
    half = {0: [0], 3: [0, 1], 1: [0, 1]}, {0: [1], 3: [2, 3], 1: [2, 3]}
    assert_femnist(femnist(folder, Limits(3, test_fraction=0.5)), half, (0, 3, 1))
    with pytest.raises(InvalidInput, match="user f2 has 1 sample, and needs one for"):
        femnist(leaf_femnist(tmp_path / "few", {2: [0]}, {1: [0, 1]}))


def test_hdf5_is_read(tmp_path):
    h5py = pytest.importorskip("h5py")
    for split, writers in zip(("train", "test"), SPLIT, strict=True):
        with h5py.File(tmp_path / f"fed_emnist_{split}.h5", "w") as file:
            for writer, rows in writers.items():
                group = file.create_group(f"examples/f{writer}")
                group["pixels"] = np.float32(PIXELS[writer, rows] / 255).reshape(-1, 28, 28)
                group["label"] = np.array(labels(writer, rows), np.int32)
    assert_femnist(femnist(tmp_path))


def text_of(x, y):
    """Inputs and targets as texts; the symbols that stand for no character as <0> to <3>."""
    characters = {number: chr(code) for code, number in CHARACTERS.items()} | {n: f"<{n}>" for n in range(4)}
    return "".join(map(characters.get, x.tolist())), "".join(characters.get(one, "") for one in y.tolist())


def test_shakespeare_of_leaf_predicts_the_character_after_each_example(tmp_path):
    text = "To be, or not to be: that is the question:\nWhether 'tis nobler in the mind to suffer\né"[: LENGTH + 6]
    pieces = [text[start : start + LENGTH] for start in range(6)]
    after = [text[start + LENGTH] for start in range(6)]
    users = {"HAMLET": (pieces[:4], after[:4]), "OPHELIA": (pieces[1:3], after[1:3])}
    client_files.write_leaf(tmp_path / "leaf", {"train": users, "test": users}, left_out=LENGTH - 1)
    found = shakespeare(tmp_path / "leaf")
    assert found.client_names == ("HAMLET", "OPHELIA")
    assert found.train_x.shape == found.train_y.shape == (6, LENGTH)
    assert text_of(found.train_x[3], found.train_y[3]) == (pieces[3], after[3])
    assert (found.train_y[:, :-1] == -1).all()
    assert found.num_classes == 0


def test_shakespeare_of_tff_predicts_every_character(tmp_path):
    long, short = b"x" * 70 + b"0123456789abc", b"Ay, \xc3\xa9!"
    clients = {"THE_TEMPEST_ARIEL": [{"snippets": long}, {"snippets": short}]}
    client_files.write_sqlite(tmp_path / "text.sqlite", {"train": clients, "test": clients})
    found = shakespeare(tmp_path / "text.sqlite")
    texts = [text_of(x, y) for x, y in zip(found.train_x, found.train_y, strict=True)]
    assert texts[0] == ("<2>" + long[:79].decode(), long[:80].decode())
    assert texts[1] == (f"{long[79:].decode()}" + "<0>" * 76, long[80:].decode() + "<3>")
    assert texts[2] == ("<2>Ay, <1>!" + "<0>" * 73, "Ay, <1>!<3>")
    assert len(texts) == 3
    assert len(shakespeare(tmp_path / "text.sqlite", Limits(1, 2, 1)).train_x) == 2


def test_tags_of_stack_overflow(tmp_path):
    def posts(*some):
        rest = {"score": -3, "type": b"question", "creation_date": b"2010-01-08 09:34:05 UTC"}
        return [{"tokens": one, "title": title, "tags": tags} | rest for one, title, tags in some]

    train = {
        "7": posts((b"use a join", b"sql join", b"sql|join"), (b"a b", b"c", b"sql")),
        "9": posts((b"a", b"a", b"c")),
    }
    test = {"7": posts((b"join unseen", b"", b"join|unseen")), "8": train["9"], "9": posts((b"b", b"b", b""))}
    client_files.write_sqlite(tmp_path / "so.sqlite", {"train": train, "heldout": train, "test": test})
    found = stackoverflow_tags(tmp_path / "so.sqlite", Limits(2))
    assert found.client_names == ("7", "9")
    # By frequency, then by the alphabet: a 4, join 2, then b, c, sql, use.
    np.testing.assert_array_equal(found.train_x[0, :6], [6, 1, 2, 5, 2, 0])
    np.testing.assert_array_equal(found.test_x[:, :3], [[2, 10_001, 0], [3, 3, 0]])
    # Tags: sql 2, c, join.
    np.testing.assert_array_equal(found.train_y, [[1, 0, 1], [1, 0, 0], [0, 1, 0]])
    np.testing.assert_array_equal(found.test_y, [[0, 0, 1], [0, 0, 0]])


@pytest.mark.parametrize("packed", [True, False])
def test_examples_are_parsed(packed):
    features = {
        "text": b"abc",
        "texts": [b"", b"\xff"],
        "number": -5,
        "numbers": [1, 300, -(2**62)],
        "floats": [0.5, -2.0],
    }
    found = tff.parse_example(client_files.example(features, packed))
    assert found.pop("floats").tolist() == features.pop("floats")
    assert found.pop("numbers").tolist() == features.pop("numbers")
    assert found == features


def sqlite_of(one):
    return lambda path: client_files.write_sqlite(path, {split: {"a": [one]} for split in ("all_train", "all_test")})


WRONG = {
    "other splits": (lambda path: client_files.write_sqlite(path, {"train": {"a": []}}), r"\(there are train\)"),
    "a label too large": (sqlite_of({"pixels": images(0, [0])[0], "label": 62}), "labels are the integers 0 to 61"),
    "images of another size": (sqlite_of({"pixels": [0.5, 0.5], "label": 6}), "is not femnist: cannot reshape"),
}


@pytest.mark.parametrize("what", WRONG)
def test_other_files_are_refused_in_one_line(what, tmp_path):
    prepare, message = WRONG[what]
    prepare(tmp_path / "data")
    with pytest.raises(InvalidInput, match=message) as error:
        femnist(tmp_path / "data")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_damaged_example_is_refused(cut, tmp_path):
    path = sql_femnist(tmp_path / "all.sqlite", *SPLIT)
    with sqlite3.connect(path) as connection:
        rows = [one for (one,) in connection.execute("SELECT serialized_example_proto FROM examples LIMIT 1")]
        connection.execute("UPDATE examples SET serialized_example_proto = ?", (rows[0][:-cut],))
    connection.close()
    with pytest.raises(InvalidInput, match="is not femnist"):
        femnist(path)
