"""Scores of each client's model on its own test examples, and their summary over clients."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import ClientData, Personal, Scores
from pfl_jax.primitives.examples import map_examples


def score(predict: Callable[[Personal, jax.Array], jax.Array], personal: Personal, data: ClientData) -> Scores:
    """Scores of one client's model on the real examples of `data`: `Scores` with scalar leaves.

    Args:
      predict: (Personal, inputs [B, ...]) -> logits or log-probabilities [B, K].
      personal: the model that the client deploys.
      data: examples [n, ...]. Without real examples all scores are NaN. NaN logits are a wrong answer; loss and AUC are
        NaN then.
    """
    logits = map_examples(lambda x: predict(personal, x).astype(jnp.float32), data.x, data.mask)
    log_probabilities = jax.nn.log_softmax(logits)
    count = jnp.sum(data.mask, dtype=jnp.float32)
    # A class that does not exist.
    predicted = jnp.where(jnp.any(jnp.isnan(logits), axis=-1), logits.shape[-1], jnp.argmax(logits, axis=-1))
    label_log_probabilities = jnp.take_along_axis(log_probabilities, data.y[:, None], axis=-1)[:, 0]
    return Scores(
        accuracy=jnp.sum((predicted == data.y) & data.mask, dtype=jnp.float32) / count,
        loss=-jnp.sum(jnp.where(data.mask, label_log_probabilities, 0.0)) / count,
        macro_f1=macro_f1(predicted, data.y, data.mask, logits.shape[-1]),
        auc=macro_auc(log_probabilities, data.y, data.mask),
    )


def no_scores(num_clients: int, *, validation: bool = False) -> Scores:
    """Scores of N clients that were never scored: NaN, float32 NumPy arrays [N].

    Args:
      num_clients: N.
      validation: whether there are scores on validation examples too.
    """
    accuracy, loss, macro_f1, auc = np.full((4, num_clients), np.nan, np.float32)
    scores = Scores(accuracy, loss, macro_f1, auc)
    return scores._replace(validation=no_scores(num_clients)) if validation else scores


def macro_f1(predicted: jax.Array, y: jax.Array, mask: jax.Array, num_classes: int) -> jax.Array:
    """Mean over classes of F1 = 2 TP / (2 TP + FP + FN), for classes that occur among labels or predictions.

    Args:
      predicted, y: [n], classes; K as prediction for an example without one.
      mask: [n], the examples that count.
      num_classes: K.

    Returns:
      A scalar in [0, 1], equal to scikit-learn's f1_score(average="macro"); NaN without examples.
    """
    weight = mask.astype(jnp.float32)
    true_positives = jnp.zeros(num_classes, weight.dtype).at[y].add(jnp.where(predicted == y, weight, 0.0))
    # (TP + FN) + (TP + FP), the denominator of F1.
    total = jnp.zeros(num_classes, weight.dtype).at[y].add(weight).at[predicted].add(weight, mode="drop")
    occurs = total > 0
    return jnp.sum(jnp.where(occurs, 2 * true_positives / jnp.where(occurs, total, 1.0), 0.0)) / jnp.sum(occurs)


def macro_auc(scores: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over classes of the area under the ROC curve of one class against all others.

    For one class it is the probability that a random example of the class has a higher score than a random example of
    the other classes, where ties count half (Mann, Whitney 1947). Classes to which all examples or none belong have no
    curve and are left out.

    Args:
      scores: [n, K], higher for more likely classes.
      y: [n], classes.
      mask: [n], the examples that count.

    Returns:
      A scalar in [0, 1], NaN if no class has a curve, or a score is NaN.
    """

    (n,) = mask.shape
    count = jnp.sum(mask, dtype=jnp.int32)
    ranks, edge = jnp.arange(n), jnp.ones(1, bool)

    def area(column, positive):
        # Padding is sorted last, where it changes no rank. Ties: ranks from `below` + 1 to `up_to` have equal scores.
        column = jnp.where(mask, column, jnp.inf)
        ordered, positive = jax.lax.sort((column, positive.astype(jnp.float32)), num_keys=1)
        differs = ordered[1:] != ordered[:-1]
        below = jax.lax.cummax(jnp.where(jnp.concatenate([edge, differs]), ranks, 0))
        up_to = jax.lax.cummin(jnp.where(jnp.concatenate([differs, edge]), ranks + 1, n), reverse=True)
        beaten = jnp.sum(positive * (below + jnp.minimum(up_to, count))) / 2
        positives = jnp.sum(positive)
        pairs = positives * (count - positives)
        return (beaten - positives * positives / 2) / jnp.where(pairs > 0, pairs, jnp.nan)

    belongs = (y[:, None] == jnp.arange(scores.shape[-1])) & mask[:, None]
    areas = jax.vmap(area, in_axes=1)(scores, belongs)
    has_curve = ~jnp.isnan(areas)
    unknown = jnp.any(jnp.isnan(scores) & mask[:, None])
    return jnp.where(unknown, jnp.nan, jnp.sum(jnp.where(has_curve, areas, 0.0)) / jnp.sum(has_curve))


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
      >>> received, trained = (Scores(*[np.full(3, value)] * 4) for value in (0.5, 0.75))
      >>> metrics.before_aggregation(received, trained, np.array([True, False, True])).accuracy.tolist()
      [0.75, 0.5, 0.75]
    """
    return jax.tree.map(lambda old, new: np.where(members, new, old), received, trained)


class Summary(NamedTuple):
    """Summary of a federation's scores; accuracies, F1 and AUC in percent.

    Attributes:
      mean: mean accuracy over clients, unweighted.
      pooled: accuracy over all test examples, which is the mean over clients weighted by their test examples.
      std: population standard deviation of the accuracy over clients.
      worst_decile: mean accuracy of the worst tenth of the clients: the number nearest to N / 10, at least one.
      jain: Jain's index (sum a)^2 / (N sum a^2) of the accuracies a: 1 if all are equal, 1/N if all but one are zero.
      loss, macro_f1, auc: means over the clients that have the score.
      clients: number of clients that have an accuracy.
    """

    mean: float
    pooled: float
    std: float
    worst_decile: float
    jain: float
    loss: float
    macro_f1: float
    auc: float
    clients: int


def summarize(scores: Scores, test_counts: np.ndarray | jax.Array) -> Summary:
    """Summarize the scores [N] of N clients; clients without scores (NaN) are left out.

    Args:
      scores: [N]; those on validation examples are not part of the summary.
      test_counts: [N], test examples of each client.

    Example:
      >>> import numpy as np
      >>> from pfl_jax import Scores
      >>> from pfl_jax.primitives import metrics
      >>> each = np.array([0.5, 1.0, np.nan])
      >>> scores = Scores(accuracy=each, loss=each, macro_f1=each, auc=each)
      >>> summary = metrics.summarize(scores, test_counts=np.array([30, 10, 10]))
      >>> summary.mean, summary.pooled, summary.worst_decile, summary.clients
      (75.0, 62.5, 50.0, 2)
    """
    values = 100 * np.sort(_without_nan(scores.accuracy))
    if not values.size:
        nan = float("nan")
        return Summary(nan, nan, nan, nan, nan, nan, nan, nan, 0)
    worst = values[: max(1, round(values.size / 10))]
    loss, f1, auc = (_mean(_without_nan(each)) for each in (scores.loss, scores.macro_f1, scores.auc))
    squares = float(np.sum(values**2))
    jain = float(np.sum(values)) ** 2 / (values.size * squares) if squares else 1.0
    return Summary(
        mean=float(values.mean()),
        pooled=100 * pooled(scores.accuracy, test_counts),
        std=float(values.std()),
        worst_decile=float(worst.mean()),
        jain=jain,
        loss=loss,
        macro_f1=100 * f1,
        auc=100 * auc,
        clients=values.size,
    )


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
