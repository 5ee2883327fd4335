"""Feature alignment and an optimal combination of classifier heads (Xu, Tong, Huang 2023)."""

from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from pfl_jax.base import (
    Backbone,
    ClientData,
    Head,
    Info,
    LocalResult,
    Mean,
    Method,
    Model,
    Privacy,
    PyTree,
    TrainingLoss,
)
from pfl_jax.messages import NOT_RECEIVED
from pfl_jax.methods.factories import CLASS_SIZES, SIZE, method_factory, needs_classes
from pfl_jax.primitives.aggregation import mean_by_class, mean_by_size, mix
from pfl_jax.primitives.feature_statistics import (
    class_centroids,
    label_feature_statistics,
    merge_centroids,
    second_moment,
)
from pfl_jax.primitives.features import extract_features, fit_head
from pfl_jax.primitives.head_combination import solve_head_weights
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import feature_alignment, loss_of_features
from pfl_jax.primitives.simplex_qp import Solver
from pfl_jax.primitives.tree import merge
from pfl_jax.validation import Epochs, NotNegative, ReadWith

Covariance: TypeAlias = Literal["identity", "empirical"]


class FedPACServer(NamedTuple):
    """State of the server.

    Attributes:
      backbone: theta.
      head: initial head of all clients.
      centroids: c [K, d], mean feature of each class over the last cohort with examples of it; initially zero.
      centroid_counts: [K], examples in each centroid; zero for classes that occurred in no cohort yet.
    """

    backbone: Backbone
    head: Head
    centroids: jax.Array
    centroid_counts: jax.Array


class FedPACMessage(NamedTuple):
    """Message of a client.

    Attributes:
      backbone: trained backbone theta_i.
      head: trained head phi_i.
      centroids: class centroids [K, d] of the trained backbone (Eq. 17), zero for classes without examples, and class
        counts [K]; as a `Mean`, or as a pair if the server needs the centroids of every client.
      statistics: statistics from which the server computes the head weights: in FedPAC (mu_i, V_i) of the received
        backbone, or (mu_i, Lambda_i).
    """

    backbone: Mean
    head: Head
    centroids: Mean | tuple[jax.Array, jax.Array]
    statistics: PyTree


@method_factory
def fedpac(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    lam: Annotated[NotNegative, ReadWith("alignment")] = 1.0,
    head_lr: NotNegative = 0.1,
    head_epochs: Epochs = 1,
    alignment: bool = True,
    collaboration: bool = True,
    covariance: Annotated[Covariance, ReadWith("collaboration")] = "identity",
    solver: Annotated[Solver, ReadWith("collaboration")] = "auto",
) -> Method:
    r"""FedPAC: a shared backbone aligned to global class centroids, and heads combined by quadratic programs.

        phi_i = head_epochs of SGD on CE from client i's head, theta fixed                            (Eq. 15)
        theta_i = E epochs of SGD from theta, phi_i fixed, on
                  CE + lambda mean_l (1/d) ||f(x_l) - c_{y_l}||^2                                     (Eq. 3, 16)
        theta = sum_i beta_i theta_i;  c_k = mean feature of class k over all clients                 (Eq. 18, 19)
        phi_i = sum_j alpha_ij phi_j, alpha_i by `head_weights`                                       (Eq. 4, 46)

    Args:
      training: recipe of local training of the backbone; also of the head, except for `head_lr` and `head_epochs`.
      lam: strength lambda of the feature alignment.
      head_lr: learning rate of the head.
      head_epochs: local epochs of the head in a round, before the backbone's.
      alignment: whether features are aligned to the global class centroids (Table 2).
      collaboration: whether heads are combined; if not, each client keeps its own (Table 2).
      covariance: the features' covariance matrix in the head weights: the identity (Eq. 43), or each client's second
        moments (Eq. 37), which it then sends; Appendix C.1 computes the weights of Figures 2 and 3 in this way.
      solver: solver for the head weights: auto, projected_gradient, osqp or interior_point.

    Returns:
      A `Method`. The server keeps a `FedPACServer`, a client its head.
      Trees: server FedPACServer(backbone, head, centroids: numbers [K, d], centroid_counts: numbers [K]); client head.

    Info:
      head_weights: [M, M], alpha_ij (Fig. 2, 3): row i has the shares of all clients' heads in client i's new head.
      gap: [M], relative Frank-Wolfe gap of each client's quadratic program.

    Reference:
      Xu, Tong, Huang. Personalized Federated Learning with Feature Alignment and Classifier Collaboration. ICLR 2023.
      Algorithm 1.

    Deviations:
      Algorithm 1 does not define c(0); here there is no alignment in the first round. In later rounds, a class without
      a global centroid is aligned to the client's own centroid under the received backbone. A class without examples in
      the cohort keeps its centroid. Features are not centered to zero mean (Assumption 2), as in the released code.
      Statistics and heads use the original images: augmentation applies only to the epochs of the backbone, whereas the
      released code augments CIFAR-10 and CINIC-10 for the heads too. Under concept shift (Table 3) the method is
      unchanged; Section 1 mentions a slight modification that the paper does not describe. Centroids and statistics of
      one label then mix the classes that different groups give this label. If the matrix of a quadratic program has a
      negative eigenvalue, by rounding, the released code leaves out all eigenvalues below 0.01, and a client for which
      that is not enough keeps its own head; here every program is solved unchanged, in float64. Weights below 1e-3 are
      set to zero, as in the released code; the paper has no such cut. The paper does not say how a singular empirical
      covariance matrix is inverted; here a thousandth of its mean eigenvalue is added to its diagonal.
    """
    needs_classes(
        model,
        "fedpac",
        "it needs a mean feature of each class to align with, and statistics of classes for its head weights",
    )

    def statistics_fn(features, data):
        mu, variance = label_feature_statistics(features, data.y, data.mask, model.num_classes)
        return mu, variance if covariance == "identity" else second_moment(features, data.mask)

    def head_weights_fn(messages, counts):
        if not collaboration:
            return jnp.eye(counts.shape[0]), {"gap": jnp.zeros(counts.shape[0])}
        mu, spread = messages.statistics
        solution = solve_head_weights(mu, spread, counts, solver=solver)
        return solution.weights, {"gap": solution.gap}

    return align_and_combine(
        model,
        training,
        training.phase(head_lr, epochs=head_epochs),
        lam if alignment else None,
        statistics_fn=statistics_fn,
        head_weights_fn=head_weights_fn,
        uncovered=("mean and variance of the features (mu, V or Lambda): sent, for the weights of the heads",),
    )


