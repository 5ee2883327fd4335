"""Losses, scores and summaries against float64 NumPy; what the methods' equations use is tested there."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import SHAPE, tiny_model
from scores import scores_of
from sklearn import metrics

from pfl_jax import ClientData, methods, tasks
from pfl_jax.outputs import mean_auc
from pfl_jax.primitives import losses, normalize_weights
from pfl_jax.primitives import metrics as evaluation
from pfl_jax.primitives import tree as trees

# One program for each kind of call; operation by operation, each shape would compile a dozen.
score = jax.jit(evaluation.score, static_argnums=0)


def test_all_finite_sees_one_number():
    tree = {"x": jnp.ones((3, 2)), "n": jnp.arange(3)}
    assert trees.all_finite(tree)
    for wrong in (jnp.nan, jnp.inf):
        assert not trees.all_finite({**tree, "x": tree["x"].at[1, 0].set(wrong)})


@pytest.mark.parametrize(("n", "real"), [(5, 3), (450, 450), (450, 201)])
def test_scores_are_scikit_learns_and_ignore_padding(n, real):
    generator = np.random.default_rng(3)
    # Rounded, so that there are ties; class 4 has no example but is predicted, class 5 occurs nowhere.
    logits, labels = generator.normal(size=(n, 6)).round(1).astype(np.float32), generator.integers(0, 4, n)
    logits[:, 5] = -9
    data = ClientData(jnp.asarray(logits), jnp.asarray(labels, jnp.int32), jnp.arange(n) < real)
    got = score(lambda scale, x: scale * x, jnp.float32(2.0), data)
    logits, labels = logits[:real].astype(np.float64), labels[:real]
    log_probabilities = 2 * logits - np.log(np.exp(2 * logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(got["accuracy"], np.mean(logits.argmax(-1) == labels), rtol=1e-6)
    np.testing.assert_allclose(got["loss"], -log_probabilities[np.arange(real), labels].mean(), rtol=1e-5)
    np.testing.assert_allclose(got["macro_f1"], metrics.f1_score(labels, logits.argmax(-1), average="macro"), rtol=1e-6)
    areas = [metrics.roc_auc_score(labels == k, log_probabilities[:, k]) for k in np.unique(labels)]
    np.testing.assert_allclose(got["auc"], np.mean(areas), rtol=1e-5)


def test_padding_comes_after_infinite_scores():
    scores = jnp.array([[jnp.inf], [0.0], [jnp.inf], [5.0], [7.0]])
    positive, mask = jnp.array([[True], [False], [False], [True], [False]]), jnp.array([True, True, True, False, False])
    # Of two pairs one is right and one a tie.
    assert mean_auc(scores, positive, mask) == 0.75


def test_the_auc_of_one_class_is_nan():
    data = ClientData(jnp.eye(3), jnp.zeros(3, jnp.int32), jnp.ones(3, bool))
    one_class = score(lambda _, x: x, (), data)
    assert np.isnan(one_class["auc"])
    np.testing.assert_allclose(one_class["macro_f1"], (2 / 4 + 0 + 0) / 3, rtol=1e-6)


def test_summary():
    accuracies = np.array([0.5, np.nan, 0.9, 0.7] + [0.8] * 17)
    test_counts = np.arange(1, 22)
    summary = evaluation.summarize(
        scores_of(accuracies, accuracies + 1, accuracies / 2, np.full(21, np.nan)), test_counts
    )
    values = 100 * accuracies[~np.isnan(accuracies)]
    np.testing.assert_allclose([summary.mean, summary.std], [values.mean(), values.std()])
    np.testing.assert_allclose(summary.worst_decile, (50 + 70) / 2)
    np.testing.assert_allclose(summary.jain, values.sum() ** 2 / (20 * (values**2).sum()))
    np.testing.assert_allclose(
        [summary.others["loss"], summary.others["macro_f1"]], [values.mean() / 100 + 1, values.mean() / 2]
    )
    counted = ~np.isnan(accuracies)
    np.testing.assert_allclose(summary.pooled, np.average(100 * accuracies[counted], weights=test_counts[counted]))
    assert summary.clients == 20
    assert np.isnan(summary.others["auc"])
    assert np.isnan(evaluation.summarize(scores_of(np.full(3, np.nan)), np.ones(3, int)).mean)


@pytest.mark.parametrize(("clients", "worst"), [(1, 1), (9, 1), (14, 1), (15, 2), (16, 2), (19, 2), (25, 2), (26, 3)])
def test_the_worst_tenth_of_the_clients_is_rounded_to_the_nearest_number(clients, worst):
    # Descending, so that the worst are the last ones.
    accuracies = np.linspace(0.9, 0.1, clients)
    summary = evaluation.summarize(scores_of(accuracies), np.ones(clients, int))
    np.testing.assert_allclose(summary.worst_decile, 100 * accuracies[-worst:].mean())


def test_an_answer_of_nan_is_wrong():
    logits = np.array([[2.0, 0, 0], [0, 2, 0], [1, 0, 2], [np.nan] * 3])
    y, mask = np.array([0, 1, 1, 0]), np.array([True] * 4)
    logits, y, mask = np.pad(logits, ((0, 20), (0, 0))), np.pad(y, (0, 20)), np.pad(mask, (0, 20))
    examples = ClientData(jnp.array(logits, jnp.float32), jnp.array(y), jnp.array(mask))
    found = score(lambda _, x: x, None, examples)
    assert float(found["accuracy"]) == 0.5
    # Classes 0 and 1: F1 2/3 each; class 2: 0.
    np.testing.assert_allclose(found["macro_f1"], 4 / 9, rtol=1e-6)
    assert np.isnan(found["loss"])
    assert np.isnan(found["auc"])
    # In padding it does not matter.
    whole = examples._replace(mask=examples.mask.at[3].set(False))
    assert float(score(lambda _, x: x, None, whole)["auc"]) == 0.75


def test_scores_and_losses_have_the_type_of_their_inputs():
    """Also where JAX's default is float64."""
    with jax.enable_x64(True), warnings.catch_warnings():
        # What JAX says of a sum of float64 terms in an array of float32, and the other way round.
        warnings.simplefilter("error", FutureWarning)
        logits, labels = jnp.ones((4, 3), jnp.float32), jnp.array([0, 1, 2, 0], jnp.int32)
        mask = jnp.ones(4, bool)
        data = ClientData(logits, labels, mask)
        scores = jax.eval_shape(lambda data: evaluation.score(lambda _, x: x, (), data), data)
        loss, half = (
            jax.eval_shape(lambda x: losses.classwise_alignment(x, 2 * x, labels, mask, 3), logits.astype(kind))
            for kind in (jnp.float32, jnp.bfloat16)
        )
    assert {leaf.dtype for leaf in (*jax.tree.leaves(scores), loss)} == {np.dtype("float32")}
    assert half.dtype == jnp.bfloat16


