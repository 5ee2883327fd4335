"""Ctrl-C is answered within two seconds, also while the main thread is in native code, such as XLA's compiler."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LIMIT = 2.0
"""Seconds until the answer."""

# What takes long here does not return to Python, and so runs no handler, before it is done.
NATIVE = """
import hashlib, sys
from rich.console import Console
from experiments.host.signals import stoppable

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
from experiments.cli.exit_codes import leave

atexit.register(print, "on the way out")
print("before")
leave(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("code", "printed"), [(130, "before\n"), (2, "before\non the way out\n")])
def test_an_interrupted_command_does_not_wait_for_xla_on_pythons_way_out(code, printed):
    """Which destroys JAX's client, and that waits for the threads that compile."""
    done = subprocess.run([sys.executable, "-c", LEAVING, str(code)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, printed, "")


def test_every_command_leaves_like_that():
    for path in sorted((ROOT / "experiments").rglob("*.py")):
        _, is_command, last = path.read_text().rpartition('\nif __name__ == "__main__":\n')
        assert not is_command or "leave(main(" in last or path.name == "child.py", path


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
