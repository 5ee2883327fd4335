"""Classifiers from feature distributions that interpolate global and local Gaussians (McLaughlin, Su 2024)."""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from pfl_jax.base import Backbone, ClientData, LocalResult, Mean, Method, Model, Privacy
from pfl_jax.methods.factories import SIZE, method_factory, needs_classes
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.feature_statistics import class_centroids, class_counts
from pfl_jax.primitives.features import extract_features
from pfl_jax.primitives.holdout import stratified_folds
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import cross_entropy, loss_of_features
from pfl_jax.streams import CLASS_MEANS
from pfl_jax.validation import Positive

Interpolation: TypeAlias = Literal["separate", "single", "local"]

FEW = 2
"""Classes with up to this many examples take the global mean (released code)."""

FOLDS = 2
"""Folds of the cross-validation that chooses the interpolation."""

EPSILON = 1e-4
"""Share of the mean variance on the diagonal of a covariance, and smoothing of class frequencies (released code)."""

ITERATIONS = 20
"""Steps of the minimization over the interpolation."""


class Gaussians(NamedTuple):
    """Feature distribution: a normal distribution for each class, with one covariance.

    Attributes:
      means: mu [K, d].
      covariance: Sigma [d, d].
    """

    means: jax.Array
    covariance: jax.Array


class PFedFDAServer(NamedTuple):
    """Shared backbone theta and global feature distribution."""

    backbone: Backbone
    features: Gaussians


class GenerativeModel(NamedTuple):
    """Model that a client deploys: backbone, and the linear classifier of its feature distribution, see `classifier`.

    Attributes:
      backbone: theta.
      kernel: [d, K].
      bias: [K].
    """

    backbone: Backbone
    kernel: jax.Array
    bias: jax.Array


def shrunk(covariance: jax.Array) -> jax.Array:
    """Covariance Sigma [d, d] with a share epsilon of its mean variance: (1 - eps) Sigma + eps tr(Sigma) / d I."""
    size = covariance.shape[0]
    return (1 - EPSILON) * covariance + EPSILON * jnp.trace(covariance) / size * jnp.eye(size)


# One matrix at a time, for the reason that `pfl_jax.lapack.thin_svd` gives.
@jax.custom_batching.sequential_vmap
def _solve(covariance: jax.Array, right: jax.Array) -> jax.Array:
    """Sigma^-1 R [d, k] for a covariance Sigma [d, d] and R [d, k]."""
    return jax.scipy.linalg.solve(covariance, right, assume_a="pos")


