"""Balanced softmax, the proximal term and mixtures of models against float64 NumPy; batches folded by hand."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.primitives import losses, tree


def problem(rows=7, classes=4):
    generator = np.random.default_rng(0)
    logits, labels = 3 * generator.normal(size=(rows, classes)), generator.integers(0, classes - 1, rows)
    return logits, labels, generator.random(rows) < 0.7


def test_balanced_softmax_weighs_every_class_by_its_count():
    logits, labels, mask = problem()
    counts = np.array([5.0, 1.0, 30.0, 2.0])
    terms = [-np.log(counts[k] * np.exp(row[k]) / (counts * np.exp(row)).sum()) for row, k in zip(logits, labels)]  # noqa: B905
    got = losses.balanced_softmax(jnp.float32(logits), jnp.int32(labels), jnp.asarray(mask), jnp.float32(counts))
    np.testing.assert_allclose(got, np.mean(np.array(terms)[mask]), rtol=1e-5)


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
    to_targets = jax.grad(lambda t: losses.classwise_alignment(jnp.float32(features), t, *arguments[1:]))(arguments[0])
    assert not to_targets.any()


def test_balanced_softmax_leaves_absent_classes_out():
    logits, labels, mask = problem()
    arguments = jnp.float32(logits), jnp.int32(labels), jnp.asarray(mask)
    counts = jnp.array([5.0, 1.0, 30.0, 0.0])
    loss, gradient = jax.value_and_grad(losses.balanced_softmax)(*arguments, counts)
    without = losses.balanced_softmax(arguments[0][:, :3], *arguments[1:], counts[:3])
    np.testing.assert_allclose(loss, without, rtol=1e-6)
    chex.assert_tree_all_finite(gradient)
    assert (np.asarray(gradient)[:, 3] == 0).all()
    assert (np.asarray(gradient)[mask, :3] != 0).any()


def test_proximal():
    generator = np.random.default_rng(1)
    left, right = ({"a": generator.normal(size=(3, 2)), "b": (generator.normal(size=4),)} for _ in range(2))
    want = ((left["a"] - right["a"]) ** 2).sum() / 2 + ((left["b"][0] - right["b"][0]) ** 2).sum() / 2
    left, right = jax.tree.map(jnp.float32, (left, right))
    value, gradient = jax.value_and_grad(losses.proximal)(left, right)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    chex.assert_trees_all_close(gradient, jax.tree.map(jnp.subtract, left, right), rtol=1e-6)


def test_interpolate():
    left, right = {"a": jnp.array([1.0, 3.1])}, {"a": jnp.array([5.0, -1.7])}
    np.testing.assert_allclose(tree.interpolate(0.25, left, right)["a"], [4.0, -0.5], rtol=1e-6)
    chex.assert_trees_all_equal(tree.interpolate(1.0, left, right), left)
    chex.assert_trees_all_equal(tree.interpolate(jnp.float32(0.0), left, right), right)
