"""Scores of classification from arrays."""

from pfl_jax.base import Scores


def scores_of(accuracy, loss=None, macro_f1=None, auc=None, validation=None):
    """`Scores` with these arrays [N]; those left out equal the accuracy."""
    given = {"accuracy": accuracy, "loss": loss, "macro_f1": macro_f1, "auc": auc}
    return Scores({name: accuracy if values is None else values for name, values in given.items()}, validation)
