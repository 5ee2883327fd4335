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
"""Data sets that have an experiment; each is a module of this package."""


def _exit(*_) -> None:
    """Exit at once: an exception during the imports of a command would print many lines, or crash."""
    os.write(2, b"interrupted while no run was going on\n")
    os._exit(130)


def _begin_command() -> None:
    """Make the settings of this process that a command needs before its imports."""
    # Ctrl-C stays ignored where nohup or a similar program ignores it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)
    # As in `pfl_jax`, but earlier: OpenBLAS reads this variable when NumPy is first imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # When XLA loads a cached program, it mistakes two of its own tuning flags for CPU features and prints many false
    # alarms. No alarm is true, since each kind of CPU has its own cache (`jax_config.cache_folder`). JAX reads this
    # variable when it is imported.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # The objects that JAX imports and traces stay alive. By default Python searches them for cycles again and again,
    # which takes a third of a command's start.
    gc.set_threshold(100_000, 20, 20)


def _refuse_unknown_module() -> None:
    """Exit with one line if `python -m experiments.NAME` names no module; Python would exit with code 1."""
    words = sys.orig_argv
    package, _, name = words[words.index("-m") + 1].partition(".") if "-m" in words else ("", "", "")
    if package == __name__ and name.isidentifier() and importlib.util.find_spec(f"{package}.{name}") is None:
        # Imported only here: Python imports this package before everything else.
        from pfl_jax.validation import unknown

        print(f"error: {unknown('dataset', name, DATASETS)}", file=sys.stderr)
        sys.exit(2)


# Python imports this package first for a command, with "-m" as its name. An import in a program changes no settings.
if sys.argv[:1] == ["-m"]:
    _begin_command()
    from experiments import known_help

    if known_help.show():
        sys.exit(0)
    _refuse_unknown_module()
