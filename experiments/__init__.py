"""Experiments of the papers from the command line: `python -m experiments.DATASET --method NAME`."""

import gc
import importlib.util
import os
import signal
import sys

DATASETS = (
    *("cifar10", "cifar100", "cinic10", "custom", "digits", "domains", "emnist", "fashion_mnist", "femnist"),
    *("fortunes", "har", "heart", "shakespeare", "stackoverflow_tags", "watch"),
)
"""The data sets that have an experiment, each a module of this name here."""


def _exit(*_) -> None:
    """Exit at once: an exception during the imports of a command would print many lines, or crash."""
    os.write(2, b"interrupted while no run was going on\n")
    os._exit(130)


def _begin_command() -> None:
    """Settings of this process that a command needs before its imports."""
    # Unless nohup or the like ignores Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)
    # As in `pfl_jax`, and for NumPy too, whose OpenBLAS reads it when NumPy is first imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # XLA takes two of its own tuning flags for CPU features when it loads a cached program, and fills the screen with
    # false alarms; the cache is kept apart for each kind of CPU (`jax_config.cache_folder`), so there is no true one.
    # Read when jax is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # What JAX imports and traces stays. By default Python looks through it for cycles again and again, which takes a
    # third of a command's start.
    gc.set_threshold(100_000, 20, 20)


def _refuse_unknown_module() -> None:
    """Exit with one line if `python -m experiments.NAME` names no module; Python would exit with code 1."""
    words = sys.orig_argv
    package, _, name = words[words.index("-m") + 1].partition(".") if "-m" in words else ("", "", "")
    if package == __name__ and name.isidentifier() and importlib.util.find_spec(f"{package}.{name}") is None:
        # Imported now: Python imports this package before all else.
        from pfl_jax.validation import unknown

        print(f"error: {unknown('dataset', name, DATASETS)}", file=sys.stderr)
        sys.exit(2)


# Python imports this package first for a command, with "-m" in place of its name. An import in a program sets nothing.
if sys.argv[:1] == ["-m"]:
    _begin_command()
    from experiments import known_help

    if known_help.show():
        sys.exit(0)
    _refuse_unknown_module()
