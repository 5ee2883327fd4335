"""Primitives by themselves: wrong shapes, labels and losses are one line, and what is not known is not certified."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfl_jax import ClientData, InvalidInput, models, primitives
from pfl_jax.primitives import simplex_qp

X: Any = np.arange(8.0).reshape(4, 2)
Y: Any = np.array([0, 1, 2, 1])
MASK: Any = np.ones(4, bool)
MODEL = models.mlp((2,), 3, hidden=(3,))
LOSS: Any = primitives.supervised_loss(MODEL)
DATA = ClientData(jnp.asarray(X), jnp.asarray(Y), jnp.asarray(MASK))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: primitives.class_centroids(X[:2], Y, MASK, 3), r"features \[2, 2\], labels \[4\], mask \[4\]"),
        (lambda: primitives.class_centroids(X[0], Y, MASK, 3), r"give features \[n, d\], labels \[n\], mask \[n\]"),
        (lambda: primitives.label_feature_statistics(X, Y[:3], MASK, 3), "do not fit"),
        (lambda: primitives.class_counts(Y, MASK[:3], 3), "do not fit"),
        (lambda: primitives.class_counts(Y, MASK, 2), "there is a label 2: labels of 2 classes are 0 to K - 1"),
        (lambda: primitives.class_centroids(X, -Y, MASK, 3), "there is a label -2"),
        (lambda: primitives.second_moment(X, MASK[:3]), "do not fit"),
        (lambda: primitives.head_weights(jnp.zeros((3, 2, 2)), jnp.ones(2), jnp.ones(3)), r"give mu \[M, K, d\]"),
        (lambda: primitives.head_weights(jnp.zeros((3, 2)), jnp.ones(3), jnp.ones(3)), "do not fit"),
        (lambda: primitives.weighted_mean(jnp.ones(3), {"w": X}), r"weights \[3\], leaf \[4, 2\]"),
        (lambda: primitives.mix(jnp.ones((3, 3)), {"w": X}), "do not fit"),
        (lambda: primitives.size_weights(X), "do not fit"),
        (lambda: primitives.trace_weights(X), "do not fit"),
        (lambda: primitives.trace_weights(jnp.ones(2), "none"), "normalization must be proportional"),
        (lambda: primitives.feature_alignment(X, X[:2], MASK), "do not fit"),
        (lambda: primitives.feature_alignment(X, X, MASK[:2]), "do not fit"),
        (lambda: primitives.classwise_alignment(X, X, Y[:2], MASK, 3), "do not fit"),
        (lambda: primitives.balanced_softmax(X, Y, MASK, jnp.ones(3)), "do not fit"),
        (lambda: primitives.proximal({"w": X}, {"w": X[:2]}), "params and anchor have different shapes"),
        (lambda: primitives.fisher_trace(LOSS, {}, DATA), "such as deployed_loss"),
        (lambda: primitives.diagonal_fisher(LOSS, {}, DATA), "such as deployed_loss"),
        (lambda: primitives.squared_gradient_norms(LOSS, {}, DATA), "deployed_loss"),
    ],
)
def test_wrong_input_is_one_line(call, said):
    with pytest.raises(InvalidInput, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_padding_may_have_any_label():
    assert primitives.class_counts(jnp.array([0, 9]), jnp.array([True, False]), 2).tolist() == [1, 0]
    assert jax.jit(primitives.class_counts, static_argnums=2)(Y, MASK, 2).tolist() == [1, 2]


def test_no_weights_follow_from_nan():
    assert np.isnan(primitives.trace_weights(jnp.array([1, jnp.nan]))).all()
    of_absent = primitives.trace_weights(jnp.array([1, jnp.nan]), present=jnp.array([True, False]))
    assert of_absent.tolist() == [1, 0]
    assert primitives.trace_weights(jnp.zeros(2)).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("solver", ["auto", "interior_point", "projected_gradient"])
def test_the_gap_of_a_program_that_is_not_convex_is_infinite(solver):
    # From equal weights, 2, nothing descends; the minimum is 1.
    matrices = jnp.array([[[1.0, 3.0], [3.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]])
    gap = simplex_qp.solve_simplex_qp(matrices, solver=solver).gap
    assert np.isinf(gap[0])
    assert (gap[1:] < 1e-6).all()
    # Convex on the simplex, though not elsewhere: all of it is the minimum.
    assert simplex_qp.solve_simplex_qp(-jnp.ones((3, 3)), solver=solver).gap < 1e-6
    # Of rank 2, and negative by rounding.
    rows = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    assert np.isfinite(simplex_qp.solve_simplex_qp(jnp.asarray(rows @ rows.T), solver=solver).gap)


def test_float64_of_numpy_is_taken_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matrices: Any = np.eye(2)
        assert simplex_qp.solve_simplex_qp(matrices).weights.tolist() == [0.5, 0.5]
