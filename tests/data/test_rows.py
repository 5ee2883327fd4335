"""Data that stays in its file: only the rows of a process's own clients are read, and they are the right ones."""

import functools
import gzip
import tracemalloc

import archives
import jax
import numpy as np
import pytest

from pfl_jax import data
from pfl_jax.data import from_arrays, from_file, rows
from pfl_jax.data.rows import Rows
from pfl_jax.data.scaling import normalized
from pfl_jax.engine import placement
from pfl_jax.engine.simulate import client_mesh
from pfl_jax.errors import InvalidInput

X = np.random.default_rng(0).normal(size=(50, 3, 2)).astype(np.float32)


def test_rows_are_those_of_the_array(monkeypatch, tmp_path):
    np.savez(tmp_path / "plain.npz", x=X, wide=X.astype(">f8"), columns=np.asfortranarray(X))
    np.savez_compressed(tmp_path / "packed.npz", x=X)
    monkeypatch.setattr(rows, "BLOCK", 7 * 24)
    kinds = [rows.of_array(X), *(rows.of_npz(tmp_path / "plain.npz", name) for name in ("x", "wide", "columns"))]
    kinds += [rows.of_npz(tmp_path / "packed.npz", "x")]
    kinds += [rows.concatenate([X[:20], kinds[1].take(np.arange(20, 33)), kinds[4].take(np.arange(33, 50))])]
    for x in kinds:
        assert (x.shape, x.ndim, len(x)) == ((50, 3, 2), 3, 50)
        for chosen in (np.array([4, 5, 6, 30, 31, 2, 2, 49]), slice(3, 40, 2), X[:, 0, 0] > 0, np.arange(50), 7):
            np.testing.assert_array_equal(x[chosen], X[chosen])
        np.testing.assert_array_equal(x[-1], X[-1])
        np.testing.assert_array_equal(x[np.array([5, -2])], X[[5, -2]])
        for missing in (50, np.array([3, 99]), -51):
            with pytest.raises(IndexError, match="there are 50 rows"):
                x[missing]
        with pytest.raises(IndexError, match="one index chooses rows"):
            x[0, 1]
        np.testing.assert_array_equal(x[np.zeros(0, np.int64)], X[:0])
        np.testing.assert_array_equal(x.take(np.array([1, 8, 9]))[np.array([2, 0])], X[[9, 1]])
        np.testing.assert_array_equal(x.astype(np.int32)[:], X.astype(np.int32))
        assert (x.min(), x.max(), x.max(initial=99)) == (X.min(), X.max(), 99)
        for (one, part), (other, wanted) in zip(rows.blocks(x.astype(np.float32)), rows.blocks(X), strict=True):
            assert one == other
            np.testing.assert_array_equal(part, wanted)


def test_only_the_rows_asked_for_are_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "BLOCK", 2**20)
    np.savez(tmp_path / "plain.npz", x=np.zeros((64, 2**19), np.uint8))
    np.savez_compressed(tmp_path / "packed.npz", x=np.zeros((64, 2**19), np.uint8))
    for name in ("plain", "packed"):
        x = rows.of_npz(tmp_path / f"{name}.npz", "x")
        tracemalloc.start()
        found = x[np.array([3, 40])]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert found.nbytes == 2**20
        # The whole array has 32 MiB.
        assert peak < 8 * 2**20


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", [np.float64, np.uint8])
def test_own_data_by_rows_is_the_same(tmp_path, monkeypatch, kind, normalize):
    x = (100 * np.abs(np.resize(X, (60, 4, 4, 1)))).astype(kind)
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(60) % 3, client=np.arange(60) % 5)
    monkeypatch.setattr(rows, "BLOCK", 1000)
    whole, lazy = (
        from_file(tmp_path / "own.npz", client_column="client", normalize=normalize, by_rows=by_rows)
        for by_rows in (False, True)
    )
    assert isinstance(lazy.train_x, Rows)
    assert isinstance(whole.train_x, np.ndarray)
    for one, other in zip(whole, lazy, strict=True):
        np.testing.assert_array_equal(one, np.asarray(other) if isinstance(other, Rows) else other)
    parts = data.partition.natural(whole.train_client, whole.test_client)
    mesh = client_mesh(jax.devices()[:2])
    placed = [placement.place(data.federate(one, parts), mesh) for one in (whole, lazy)]
    jax.tree.map(np.testing.assert_array_equal, *placed)


def test_sums_of_blocks_are_the_mean_and_deviation():
    x = X.astype(np.float64)
    scaled, _, _, _ = normalized(X, X[:3])
    np.testing.assert_array_equal(scaled, ((X - x.mean(0)) / x.std(0)).astype(np.float32))


def test_nan_is_found_in_any_block(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "BLOCK", 1000)
    x = np.zeros((90, 4))
    x[[70, 80], 2] = np.nan
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(90) % 3)
    for by_rows in (False, True):
        with pytest.raises(InvalidInput, match=r"nan in row 70, place \[2\] \(2 such"):
            from_file(tmp_path / "own.npz", by_rows=by_rows)
    with pytest.raises(InvalidInput, match="objects"):
        from_arrays(rows.of_array(np.array([[None]] * 4)), [0, 1, 0, 1])


@pytest.mark.parametrize("compress", [True, False])
def test_published_files_by_rows_are_the_same(tmp_path, compress):
    grey = (*archives.images(40, 62, (28, 28)), *archives.images(20, 62, (28, 28), 1))
    grey[1][-1] = 61
    archives.write_idx(tmp_path / "emnist", grey, compress=compress)
    colour = (*archives.images(20, 10, (32, 32, 3)), *archives.images(10, 10, (32, 32, 3), 1))
    members = archives.cifar_members("cifar10", colour)
    if compress:
        archives.write_tar(tmp_path / "cifar-10-binary.tar.gz", members)
    for path, content in () if compress else members.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    for name in ("emnist", "cifar10"):
        whole, lazy = (data.load(name, "files", tmp_path, notify=str, by_rows=by_rows) for by_rows in (False, True))
        assert isinstance(lazy.train_x, Rows)
        assert lazy.input_shape == whole.input_shape
        for one, other in zip(whole, lazy, strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(lazy.train_x[np.array([7, 3])], whole.train_x[[7, 3]])


@pytest.mark.parametrize("compress", [True, False])
def test_damage_is_one_line(tmp_path, compress):
    archives.write_idx(tmp_path, (*archives.images(40, 10, (28, 28)),) * 2, compress=compress)
    path = tmp_path / (archives.IDX_NAMES[0] + ".gz" * compress)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidInput, match=r"truncated|promises"):
        # A compressed file shows it when its rows are read.
        data.load("fashion_mnist", "files", tmp_path, notify=str, by_rows=True).train_x[:1]
    archives.write_idx(tmp_path, (*archives.images(40, 10, (28, 28)),) * 2, compress=compress)
    images = data.load("fashion_mnist", "files", tmp_path, notify=str, by_rows=True).train_x
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InvalidInput, match=r"damaged|truncated") as error:
        images[np.array([0, 39])]
    assert "\n" not in str(error.value)


def test_a_stream_that_does_not_end_with_its_array_is_damaged(tmp_path):
    (tmp_path / "x.gz").write_bytes(gzip.compress(X.tobytes() + b"more"))
    stream = rows.of_stream(tmp_path / "x.gz", functools.partial(gzip.open, tmp_path / "x.gz"), 0, X.shape, X.dtype)
    with pytest.raises(InvalidInput, match=r"x.gz is damaged: it has more than the 1200 bytes promised"):
        stream[:1]
