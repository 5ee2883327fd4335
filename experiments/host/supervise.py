"""Supervision of one process of a distributed run: however it or another one ends, the user reads one line.

If another process dies, JAX's runtime aborts this one from a thread in C++, with a stack trace and an exit code of its
own, and nothing in Python can prevent it. The command that the user starts is therefore a supervisor. It runs the same
command in a child process, passes signals on, keeps what C++ writes to stderr, and says in one line how the child
ended. If the supervisor is killed, the child ends too.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO

import experiments
from experiments.cli.exit_codes import INTERRUPTED, INVALID, print_line

_CHILD = "PFL_JAX_SUPERVISED"
"""Environment variable of the child, with file descriptors: of stderr, of a pipe from the supervisor, of the note."""

LOST = "another process of the run has died, or cannot be reached"

_OF_RUNTIME = ("distributed service detected fatal errors", "coordination service", "CoordinationService")
"""Parts of what JAX's runtime writes when it aborts because another process is gone; at most log levels, nothing."""

_note: int | None = None


def is_supervised() -> bool:
    """Whether this process is the child of a supervisor."""
    return _CHILD in os.environ


def supervise(dataset: str, arguments: Sequence[str]) -> int:
    """Run a command in a child process.

    Args:
      dataset: name of the experiment.
      arguments: command-line arguments.

    Returns:
      The exit code: the child's, 2 if another process has died, or 128 and the number of the signal that ended the
      child.
    """
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as note:
        handed = (os.dup(2), reader, note.fileno())
        path = [str(Path(experiments.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = {_CHILD: " ".join(map(str, handed)), "PYTHONPATH": os.pathsep.join(filter(None, path))}
        # A group of its own, so that Ctrl-C reaches the child only once.
        child = subprocess.Popen(
            [sys.executable, "-m", "experiments", dataset, *arguments],
            env=os.environ | environment,
            stderr=errors,
            pass_fds=handed,
            process_group=0,
        )
        os.close(reader)
        os.close(handed[0])

        def pass_on(number: int, _: FrameType | None) -> None:
            # Not if it has ended: its number may be another process's then.
            if child.poll() is None:
                child.send_signal(number)

        previous = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = child.wait()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(writer)
        return _ended(code, _content(errors), _content(note))


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _ended(code: int, errors: str, note: str) -> int:
    """Exit code for a child's; say what needs to be said, given what C++ wrote and the note of `remember`."""
    if code == -signal.SIGABRT and (not errors.strip() or any(part in errors for part in _OF_RUNTIME)):
        print_line(f"error: {LOST}{note}")
        return INVALID
    # What led to 2 and 130 has been said by Python.
    if errors and code not in (0, INVALID, INTERRUPTED):
        print(errors, end="", file=sys.stderr, flush=True)
    if code >= 0:
        return code
    name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
    why = ", perhaps because the machine's memory did not suffice" if -code == signal.SIGKILL else ""
    print_line(f"error: this process was ended by {name}{why}{note}")
    return 128 - code


def attach() -> None:
    """Take over what the supervisor has handed to this process; at its start, before anything else."""
    global _note
    said, alive, _note = map(int, os.environ.pop(_CHILD).split())
    for descriptor in (said, alive, _note):
        os.set_inheritable(descriptor, False)
    # Python's messages go where the user reads them at once, those of C++ into the supervisor's file.
    sys.stderr = open(said, "w", buffering=1, encoding=sys.stderr.encoding, errors=sys.stderr.errors)  # noqa: SIM115

    def watch() -> None:
        os.read(alive, 1)
        os._exit(INVALID)

    threading.Thread(target=watch, daemon=True).start()


def remember(text: str) -> None:
    """Set the end of the line that the supervisor says if this process is lost; no effect without a supervisor."""
    if _note is None:
        return
    os.ftruncate(_note, 0)
    os.pwrite(_note, text.encode(errors="replace"), 0)
