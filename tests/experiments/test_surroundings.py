"""Terminals, locales, home folders and disks that are not as usual: a command does its work, or says one line."""

import contextlib
import errno
import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from bad_input import RUN
from rich.console import Console

from experiments.cli.exit_codes import exit_code
from experiments.host import jax_config
from experiments.host.console import print_text
from pfl_jax.errors import InvalidInput

ROOT = Path(__file__).parents[2]
HARD = "a folder with ünïcode 数据 and 'quotes'"


def printed(text, encoding, errors, monkeypatch):
    """Bytes that a command prints to a terminal with this encoding."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors)
    monkeypatch.setattr(sys, "stdout", terminal)
    assert exit_code(lambda: print(text)) == 0
    return terminal.buffer.getvalue()


def test_characters_that_a_terminal_lacks_are_printed_in_another_way(monkeypatch):
    assert printed("98.3 ± 0.2 — 数", "ascii", "strict", monkeypatch) == b"98.3 +- 0.2 - ?\n"
    # Bytes of a file's name that are no text.
    assert printed("saved r\udcfcn ±", "utf-8", "strict", monkeypatch) == "saved r?n ±\n".encode()
    assert printed("saved r\udcfcn ±", "ascii", "surrogateescape", monkeypatch) == b"saved r?n +-\n"


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


@pytest.mark.parametrize(("error", "code"), [(None, 1), (InvalidInput("wrong"), 2)])
def test_a_command_whose_reader_has_exited_goes_on_to_its_end(monkeypatch, error, code):
    reader, writer = os.pipe()
    before, done = open(writer, "w", encoding="ascii"), []  # noqa: SIM115

    def work():
        Console().print("first ±")
        assert os.read(reader, 100) == b"first +-\n"
        os.close(reader)
        for place in range(3):
            Console().print("more")
            print("x" * 100_000, flush=True)
            done.append(place)
        if error:
            raise error

    with before, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", before)
        assert exit_code(work) == code
        assert sys.stdout is before
    assert done == [0, 1, 2]


def test_a_command_whose_reader_stays_ends_with_zero(monkeypatch):
    reader, writer = os.pipe()
    with open(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert exit_code(lambda: print("all of it")) == 0
    assert os.read(reader, 100) == b"all of it\n"
    os.close(reader)


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


# Whole commands


def command(module, *words, cwd, code=0, **environment):
    """Runs a command with other variables of the environment, None for none; returns its stdout and stderr."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    variables |= {"PFL_JAX_CACHE": str(Path(cwd) / "cache")} | environment
    ended = subprocess.run(
        [sys.executable, "-m", f"experiments.{module}", *words],
        cwd=cwd,
        env={name: value for name, value in variables.items() if value is not None},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=240,
    )
    assert ended.returncode == code, ended.stderr.decode()
    return ended.stdout, ended.stderr


WORDS = [word for word in RUN.split() if word != "--no-compilation-cache"]


