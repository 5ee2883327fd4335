"""What is called whole is on the disk first: a power cut between any two of these steps loses no finished file."""

import os

import jax
import numpy as np
import pytest

from experiments.execution.history import History
from experiments.results.run_folder import RunFolder
from pfl_jax.atomic_write import make_folder, write_text
from pfl_jax.base import State
from pfl_jax.engine.checkpoint import MANIFEST, Checkpoints
from pfl_jax.engine.disk_state import Table
from pfl_jax.errors import CannotWrite


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """What was written to the disk ("disk"), and what was renamed to another name ("name"), in order."""
    found, fsync = [], os.fsync

    def relative(path):
        # Without the process in the name of a file that is not renamed yet.
        return os.path.relpath(path, tmp_path).removesuffix(f".{os.getpid()}")

    def synced(descriptor):
        found.append(("disk", relative(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("rename", "replace"):
        usual = getattr(os, name)

        def renamed(source, target, usual=usual, **options):
            found.append(("name", relative(target)))
            return usual(source, target, **options)

        monkeypatch.setattr(os, name, renamed)
    return found


def test_a_file_is_written_then_named_then_its_folder(steps, tmp_path):
    make_folder(tmp_path / "new" / "folder")
    assert steps == [("disk", "new")]
    steps.clear()
    write_text(tmp_path / "new" / "file", "content")
    assert steps == [("disk", "new/.file"), ("name", "new/file"), ("disk", "new")]


def test_the_log_comes_before_the_checkpoint_and_the_checkpoint_before_its_name(steps, tmp_path):
    log, folder = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    log.write_text('{"round": 1}\n')
    state = State({"head": np.ones((3, 2), np.float32)}, (), (), jax.random.key(0), np.int32(1))
    History(wasted=[0.0]).save(Checkpoints(folder), state, log, {})
    named = steps.index(("name", "checkpoints/1"))
    assert steps[0] == ("disk", "metrics.jsonl")
    assert steps[named + 1] == ("disk", "checkpoints")
    # Every file and folder of it, wherever it stood before; the manifest last.
    before = {path for kind, path in steps[:named] if kind == "disk"}
    partial, inside = folder / "1", "checkpoints/.writing/1"
    manifest = steps.index(("name", f"{inside}/{MANIFEST}"))
    for path in (partial, *partial.rglob("*")):
        if path.name == MANIFEST:
            assert steps[manifest - 1 : manifest + 2] == [
                *(("disk", f"{inside}/.{MANIFEST}"), ("name", f"{inside}/{MANIFEST}"), ("disk", inside)),
            ]
        else:
            place = os.path.relpath(path, partial)
            assert os.path.normpath(f"{inside}/{place}") in before
            assert ("disk", os.path.normpath(f"{inside}/{place}")) in steps[:manifest]


def test_states_on_disk_come_before_the_name_of_the_checkpoint_that_refers_to_them(steps, tmp_path):
    head = np.ones((3, 2), np.float32)
    table = Table.create(tmp_path, [head], 3)
    table.fill(np.arange(3), [head])
    state = State((), table.tree(jax.tree.structure(0)), (), jax.random.key(0), np.int32(1))
    Checkpoints(tmp_path / "checkpoints").save(state, {}, {})
    rows = steps.index(("disk", "clients.rows"))
    assert steps[rows + 1] == ("disk", ".")
    assert rows < steps.index(("name", "checkpoints/1"))


def test_the_log_comes_before_the_summary_that_has_its_digest(steps, tmp_path):
    folder = RunFolder.claim(tmp_path / "run", "never")
    assert steps == [("disk", ".")]
    folder.finish({"rounds": 1})
    wanted = ["run/metrics.jsonl", "run/.summary.json", "run/summary.json", "run"]
    assert [path for _, path in steps[1:]] == wanted


def test_a_disk_that_fails_keeps_the_previous_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")

    def fail(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CannotWrite, match="file: Input/output error"):
        write_text(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_a_file_system_that_cannot_write_a_folder_to_the_disk(tmp_path, monkeypatch):
    usual = os.fsync

    def fsync(descriptor):
        if os.path.isdir(os.readlink(f"/proc/self/fd/{descriptor}")):
            raise OSError(22, "Invalid argument")
        usual(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_text(tmp_path / "file", "content")
    assert (tmp_path / "file").read_text() == "content"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/null", path)])
def test_only_a_file_is_replaced(tmp_path, make):
    make(tmp_path / "file")
    with pytest.raises(CannotWrite, match="file: It is no regular file"):
        write_text(tmp_path / "file", "content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert not (tmp_path / "file").is_file()
