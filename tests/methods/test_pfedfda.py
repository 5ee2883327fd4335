"""pFedFDA: feature distributions, their interpolation, and whole rounds against float64 NumPy."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from problems import CLASSES
from reference import cross_entropy
from scipy import optimize

from pfl_jax import ClientData
from pfl_jax.methods.pfedfda import Gaussians, best_interpolation, local_gaussians, validation_loss
from pfl_jax.primitives import stratified_folds

# One program for each kind of call; operation by operation, each shape would compile a dozen.
best_interpolation = jax.jit(best_interpolation, static_argnames="single")
local_gaussians = jax.jit(local_gaussians)


def local(features, y, known, ridge, everything=None):
    """Means and covariance of one client; classes with one or two of all examples take the known mean."""
    sizes = np.bincount(y if everything is None else everything, minlength=CLASSES)
    means = np.array([features[y == k].mean(0) if sizes[k] > 2 else known[0][k] for k in range(CLASSES)])
    centered = features - means[y]
    size = features.shape[1]
    return means, sum(np.outer(row, row) for row in centered) / (len(y) - 1) + ridge * np.eye(size)


def scores(features, distribution, y):
    """Scores of the classifier of a distribution, with the priors of the labels y."""
    means, covariance = distribution
    size = covariance.shape[0]
    covariance = (1 - 1e-4) * covariance + 1e-4 * np.trace(covariance) / size * np.eye(size)
    priors = np.bincount(y, minlength=CLASSES) / len(y) + 1e-4
    inverse = np.linalg.inv(covariance)
    constant = [np.log(p / priors.sum()) - mean @ inverse @ mean / 2 for p, mean in zip(priors, means, strict=True)]
    return features @ inverse @ means.T + constant


def mix(beta, own, known):
    return tuple(b * mine + (1 - b) * theirs for b, mine, theirs in zip(beta, own, known, strict=True))


def cross_validation(beta, features, y, known, ridge):
    """Sum over both folds of the loss of a fold under the other one's statistics."""
    folds = np.asarray(stratified_folds(jnp.int32(y), jnp.ones(len(y), bool)))
    judged = np.bincount(y, minlength=CLASSES)[y] >= 2
    total = 0.0
    for fold in range(2):
        ours, theirs = judged & (folds == fold), judged & (folds != fold)
        distribution = mix(beta, local(features[theirs], y[theirs], known, ridge, y), known)
        total -= reference.log_softmax(scores(features, distribution, y))[np.arange(len(y)), y][ours].mean()
    return total


def example(seed=0, size=40):
    """Features of a client that differ from the known distribution."""
    generator = np.random.default_rng(seed)
    y = np.r_[generator.choice(CLASSES, size, p=[0.6, 0.3, 0.1]), 0, 1]
    known = generator.normal(size=(CLASSES, 4)), np.diag([1.0, 2.0, 0.5, 1.0])
    features = (known[0] + 0.7 * generator.normal(size=(CLASSES, 4)))[y] + generator.normal(size=(len(y), 4))
    return features, y, known


def as_jax(features, y, known, pad=5):
    n = len(y)
    rows = jnp.pad(jnp.float32(features), ((0, pad), (0, 0)), constant_values=3.0)
    data = ClientData(rows, jnp.pad(jnp.int32(y), (0, pad)), jnp.arange(n + pad) < n)
    return rows, data, Gaussians(jnp.float32(known[0]), jnp.float32(known[1]))


def test_local_gaussians():
    features, y, known = example()
    few = np.flatnonzero(y == 2)[2:]
    features, y = np.delete(features, few, 0), np.delete(y, few)
    got = local_gaussians(*as_jax(features, y, known), 0.5)
    for mine, want in zip(got, local(features, y, known, 0.5), strict=True):
        np.testing.assert_allclose(mine, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.means[2], known[0][2], rtol=1e-6)


@pytest.mark.parametrize("single", [False, True])
def test_the_best_interpolation(single):
    features, y, known = example(seed=1)
    # Of class 2 each fold has two examples, too few for a client that has no more.
    rest = np.flatnonzero(y == 2)[4:]
    features, y = np.delete(features, rest, 0), np.delete(y, rest)
    assert np.sum(y == 2) == 4
    arguments, ridge = as_jax(features, y, known), 0.5
    loss = jax.jit(lambda beta: validation_loss(*arguments, ridge)(beta))
    for beta in ([0.2, 0.9], [1.0, 0.0]):
        want = cross_validation(beta, features, y, known, ridge)
        np.testing.assert_allclose(loss(jnp.array(beta)), want, rtol=1e-4)
    beta = np.asarray(best_interpolation(*arguments, ridge, single=single), np.float64)

    def objective(beta):
        return cross_validation(np.broadcast_to(beta, 2), features, y, known, ridge)

    count = 1 if single else 2
    best = optimize.minimize(objective, [0.5] * count, bounds=[(0, 1)] * count)
    np.testing.assert_allclose(beta, np.broadcast_to(best.x, 2), atol=0.02)
    assert cross_validation(beta, features, y, known, ridge) <= best.fun + 1e-4
    # Inside the interval, where a wrong gradient would be seen.
    assert 0.05 < best.x[0] < 0.95


def test_a_client_without_two_examples_of_a_class_takes_the_global_distribution():
    features, y, known = example()
    lone = [np.flatnonzero(y == k)[0] for k in range(CLASSES)]
    got = best_interpolation(*as_jax(features[lone], y[lone], known), 1.0, single=False)
    np.testing.assert_array_equal(got, 0.0)


@pytest.mark.parametrize("interpolation", ["local", pytest.param("separate", marks=pytest.mark.slow)])
def test_pfedfda(interpolation):
    start, clients = full.start_of("pfedfda", interpolation=interpolation), full.training_examples()
    w = reference.to_numpy({"backbone": start.backbone, "head": {"kernel": np.zeros((4, 3)), "bias": np.zeros(3)}})
    known = tuple(map(np.float64, start.features))

    def adapted(w, x, y):
        features = reference.features(w, x)
        own = local(features, y, known, 1.0)
        if interpolation == "local":
            return own
        return mix(np.float64(best_interpolation(*as_jax(features, y, known), 1.0, single=False)), own, known)

    for _ in range(2):
        new, distributions = [], []
        for x, y in clients:
            # The classifier as a head that is not trained.
            zeros = scores(np.zeros((1, 4)), known, y)[0]
            head = {"head/kernel": scores(np.eye(4), known, y) - zeros, "head/bias": zeros}
            new.append(full.fit({**w, **head}, lambda v, now, x=x, y=y: reference.risk(v, x, y), name="backbone"))
            distributions.append(adapted(new[-1], x, y))
        w = reference.mean(full.BETA, new)
        known = tuple(np.tensordot(full.BETA, np.array(parts), 1) for parts in zip(*distributions, strict=True))
    last = full.run("pfedfda", interpolation=interpolation)
    server = last.state.server
    for got, want in zip(server.features, known, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=5e-4)
    np.testing.assert_allclose(server.backbone["kernel"], w["backbone/kernel"], rtol=1e-3, atol=1e-4)
    for client, (x, y) in enumerate(clients):
        test_x, test_y = full.unseen_examples(client)
        got = scores(reference.features(w, test_x), adapted(w, x, y), y)
        np.testing.assert_allclose(last.received["loss"][client], cross_entropy(got, test_y), rtol=3e-3)
        got = scores(reference.features(new[client], test_x), distributions[client], y)
        np.testing.assert_allclose(last.trained["loss"][client], cross_entropy(got, test_y), rtol=3e-3)
