"""Whether whole commands do their work in terminals, locales, home folders and pipes that are not as usual. A tool:

    python tests/support/surroundings.py [NAME ...]

Runs a small run, its report and its export in each of the surroundings below, and compares the run's scores with those
of usual ones. Prints a line for each, and ends with exit code 1 if one differs.
"""

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = ["--method", "local", "--rounds", "3", "--num-clients", "4", "--train-size", "20", "--test-size", "10"]
RUN = [*RUN, "--checkpoint-every", "1"]
HARD = "a folder with ünïcode 数据 and 'quotes'"

VARIABLES: dict[str, dict[str, str | None]] = {
    "ASCII": {"PYTHONIOENCODING": "ascii"},
    "a C locale": {"LC_ALL": "C", "LANG": None, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "a narrow terminal": {"COLUMNS": "12", "LINES": "3", "TERM": "dumb"},
    "a terminal of one column": {"COLUMNS": "1"},
    "no home": {"HOME": None, "PFL_JAX_CACHE": None, "XDG_CACHE_HOME": None},
    "a home that cannot be written": {"HOME": "/proc/none", "PFL_JAX_CACHE": None, "MPLCONFIGDIR": None},
    "a cache that cannot be written": {"PFL_JAX_CACHE": "/proc/none"},
    "a cache that is a file": {"PFL_JAX_CACHE": "/etc/hostname"},
}
"""Name -> variables of the environment, None for none."""


def command(module: str, *words: str, cwd: Path, code: int = 0, **changed: str | None) -> tuple[bytes, bytes]:
    """Run a command with other variables of the environment; return its stdout and stderr."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PFL_JAX_CACHE": str(cwd / "cache")} | changed
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


def scores(folder: Path) -> list[dict]:
    """All that a run's metrics have but times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "second" not in k} for line in lines]


def with_variables(name: str, here: Path) -> Path:
    """A run, its report and its model with other variables, in folders with other characters."""
    changed = VARIABLES[name]
    _, told = command("digits", *RUN, "--plot", "--out", f"{HARD}/run", cwd=here, **changed)
    assert told == b""
    command("report", HARD, "--out", "ré port.html", cwd=here, **changed)
    assert "local" in (here / "ré port.html").read_text()
    command("export", f"{HARD}/run", "--client", "0", "--to", "modèl.msgpack", cwd=here, **changed)
    assert (here / "modèl.msgpack").stat().st_size > 1000
    return here / HARD / "run"


def no_text(here: Path) -> Path:
    """A folder whose name is no text."""
    name = os.fsdecode(b"r\xfcn")
    command("digits", *RUN, "--out", name, cwd=here)
    command("report", name, "--out", os.fsdecode(b"p\xe4ge.html"), cwd=here)
    return here / name


def on_a_terminal(here: Path, columns: int) -> Path:
    """The progress bar of a terminal with so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 3, columns, 0, 0))
    variables = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    variables.pop("COLUMNS", None)
    words = [sys.executable, "-m", "experiments.digits", *RUN, "--out", "run"]
    child = subprocess.Popen(words, cwd=here, env=variables, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE)
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
    return here / "run"


def shell(words: str, here: Path) -> subprocess.CompletedProcess:
    """Run a shell command in which $RUN is the run."""
    run = f"{sys.executable} -m experiments.digits {' '.join(RUN)} --out run"
    variables = os.environ | {"PYTHONPATH": str(ROOT), "RUN": run}
    start = ["bash", "-o", "pipefail", "-c", words]
    return subprocess.run(start, cwd=here, env=variables, timeout=240, capture_output=True)


def one_line(here: Path) -> Path:
    """A reader that takes one line."""
    ended = shell("$RUN 2> errors | head -1", here)
    assert (ended.returncode, ended.stdout.count(b"\n"), (here / "errors").read_bytes()) == (0, 1, b"")
    return here / "run"


def closed(here: Path) -> Path:
    """Closed streams."""
    assert shell("exec $RUN <&- >&- 2>&-", here).returncode == 0
    return here / "run"


def full(here: Path) -> None:
    """A full disk behind the output, which ends the run."""
    ended = shell("exec $RUN >/dev/full", here)
    assert (ended.returncode, ended.stderr) == (2, b"error: cannot write the output: No space left on device\n")


CHECKS: dict[str, Callable[[Path], Path | None]] = {
    **{name: lambda here, name=name: with_variables(name, here) for name in VARIABLES},
    **{f"{columns} columns": lambda here, columns=columns: on_a_terminal(here, columns) for columns in (1, 9, 80)},
    "no text": no_text,
    "a reader of one line": one_line,
    "closed streams": closed,
    "a full output": full,
}
"""Name -> what makes a run and returns its folder; None without one."""


def main(names: list[str]) -> int:
    """Check the surroundings of these names, by default all; return the exit code."""
    failed = 0
    with tempfile.TemporaryDirectory() as root:
        usual = Path(root) / "usual"
        usual.mkdir()
        command("digits", *RUN, "--out", "run", cwd=usual)
        for index, name in enumerate(names or CHECKS):
            here = Path(root) / str(index)
            here.mkdir()
            try:
                folder = CHECKS[name](here)
                problem = "" if folder is None or scores(folder) == scores(usual / "run") else "other scores"
            except AssertionError as error:
                problem = str(error) or "not as expected"
            failed += bool(problem)
            print(f"{name}: {problem or 'as usual'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
