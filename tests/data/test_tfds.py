"""tensorflow-datasets' own download_and_prepare, offline, on small archives placed into its download cache.

tfds takes an archive for downloaded when a file of the name it would give it lies in `downloads/` with an INFO file
beside it; the name holds the checksum that tfds has on record for the true archive.
"""

import gzip
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import archives
import numpy as np
import pytest

from pfl_jax import InvalidInput
from pfl_jax.data import SPECS, load
from pfl_jax.data import tfds as source
from pfl_jax.errors import CannotWrite

SMALL = {
    "cifar10": (*archives.images(50, 10, (32, 32, 3)), *archives.images(10, 10, (32, 32, 3), 1)),
    "cinic10": (*archives.images(40, 10, (32, 32, 3)), *archives.images(20, 10, (32, 32, 3), 1)),
    "emnist": (*archives.images(124, 62, (28, 28, 1)), *archives.images(62, 62, (28, 28, 1), 1)),
}


def quiet(message: str) -> None:
    """A notify for tests."""


def write_archive(name: str, folder: Path) -> Path:
    if name == "cifar10":
        path = folder / SPECS[name].url.rpartition("/")[2]
        return archives.write_tar(path, archives.cifar_members(name, SMALL[name]))
    if name == "cinic10":
        members = archives.cinic_members(SMALL[name], source.CINIC10_CLASSES)
        return archives.write_tar(folder / "CINIC-10.tar.gz", members)
    path = folder / "gzip.zip"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        for idx_name, array in zip(archives.IDX_NAMES, SMALL[name], strict=True):
            # The published images have rows and columns exchanged.
            sideways = array[..., 0].swapaxes(1, 2) if array.ndim == 4 else array
            member = f"gzip/emnist-byclass-{idx_name.replace('t10k', 'test')}.gz"
            file.writestr(member, gzip.compress(archives.idx(sideways), 1))
    return path


def fill_download_cache(name: str, data_dir: Path) -> None:
    """Puts the small archive where tfds keeps what it has downloaded."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core.download import resource

    # Nobody has recorded the checksum of CINIC-10: tfds goes by the address alone.
    recorded = {} if name == "cinic10" else tfds.builder_cls(SPECS[name].tfds_name.split("/")[0]).url_infos
    downloads = data_dir / "downloads" / SPECS[name].tfds_name.split("/")[0]
    downloads.mkdir(parents=True)
    url, archive = SPECS[name].url, write_archive(name, data_dir / "made")
    target, content = (
        downloads / resource.get_dl_fname(url, getattr(recorded.get(url), "checksum", None)),
        archive.read_bytes(),
    )
    archive.rename(target)
    info: dict[str, object] = {"urls": [url], "original_fname": archive.name}
    if url not in recorded:
        checksum = hashlib.sha256(content).hexdigest()
        info["url_info"] = {"checksum": checksum, "size": len(content), "filename": archive.name}
    Path(f"{target}.INFO").write_text(json.dumps(info))


@pytest.fixture(scope="module")
def patched():
    """tfds' counts of EMNIST lowered to those of the small files, and no network."""
    pytest.importorskip("tensorflow_datasets")
    with pytest.MonkeyPatch.context() as patch, source._tensorflow_datasets() as tfds:
        byclass = tfds.builder_cls("emnist").builder_configs["byclass"]
        patch.setattr(byclass, "train_examples", len(SMALL["emnist"][1]))
        patch.setattr(byclass, "test_examples", len(SMALL["emnist"][3]))
        patch.setattr(source, "_unreachable", lambda url: "")
        yield


@pytest.fixture(scope="module")
def prepared(patched, tmp_path_factory):
    """A data folder in which the datasets have been prepared and read once; and what was loaded."""
    data_dir = tmp_path_factory.mktemp("tfds")
    loaded = {}
    for name in SMALL:
        fill_download_cache(name, data_dir)
        loaded[name] = load(name, "tfds", data_dir, notify=quiet)
    return data_dir, loaded


def by_content(x, y):
    """Examples in an order of their own: tfds shuffles them once, when it prepares them."""
    return sorted(zip((image.tobytes() for image in x), y.tolist(), strict=True))


@pytest.mark.parametrize("name", SMALL)
def test_prepared_data_is_the_archives(prepared, name):
    _, loaded = prepared
    dataset = loaded[name]
    for x, y, small_x, small_y in (
        (dataset.train_x, dataset.train_y, *SMALL[name][:2]),
        (dataset.test_x, dataset.test_y, *SMALL[name][2:]),
    ):
        assert (x.dtype, y.dtype) == (np.uint8, np.int32)
        assert x.shape[1:] == SPECS[name].shape
        assert by_content(x, y) == by_content(small_x, small_y)
    assert dataset.is_real
    assert dataset.source == "tfds"
    # These small archives never pass for the published dataset.
    assert "examples" in dataset.description


@pytest.mark.parametrize("source_name", ["auto", "tfds"])
def test_later_runs_import_neither_tensorflow_nor_tfds(prepared, source_name):
    data_dir, loaded = prepared
    code = (
        "import sys; from pfl_jax.data import load;"
        f"d = load('cifar10', {source_name!r}, {str(data_dir)!r}, notify=lambda text: None);"
        "print(d.description, int(d.train_x.astype(int).sum()),"
        " [m for m in ('tensorflow', 'tensorflow_datasets') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = loaded["cifar10"]
    assert result.stdout.strip() == f"{expected.description} {expected.train_x.astype(int).sum()} []"


def test_a_damaged_cache_is_rebuilt(prepared):
    data_dir, loaded = prepared
    (cache,) = (data_dir / "pfl_jax").glob("cifar10-*.npz")
    whole = cache.read_bytes()
    with np.load(cache) as stored:
        np.savez(data_dir / "other.npz", **{**stored, "train_x": stored["train_x"][:, :5]})
    other = (data_dir / "other.npz").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole[:1000] + bytes(1000) + whole[2000:], other):
        cache.write_bytes(damaged)
        dataset = load("cifar10", "auto", data_dir, notify=quiet)
        np.testing.assert_array_equal(dataset.train_x, loaded["cifar10"].train_x)
        assert len(cache.read_bytes()) == len(whole)
    assert not list((data_dir / "pfl_jax").glob("*.tmp"))


def test_a_folder_that_cannot_be_written_is_read_all_the_same(prepared, monkeypatch):
    data_dir, loaded = prepared
    (cache,) = (data_dir / "pfl_jax").glob("cinic10-*.npz")
    cache.unlink()

    def refuse(*args, **kwargs):
        raise CannotWrite("read-only file system")

    monkeypatch.setattr(source, "write_binary", refuse)
    notices = []
    dataset = load("cinic10", "tfds", data_dir, notify=notices.append)
    np.testing.assert_array_equal(dataset.train_x, loaded["cinic10"].train_x)
    assert any("read-only file system" in notice for notice in notices)


def test_a_damaged_prepared_folder_gives_a_one_line_error(prepared, tmp_path):
    data_dir, _ = prepared
    (folder,) = (data_dir / "cifar10").glob("*.*.*")
    copy = tmp_path / "cifar10" / folder.name
    copy.mkdir(parents=True)
    for path in folder.iterdir():
        content = path.read_bytes()
        (copy / path.name).write_bytes(content[:-50] if "tfrecord" in path.name else content)
    for source_name in ("auto", "tfds"):
        with pytest.raises(InvalidInput, match="is not a usable cifar10") as error:
            load("cifar10", source_name, tmp_path, notify=quiet)
        assert "\n" not in str(error.value)
