"""Tasks: the meaning of a model's outputs and of the labels y, as a loss for training and scores for evaluation.

A model has its task in `Model.task`, by default CLASSIFICATION: `model._replace(task=tasks.REGRESSION)`. Your own task
is a `Task` with a loss and scores; another loss for classes is `CLASSIFICATION._replace(loss=focal)`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pfl_jax.errors import InvalidInput
from pfl_jax.outputs import cross_entropy, macro_auc, macro_f1, masked_mean, mean_auc

Kind = Literal["classes", "vectors", "sequences"]
"""Outputs of a model for one example: logits of classes, exactly one of them right; any other vector; or a sequence of
vectors, whose features are a sequence too."""


class Score(NamedTuple):
    """One number that says how well a model's outputs fit the labels of one client's examples.

    Attributes:
      name: name in results, files and tables.
      value: (outputs [n, ...], y [n, ...], mask [n]) -> scalar over the real examples; outputs in the form that
        `Task.kept` leaves. Outputs of padding are finite, and the score must not depend on them. NaN means no score.
      higher_is_better: False for a loss.
      percent: whether files and tables show 100 times the value.
    """

    name: str
    value: Callable[[Any, jax.Array, jax.Array], jax.Array]
    higher_is_better: bool = True
    percent: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scores:
    """Scores of clients' models on their own test examples, by name: `scores["accuracy"]`.

    Attributes:
      by_name: name of each of `Task.scores` -> [N], float32; NaN for clients without model or examples. CLASSIFICATION
        has accuracy, macro_f1 (over classes that occur among labels or predictions) and auc (of the one-vs-rest ROC
        curves; NaN if all examples are of one class), all in [0, 1], and loss, the mean cross entropy of the softmax
        of `Method.predict`, in nats.
      validation: the same scores on the clients' validation examples; None for a federation without such examples.
      train: "loss", the task's loss on the clients' training examples, in scores of models right after local training
        if `Settings.select` reads losses; None otherwise.
    """

    by_name: dict[str, jax.Array | np.ndarray]
    validation: "Scores | None" = None
    train: "Scores | None" = None

    def __getitem__(self, name: str) -> jax.Array | np.ndarray:
        return self.by_name[name]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of every score: [N], () for one client, with a leading axis of runs in sweeps."""
        return next(iter(self.by_name.values())).shape


class Task(NamedTuple):
    """Goal for which a model is trained.

    Attributes:
      loss: (outputs [B, ...], y [B, ...], mask [B]) -> scalar, the mean of one term for each real example. Terms of
        padding must be finite.
      scores: at least one; the first is the primary score, by which rounds and runs are chosen.
      name: name in errors and files.
      kind: see `Kind`; methods with equations for classes need "classes".
      likelihood: like `loss`: the mean of -log p(y | x) up to a constant; None if this is the loss.
      kept: (outputs [B, ...], y [B, ...]) -> values that the scores need for each example, leaves [B, ...]. They are
        kept for all test examples of a client, so large outputs should be reduced here.
      check: (shape of the outputs, number of classes of the data or 0) -> None; raises InvalidInput for
        outputs that do not fit the task.
    """

    loss: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
    scores: tuple[Score, ...]
    name: str = "own"
    kind: Kind = "vectors"
    likelihood: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = None
    kept: Callable[[jax.Array, jax.Array], Any] = lambda outputs, y: outputs
    check: Callable[[tuple[int, ...], int], None] = lambda shape, num_classes: None

    @property
    def primary(self) -> Score:
        """The first score."""
        return self.scores[0]

    def example_losses(self, outputs: jax.Array, y: jax.Array) -> jax.Array:
        """Losses [B] of single examples.

        Args:
          outputs, y: outputs and labels of the examples, [B, ...].
        """
        real = jnp.ones(1, bool)
        return jax.vmap(lambda outputs, y: self.loss(outputs[None], y[None], real))(outputs, y)


def _share(right: jax.Array, mask: jax.Array) -> jax.Array:
    """Share of the real examples where right [n] is True; NaN without real examples."""
    return jnp.sum(right & mask, dtype=jnp.float32) / jnp.sum(mask, dtype=jnp.float32)


