"""Ctrl-C in this process, as a run hears it."""

import gc
import os
import signal
import time

from experiments.host.exit_codes import Stop


def ask_to_stop(number=signal.SIGTERM):
    """Sends a signal, and waits until the thread has told the run; fails after ten seconds."""
    os.kill(os.getpid(), number)
    until = time.monotonic() + 10
    while not any(type(one) is Stop and one.requested for one in gc.get_objects()):
        assert time.monotonic() < until
        time.sleep(0.01)
