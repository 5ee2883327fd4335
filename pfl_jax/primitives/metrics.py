"""Scores of each client's model on its own test examples, and their summary over clients."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import ClientData, Personal, Scores
from pfl_jax.primitives.examples import FORWARD_BATCH, map_examples
from pfl_jax.tasks import CLASSIFICATION, Score, Task, task_of


def score(
    predict: Callable[[Personal, jax.Array], jax.Array],
    personal: Personal,
    data: ClientData,
    task: Task | None = None,
) -> Scores:
    """Scores of one client's model on the real examples of `data`: `Scores` with scalar leaves.

    Args:
      predict: (Personal, inputs [B, ...]) -> logits or log-probabilities [B, K], or other outputs of the task.
      personal: the model that the client deploys.
      data: examples [n, ...]. Without real examples all scores are NaN.
      task: task, which defines the scores; None for the task of the model whose `apply` is `predict`, see
        `pfl_jax.tasks.task_of`.
    """
    task = task_of(predict) if task is None else task

    def kept(rows):
        x, y = rows
        return task.kept(predict(personal, x).astype(jnp.float32), y)

    # Compiling a loop of one batch takes five times as long as compiling the batch.
    rows, is_one_batch = (data.x, data.y), len(data.mask) <= FORWARD_BATCH
    outputs = kept(rows) if is_one_batch else map_examples(kept, rows, data.mask)
    has_examples = jnp.any(data.mask)
    return Scores(
        {one.name: jnp.where(has_examples, one.value(outputs, data.y, data.mask), jnp.nan) for one in task.scores}
    )


def no_scores(num_clients: int, task: Task = CLASSIFICATION, *, validation: bool = False) -> Scores:
    """Scores of N clients that were never scored: NaN, float32 NumPy arrays [N].

    Args:
      num_clients: N.
      task: task, which defines the scores.
      validation: whether there are scores on validation examples too.
    """
    by_name: dict[str, jax.Array | np.ndarray] = {
        one.name: np.full(num_clients, np.nan, np.float32) for one in task.scores
    }
    return Scores(by_name, no_scores(num_clients, task) if validation else None)


def before_aggregation(received: Scores, trained: Scores, members: np.ndarray) -> Scores:
    """Scores of the clients' models in the middle of a round: after local training, before aggregation.

    This is the third evaluation protocol. Members of the cohort are tested with their model right after local training,
    all other clients with the model that they would have deployed after the previous round. The code released with
    FedAS tests FedPer and FedAvg in this way: it sends the parameters of the previous round to all clients.

    Args:
      received: leaves [..., N], scores of the model that each client would have deployed after the previous round.
      trained: leaves [..., N], scores of each client's model right after its own last local training.
      members: [..., N], bool; the clients that trained in this round.

    Returns:
      Leaves [..., N], NumPy arrays.

    Example:
      >>> import numpy as np
      >>> from pfl_jax import Scores
      >>> from pfl_jax.primitives import metrics
      >>> received, trained = (Scores({"accuracy": np.full(3, value)}) for value in (0.5, 0.75))
      >>> metrics.before_aggregation(received, trained, np.array([True, False, True]))["accuracy"].tolist()
      [0.75, 0.5, 0.75]
    """
    return jax.tree.map(lambda old, new: np.where(members, new, old), received, trained)


class Summary(NamedTuple):
    """Summary of a federation's scores; scores that are shares, such as accuracies, in percent: see `Score.percent`.

    Attributes:
      mean: mean of the primary score over clients, unweighted.
      pooled: mean weighted by test examples; for the accuracy, this is the accuracy over all test examples.
      std: population standard deviation over clients.
      worst_decile: mean over the worst tenth of the clients: the number nearest to N / 10, at least one.
      jain: Jain's index (sum a)^2 / (N sum a^2) of the scores a: 1 if all are equal, 1/N if all but one are zero.
      others: name -> mean of another score over the clients that have it.
      clients: number of clients that have the primary score.
    """

    mean: float
    pooled: float
    std: float
    worst_decile: float
    jain: float
    others: dict[str, float]
    clients: int


def summarize(scores: Scores, test_counts: np.ndarray | jax.Array, task: Task = CLASSIFICATION) -> Summary:
    """Summarize the scores [N] of N clients; clients without scores (NaN) are left out.

    Args:
      scores: [N]; scores on validation examples are not part of the summary.
      test_counts: [N], test examples of each client.
      task: task, which defines the scores.

    Example:
      >>> import numpy as np
      >>> from pfl_jax.primitives import metrics
      >>> scores = metrics.no_scores(3)
      >>> scores.by_name["accuracy"][:] = [0.5, 1.0, np.nan]
      >>> summary = metrics.summarize(scores, test_counts=np.array([30, 10, 10]))
      >>> summary.mean, summary.pooled, summary.worst_decile, summary.clients
      (75.0, 62.5, 50.0, 2)
    """
    primary, *others = task.scores
    means = {one.name: _factor(one) * _mean(_without_nan(scores[one.name])) for one in others}
    values = _factor(primary) * np.sort(_without_nan(scores[primary.name]))
    if not values.size:
        nan = float("nan")
        return Summary(nan, nan, nan, nan, nan, dict.fromkeys(means, nan), 0)
    worst = (values if primary.higher_is_better else values[::-1])[: max(1, round(values.size / 10))]
    squares = float(np.sum(values**2))
    jain = float(np.sum(values)) ** 2 / (values.size * squares) if squares else 1.0
    return Summary(
        mean=float(values.mean()),
        pooled=_factor(primary) * pooled(scores[primary.name], test_counts),
        # An infinite error has no deviation.
        std=float(values.std()) if np.isfinite(values).all() else float("nan"),
        worst_decile=float(worst.mean()),
        jain=jain,
        others=means,
        clients=values.size,
    )


def _factor(score: Score) -> int:
    """Factor by which results multiply a score."""
    return 100 if score.percent else 1


def pooled(values: np.ndarray | jax.Array, test_counts: np.ndarray | jax.Array) -> float:
    """Mean over clients weighted by their test examples.

    Args:
      values: [N], such as accuracies; clients with NaN are left out.
      test_counts: [N], test examples of each client.

    Returns:
      The weighted mean; NaN if all clients are left out.
    """
    values, weights = np.asarray(values, np.float64), np.asarray(test_counts, np.float64)
    valid = ~np.isnan(values)
    total = float(weights[valid].sum())
    return float(values[valid] @ weights[valid]) / total if total else float("nan")


def _without_nan(values: np.ndarray | jax.Array) -> np.ndarray:
    values = np.asarray(values, np.float64)
    return values[~np.isnan(values)]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else float("nan")


class Transfer(NamedTuple):
    """Forgetting and gains over the phases of a run, in the units of the scores.

    Attributes:
      average: mean score over the phases so far.
      forgetting: mean over the earlier phases of the gap between the score now and the best score at the end of any
        phase since then; NaN in the first phase.
      forward: mean over the phases after the first of the score just before the phase minus the score before any
        training; NaN in the first phase.
    """

    average: float
    forgetting: float
    forward: float


def transfer(after: np.ndarray, untrained: np.ndarray, *, higher_is_better: bool = True) -> Transfer:
    """Forgetting and transfer over the phases of a federation whose data change, see `pfl_jax.data.phases`.

        average_p = mean_(q <= p) a_pq;   forgetting_p = mean_(q < p) max_(q <= l < p) a_lq - a_pq;
        forward_p = mean_(1 <= q <= p) a_(q-1)q - b_q

    Args:
      after: a [p + 1, P], mean score over clients at the end of phase l, from 0, on the test examples of phase q.
      untrained: b [P], these scores before the first round.
      higher_is_better: False for errors, whose differences change sign.

    Example:
      >>> import numpy as np
      >>> from pfl_jax.primitives import transfer
      >>> transfer(np.array([[90.0, 30.0], [70.0, 80.0]]), np.array([10.0, 10.0]))
      Transfer(average=75.0, forgetting=20.0, forward=20.0)

    Reference:
      Forgetting: Chaudhry et al. Riemannian Walk for Incremental Learning. ECCV 2018, Section 4. Forward transfer:
      Lopez-Paz, Ranzato. Gradient Episodic Memory for Continual Learning. NeurIPS 2017, Eq. 4.
    """
    after, untrained = np.asarray(after, np.float64), np.asarray(untrained, np.float64)
    sign, last = 1 if higher_is_better else -1, len(after) - 1
    best = [np.max(sign * after[q:last, q]) - sign * after[last, q] for q in range(last)]
    gained = [sign * (after[q - 1, q] - untrained[q]) for q in range(1, last + 1)]
    means = (float(np.mean(found)) if found else float("nan") for found in (best, gained))
    return Transfer(float(np.mean(after[last, : last + 1])), *means)
