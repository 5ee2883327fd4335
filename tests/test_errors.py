"""Errors of the library, and the words of their messages."""

import copy
import os
import pickle
from pathlib import Path

import pytest

from pfl_jax import Diverged, InvalidInput
from pfl_jax.atomic_write import append_line, write_binary, write_text
from pfl_jax.errors import CannotWrite, first_line, one_line, shortened


@pytest.mark.parametrize("clients", [[2, 5], []])
def test_a_divergence_can_be_sent_to_another_process_and_copied(clients):
    error = Diverged(3, clients)
    error.add_note("lr 9")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is Diverged
        assert (str(other), other.round, other.clients) == (str(error), 3, clients)
        assert other.__notes__ == ["lr 9"]


def test_an_error_is_told_in_one_line_of_limited_length():
    assert first_line(InvalidInput("one\ntwo")) == "one"
    assert first_line(InvalidInput()) == ""
    assert one_line(ValueError(" one\n  two")) == "one two"
    assert one_line(ValueError()) == "ValueError"
    assert shortened("a" * 200) == "a" * 200
    assert shortened("a" * 201) == "a" * 197 + "..."
    assert len(first_line("a" * 900)) == 200
    assert len(one_line("a" * 900)) == 300


def test_a_line_that_cannot_be_appended_is_told(tmp_path, full_disk):
    log = tmp_path / "log"
    append_line(log, "first")
    with full_disk(20), pytest.raises(CannotWrite, match=r"cannot write .*log: File too large; make room"):
        append_line(log, "second" * 10)
    assert log.read_text().startswith("first\n")
    with pytest.raises(CannotWrite, match="/dev/full: No space left on device; make room"):
        append_line(Path("/dev/full"), "line")


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path, full_disk):
    path = tmp_path / "file"
    write_text(path, "old")
    with full_disk(10), pytest.raises(CannotWrite, match="make room"):
        write_text(path, "new" * 10)

    def interrupted(file):
        file.write(b"new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_binary(path, interrupted)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    with pytest.raises(CannotWrite, match="No such file or directory; give a folder that can be written"):
        write_text(tmp_path / "absent" / "file", "new")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/null", path)])
def test_only_a_file_is_replaced(tmp_path, make):
    make(tmp_path / "file")
    with pytest.raises(CannotWrite, match="file: It is no regular file"):
        write_text(tmp_path / "file", "content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert not (tmp_path / "file").is_file()
