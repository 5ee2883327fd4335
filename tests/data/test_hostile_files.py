"""Large files: read row by row, with the same result as read whole."""

import tracemalloc

import archives
import jax
import numpy as np
import pytest

from pfl_jax import InvalidInput, client_mesh, data
from pfl_jax.data import from_arrays, from_file, rows
from pfl_jax.data.rows import LazyArray
from pfl_jax.engine import placement

X = np.random.default_rng(0).normal(size=(50, 3, 2)).astype(np.float32)


def test_rows_are_those_of_the_array(monkeypatch, tmp_path):
    np.savez(tmp_path / "plain.npz", x=X, wide=X.astype(">f8"))
    monkeypatch.setattr(rows, "BLOCK", 7 * 24)
    kinds = [rows.as_rows(X), *(rows.of_npz(tmp_path / "plain.npz", name) for name in ("x", "wide"))]
    kinds += [rows.concatenate([X[:20], kinds[1].take(np.arange(20, 33)), kinds[2].take(np.arange(33, 50))])]
    for x in kinds:
        assert (x.shape, x.ndim, len(x)) == ((50, 3, 2), 3, 50)
        for chosen in (np.array([4, 5, 6, 30, 31, 2, 2, 49]), slice(3, 40, 2), X[:, 0, 0] > 0, np.arange(50), 7):
            np.testing.assert_array_equal(x[chosen], X[chosen])
        np.testing.assert_array_equal(x[-1], X[-1])
        np.testing.assert_array_equal(x[np.array([5, -2])], X[[5, -2]])
        for missing in (50, np.array([3, 99]), -51):
            with pytest.raises(IndexError, match="out of bounds"):
                x[missing]
        with pytest.raises(IndexError, match="too many indices"):
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
    x = rows.of_npz(tmp_path / "plain.npz", "x")
    tracemalloc.start()
    found = x[np.array([3, 40])]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.nbytes == 2**20
    # The whole array has 32 MiB.
    assert peak < 8 * 2**20


def test_what_cannot_be_read_by_rows_is_read_whole(tmp_path):
    np.savez(tmp_path / "plain.npz", columns=np.asfortranarray(X))
    np.savez_compressed(tmp_path / "packed.npz", x=X)
    for name, array in (("plain", "columns"), ("packed", "x")):
        found = rows.of_npz(tmp_path / f"{name}.npz", array)
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, X)


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
    assert isinstance(lazy.train_x, LazyArray)
    assert isinstance(whole.train_x, np.ndarray)
    for one, other in zip(whole, lazy, strict=True):
        np.testing.assert_array_equal(one, np.asarray(other) if isinstance(other, LazyArray) else other)
    parts = data.partition.natural(whole)
    mesh = client_mesh(jax.devices()[:2])
    placed = [placement.place(data.federate(one, parts), mesh) for one in (whole, lazy)]
    jax.tree.map(np.testing.assert_array_equal, *placed)


def test_nan_is_found_in_any_block(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "BLOCK", 1000)
    x = np.zeros((90, 4))
    x[[70, 80], 2] = np.nan
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(90) % 3)
    for by_rows in (False, True):
        with pytest.raises(InvalidInput, match=r"nan in row 70, place \[2\]"):
            from_file(tmp_path / "own.npz", by_rows=by_rows)
    with pytest.raises(InvalidInput, match=r"x has nan in row 1, place \[0\]"):
        from_arrays(np.array([[1], [None], [2], [3]]), [0, 1, 0, 1])


@pytest.mark.parametrize("compress", [True, False])
def test_idx_files_by_rows_are_the_same(tmp_path, compress):
    grey = (*archives.images(62, 62, (28, 28)), *archives.images(20, 62, (28, 28), 1))
    archives.write_idx(tmp_path, grey, compress=compress)
    whole, lazy = (data.load("emnist", "files", tmp_path, notify=str, by_rows=by_rows) for by_rows in (False, True))
    assert isinstance(lazy.train_x, np.ndarray if compress else LazyArray)
    for one, other in zip(whole, lazy, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_file_that_is_cut_meanwhile_is_one_line(tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, x=X)
    x = rows.of_npz(path, "x")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(InvalidInput, match="damaged: it ends too early") as error:
        x[np.array([0, 39])]
    assert "\n" not in str(error.value)
