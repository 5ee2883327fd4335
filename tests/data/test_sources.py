"""Files in true formats, damaged files, and what `auto` settles for; tensorflow-datasets is in test_tfds.py."""

import functools
import hashlib

import archives
import numpy as np
import pytest
from sklearn.datasets import load_digits

from pfl_jax import InvalidInput
from pfl_jax.data import SPECS, embedded, idx_and_cifar, load, tfds

GREY = (*archives.images(40, 10, (28, 28)), *archives.images(20, 10, (28, 28), 1))
EMNIST = (*archives.images(124, 62, (28, 28)), *archives.images(62, 62, (28, 28), 1))
CIFAR = {
    name: (*archives.images(2 * size, size, (32, 32, 3)), *archives.images(size, size, (32, 32, 3), 1))
    for name, size in (("cifar10", 10), ("cifar100", 100))
}


@pytest.fixture(autouse=True)
def _isolated(monkeypatch, tmp_path):
    """No system folders, no tfds folder of the user's, and no network."""
    monkeypatch.setattr(idx_and_cifar, "SYSTEM_FOLDERS", ())
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "no_tfds"))
    monkeypatch.setattr(tfds, "_unreachable", lambda url: "the host did not answer")


def assert_equal(dataset, arrays):
    for got, expected in zip((dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y), arrays, strict=True):
        np.testing.assert_array_equal(got, expected.reshape(got.shape))
    assert dataset.train_x.dtype == dataset.test_x.dtype == np.uint8
    assert dataset.train_y.dtype == dataset.test_y.dtype == np.int32


# Files


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("subfolder", ["", "fashion-mnist", "FashionMNIST/raw"])
def test_idx(tmp_path, compress, subfolder):
    archives.write_idx(tmp_path / subfolder, GREY, compress=compress)
    notices = []
    dataset = load("fashion_mnist", "files", tmp_path, notify=notices.append)
    assert_equal(dataset, GREY)
    assert dataset.is_real
    assert not dataset.keep_split
    assert (dataset.num_classes, dataset.mean, dataset.std) == (10, (0.1307,), (0.3081,))
    assert dataset.input_shape == (28, 28, 1)
    # An incomplete set cannot pass for the published one.
    assert "40 + 20 of 60000 + 10000" in dataset.description
    assert "40 + 20 of 60000 + 10000" in notices[0]


@pytest.mark.parametrize("prefix", ["", "emnist-byclass-"])
def test_emnist_is_turned_upright(tmp_path, prefix):
    names = [prefix + (name.replace("t10k", "test") if prefix else name) for name in archives.IDX_NAMES]
    sideways = [array.swapaxes(1, 2) if array.ndim == 3 else array for array in EMNIST]
    archives.write_idx(tmp_path, sideways, names)
    assert_equal(load("emnist", "files", tmp_path, notify=lambda text: None), EMNIST)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar(tmp_path, name):
    folder, *_ = archives.CIFAR_FILES[name]
    members = archives.cifar_members(name, CIFAR[name])
    archives.write_tar(tmp_path / "archive" / f"{folder.replace('-batches-bin', '-binary')}.tar.gz", members)
    for path, content in members.items():
        (tmp_path / "extracted" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "extracted" / path).write_bytes(content)
    for place in ("archive", "extracted", f"extracted/{folder}"):
        assert_equal(load(name, "files", tmp_path / place, notify=lambda text: None), CIFAR[name])
    assert not (tmp_path / "archive" / folder).exists()


def test_a_copy_says_what_it_is(tmp_path):
    published = np.array([3, 8, 8, 0, 6, 6, 1, 6, 3, 1, 0, 9, 5, 7, 9, 8, 2, 4], np.int32)
    arrays = (*CIFAR["cifar10"][:2], CIFAR["cifar10"][0][: len(published)], published)
    for name, kept in (("whole", published), ("copy", published[::-1])):
        for path, content in archives.cifar_members("cifar10", (*arrays[:3], kept)).items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_bytes(content)

    def described(name):
        dataset = load("cifar10", "files", tmp_path / name, notify=lambda text: None)
        return dataset.note, dataset.description.partition(" (")[0]

    assert described("whole") == ("", "cifar10")
    assert described("copy") == ("a copy in another order", "cifar10, a copy in another order")
    for name in ("whole", "copy"):
        (tmp_path / name / "cifar-10-batches-bin/note.txt").write_text("JPEG copy\nof quality 75\n")
        assert described(name) == ("JPEG copy", "cifar10, JPEG copy")
    (tmp_path / "copy/cifar-10-batches-bin/note.txt").write_bytes(b"\xff")
    with pytest.raises(InvalidInput, match=r"note\.txt cannot be read"):
        described("copy")


