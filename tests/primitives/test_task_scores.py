"""Losses, scores and likelihoods of tasks against scikit-learn and float64 NumPy; padding has no part in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import tiny_federation, tiny_model
from sklearn import metrics

from pfl_jax import ClientData, InvalidInput, networks, tasks
from pfl_jax.data import client_data
from pfl_jax.primitives import fisher_trace, losses, no_scores, score, summarize
from pfl_jax.tasks import BINARY, CLASSIFICATION, MULTI_LABEL, NEXT_SYMBOL, REGRESSION, TASKS, Score, Task

N, REAL = 23, 17


def examples(outputs, y):
    """Data whose inputs are a model's outputs; the last rows are padding."""
    return ClientData(jnp.asarray(outputs, jnp.float32), jnp.asarray(y), jnp.arange(N) < REAL)


def found(task, data):
    """Loss, and scores by name, of a model that gives its inputs."""
    scores = jax.jit(lambda data: score(lambda _, x: x, (), data, task))(data)
    return float(task.loss(data.x, data.y, data.mask)), {name: float(value) for name, value in scores.by_name.items()}


@pytest.mark.parametrize("columns", [1, 3])
def test_regression_is_scikit_learns(columns):
    generator = np.random.default_rng(0)
    y = generator.normal(size=(N, columns)).astype(np.float32)
    outputs = y + generator.normal(size=(N, columns)).astype(np.float32)
    loss, scores = found(REGRESSION, examples(outputs, y))
    y, outputs = y[:REAL], outputs[:REAL]
    want = {
        "mse": metrics.mean_squared_error(y, outputs),
        "mae": metrics.mean_absolute_error(y, outputs),
        "r2": metrics.r2_score(y, outputs),
    }
    assert scores == pytest.approx(want, rel=1e-5)
    assert loss == pytest.approx(want["mse"], rel=1e-5)


def test_one_number_for_each_example_may_lack_its_axis():
    generator = np.random.default_rng(1)
    y, outputs = generator.normal(size=(2, N)).astype(np.float32)
    want = found(REGRESSION, examples(outputs[:, None], y[:, None]))
    assert found(REGRESSION, examples(outputs[:, None], y)) == want == found(REGRESSION, examples(outputs, y))
    bits = (y > 0).astype(np.int32)
    assert found(BINARY, examples(outputs[:, None], bits)) == found(BINARY, examples(outputs, bits))


# The mean of equal numbers such as 0.1 is rounded.
@pytest.mark.parametrize("constant", [3.0, 0.1, 20.3])
def test_r2_is_over_the_numbers_that_vary(constant):
    generator = np.random.default_rng(2)
    y, outputs = generator.normal(size=(2, N, 2)).astype(np.float32)
    y[:, 1] = constant
    _, scores = found(REGRESSION, examples(outputs, y))
    assert scores["r2"] == pytest.approx(metrics.r2_score(y[:REAL, 0], outputs[:REAL, 0]), rel=1e-5)
    assert np.isnan(found(REGRESSION, examples(outputs, np.full((N, 2), constant, np.float32)))[1]["r2"])


def bits_of(generator, columns):
    # Rounded, so that there are ties.
    return generator.normal(size=(N, columns)).round(1), generator.integers(0, 2, (N, columns))


def test_multi_label_is_scikit_learns():
    logits, y = bits_of(np.random.default_rng(3), 4)
    y[:, 3] = 1  # Without a curve.
    loss, scores = found(MULTI_LABEL, examples(logits, y))
    logits, y = logits[:REAL], y[:REAL]
    likely = 1 / (1 + np.exp(-logits))
    want = {
        "auc": np.mean([metrics.roc_auc_score(y[:, label], logits[:, label]) for label in range(3)]),
        "subset_accuracy": metrics.accuracy_score(y, logits > 0),
        "loss": np.mean([metrics.log_loss(y[:, label], likely[:, label], labels=[0, 1]) for label in range(4)]),
    }
    assert scores == pytest.approx(want, rel=1e-5)
    assert loss == pytest.approx(want["loss"], rel=1e-5)


def test_binary_is_scikit_learns():
    logits, y = bits_of(np.random.default_rng(4), 1)
    loss, scores = found(BINARY, examples(logits, y[:, 0]))
    logits, y = logits[:REAL, 0], y[:REAL, 0]
    want = {
        "accuracy": metrics.accuracy_score(y, logits > 0),
        "loss": metrics.log_loss(y, 1 / (1 + np.exp(-logits))),
        "auc": metrics.roc_auc_score(y, logits),
    }
    assert scores == pytest.approx(want, rel=1e-5)
    assert loss == pytest.approx(want["loss"], rel=1e-5)


