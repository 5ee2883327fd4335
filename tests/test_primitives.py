"""Losses, aggregation, trees and summaries against float64 NumPy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfl_jax import aggregation, evaluation, losses, trees
from pfl_jax.base import ClientData


def numpy_cross_entropy(logits, labels):
    logits = np.float64(logits)
    return np.mean(
        [np.log(np.exp(row - row.max()).sum()) + row.max() - row[k] for row, k in zip(logits, labels, strict=True)]
    )


def test_cross_entropy_counts_real_examples_only():
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=(7, 4)) * 5, generator.integers(0, 4, 7)
    mask = np.array([1, 1, 0, 1, 0, 0, 1], bool)
    got = losses.cross_entropy(jnp.float32(logits), jnp.int32(labels), jnp.asarray(mask))
    np.testing.assert_allclose(got, numpy_cross_entropy(logits[mask], labels[mask]), rtol=1e-5)
    gradient = jax.grad(losses.cross_entropy)(jnp.float32(logits), jnp.int32(labels), jnp.asarray(mask))
    assert (np.asarray(gradient)[~mask] == 0).all()
    assert losses.cross_entropy(jnp.float32(logits), jnp.int32(labels), jnp.zeros(7, bool)) == 0


def test_feature_alignment_is_equation_3():
    generator = np.random.default_rng(1)
    features, targets = generator.normal(size=(2, 5, 3))
    mask = np.array([1, 0, 1, 1, 0], bool)
    want = np.mean([np.sum((f - t) ** 2) / 3 for f, t in zip(features[mask], targets[mask], strict=True)])
    arguments = jnp.float32(features), jnp.float32(targets), jnp.asarray(mask)
    np.testing.assert_allclose(losses.feature_alignment(*arguments), want, rtol=1e-5)
    assert (jax.grad(losses.feature_alignment, argnums=1)(*arguments) == 0).all()


def test_weighted_mean_and_mix():
    generator = np.random.default_rng(2)
    stacked = {"a": generator.normal(size=(3, 2, 2)), "b": (generator.normal(size=3),)}
    matrix = generator.dirichlet(np.ones(3), size=3)
    tree = jax.tree.map(jnp.float32, stacked)
    mean = aggregation.weighted_mean(jnp.float32(matrix[0]), tree)
    want = jax.tree.map(lambda leaf: sum(w * row for w, row in zip(matrix[0], leaf, strict=True)), stacked)
    chex.assert_trees_all_close(mean, jax.tree.map(np.float32, want), rtol=1e-5)
    mixed = aggregation.mix(jnp.float32(matrix), tree)
    for i in range(3):
        row = aggregation.weighted_mean(jnp.float32(matrix[i]), tree)
        chex.assert_trees_all_close(trees.gather(mixed, i), row, rtol=1e-5)


def test_weights():
    np.testing.assert_allclose(aggregation.size_weights(jnp.array([300, 600, 1100])), [0.15, 0.3, 0.55], rtol=1e-6)
    np.testing.assert_allclose(aggregation.normalize(jnp.zeros(4)), [0.25] * 4)


def test_gather_scatter_merge_split():
    tree = {"x": jnp.arange(10.0).reshape(5, 2), "flag": jnp.array([True] * 5)}
    rows = trees.gather(tree, jnp.array([3, 1]))
    np.testing.assert_array_equal(rows["x"], [[6, 7], [2, 3]])
    back = trees.scatter(tree, jnp.array([3, 1]), jax.tree.map(jnp.zeros_like, rows))
    np.testing.assert_array_equal(back["x"], [[0, 1], [0, 0], [4, 5], [0, 0], [8, 9]])
    np.testing.assert_array_equal(back["flag"], [True, False, True, False, True])
    assert trees.split(trees.merge("theta", "phi")) == ("theta", "phi")
    assert trees.byte_count(tree) == 10 * 4 + 5


@pytest.mark.parametrize(("n", "real"), [(5, 3), (450, 450), (450, 201)])
def test_accuracy_ignores_padding(n, real):
    generator = np.random.default_rng(3)
    logits, labels = generator.normal(size=(n, 4)).astype(np.float32), generator.integers(0, 4, n).astype(np.int32)
    data = ClientData(jnp.asarray(logits), jnp.asarray(labels), jnp.arange(n) < real)
    got = evaluation.accuracy(lambda scale, x: scale * x, jnp.float32(2.0), data)
    np.testing.assert_allclose(got, np.mean(logits.argmax(-1)[:real] == labels[:real]), rtol=1e-6)
    assert np.isnan(evaluation.accuracy(lambda _, x: x, (), data._replace(mask=jnp.zeros(n, bool))))


def test_summary():
    accuracies = np.array([0.5, np.nan, 0.9, 0.7] + [0.8] * 17)
    summary = evaluation.summarize(accuracies)
    values = 100 * accuracies[~np.isnan(accuracies)]
    np.testing.assert_allclose([summary.mean, summary.std], [values.mean(), values.std()])
    np.testing.assert_allclose(summary.worst_decile, (50 + 70) / 2)
    assert summary.clients == 20
    assert np.isnan(evaluation.summarize(np.full(3, np.nan)).mean)