def scores(folder):
    """All that a run's metrics have but times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "second" not in k} for line in lines]


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """The scores of a run in usual surroundings."""
    here = tmp_path_factory.mktemp("usual")
    command("digits", *WORDS, "--out", "run", cwd=here)
    return scores(here / "run")


SURROUNDINGS = {
    "ASCII": {"PYTHONIOENCODING": "ascii"},
    "a C locale": {"LC_ALL": "C", "LANG": None, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "a narrow terminal": {"COLUMNS": "12", "LINES": "3", "TERM": "dumb"},
    "a terminal of one column": {"COLUMNS": "1"},
    "no home": {"HOME": None, "PFL_JAX_CACHE": None, "XDG_CACHE_HOME": None},
    "a home that cannot be written": {"HOME": "/proc/none", "PFL_JAX_CACHE": None, "MPLCONFIGDIR": None},
    "a cache that cannot be written": {"PFL_JAX_CACHE": "/proc/none"},
    "a cache that is a file": {"PFL_JAX_CACHE": "/etc/hostname"},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", SURROUNDINGS)
def test_a_run_its_report_and_its_model_in_all_surroundings(usual, tmp_path, what):
    here = tmp_path / HARD
    here.mkdir()
    _, told = command("digits", *WORDS, "--plot", "--out", f"{HARD}/run", cwd=here, **SURROUNDINGS[what])
    assert told == b""
    assert scores(here / HARD / "run") == usual
    command("report", HARD, "--out", "ré port.html", cwd=here, **SURROUNDINGS[what])
    assert "local" in (here / "ré port.html").read_text()
    command("export", f"{HARD}/run", "--client", "0", "--to", "modèl.msgpack", cwd=here, **SURROUNDINGS[what])
    assert (here / "modèl.msgpack").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize("what", ["ASCII", "a terminal of one column"])
def test_a_sweep_in_all_surroundings(tmp_path, what):
    words = ["--dataset", "digits", *WORDS, "--rounds", "1", "--seeds", "2", "--out", HARD]
    said, told = command("sweep", *words, cwd=tmp_path, **SURROUNDINGS[what])
    assert told == b""
    assert (b"+-" in said) == (what == "ASCII")
    assert json.loads((tmp_path / HARD / "sweep.json").read_text())["settings"]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, 9, 80])
def test_the_progress_bar_of_a_narrow_terminal(usual, tmp_path, columns):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 3, columns, 0, 0))
    variables = os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "TERM": "xterm"}
    variables.pop("COLUMNS", None)
    words = [sys.executable, "-m", "experiments.digits", *WORDS, "--out", "run"]
    child = subprocess.Popen(words, cwd=tmp_path, env=variables, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    said = b""
    # Linux has this error for the end of a terminal.
    with contextlib.suppress(OSError):
        while part := os.read(ours, 65536):
            said += part
    os.close(ours)
    assert child.communicate(timeout=240) == (None, b"")
    assert child.returncode == 0
    assert b"\x1b[" in said
    # The first line is broken by us, between words.
    assert len(said.split(b"\r\n")[0]) <= max(columns, 12)
    assert scores(tmp_path / "run") == usual


@pytest.mark.slow
def test_a_folder_whose_name_is_no_text(usual, tmp_path):
    name = os.fsdecode(b"r\xfcn")
    command("digits", *WORDS, "--checkpoint-every", "1", "--out", name, cwd=tmp_path)
    assert scores(tmp_path / name) == usual
    assert [path.name for path in (tmp_path / name / "checkpoints" / "0-of-1").iterdir()]
    command("report", name, "--out", os.fsdecode(b"p\xe4ge.html"), cwd=tmp_path)
    assert (tmp_path / os.fsdecode(b"p\xe4ge.html")).stat().st_size > 1000


@pytest.mark.slow
def test_a_run_whose_reader_takes_one_line(usual, tmp_path):
    variables = os.environ | {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    start = f"{sys.executable} -m experiments.digits {' '.join(WORDS)} --out run 2> errors | head -1"
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", start], cwd=tmp_path, env=variables, capture_output=True)
    assert ended.returncode == 1
    assert ended.stdout.count(b"\n") == 1
    assert (tmp_path / "errors").read_bytes() == b""
    assert scores(tmp_path / "run") == usual
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_output_into_nothing(tmp_path):
    """Both streams closed, or both on a full disk."""
    start = f"exec {sys.executable} -m experiments.digits {' '.join(WORDS)} --out"
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PFL_JAX_CACHE": str(tmp_path / "cache")}

    def shell(words):
        return subprocess.run(["sh", "-c", words], cwd=tmp_path, env=variables, timeout=240, capture_output=True)

    closed = shell(f"{start} closed <&- >&- 2>&-")
    assert closed.returncode == 0
    assert len(scores(tmp_path / "closed")) == 1
    full = shell(f"{start} full >/dev/full")
    assert full.returncode == 2
    assert full.stderr == b"error: cannot write the output: No space left on device\n"
