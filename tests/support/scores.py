"""Scores of classification from arrays."""

from experiments.folder.run_folder import evaluation
from pfl_jax import Scores


def scores_of(accuracy, loss=None, macro_f1=None, auc=None, validation=None):
    """`Scores` with these arrays [N]; those left out equal the accuracy."""
    given = {"accuracy": accuracy, "loss": loss, "macro_f1": macro_f1, "auc": auc}
    return Scores({name: accuracy if values is None else values for name, values in given.items()}, validation)


def line_of(number, received, trained, middle=None, *, counts, newcomers=None, seconds=1.0, speed=1.0):
    """Line of a run's log, from `Scores` after aggregation, after training and, if given, in the middle."""
    scores = {"received": received, "trained": trained, "before_aggregation": middle}
    measured = {name: one for name, one in scores.items() if one is not None}
    counters = {
        "bytes_up": 1_000_000 * number,
        "bytes_down": 2_000_000 * number,
        "seconds": seconds,
        "examples_per_second": speed,
    }
    return evaluation(number, measured, counts, newcomers) | counters