def align_and_combine(
    model: Model,
    training: LocalTraining,
    head_training: LocalTraining,
    lam: float | None,
    *,
    statistics_fn: Callable[[jax.Array, ClientData], PyTree],
    head_weights_fn: Callable[[FedPACMessage, jax.Array], tuple[jax.Array, Info]],
    send_centroids: bool = False,
    uncovered: tuple[str, ...] = (),
) -> Method:
    """FedPAC with a given rule for the head weights.

    Args:
      model: the architecture.
      training: recipe of the backbone's training.
      head_training: recipe of the head's training.
      lam: strength of the alignment; None for no alignment.
      statistics_fn: (features [n, d] of the received backbone, client's data) -> statistics that the client sends.
      head_weights_fn: (messages stacked along M, example counts [M]) -> (alpha [M, M], its part of Info).
      send_centroids: whether the server gets the centroids of every client (if `head_weights_fn` needs them) or only
        their mean.
    """

    def init_server(key):
        params = model.init(key)
        centroids = jnp.zeros((model.num_classes, model.num_features))
        return FedPACServer(params["backbone"], params["head"], centroids, jnp.zeros(model.num_classes))

    def local(key, server, client, data):
        head_key, backbone_key = jax.random.split(key)
        # Statistics and head training use the same received backbone, so one forward pass serves both.
        features = extract_features(model, server.backbone, data)
        head = fit_head(head_key, model, client, features, data, head_training)
        loss = _alignment_loss(model, lam, head, server, features, data)
        backbone = training.fit(backbone_key, server.backbone, data, loss)
        centroids = class_centroids(extract_features(model, backbone, data), data.y, data.mask, model.num_classes)
        if not send_centroids:
            centroids = Mean(*centroids)
        message = FedPACMessage(mean_by_size(backbone, data), head, centroids, statistics_fn(features, data))
        return LocalResult(client=head, message=message, personal=merge(backbone, head))

    def aggregate(key, server, clients, messages, cohort):
        mean = mean_by_class(*messages.centroids) if send_centroids else messages.centroids
        centroids, counts = merge_centroids(server.centroids, server.centroid_counts, mean)
        weights, info = head_weights_fn(messages, cohort.counts)
        server = FedPACServer(messages.backbone.value, server.head, centroids, counts)
        return server, mix(weights, messages.head), {"head_weights": weights, **info}

    def download(server, client):
        centroids = () if lam is None else (server.centroids, server.centroid_counts)
        return server.backbone, client, centroids

    return Method(
        init_server=init_server,
        init_client=lambda key, server, data: server.head,
        local=local,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: merge(server.backbone, client),
        predict=model.apply,
        download=download,
        # Class means are not received: clients compute them from their data.
        trained_from=lambda server, client: FedPACMessage(server.backbone, *[NOT_RECEIVED] * 3),
        privacy=Privacy(
            head_training.most_passes + training.most_passes,
            (
                SIZE,
                CLASS_SIZES,
                "mean feature of each class: sent, and targets of the training for classes without a shared one",
                *uncovered,
            ),
            clients=("head: sent", "mean feature and number of examples of each class: sent", *uncovered),
        ),
    )


def _alignment_loss(
    model: Model, lam: float | None, head: Head, server: FedPACServer, features: jax.Array, data: ClientData
) -> TrainingLoss:
    """Loss of the backbone with a fixed head (Eq. 3) and class centroids as targets.

    A class without a global centroid is aligned to the client's own centroid, from the features [n, d] of the received
    backbone. If there are no global centroids yet, there is no alignment.
    """
    own_centroids, _ = class_centroids(features, data.y, data.mask, model.num_classes)
    held = server.centroid_counts > 0
    targets = jnp.where(held[:, None], server.centroids, own_centroids)

    def value(backbone, features, batch):
        risk = model.task.loss(model.classify(head, features), batch.y, batch.mask)
        if lam is None:
            return risk
        strength = jnp.where(jnp.any(held), lam, 0.0)
        return risk + strength * feature_alignment(features, targets[batch.y], batch.mask)

    return loss_of_features(model, value, lambda backbone: backbone)