def test_shares_are_as_good_as_counts_and_half_precision_sums_do_not_overflow():
    logits, labels, mask = jnp.zeros((2, 2)), jnp.array([0, 0]), jnp.ones(2, bool)
    found = losses.balanced_softmax(logits, labels, mask, jnp.array([0.25, 0.75]))
    np.testing.assert_allclose(found, np.log(4), rtol=1e-6)
    assert normalize_weights(jnp.full(4, 6e4, jnp.float16)).tolist() == [0.25] * 4


def test_a_model_brings_its_own_scores():
    model = tiny_model()._replace(task=tasks.REGRESSION)
    data = ClientData(jnp.ones((3, *SHAPE)), jnp.ones((3, 3)), jnp.ones(3, bool))
    params = model.init(jax.random.key(0))
    assert evaluation.score(model.apply, params, data).by_name.keys() == {one.name for one in tasks.REGRESSION.scores}
    method = methods.fedavg(model)
    assert method._replace(work=None, predict=model.apply).task is tasks.REGRESSION
    assert method._replace(work=None, predict=lambda *given: model.apply(*given)).task is tasks.CLASSIFICATION


def test_classwise_alignment_adds_up_the_means_of_the_classes():
    generator = np.random.default_rng(1)
    features, targets = generator.normal(size=(2, 9, 5))
    labels, mask = np.array([0, 0, 0, 2, 2, 3, 1, 1, 0]), np.arange(9) < 8
    distances = ((features - targets) ** 2).mean(1)
    want = sum(distances[(labels == label) & mask].mean() for label in (0, 1, 2, 3))
    arguments = jnp.float32(targets), jnp.asarray(labels), jnp.asarray(mask), 6
    np.testing.assert_allclose(losses.classwise_alignment(jnp.float32(features), *arguments), want, rtol=1e-5)
    nobody = losses.classwise_alignment(jnp.float32(features), *arguments[:2], jnp.zeros(9, bool), 6)
    assert nobody == 0