def test_answers_of_nan_are_wrong():
    logits = np.full((N, 1), np.nan)
    assert found(BINARY, examples(logits, np.zeros(N, np.int32)))[1]["accuracy"] == 0
    assert found(MULTI_LABEL, examples(logits, np.zeros((N, 1), np.int32)))[1]["subset_accuracy"] == 0
    _, scores = found(NEXT_SYMBOL, examples(np.full((N, 2, 3), np.nan), np.zeros((N, 2), np.int32)))
    assert scores["accuracy"] == 0


def test_no_client_is_left_out_of_the_mean_of_a_primary_score_for_a_prediction_of_nan():
    outputs, y = np.random.default_rng(6).normal(size=(2, N, 1))
    bits = (y > 0).astype(np.int32)
    perfect = np.where(bits, 1.0, -1.0)
    _, want = found(MULTI_LABEL, examples(np.where(np.arange(N)[:, None] == 3, -2 * perfect, perfect), bits))
    for values in (outputs, perfect):
        values[[3, REAL]] = np.nan
    _, scores = found(REGRESSION, examples(outputs, y))
    assert scores == {"mse": np.inf, "mae": np.inf, "r2": -np.inf}
    both = {name: np.array([value, 0.5], np.float32) for name, value in scores.items()}
    summary = summarize(tasks.Scores(both), np.array([3, 5]), REGRESSION)
    assert (summary.mean, summary.pooled, summary.worst_decile, summary.clients) == (np.inf, np.inf, np.inf, 2)
    _, scores = found(MULTI_LABEL, examples(perfect, bits))
    # As the example that is the furthest on the wrong side.
    assert scores["auc"] == want["auc"] < 1
    symbols = np.zeros((N, 2, 3))
    symbols[3, 1] = np.nan
    assert found(NEXT_SYMBOL, examples(symbols, np.zeros((N, 2), np.int32)))[1]["cross_entropy"] == np.inf
    symbols[3, 1], symbols[REAL:] = 0.0, np.nan
    _, scores = found(NEXT_SYMBOL, examples(symbols, np.zeros((N, 2), np.int32)))
    assert scores["cross_entropy"] == pytest.approx(np.log(3))


def test_next_symbols_are_scikit_learns_over_all_symbols():
    generator = np.random.default_rng(5)
    logits, y = generator.normal(size=(N, 6, 5)), generator.integers(0, 5, (N, 6)).astype(np.int32)
    lengths = generator.integers(1, 7, N)
    y[np.arange(6) >= lengths[:, None]] = -1
    loss, scores = found(NEXT_SYMBOL, examples(logits, y))
    logits, y, real = logits[:REAL], y[:REAL], y[:REAL] >= 0
    likely = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    mean = metrics.log_loss(y[real], likely[real], labels=range(5))
    want = {
        "cross_entropy": mean,
        "accuracy": metrics.accuracy_score(y[real], logits[real].argmax(-1)),
        "perplexity": np.exp(mean),
    }
    assert scores == pytest.approx(want, rel=1e-5)
    # Each example counts as much as another, however long it is.
    own = [metrics.log_loss(y[row][real[row]], likely[row][real[row]], labels=range(5)) for row in range(REAL)]
    assert loss == pytest.approx(np.mean(own), rel=1e-5)
    assert abs(np.mean(own) - mean) > 1e-3


def of_task(task, client=1):
    """A tiny model's parameters, and examples of a client."""
    model = tiny_model(task)
    return model, model.init(jax.random.key(0)), client_data(tiny_federation(task=task), client, "train")


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_the_loss_is_the_mean_over_examples_and_has_no_gradient_of_padding(task):
    model, params, data = of_task(task, client=0)
    assert not data.mask.all()
    outputs, mask = jax.jit(model.apply)(params, data.x), np.asarray(data.mask)
    each = np.asarray(jax.jit(task.example_losses)(outputs, data.y))
    loss, gradient = jax.jit(jax.value_and_grad(task.loss))(outputs, data.y, data.mask)
    assert float(loss) == pytest.approx(each[mask].mean(), rel=1e-5)
    assert not np.asarray(gradient)[~mask].any()
    assert np.asarray(gradient)[mask].any()
    assert float(jax.jit(task.loss)(outputs, data.y, jnp.zeros_like(data.mask))) == 0


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_without_examples_there_is_no_score(task):
    model, params, data = of_task(task)
    none = jax.jit(lambda params, data: score(model.apply, params, data, task))(
        params, data._replace(mask=jnp.zeros_like(data.mask))
    )
    assert all(np.isnan(value) for value in none.by_name.values())
    assert none.by_name.keys() == no_scores(3, task).by_name.keys()
    assert {value.dtype for value in none.by_name.values()} == {np.dtype(np.float32)}


