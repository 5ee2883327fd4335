"""Files that are hostile, damaged or large: refused in one line, or read row by row."""

import io
import tarfile
import tracemalloc
import zipfile

import archives
import jax
import numpy as np
import pytest
from damage import FUZZ, limit, mutations
from hypothesis import given
from hypothesis import strategies as st

from pfl_jax import InvalidInput, client_mesh, data
from pfl_jax.data import SPECS, files, from_arrays, from_file, read_tables, rows, tfds
from pfl_jax.data.rows import Rows
from pfl_jax.engine import placement


def refusal(load):
    """The line that refuses a file, within ten seconds."""
    with limit(10), pytest.raises(InvalidInput) as raised:
        load()
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.fixture(autouse=True)
def _no_other_folders(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "SYSTEM_FOLDERS", ())
    monkeypatch.chdir(tmp_path)


def npz(path, **members):
    """Writes an archive of arrays; a member that is bytes is stored as it is."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            if not isinstance(content, bytes):
                stream = io.BytesIO()
                np.save(stream, content, allow_pickle=True)
                content = stream.getvalue()
            archive.writestr(f"{name}.npy", content)
    return path


def header(shape, kind="<f8"):
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": kind, "fortran_order": False, "shape": shape})
    return stream.getvalue()


@pytest.mark.parametrize("shape", [(10**10,), (2**40, 2**40), (100, 100, 100_000)])
def test_an_array_that_promises_gigabytes(tmp_path, shape):
    path = npz(tmp_path / "my.npz", x=header(shape) + bytes(80), y=np.arange(3))
    for by_rows in (False, True):
        refusal(lambda by_rows=by_rows: read_tables.npz(path, None, None, by_rows=by_rows))
        assert tfds._read_cache(path, SPECS["cifar10"], by_rows=by_rows) is None


# Anything


def survives(load):
    """Whatever a file holds, it is read or refused, within ten seconds."""
    text = ""
    with limit(10):
        try:
            load()
        except InvalidInput as error:
            text = str(error)
    assert "\n" not in text


@pytest.mark.slow
@FUZZ
@given(choice=st.data())
def test_any_table_is_read_or_refused(tmp_path_factory, choice):
    folder = tmp_path_factory.mktemp("table")
    good = npz(folder / "my.npz", x=np.arange(24.0).reshape(12, 2), y=np.arange(12) % 2).read_bytes()
    (folder / "my.npz").write_bytes(choice.draw(mutations(good)))
    survives(lambda: data.from_file(folder / "my.npz"))
    rows = "a,b,label\n" + "".join(f"{i},{i * 0.5},{i % 2}\n" for i in range(12))
    (folder / "my.csv").write_bytes(choice.draw(mutations(rows.encode())))
    survives(lambda: data.from_file(folder / "my.csv"))
    if choice.draw(st.booleans()):
        survives(lambda: data.from_file(folder))


def member(name, content=b"", **fields):
    """A member of a tar archive, as its header and content."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf() + content + bytes(-len(content) % 512)


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
    assert isinstance(lazy.train_x, Rows)
    assert isinstance(whole.train_x, np.ndarray)
    for one, other in zip(whole, lazy, strict=True):
        np.testing.assert_array_equal(one, np.asarray(other) if isinstance(other, Rows) else other)
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
    with pytest.raises(InvalidInput, match="object"):
        from_arrays(np.array([[None]] * 4), [0, 1, 0, 1])


@pytest.mark.parametrize("compress", [True, False])
def test_idx_files_by_rows_are_the_same(tmp_path, compress):
    grey = (*archives.images(62, 62, (28, 28)), *archives.images(20, 62, (28, 28), 1))
    archives.write_idx(tmp_path, grey, compress=compress)
    whole, lazy = (data.load("emnist", "files", tmp_path, notify=str, by_rows=by_rows) for by_rows in (False, True))
    assert isinstance(lazy.train_x, np.ndarray if compress else Rows)
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
