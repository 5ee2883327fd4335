"""Early stopping by the scores on validation examples, of one run or of several whose arrays have a leading axis."""

import warnings
from typing import Any, NamedTuple

import jax
import numpy as np

from pfl_jax.base import PyTree, Scores
from pfl_jax.tasks import Score


class Patience(NamedTuple):
    """Best evaluation of a run so far, arrays [] or [R].

    Attributes:
      kept: number of its round; 0 before the first evaluation.
      mean: mean over clients of the primary score on validation examples there, of errors minus it.
      ended: bool; whether the run has waited long enough for a better one.
    """

    kept: np.ndarray
    mean: np.ndarray
    ended: np.ndarray

    @classmethod
    def begin(cls, shape: tuple[int, ...]) -> "Patience":
        """Before the first evaluation of runs of this shape, () or (R,)."""
        return cls(np.zeros(shape, int), np.full(shape, -np.inf), np.zeros(shape, bool))

    def after(self, number: int, received: Scores, primary: Score, patience: int) -> "Patience":
        """After another evaluation. A run that has ended stays as it is, and equal means keep the earlier round.

        Args:
          number: of the round, from 1.
          received: leaves [N] or [R, N], with scores on validation examples.
          primary: the task's primary score.
          patience: rounds without a better mean after which a run ends.
        """
        assert received.validation is not None
        with warnings.catch_warnings():
            # Of a run without any score the mean is NaN, which is never better.
            warnings.simplefilter("ignore", RuntimeWarning)
            found = np.nanmean(np.asarray(received.validation[primary.name], np.float64), axis=-1)
        found = found if primary.higher_is_better else -found
        better = (found > self.mean) & ~self.ended
        kept = np.where(better, number, self.kept)
        return Patience(kept, np.where(better, found, self.mean), self.ended | (number - kept >= patience))


def without_ended(scores: PyTree, ended: np.ndarray) -> Any:
    """Scores with NaN for the runs that have ended.

    Args:
      scores: leaves [R, N]; None stays None.
      ended: [R], bool.
    """
    return jax.tree.map(lambda leaf: np.where(ended[..., None], np.nan, leaf).astype(leaf.dtype), scores)
