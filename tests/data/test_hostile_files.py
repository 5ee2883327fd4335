"""Files that hold anything: read or refused in one line, without executing, writing or waiting for anything."""

import gzip
import io
import os
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
from archives import cifar_members, images, write_idx, write_tar
from damage import FUZZ, limit, mutations
from hypothesis import given
from hypothesis import strategies as st

from pfl_jax import data
from pfl_jax.data import files, read_tables, tfds
from pfl_jax.data.specs import SPECS, Arrays
from pfl_jax.errors import InvalidInput

GRAY = (*images(40, 10, (28, 28)), *images(20, 10, (28, 28), 1))
COLOR = (*images(20, 10, (32, 32, 3)), *images(10, 10, (32, 32, 3), 1))


class Evil:
    """Unpickled, it leaves a folder behind."""

    def __reduce__(self):
        return os.mkdir, ("pickles-are-executed",)


def refusal(load):
    """The line that refuses a file, within ten seconds."""
    with limit(10), pytest.raises(InvalidInput) as raised:
        load()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def gray(folder):
    return lambda: data.load("fashion_mnist", source="files", data_dir=folder)


def color(folder):
    return lambda: data.load("cifar10", source="files", data_dir=folder)


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
    """Beginning of a stored array."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": kind, "fortran_order": False, "shape": shape})
    return stream.getvalue()


@pytest.mark.parametrize("shape", [(10**10,), (2**40, 2**40), (100, 100, 100_000)])
def test_an_array_that_promises_gigabytes(tmp_path, shape):
    path = npz(tmp_path / "my.npz", x=header(shape) + bytes(80), y=np.arange(3))
    for by_rows in (False, True):
        refusal(lambda by_rows=by_rows: read_tables.npz(path, None, None, by_rows=by_rows))
        assert tfds._read_cache(path, SPECS["cifar10"], by_rows=by_rows) is None


@pytest.mark.parametrize(
    "content", [np.array([Evil()], object), pickle.dumps(Evil()), b"\x93NUMPY" + pickle.dumps(Evil())]
)
def test_pickles_are_never_read(tmp_path, content):
    path = npz(tmp_path / "my.npz", x=content, y=np.arange(3))
    refusal(lambda: data.from_file(path))
    cache = npz(tmp_path / "cache.npz", **dict.fromkeys(Arrays._fields, content))
    assert tfds._read_cache(cache, SPECS["cifar10"], by_rows=False) is None
    np.save(tmp_path / "single.npy", np.arange(3))
    (tmp_path / "single.npy").rename(path)
    assert "single array" in refusal(lambda: data.from_file(path))
    path.write_bytes(pickle.dumps(Evil()))
    assert "pickle" in refusal(lambda: data.from_file(path))
    assert not (tmp_path / "pickles-are-executed").exists()


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


def images_of(folder):
    """The first file of a folder with gray images, and how the folder is read."""
    return write_idx(folder, GRAY)[0], gray(folder)


def archive_of(folder):
    """An archive of CIFAR-10, and how its folder is read."""
    return write_tar(folder / "cifar-10-binary.tar.gz", cifar_members("cifar10", COLOR)), color(folder)


@pytest.mark.slow
@pytest.mark.parametrize("make", [images_of, archive_of])
@FUZZ
@given(choice=st.data())
def test_any_compressed_file_is_read_or_refused(tmp_path_factory, make, choice):
    path, load = make(tmp_path_factory.mktemp("data"))
    good = path.read_bytes()
    raw = mutations(gzip.decompress(good)).map(lambda content: gzip.compress(content, 1))
    path.write_bytes(choice.draw(mutations(good) | raw))
    survives(load)


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


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_in_place_of_a_batch_are_not_followed(tmp_path, kind):
    members = cifar_members("cifar10", COLOR)
    name = "cifar-10-batches-bin/data_batch_2.bin"
    content = b"".join(member(one, text) for one, text in members.items() if one != name)
    link = member(name, type=kind, linkname="/etc/passwd")
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(link + content + bytes(1024)))
    assert "data_batch_2.bin has no bytes" in refusal(color(tmp_path))