def _mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of values [n] over the real examples; NaN without real examples."""
    return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.sum(mask, dtype=jnp.float32)


def _worst(values: jax.Array, worst: jax.Array | float) -> jax.Array:
    """Values with NaN replaced by the worst value: a score of NaN would leave the client out of all means."""
    return jnp.where(jnp.isnan(values), worst, values)


def _predicted(logits: jax.Array) -> jax.Array:
    """Class with the largest of the logits [..., K]; K, a class that does not exist, where a logit is NaN."""
    return jnp.where(jnp.any(jnp.isnan(logits), axis=-1), logits.shape[-1], jnp.argmax(logits, axis=-1))


def _label_loss(logits: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
    is_label = y[:, None] == jnp.arange(logits.shape[-1])
    return -_mean(jnp.sum(jnp.where(is_label, jax.nn.log_softmax(logits), 0), axis=-1), mask)


def _check_logits(shape: tuple[int, ...], num_classes: int) -> None:
    if len(shape) != 2:
        raise InvalidInput(f"predictions must be logits [B, K], not {list(shape)}")
    if shape[1] < num_classes:
        raise InvalidInput(
            f"the model has {shape[1]} classes, and the data {num_classes}: build it for dataset.num_classes"
        )


CLASSIFICATION = Task(
    cross_entropy,
    (
        Score("accuracy", lambda logits, y, mask: _share(_predicted(logits) == y, mask), percent=True),
        Score("loss", _label_loss, higher_is_better=False),
        Score(
            "macro_f1", lambda logits, y, mask: macro_f1(_predicted(logits), y, mask, logits.shape[-1]), percent=True
        ),
        Score("auc", lambda logits, y, mask: macro_auc(jax.nn.log_softmax(logits), y, mask), percent=True),
    ),
    name="classification",
    kind="classes",
    check=_check_logits,
)
"""One of K classes: logits [B, K], y int [B]. NaN logits count as a wrong answer; their loss and AUC are NaN."""


def task_of(predict: Callable[..., Any]) -> Task:
    """Task of the model whose `apply` the function `predict` is; CLASSIFICATION for other functions."""
    return getattr(getattr(predict, "__self__", None), "task", CLASSIFICATION)


def _columns(outputs: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Outputs and labels as [B, D], from [B, D] or, for D = 1, [B] or [B, 1]; InvalidInput if they do not fit."""
    rows = outputs.shape[0]
    columns = outputs.reshape(rows, -1), y.reshape(rows, -1).astype(outputs.dtype)
    if max(outputs.ndim, y.ndim) > 2 or columns[0].shape != columns[1].shape:
        raise InvalidInput(
            f"the model's outputs {list(outputs.shape)} do not fit y {list(y.shape)}: an output for each number of y"
        )
    return columns


def _of_columns(
    value: Callable[[jax.Array, jax.Array], jax.Array], mean: Callable[[jax.Array, jax.Array], jax.Array] = _mean
) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Mean over examples of value(outputs [B, D], y [B, D]) [B]."""
    return lambda outputs, y, mask: mean(value(*_columns(outputs, y)), mask)


def _r2(outputs: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
    outputs, y = _columns(outputs, y)
    real = mask[:, None]
    center = jnp.sum(jnp.where(real, y, 0), axis=0) / jnp.sum(mask)
    residual = jnp.sum(jnp.where(real, jnp.square(y - outputs), 0), axis=0)
    spread = jnp.sum(jnp.where(real, jnp.square(y - center), 0), axis=0)
    # Not by the spread, which rounding makes positive for equal values.
    low, high = (jnp.where(real, y, end) for end in (jnp.inf, -jnp.inf))
    varies = jnp.min(low, axis=0) < jnp.max(high, axis=0)
    return jnp.sum(jnp.where(varies, 1 - residual / jnp.where(varies, spread, 1), 0)) / jnp.sum(varies)


def _squares(outputs: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(outputs - y), axis=-1)


REGRESSION = Task(
    _of_columns(_squares, masked_mean),
    (
        Score("mse", _of_columns(_squares), higher_is_better=False),
        Score("mae", _of_columns(lambda outputs, y: jnp.mean(jnp.abs(outputs - y), axis=-1)), higher_is_better=False),
        Score("r2", _r2),
    ),
    name="regression",
    likelihood=_of_columns(lambda outputs, y: jnp.sum(jnp.square(outputs - y), axis=-1) / 2, masked_mean),
    kept=lambda outputs, y: _worst(outputs, jnp.inf),
)
"""Numbers: outputs [B, D] and y float [B, D], or [B, 1] or [B] for D = 1. The loss is the mean squared error over
examples and numbers; the likelihood is Gaussian with unit variance, 1/2 ||output - y||^2 for an example. R2 is the mean
over numbers that vary among a client's examples; NaN if no number varies. For NaN outputs the errors are infinite."""