def test_system_folders_are_searched(tmp_path, monkeypatch):
    monkeypatch.setattr(idx_and_cifar, "SYSTEM_FOLDERS", (tmp_path,))
    archives.write_idx(tmp_path / "fashion-mnist", GREY)
    for source in ("files", "auto"):
        dataset = load("fashion_mnist", source, notify=lambda text: None)
        assert dataset.description.startswith(f"fashion_mnist (files: {tmp_path}/fashion-mnist")


@pytest.mark.real_data
def test_debians_fashion_mnist(monkeypatch):
    monkeypatch.undo()
    notices = []
    dataset = load("fashion_mnist", "files", notify=notices.append)
    assert dataset.description == "fashion_mnist (files: /usr/share/datasets/fashion-mnist)"
    assert not notices
    np.testing.assert_array_equal(np.bincount(dataset.train_y), np.full(10, 6000))
    np.testing.assert_array_equal(np.bincount(dataset.test_y), np.full(10, 1000))
    np.testing.assert_allclose(dataset.train_x.mean() / 255, 0.2860, atol=1e-4)


# Choosing


def test_embedded_data_names_its_source():
    dataset = load("cifar100", "embedded")
    assert dataset.description == "cifar100 (embedded digit pairs)"
    assert not dataset.is_real
    assert dataset.keep_split
    assert load("cifar10", "embedded").description == "cifar10 (embedded digits)"
    digits = load("digits")
    assert digits.description == "digits (scikit-learn digits)"
    assert digits.is_real
    assert digits.keep_split


def test_auto_falls_back_with_a_notice_that_names_the_stand_in(tmp_path):
    notices = []
    dataset = load("cifar100", "auto", tmp_path, notify=notices.append)
    assert dataset.description == "cifar100 (embedded digit pairs)"
    assert len(notices) == 1
    assert "THIS IS NOT CIFAR100" in notices[0]
    assert "cifar100 (embedded digit pairs)" in notices[0]
    assert "did not answer" in notices[0]


def test_a_host_that_does_not_answer_times_out(monkeypatch):
    """A server that accepts the connection and never answers."""
    import socket
    import time

    monkeypatch.undo()
    monkeypatch.setattr(tfds, "HOST_TIMEOUT", 0.3)
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as server:
        started = time.monotonic()
        reason = tfds._unreachable(f"http://127.0.0.1:{server.getsockname()[1]}/archive.tar.gz")
    assert "127.0.0.1" in reason
    assert time.monotonic() - started < 2


compose = functools.cache(embedded.compose_images)


def digest(arrays) -> str:
    return hashlib.sha256(b"".join(part.tobytes() for part in arrays)).hexdigest()


def test_bytes_are_the_same_on_every_machine():
    """Runs that somebody made rest on these bytes: a change of the pictures must be a decision."""
    assert digest(compose(SPECS["fashion_mnist"], 0)) == GREY_DIGEST
    assert digest(compose(SPECS["cifar100"], 0)) == COLOUR_DIGEST


GREY_DIGEST = "e46d72230e46cfb60e9228703083bb413c9c648fb3085648391631a9ee522621"
COLOUR_DIGEST = "088f2dbf9e16b379af7e218c1cd200e5d17f72e2021c4f17f904f2229bc18cf5"


def test_digits_are_scikit_learns_own():
    arrays = embedded.digits()
    assert arrays.train_x.shape == (1287, 8, 8, 1)
    assert arrays.test_x.shape == (510, 8, 8, 1)
    original = load_digits().images
    whole = np.concatenate([arrays.train_x, arrays.test_x])[..., 0]
    np.testing.assert_array_equal(np.round(whole / 255 * 16), original)


def test_images_outside_tensorflow_datasets_are_not_taken_for_the_digits(tmp_path, monkeypatch):
    monkeypatch.setitem(SPECS, "new", SPECS["fashion_mnist"]._replace(name="new", tfds_name=None, folders=("new",)))
    with pytest.raises(
        InvalidInput, match=r"^new cannot be downloaded: it is not in tensorflow-datasets; give data_dir"
    ):
        load("new", "tfds", data_dir=tmp_path)
    stand_in = load("new", data_dir=tmp_path, notify=lambda text: None)
    assert stand_in.description == "new (embedded digits)"
    assert not stand_in.is_real
