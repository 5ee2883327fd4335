"""What a user's files hold comes back: arrays, tables, images by class, Hugging Face datasets."""

import csv
import sys
import types

import numpy as np
import pytest
from PIL import Image
from tables import Split, assert_rows

from pfl_jax import InvalidInput
from pfl_jax.data import fortunes, from_clients, from_file, own_files
from pfl_jax.data.texts import CATEGORIES, FOLDER

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3))
KIND = np.array(["no", "yes", "some"])[np.arange(24) % 3]
USER = np.array(["u2", "u1"])[np.arange(24) // 2 % 2]


def write_csv(path, columns):
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows(zip(*columns.values(), strict=True))


def test_csv(tmp_path):
    columns = {"a": X[:, 0].tolist(), "user": USER, "b": X[:, 1].tolist(), "kind": KIND, "c": np.arange(24)}
    write_csv(tmp_path / "my.csv", columns)
    dataset = from_file(tmp_path / "my.csv", label="kind", client_column="user")
    assert_rows(dataset, np.stack([X[:, 0], X[:, 1], np.arange(24)], axis=1), KIND, USER)
    # Whole numbers in all columns stay whole; labels too.
    label = np.arange(24) % 3 + 9
    write_csv(tmp_path / "tokens.csv", {"t0": np.arange(24), "t1": np.arange(24) % 7, "label": label})
    dataset = from_file(tmp_path / "tokens.csv")
    assert (dataset.train_x.dtype, dataset.class_names) == (np.int32, ("9", "10", "11"))
    assert_rows(dataset, np.stack([np.arange(24), np.arange(24) % 7], axis=1), label.astype(str))
    # Spaces behind commas, quotes around words, and empty lines.
    user = np.array(["01234", "1234", "7"] * 8)
    write_csv(tmp_path / "zip.csv", {"a": np.arange(24), "user": user, "label": label})
    assert from_file(tmp_path / "zip.csv", client_column="user").client_names == ("01234", "1234", "7")
    write_csv(tmp_path / "under.csv", {"a": ["1", "1_0"] * 12, "b": np.arange(24), "label": label})
    with pytest.raises(InvalidInput, match=r"counted from 0\): a \('1_0' in row 1\)\. Leave"):
        from_file(tmp_path / "under.csv")
    # Missing values of columns of numbers are neither classes nor clients.
    for name in ("label", "user"):
        gone = {"a": np.arange(24), "user": USER, "label": label, name: ["NA", *map(str, np.arange(23) % 3)]}
        write_csv(tmp_path / "gone.csv", gone)
        with pytest.raises(InvalidInput, match=r"has nan in row 0 \(counted from 0\)"):
            from_file(tmp_path / "gone.csv", client_column="user")
    (tmp_path / "words.csv").write_text("a, label\n\n" + '1, "no"\n2, "yes"\n3,"no "\n' * 3)
    assert from_file(tmp_path / "words.csv").class_names == ("no", "yes")


def test_numbers_of_a_csv_file(tmp_path):
    targets = [".5", "5.", "+5.25", "-2e1", "+3", "0"] * 4
    users = [f"1000000000000000000{one}" for one in range(4)]
    write_csv(tmp_path / "my.csv", {"a": range(24), "user": users * 6, "label": targets})
    dataset = from_file(tmp_path / "my.csv", client_column="user")
    # More digits than 64 bits have would be rounded.
    assert (dataset.client_names, dataset.num_classes) == (tuple(users), 0)
    assert set(dataset.train_y.tolist()) == {0.5, 5, 5.25, -20, 3, 0}


@pytest.mark.parametrize(("x", "y"), [("x", "y"), ("x_train", "y_train")])
def test_arrays_of_test_rows_by_other_names_are_noted(tmp_path, x, y):
    np.savez(tmp_path / "my.npz", **{x: X, y: KIND, "x_test": X, "y_test": KIND, "latest": X})
    said = f"my.npz: the rows of x_test, y_test are left out; name them test_{x}, test_{y} to test on them$"
    with pytest.warns(UserWarning, match=said):
        assert len(from_file(tmp_path / "my.npz", inputs=x, label=y).train_y) == 18


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_text_of_another_encoding_is_called_so(tmp_path, encoding):
    (tmp_path / "my.csv").write_text("a,label\n1,\u00e9\n2,no\n" * 3, encoding)
    with pytest.raises(InvalidInput, match=r"my\.csv is not text in UTF-8 \(.*\): save it in that encoding$"):
        from_file(tmp_path / "my.csv")


GOOD = [f"{number},{number / 2},{['no', 'yes'][number % 2]}" for number in range(1200)]


def check_refused(path, content, text):
    path.write_text(content)
    with pytest.raises(InvalidInput, match=text):
        from_file(path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_ends_of_lines(tmp_path, end):
    path, rows = tmp_path / "my.csv", "a,b,label" + end + end.join(GOOD)
    check_refused(path, rows[:-5], "2 fields in line 1201, and 3 in its header")
    for whole in (rows, rows + end):
        path.write_bytes(whole.encode())
        assert sum(map(len, from_file(path)[4:7:2])) == 1200


def test_numbers_beyond_float32_are_refused_as_they_stand(tmp_path):
    rows = "\n".join(["a,b,label", *GOOD, "1,-1e39,no", "3e38,1,no"]) + "\n"
    check_refused(
        tmp_path / "my.csv",
        rows,
        r"x has -1e\+39 in row 1200, place \[1\] \(counted from 0\), which is not a finite float32",
    )
    x = X.copy()
    x[7, 2] = 1e39
    np.savez(tmp_path / "my.npz", x=x, y=KIND)
    with pytest.raises(InvalidInput, match=r"x has 1e\+39 in row 7, place \[2\]"):
        from_file(tmp_path / "my.npz")


def test_test_files(tmp_path):
    train = {"a": np.arange(24), "kind": KIND, "user": USER}
    write_csv(tmp_path / "train.csv", train)
    write_csv(tmp_path / "test.csv", train | {"a": np.arange(24) + 0.5})
    dataset = from_file(tmp_path / "train.csv", label="kind", client_column="user", test_data=tmp_path / "test.csv")
    # The integers of one file and the floats of the other are floats.
    assert dataset.train_x.dtype == dataset.test_x.dtype == np.float32
    np.testing.assert_array_equal(dataset.train_x[:, 0], np.arange(24))
    np.testing.assert_array_equal(dataset.test_x[:, 0], np.arange(24) + 0.5)
    np.testing.assert_array_equal(dataset.test_client, dataset.train_client)
    assert dataset.origin == own_files.digest(tmp_path / "train.csv", tmp_path / "test.csv")
    write_csv(tmp_path / "train.csv", {"a": np.arange(24), "label": np.arange(24) / 4})
    write_csv(tmp_path / "test.csv", {"a": np.arange(6), "label": np.arange(6) / 2})
    numbers = from_file(tmp_path / "train.csv", test_data=tmp_path / "test.csv", num_classes=0)
    np.testing.assert_array_equal(numbers.test_y, np.float32(np.arange(6) / 2))


IMAGES = type("Image", (), {})()
"""Feature of a column of images."""


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the package datasets, and the splits that it gives."""
    splits = {}
    stand_in = types.SimpleNamespace(load_dataset=lambda name: splits, load_from_disk=lambda path: splits)
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    own_files._digest_on_hub.cache_clear()
    yield splits
    own_files._digest_on_hub.cache_clear()


def test_hugging_face(hub, tmp_path):
    (tmp_path / "dataset_dict.json").write_text("{}")
    names = types.SimpleNamespace(names=["no", "yes", "some"])
    hub["train"] = Split({"a": X[:, 0], "b": X[:, 1], "label": np.arange(24) % 3, "user": USER}, label=names)
    dataset = from_file(tmp_path, client_column="user")
    assert dataset.source == "Hugging Face"
    assert_rows(dataset, X[:, :2], KIND, USER)
    hub["test"] = Split({"a": X[:, 1], "b": X[:, 0], "label": np.arange(24) % 3, "user": USER}, label=names)
    dataset = from_file("hf:someone/wines", client_column="user")
    np.testing.assert_array_equal(dataset.test_x, X[:, [1, 0]].astype(np.float32))
    assert dataset.name == "someone/wines"
    # Images and sequences are chosen before other columns.
    pixels = RNG.integers(0, 256, (24, 4, 4), dtype=np.uint8)
    hub.clear()
    hub["train"] = Split(
        {"image": list(map(Image.fromarray, pixels)), "id": KIND, "label": np.arange(24) % 3}, label=names, image=IMAGES
    )
    assert_rows(from_file(tmp_path), pixels[..., None], KIND)
    tokens = RNG.integers(0, 99, (24, 6))
    hub["train"] = Split({"tokens": tokens, "text": KIND, "label": np.arange(24) % 3}, label=names)
    dataset = from_file(tmp_path)
    assert dataset.train_x.dtype == np.int32
    assert_rows(dataset, tokens, KIND)


def test_rows_of_hugging_face_without_a_label_are_refused(hub, tmp_path):
    (tmp_path / "state.json").write_text("{}")
    labels = np.arange(24) % 3
    hub["train"] = Split({"a": labels, "label": labels - 1}, label=types.SimpleNamespace(names=["x", "y", "z"]))
    with pytest.raises(InvalidInput, match=r"y has None in row 0 \(counted from 0\), the first of 8 such rows"):
        from_file(tmp_path)


def test_floats_of_hugging_face_keep_their_digits():
    datasets = pytest.importorskip("datasets")
    numbers = [2.0**24 + one for one in range(12)]
    rows = datasets.Dataset.from_dict({"a": numbers, "user": numbers[:4] * 3, "label": [0, 1] * 6})
    dataset = from_clients(rows, client="user", y="label")
    assert dataset.client_names == tuple(str(int(one)) for one in numbers[:4])


def test_the_digest_is_of_the_content(tmp_path):
    for folder in ("one", "two"):
        for name in ("a", "b"):
            (tmp_path / folder / name).mkdir(parents=True)
            (tmp_path / folder / name / "file").write_text(name)
    first = own_files.digest(tmp_path / "one")
    assert first == own_files.digest(tmp_path / "two")
    assert len(first) == 16
    (tmp_path / "two" / "b" / "file").write_text("a")
    assert own_files.digest(tmp_path / "two") != first
    # A file of another name within the folder: another class.
    (tmp_path / "one" / "b").rename(tmp_path / "one" / "c")
    assert own_files.digest(tmp_path / "one") != first
    assert own_files.digest(tmp_path / "one" / "a" / "file") != own_files.digest(
        tmp_path / "one" / "a" / "file", tmp_path / "one" / "c" / "file"
    )


tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def files(tmp_path):
    """Folder with two categories, and a tokenizer of words that numbers them by their first letter."""
    (tmp_path / "fruit").write_text("an apple\n%\na banana\n\ta cherry\n%\nan apple\n%\na date\n%\n")
    (tmp_path / "tools").write_text("a hammer\n%\nan apple\n%\na lathe a lathe a lathe a lathe\n%\n")
    words = ["[PAD]", "a", "an", "apple", "banana", "cherry", "date", "hammer", "lathe"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[PAD]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def load(files, **options):
    return fortunes(files / "tokenizer.json", folder=files, categories=("fruit", "tools"), **options)


def test_texts_are_tokens_with_the_category_as_label(files):
    dataset = load(files, length=4, test_share=0.4)
    assert (dataset.train_x.shape, dataset.test_x.shape) == ((3, 4), (2, 4))
    x, y = np.concatenate([dataset.test_x, dataset.train_x]), np.concatenate([dataset.test_y, dataset.train_y])
    found = {tuple(row): label for row, label in zip(x.tolist(), y.tolist(), strict=True)}
    # "an apple" counts once, for the first category that has it; long texts are cut.
    assert found == {(2, 3, 0, 0): 0, (1, 4, 1, 5): 0, (1, 6, 0, 0): 0, (1, 7, 0, 0): 1, (1, 8, 1, 8): 1}


@pytest.mark.real_data
@pytest.mark.skipif(not FOLDER.is_dir(), reason="apt-get install fortunes")
def test_debian_s_texts_are_there(files):
    dataset = fortunes(files / "tokenizer.json")
    assert len(dataset.train_y) + len(dataset.test_y) > 11_000
    assert np.bincount(dataset.train_y, minlength=len(CATEGORIES)).min() > 80