def _mean_of_bits(logits: jax.Array, y: jax.Array) -> jax.Array:
    """Mean cross entropy [B] over the bits of each example."""
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, y), axis=-1)


_bit_loss = Score("loss", _of_columns(_mean_of_bits), higher_is_better=False)


def _all_right(logits: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
    logits, y = _columns(logits, y)
    return _share(jnp.all(((logits > 0) == (y > 0)) & ~jnp.isnan(logits), axis=-1), mask)


def _bit_auc(logits: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
    logits, y = _columns(logits, y)
    return mean_auc(_worst(logits, jnp.where(y > 0, -jnp.inf, jnp.inf)), y > 0, mask)


def _check_bits(shape: tuple[int, ...], num_classes: int) -> None:
    # A third class would count as the second one. Flags are not classes.
    if num_classes not in (0, 2):
        raise InvalidInput(f"the task is for flags 0 and 1, and the data has {num_classes} classes")


MULTI_LABEL = Task(
    _of_columns(_mean_of_bits, masked_mean),
    (
        Score("auc", _bit_auc, percent=True),
        Score("subset_accuracy", _all_right, percent=True),
        _bit_loss,
    ),
    name="multi_label",
    likelihood=_of_columns(lambda logits, y: y.shape[-1] * _mean_of_bits(logits, y), masked_mean),
    check=_check_bits,
)
"""Any of L labels: logits [B, L], y [B, L] of 0 and 1. The loss is the mean cross entropy over examples and labels. The
auc is the mean over labels that only some of a client's examples have; subset accuracy is the share of examples with
all labels right."""

BINARY = Task(
    MULTI_LABEL.loss,
    (
        Score("accuracy", _all_right, percent=True),
        _bit_loss,
        Score("auc", _bit_auc, percent=True),
    ),
    name="binary",
    check=_check_bits,
)
"""Yes or no: one logit [B] or [B, 1], y [B] of 0 and 1."""


def _symbol_losses(logits: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross entropies [B, T], 0 for padding, and the real symbols [B, T]."""
    real = y >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(y, 0))
    return jnp.where(real, losses, 0.0), real


def _mean_of_symbols(logits: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
    losses, real = _symbol_losses(logits, y)
    return masked_mean(jnp.sum(losses, axis=-1) / jnp.maximum(jnp.sum(real, axis=-1), 1), mask)


def _symbol_sums(logits: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    """For each example [B]: its cross entropy, its number of right symbols and its number of symbols."""
    losses, real = _symbol_losses(logits, y)
    sums = {"loss": _worst(losses, jnp.inf), "right": (_predicted(logits) == y) & real, "symbols": real}
    return {name: jnp.sum(values, axis=-1, dtype=jnp.float32) for name, values in sums.items()}


def _per_symbol(name: str) -> Callable[[dict[str, jax.Array], jax.Array, jax.Array], jax.Array]:
    def mean(sums, y, mask):
        total = {name: jnp.sum(jnp.where(mask, values, 0.0)) for name, values in sums.items()}
        return total[name] / total["symbols"]

    return mean


def _check_sequences(shape: tuple[int, ...], num_classes: int) -> None:
    if len(shape) != 3:
        raise InvalidInput(f"predictions must be logits [B, T, K] of T symbols, not {list(shape)}")
    _check_logits((shape[0], shape[2]), num_classes)


NEXT_SYMBOL = Task(
    _mean_of_symbols,
    (
        Score("cross_entropy", _per_symbol("loss"), higher_is_better=False),
        Score("accuracy", _per_symbol("right"), percent=True),
        Score("perplexity", lambda *of: jnp.exp(_per_symbol("loss")(*of)), higher_is_better=False),
    ),
    name="next_symbol",
    kind="sequences",
    likelihood=lambda logits, y, mask: masked_mean(jnp.sum(_symbol_losses(logits, y)[0], axis=-1), mask),
    kept=_symbol_sums,
    check=_check_sequences,
)
"""A symbol at each of T places: logits [B, T, K], y int [B, T], negative for padding. The loss is the mean over
examples of the mean over each example's symbols; scores are over all symbols of a client."""

TASKS: dict[str, Task] = {task.name: task for task in (CLASSIFICATION, REGRESSION, MULTI_LABEL, NEXT_SYMBOL, BINARY)}
"""name -> task"""