@jax.custom_batching.sequential_vmap
def _diagonalize(known: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Axes T [d, d] and variances [d] such that T'known T is the identity and T'own T has the variances as diagonal."""
    root = jnp.linalg.cholesky(known)
    half = jax.scipy.linalg.solve_triangular(root, own, lower=True)
    variances, axes = jnp.linalg.eigh(jax.scipy.linalg.solve_triangular(root, half.T, lower=True))
    return jax.scipy.linalg.solve_triangular(root, axes, lower=True, trans="T"), variances


@jax.custom_batching.sequential_vmap
def at_least(covariance: jax.Array, floor: jax.Array) -> jax.Array:
    """Covariance [d, d] whose eigenvalues below a positive floor are raised to it; unchanged if there are none."""
    values, axes = jnp.linalg.eigh((covariance + covariance.T) / 2)
    raised = jnp.matmul(axes * jnp.maximum(values, floor), axes.T, precision="highest")
    # Half of the floor, because of rounding.
    return jnp.where(jnp.min(values) < floor / 2, raised, covariance)


def log_priors(data: ClientData, num_classes: int) -> jax.Array:
    """Logarithms [K] of a client's class frequencies, smoothed so that none is zero."""
    counts = class_counts(data.y, data.mask, num_classes)
    frequencies = counts / jnp.maximum(jnp.sum(counts), 1) + EPSILON
    return jnp.log(frequencies / jnp.sum(frequencies))


def classifier(distribution: Gaussians, priors: jax.Array) -> tuple[jax.Array, jax.Array]:
    r"""Linear classifier of Bayes' rule: log p(y = k | f) is f . Sigma^-1 mu_k - mu_k . Sigma^-1 mu_k / 2 + log pi_k.

    Args:
      distribution: features of the classes.
      priors: log pi [K].

    Returns:
      Kernel [d, K] and bias [K], up to a constant.
    """
    means, covariance = distribution
    kernel = _solve(shrunk(covariance), means.T)
    return kernel, priors - jnp.sum(means * kernel.T, axis=-1) / 2


def local_gaussians(
    features: jax.Array,
    data: ClientData,
    known: Gaussians,
    ridge: float | jax.Array,
    class_sizes: jax.Array | None = None,
) -> Gaussians:
    """A client's own feature distribution: class means, and the pooled covariance plus ridge times the identity.

    Args:
      features: [n, d].
      data: examples of the features.
      known: global distribution, whose means replace the means of classes with up to `FEW` examples.
      ridge: positive, so that the covariance is invertible.
      class_sizes: the client's examples of each class [K], if `data` has only a part of them.
    """
    centroids, counts = class_centroids(features, data.y, data.mask, known.means.shape[0])
    enough = (counts if class_sizes is None else class_sizes * (counts > 0)) > FEW
    means = jnp.where(enough[:, None], centroids, known.means)
    centered = (features - means[data.y]) * data.mask[:, None]
    scatter = jnp.matmul(centered.T, centered, precision="highest")
    covariance = scatter / jnp.maximum(jnp.sum(counts) - 1, 1)
    return Gaussians(means, covariance + ridge * jnp.eye(covariance.shape[0]))


def interpolate_gaussians(beta: jax.Array, own: Gaussians, known: Gaussians) -> Gaussians:
    """Interpolation beta own + (1 - beta) known, with beta [2] of the means and of the covariance."""
    return Gaussians(*(b * mine + (1 - b) * theirs for b, mine, theirs in zip(beta, own, known, strict=True)))


def validation_loss(
    features: jax.Array, data: ClientData, known: Gaussians, ridge: float | jax.Array
) -> Callable[[jax.Array], jax.Array]:
    """Loss that chooses the interpolation: the mean cross entropy of each fold under the Gaussians of the other one.

    Args:
      features: [n, d].
      data: examples of the features.
      known, ridge: see `local_gaussians`.

    Returns:
      beta [2] of means and covariance -> scalar, the sum over the folds; another beta needs no new factorization.
    """
    num_classes = known.means.shape[0]
    priors, folds = log_priors(data, num_classes), stratified_folds(data.y, data.mask, FOLDS)
    class_sizes = class_counts(data.y, data.mask, num_classes)
    judged = data.mask & (class_sizes[data.y] >= FOLDS)

    def fold_loss(fold):
        # A fold has half of the examples, but its means must cover the same classes as the deployed means.
        own = local_gaussians(features, data._replace(mask=judged & (folds != fold)), known, ridge, class_sizes)
        # In these coordinates the global covariance is the identity and the client's is diagonal.
        axes, variances = _diagonalize(shrunk(known.covariance), shrunk(own.covariance))
        points, mine, theirs = (
            jnp.matmul(rows, axes, precision="highest") for rows in (features, own.means, known.means)
        )

        def loss(beta):
            means = beta[0] * mine + (1 - beta[0]) * theirs
            kernel = means / (beta[1] * variances + 1 - beta[1])
            scores = jnp.matmul(points, kernel.T, precision="highest") - jnp.sum(means * kernel, axis=-1) / 2
            return cross_entropy(scores + priors, data.y, judged & (folds == fold))

        return loss

    losses = [fold_loss(fold) for fold in range(FOLDS)]
    return lambda beta: sum((loss(beta) for loss in losses), jnp.zeros(()))


def best_interpolation(
    features: jax.Array, data: ClientData, known: Gaussians, ridge: float | jax.Array, *, single: bool
) -> jax.Array:
    """Interpolation beta in [0, 1] of means and covariance [2] with the smallest `validation_loss`.

    Projected gradient descent from 1/2, whose step length is the best of several powers of 4.

    Args:
      features: [n, d].
      data: examples of the features.
      known, ridge: see `local_gaussians`.
      single: whether both coefficients are equal.

    Returns:
      beta [2]; 0, the global distribution, for a client without two examples of any class.
    """
    loss = validation_loss(features, data, known, ridge)
    lengths = 4.0 ** jnp.arange(2.0, -7.0, -1.0)

    def objective(beta):
        return loss(jnp.broadcast_to(beta, (2,)))

    def step(_, beta):
        tried = jnp.clip(beta - lengths[:, None] * jax.grad(objective)(beta), 0.0, 1.0)
        tried = jnp.concatenate([beta[None], tried])
        return tried[jnp.argmin(jax.vmap(objective)(tried))]

    beta = jax.lax.fori_loop(0, ITERATIONS, step, jnp.full((1 if single else 2,), 0.5))
    counts = class_counts(data.y, data.mask, known.means.shape[0])
    return jnp.where(jnp.any(counts >= FOLDS), jnp.broadcast_to(beta, (2,)), 0.0)


@method_factory
def pfedfda(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    interpolation: Interpolation = "separate",
    ridge: Positive = 1.0,
) -> Method:
    r"""pFedFDA: a shared backbone under generative classifiers, from Gaussian feature distributions of each client.

        p(y = k | f) proportional to  pi_ik N(f; mu_k, Sigma),   pi_i = class frequencies of client i
        theta_i = E epochs of SGD from theta on CE of this classifier with the global mu, Sigma, which stay fixed
        mu_i, Sigma_i = class means and pooled covariance of client i's features under theta_i
        mu~_i = b mu_i + (1 - b) mu,  Sigma~_i = c Sigma_i + (1 - c) Sigma;  b, c in [0, 1] by two-fold cross-validation
        theta, mu, Sigma = sum_i beta_i (theta_i, mu~_i, Sigma~_i),   beta_i = n_i / sum_j n_j

    A client deploys the classifier of its interpolated distribution, computed anew with the backbone and the global
    distribution that it received. The model's own head is not used.

    Args:
      training: recipe of local training of the backbone.
      interpolation: separate chooses b for the means and c for the covariance, single has b = c, local has b = c = 1.
      ridge: factor of the identity that is added to a client's covariance; positive.

    Returns:
      A `Method` with a `PFedFDAServer` as server state and no client state.
      Trees: server PFedFDAServer(backbone, features: Gaussians(means: numbers [K, d], covariance: numbers [d, d]));
      client nothing.

    Reference:
      McLaughlin, Su. Personalized Federated Learning via Feature Distribution Adaptation. NeurIPS 2024. The equations
      follow the released code; two coefficients, two folds and ridge = 1 are its defaults, for CIFAR-10 and CIFAR-100
      with batches of 50 and EMNIST with batches of 16, learning rate 0.01, momentum 0.5 and 5 local epochs.

    Deviations:
      Local statistics are computed with the trained backbone; the released code collects features during training,
      while the backbone changes, over all epochs. A class with only one or two examples of the client takes the global
      mean everywhere, even in the covariance (released: only as the mean that is deployed in evaluation, not in
      training or in the folds). The released code also adds 1e-4 to every entry of the covariance. Folds are drawn once
      and are the same in every round. Coefficients are found by projected gradient descent (released: ten iterations of
      L-BFGS). Compared with that code (commit 73c7c40, without the 1e-4): on the same features, statistics, classifiers
      and the loss that chooses the coefficients agree to 1e-5, the coefficients to 1e-3.
    """
    needs_classes(model, "pfedfda", "it needs a Gaussian of features for each class")

    def adapt(backbone: Backbone, known: Gaussians, data: ClientData) -> Gaussians:
        features = extract_features(model, backbone, data)
        own = local_gaussians(features, data, known, ridge)
        if interpolation == "local":
            return own
        beta = best_interpolation(features, data, known, ridge, single=interpolation == "single")
        return interpolate_gaussians(beta, own, known)

    def deploy(backbone: Backbone, distribution: Gaussians, data: ClientData) -> GenerativeModel:
        return GenerativeModel(backbone, *classifier(distribution, log_priors(data, model.num_classes)))

    def train(key, server, client, data):
        _, kernel, bias = deploy(server.backbone, server.features, data)

        def value(backbone, features, batch):
            return cross_entropy(features @ kernel + bias, batch.y, batch.mask)

        loss = loss_of_features(model, value, lambda backbone: backbone)
        backbone = training.fit(key, server.backbone, data, loss)
        distribution = adapt(backbone, server.features, data)
        message = mean_by_size(PFedFDAServer(backbone, distribution), data)
        return LocalResult(client=(), message=message, personal=deploy(backbone, distribution, data))

    def aggregate(key, server, clients, messages: Mean, cohort):
        backbone, (means, covariance) = messages.value
        # No client's covariance has a smaller eigenvalue, but compression or a median may cause one.
        covariance = at_least(covariance, jnp.minimum(jnp.asarray(ridge, jnp.float32), 1.0))
        return PFedFDAServer(backbone, Gaussians(means, covariance)), clients, {}

    def init_server(key):
        # The means are drawn as in the released code.
        means = jax.random.uniform(jax.random.fold_in(key, CLASS_MEANS), (model.num_classes, model.num_features))
        return PFedFDAServer(model.init(key)["backbone"], Gaussians(means, jnp.eye(model.num_features)))

    def personalize(key, server, client, data):
        return deploy(server.backbone, adapt(server.backbone, server.features, data), data)

    return Method(
        init_server=init_server,
        init_client=lambda key, server, data: (),
        local=train,
        aggregate=aggregate,
        personalize=personalize,
        # Also the distribution: a client moves the received one toward its own.
        trained_from=lambda server, client: server,
        predict=lambda personal, inputs: model.features(personal.backbone, inputs) @ personal.kernel + personal.bias,
        privacy=Privacy(
            training.most_passes,
            (
                SIZE,
                "class means and covariance of the features: sent, and the classifier of the training",
                "numbers of examples of each class: the classifier of the training",
            ),
        ),
    )