LOG_LIKELIHOOD = {
    "classification": lambda logits, y: jax.nn.log_softmax(logits)[y],
    "regression": lambda outputs, y: jax.scipy.stats.norm.logpdf(y, outputs, 1.0).sum(),
    "multi_label": lambda logits, y: jnp.where(y == 1, jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)).sum(),
    "binary": lambda logits, y: jnp.where(y == 1, jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits))[0],
    "next_symbol": lambda logits, y: sum(
        jnp.where(symbol < 0, 0.0, jax.nn.log_softmax(row)[symbol]) for row, symbol in zip(logits, y, strict=True)
    ),
}


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
@pytest.mark.parametrize("dense", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_fisher_trace_is_that_of_the_likelihood(task, dense):
    """Also where it has a closed form, that of this package's layers."""
    model, params, data = of_task(task, client=0)
    if dense:
        layer = networks.layers.Dense(model.num_classes)
        model = model._replace(classify=lambda head, features: layer.apply({"params": head}, features))
    got = jax.jit(lambda params, data: fisher_trace(losses.negative_log_likelihood(model), params, data))(params, data)

    @jax.jit
    def squared_norm(x, y):
        gradient = jax.grad(lambda w: LOG_LIKELIHOOD[task.name](model.apply(w, x[None])[0], y))(params)
        return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient))

    want = [float(squared_norm(x, y)) for x, y, real in zip(*data, strict=True) if real]
    assert float(got) == pytest.approx(np.mean(want), rel=1e-4)


def test_outputs_that_do_not_fit_are_named():
    wrong = "the model's outputs [23, 3] do not fit y [23]"
    with pytest.raises(InvalidInput, match="^" + wrong.replace("[", r"\[").replace("]", r"\]")):
        found(REGRESSION, examples(np.zeros((N, 3)), np.zeros(N, np.float32)))
    for task, shape, labels, words in (
        (CLASSIFICATION, (4,), 0, "logits [B, K], not [4]"),
        (CLASSIFICATION, (4, 2), 3, "the model has 2 classes, and the data 3"),
        (NEXT_SYMBOL, (4, 2), 0, "logits [B, T, K] of T symbols, not [4, 2]"),
        (NEXT_SYMBOL, (4, 2, 5), 6, "the model has 5 classes, and the data 6"),
        (BINARY, (4, 1), 3, "for flags 0 and 1, and the data has 3 classes"),
        (MULTI_LABEL, (4, 3), 3, "for flags 0 and 1, and the data has 3 classes"),
    ):
        with pytest.raises(InvalidInput) as error:
            task.check(shape, labels)
        assert words in str(error.value)


def test_a_task_of_ones_own_is_a_loss_and_scores():
    def pinball(outputs, y, mask):
        gap = y - outputs[:, 0]
        return tasks.masked_mean(jnp.maximum(0.9 * gap, -0.1 * gap), mask)

    task = Task(pinball, (Score("pinball", pinball, higher_is_better=False),), name="quantile")
    generator = np.random.default_rng(6)
    y, outputs = generator.normal(size=(2, N)).astype(np.float32)
    loss, scores = found(task, examples(outputs[:, None], y))
    want = metrics.mean_pinball_loss(y[:REAL], outputs[:REAL], alpha=0.9)
    assert loss == pytest.approx(want, rel=1e-5)
    assert scores == pytest.approx({"pinball": want}, rel=1e-5)
    assert losses.negative_log_likelihood(tiny_model()._replace(task=task)) is not None


def test_the_worst_clients_are_those_with_the_largest_error():
    scores = no_scores(20, REGRESSION)
    scores.by_name["mse"][:] = np.arange(20)
    scores.by_name["r2"][:] = 0.5
    summary = summarize(scores, np.ones(20, int), REGRESSION)
    assert (summary.mean, summary.worst_decile, summary.others["r2"]) == (9.5, 18.5, 0.5)
    assert np.isnan(summary.others["mae"])
