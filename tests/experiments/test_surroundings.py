"""Terminals, locales, home folders and disks that are not as usual: a command does its work, or says one line."""

import contextlib
import errno
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.host import jax_config
from experiments.host.console import Terminal, print_line
from experiments.host.exit_codes import exit_code


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


def test_a_cache_that_xla_would_refuse_is_none(monkeypatch):
    """XLA takes the folder's name as text."""
    monkeypatch.setenv("PFL_JAX_CACHE", os.fsdecode(b"/tmp/r\xfcn"))
    assert jax_config.cache_folder() is None
    monkeypatch.setenv("PFL_JAX_CACHE", "/tmp/rün")
    assert jax_config.cache_folder().parent == Path("/tmp/rün")
    # Nor has a user without a home folder one.
    monkeypatch.setenv("PFL_JAX_CACHE", "~nobody-of-this-name/cache")
    assert jax_config.cache_folder() is None


ROOT = Path(__file__).parents[2]

LIMIT = 2.0
"""Seconds until the answer."""

# What takes long here does not return to Python, and so runs no handler, before it is done.
NATIVE = """
import hashlib, sys
from rich.console import Console
from experiments.host.exit_codes import stoppable

with stoppable(Console(), lambda: "what remains") as stop:
    stop.at_once = "completed" not in sys.argv
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000_000)
"""


@pytest.fixture
def start():
    """Starts NATIVE with these words, up to its native code; it is killed at the end."""
    children = []

    def started(*words):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        children.append(subprocess.Popen([sys.executable, "-c", NATIVE, *words], cwd=ROOT, **pipes))
        assert children[-1].stdout.readline() == "ready\n"
        time.sleep(0.2)
        return children[-1]

    yield started
    for child in children:
        child.kill()
        child.communicate()


def interrupted(child):
    """Ctrl-C, and what the process said on stderr when it ended, within the limit."""
    began = time.monotonic()
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=30)
    assert time.monotonic() - began < LIMIT
    assert child.returncode == 130
    return said


def test_native_code_before_the_first_round_is_left_at_once(start):
    assert interrupted(start()) == "what remains\n"


def test_native_code_in_a_later_round_is_left_the_second_time(start):
    child = start("completed")
    began = time.monotonic()
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "stopping after this round; once more to stop at once\n"
    assert time.monotonic() - began < LIMIT
    assert child.poll() is None
    assert interrupted(child) == "what remains\n"


LEAVING = """
import atexit, sys
from experiments.host.exit_codes import exit_process

atexit.register(print, "on the way out")
print("before")
exit_process(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("code", "printed"), [(130, "before\n"), (2, "before\non the way out\n")])
def test_an_interrupted_command_does_not_wait_for_xla_on_pythons_way_out(code, printed):
    """Which destroys JAX's client, and that waits for the threads that compile."""
    done = subprocess.run([sys.executable, "-c", LEAVING, str(code)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, printed, "")


def test_an_import_sets_nothing():
    names = ("OPENBLAS_NUM_THREADS", "TF_CPP_MIN_LOG_LEVEL")
    # jax sets the second one itself.
    program = f"import os, jax, experiments.export; print(*map(os.environ.get, {names}))"
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "None 1\n"


CHILDREN = ("child.py", "parts.py", "queued.py", "pfllib.py")
"""Programs that another one of ours starts, or that run elsewhere."""


def test_every_command_leaves_like_that():
    for path in sorted(path for name in ("experiments", "lab") for path in (ROOT / name).rglob("*.py")):
        _, is_command, last = path.read_text().rpartition('\nif __name__ == "__main__":\n')
        assert not is_command or "exit_process(main(" in last or path.name in CHILDREN, path


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.5, 3.0, 8.0])
def test_a_run_that_compiles_is_left_within_two_seconds(tmp_path, after):
    words = "--method fedpac --model resnet8 --rounds 3 --num-clients 4 --train-size 20 --test-size 10 --chunk 4"
    environment = {**os.environ, "PFL_JAX_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "experiments.cifar10", "--source", "embedded", *words.split(), "--out", "run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen(command, cwd=tmp_path, env={**environment, "PYTHONPATH": str(ROOT)}, **pipes)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "config.json").exists():
            assert child.poll() is None, child.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(after)
        assert interrupted(child) == "interrupted before the first evaluation: nothing is left\n"
    finally:
        child.kill()
    assert not (tmp_path / "run").exists()
