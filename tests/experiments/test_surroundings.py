"""Terminals, locales, home folders and disks that are not as usual: a command does its work, or says one line."""

import contextlib
import errno
import io
import os
import sys
from pathlib import Path

import pytest
import surroundings
from rich.console import Console

from experiments.cli.exit_codes import exit_code
from experiments.host import jax_config
from experiments.host.console import Terminal, print_line, print_text


def printed(text, encoding, errors, monkeypatch):
    """Bytes that a command prints to a terminal with this encoding."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert exit_code(lambda: print(text)) == 0
    return terminal.buffer.getvalue()


def test_characters_that_a_terminal_lacks_are_printed_in_another_way(monkeypatch):
    assert printed("98.3 ± 0.2 数", "ascii", "strict", monkeypatch) == b"98.3 ? 0.2 ?\n"
    # Bytes of a file's name that are no text.
    assert printed("saved r\udcfcn ±", "utf-8", "strict", monkeypatch) == "saved r?n ±\n".encode()
    assert printed("saved r\udcfcn ±", "ascii", "surrogateescape", monkeypatch) == b"saved r?n ?\n"


def raising(error):
    def work():
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (lambda: Path("~nobody-of-this-name/run").expanduser(), "a path begins with ~, and the home folder cannot be"),
        (raising(PermissionError(errno.EACCES, "Permission denied", "/root/x")), "error: /root/x: Permission denied"),
        (raising(OSError(errno.ENOSPC, "No space left on device", "/x")), "error: /x: No space left on device"),
        (lambda: (Path("x" * 300) / "config.json").is_file(), f"error: {'x' * 300}/config.json: File name too long"),
    ],
)
def test_paths_that_cannot_be_used_are_one_line(work, told, capsys):
    assert exit_code(work) == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1


def test_other_errors_stay_what_they_are():
    for error in (OSError(errno.EIO, "Input/output error"), RuntimeError("broken"), PermissionError(1, "no path")):
        with pytest.raises(type(error)):
            exit_code(raising(error))


def test_a_full_disk_behind_the_output_is_one_line(monkeypatch, capsys):
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert exit_code(lambda: print("a line")) == 2
    assert capsys.readouterr().err == "error: cannot write the output: No space left on device\n"
    # Closing it fails once more.
    with contextlib.suppress(OSError), open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        code = exit_code(raising(PermissionError(errno.EACCES, "Permission denied", "/root/x")))
    assert code == 2


def test_a_command_whose_reader_has_exited_goes_on_to_its_end(monkeypatch):
    reader, writer = os.pipe()
    done = []

    def work():
        console = Terminal()
        console.print("first")
        assert os.read(reader, 100) == b"first\n"
        os.close(reader)
        for place in range(3):
            print_line(console, "x" * 100_000)
            done.append(place)

    with open(writer, "w", encoding="ascii") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert exit_code(work) == 0
    assert done == [0, 1, 2]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_for_people_break_between_words_on_a_terminal_alone(is_terminal):
    text = " ".join(["participation=1.0,"] * 12)
    console = Console(width=80, force_terminal=is_terminal, color_system=None, file=io.StringIO())
    print_text(console, text)
    lines = console.file.getvalue().splitlines()
    assert (len(lines) > 1) == is_terminal
    assert max(map(len, lines)) <= 80 or not is_terminal
    assert " ".join(line.strip() for line in lines) == text


def test_a_cache_that_xla_would_refuse_is_none(monkeypatch):
    """XLA takes the folder's name as text."""
    monkeypatch.setenv("PFL_JAX_CACHE", os.fsdecode(b"/tmp/r\xfcn"))
    assert jax_config.cache_folder() is None
    monkeypatch.setenv("PFL_JAX_CACHE", "/tmp/rün")
    assert jax_config.cache_folder().parent == Path("/tmp/rün")


def test_a_user_without_a_home_folder_has_no_cache(monkeypatch):
    def no_home(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PFL_JAX_CACHE", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    assert jax_config.cache_folder() is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ASCII", "no text"])
def test_whole_commands(name):
    """`tests/support/surroundings.py` has more."""
    assert surroundings.main([name]) == 0
