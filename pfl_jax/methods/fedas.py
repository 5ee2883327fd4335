"""Align the received backbone with the client's last one, weight clients by Fisher information (Yang et al. 2024)."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from pfl_jax.base import (
    Backbone,
    ClientData,
    Cohort,
    Head,
    LocalResult,
    Loss,
    Mean,
    Method,
    Model,
    Params,
    PRNGKey,
    PyTree,
)
from pfl_jax.primitives.aggregation import mean_by_size, normalize, weighted_mean
from pfl_jax.primitives.feature_statistics import class_centroids, merge_centroids
from pfl_jax.primitives.features import extract_features
from pfl_jax.primitives.fisher import batch_fisher_trace, fisher_trace
from pfl_jax.primitives.local_sgd import LocalSGD
from pfl_jax.primitives.losses import classwise_alignment, cross_entropy, feature_alignment, supervised_loss
from pfl_jax.primitives.tree import merge

FEDAS_TRAINING = LocalSGD(lr=5e-3, momentum=0.0, weight_decay=0.0, batch_size=16)
"""Local training in FedAS's experiments (Section 4.1, which names neither momentum nor weight decay)."""

Target: TypeAlias = Literal["example", "class_mean", "global_class_mean"]
AlignmentLoss: TypeAlias = Literal["mean", "class_sum"]
Normalization: TypeAlias = Literal["proportional", "softmax", "min_max"]
Reduction: TypeAlias = Literal["mean", "sum", "batch_means"]


class FedASServer(NamedTuple):
    """What the FedAS server keeps.

    Attributes:
      backbone: theta.
      head: the head that every client starts from.
      centroids: mean embedding of each class over the clients of the last round [K, d], where clients are aligned with
        global class means; () otherwise.
      centroid_counts: examples behind them [K], or ().
    """

    backbone: Backbone
    head: Head
    centroids: PyTree = ()
    centroid_counts: PyTree = ()


class FedASClient(NamedTuple):
    """What a FedAS client keeps: its model after its own last training, and whether there was any.

    Attributes:
      backbone: theta_i.
      head: phi_i.
      trained: bool scalar; False until the first local training, when there is no previous backbone.
    """

    backbone: Backbone
    head: Head
    trained: jax.Array


class FedASMessage(NamedTuple):
    """What a FedAS client sends.

    Attributes:
      backbone: theta_i; a `Mean`, but for normalizations of the traces that need those of the whole cohort first.
      trace: alpha_i of its Fisher information.
      centroids: its class means under theta_i [K, d] and the examples behind them [K], where clients are aligned
        with global class means; () otherwise.
    """

    backbone: Mean | Backbone
    trace: jax.Array
    centroids: Mean | tuple[()] = ()


LEAST_TRACE = 1e-30
"""Weight of a client whose trace is zero: where all are, they count the same."""


def trace_weights(
    traces: jax.Array, normalization: str = "proportional", present: jax.Array | None = None
) -> jax.Array:
    """Aggregation weights alpha' [M] >= 0 with sum one, from Fisher traces alpha [M] (FedAS, Eq. 7 and Fig. 6a).

    Args:
      traces: [M], nonnegative.
      normalization: "proportional": alpha / sum alpha (Eq. 7); "softmax": softmax(alpha); "min_max":
        alpha - min alpha, scaled to sum one. Clients that cannot be told apart get equal weights.
      present: [M], bool; the others get no weight. None is everyone.
    """
    present = jnp.ones(traces.shape, bool) if present is None else present
    if normalization == "proportional":
        return normalize(traces, present)
    if normalization == "softmax":
        return jax.nn.softmax(jnp.where(present, traces, -jnp.inf))
    if normalization == "min_max":
        return normalize(traces - jnp.min(jnp.where(present, traces, jnp.inf)), present)
    raise ValueError(f"normalization must be proportional, softmax or min_max, not {normalization!r}")


def fedas(
    model: Model,
    training: LocalSGD = FEDAS_TRAINING,
    *,
    align_lr: float = 0.01,
    align_batch_size: int = 16,
    align_epochs: int = 1,
    alignment: bool = True,
    synchronization: bool = True,
    manner: Literal["serial", "parallel"] = "serial",
    lam: float = 1.0,
    target: Target = "example",
    align_loss: AlignmentLoss = "mean",
    first_alignment: bool = False,
    normalization: Normalization = "proportional",
    reduction: Reduction = "mean",
) -> Method:
    """FedAS: parameter alignment on the client, synchronization by Fisher traces on the server.

    A client that receives theta
      1. aligns it with its own previous backbone theta_i: SGD on (1/d) ||f(theta, x) - H_i(x)||^2, where
         H_i(x) = f(theta_i, x) is computed once (Eq. 2-4);
      2. trains (theta, phi_i) together, E epochs on cross entropy;
      3. sends theta_i and alpha_i = tr(diag F_i), the mean over its examples of the squared norm of the
         gradient of log p(y|x) with respect to all parameters (Eq. 5-6).
    The server moves theta by sum_i alpha'_i (theta_i - theta) with alpha' = alpha / sum alpha (Eq. 7-8).

    Without alignment and synchronization this is FedPer.

    Args:
      training: recipe of local training; the alignment has its optimizer too, without momentum and weight decay.
      align_lr: learning rate of the alignment.
      align_batch_size: examples of a mini-batch of the alignment.
      align_epochs: epochs of the alignment.
      alignment: align the received backbone with the client's previous one.
      synchronization: weight clients by their Fisher trace; by their number of examples otherwise.
      manner: align before the training on labels (serial), or within it as a further term of the loss (parallel).
      lam: strength of that term; only the parallel manner reads it.
      target: align each example with its own previous embedding, with the mean one of its class, or with the mean
        embedding of its class over all clients, as trained in the last round (global_class_mean).
      align_loss: the distance to the targets as a mean over the examples of a batch, or as a sum over the classes of
        the batch of the means over their examples (class_sum).
      first_alignment: align clients that have never trained too, with the initial backbone.
      normalization: how traces become weights.
      reduction: mean or sum of the examples' squared gradient norms, of which the sum grows with the client's size; or
        the sum of the squared norms of the gradients of mini-batches (batch_means), see `pfl_jax.primitives.fisher`.

    Returns:
      A `Method`. The server keeps a `FedASServer`, a client a `FedASClient`. Info holds the cohort's traces and
      weights. What a client deploys under `received` is the backbone, aligned if the manner is serial, with its own
      head; under `trained`, its model after local training, which is what the released code evaluates.

    Reference:
      Yang, Huang, Ye. FedAS: Bridging Inconsistency in Personalized Federated Learning. CVPR 2024. Algorithm 1.

    Deviations:
      Eq. 8 divides by m once more although the weights already sum to one, which would shrink every step m-fold;
      that factor is dropped, as in the released code. A client that has never trained has no previous backbone, and
      the text does not say what it does: here it takes the received backbone as it is.
      The released code is `target="class_mean"`, `align_loss="class_sum"`, `first_alignment=True` and
      `reduction="batch_means"`, with `LocalSGD(drop_last=True, shuffle=False)`. Moreover it
      aligns one shared model in place, client after client, where here every client aligns its own copy: that is no
      method of single clients any more, and `python -m experiments.fedas_released` runs it. The other ways to align of
      Fig. 4b have no equations: the parallel manner adds the loss of Eq. 4, times lam, to the cross entropy; the global
      target is FedPAC's (Eq. 17, 19), and classes that no cohort has held yet are left out.
    """
    align_training = training.plain(lr=align_lr, batch_size=align_batch_size, epochs=align_epochs)
    serial, parallel = (alignment and manner == name for name in ("serial", "parallel"))
    visits = align_training if serial else training
    aligner = _Alignment(model, visits, alignment, target, align_loss, lam, first_alignment)
    weighing = _Synchronization(model, training, synchronization, normalization, reduction)

    def receive(key, server, client, data):
        backbone = aligner.fit(key, server, client, data) if serial else server.backbone
        return merge(backbone, client.head)

    def train(key, server, client, data):
        align_key, train_key = jax.random.split(key)
        params = receive(align_key, server, client, data)
        if parallel:
            examples = data._replace(y=(data.y, *aligner.targets(server, client, data)))
            params = training.fit(train_key, params, examples, aligner.joint_loss())
        else:
            params = training.fit(train_key, params, data, supervised_loss(model))
        # The epochs of the training have the keys before this one.
        trace = weighing.trace(jax.random.fold_in(train_key, training.epochs), params, data)
        return LocalResult(
            client=FedASClient(params["backbone"], params["head"], jnp.ones((), bool)),
            message=FedASMessage(weighing.sent(params["backbone"], trace, data), trace, aligner.sent(params, data)),
            personal=params,
        )

    def aggregate(key, server, clients, messages, cohort):
        weights = weighing.weights(messages.trace, cohort)
        # The weights sum to one: theta + sum_i w_i (theta_i - theta) is the weighted mean itself.
        sent = messages.backbone
        server = server._replace(backbone=sent.value if isinstance(sent, Mean) else weighted_mean(weights, sent))
        return aligner.merged(server, messages), clients, {"trace": messages.trace, "weights": weights}

    return Method(
        init_server=lambda key: aligner.first_server(model.init(key)),
        init_client=lambda key, server, data: FedASClient(server.backbone, server.head, jnp.zeros((), bool)),
        local=train,
        aggregate=aggregate,
        personalize=receive,
        predict=model.apply,
        # The head is where clients start, once.
        download=lambda server, client: server._replace(head=()),
    )


@dataclass(frozen=True)
class _Alignment:
    """Alignment of a received backbone with embeddings of a client's examples (Eq. 2-4, Fig. 4b).

    Attributes:
      model: the architecture.
      training: recipe of the steps that visit the aligned examples.
      on: whether there is any.
      target, loss, lam, first: see target, align_loss, lam and first_alignment of `fedas`.
    """

    model: Model
    training: LocalSGD
    on: bool
    target: Target
    loss: AlignmentLoss
    lam: float | jax.Array
    first: bool

    @property
    def shares_centroids(self) -> bool:
        """Whether clients are aligned with class means over all of them."""
        return self.on and self.target == "global_class_mean"

    def first_server(self, params: Params) -> FedASServer:
        """The server before the first round, without class means."""
        if not self.shares_centroids:
            return FedASServer(params["backbone"], params["head"])
        centroids = jnp.zeros((self.model.num_classes, self.model.num_features))
        return FedASServer(params["backbone"], params["head"], centroids, jnp.zeros(self.model.num_classes))

    def sent(self, params: Params, data: ClientData) -> Mean | tuple[()]:
        """Class means that a client sends."""
        if not self.shares_centroids:
            return ()
        features = extract_features(self.model, params["backbone"], data)
        return Mean(*class_centroids(features, data.y, data.mask, self.model.num_classes))

    def merged(self, server: FedASServer, messages: FedASMessage) -> FedASServer:
        """The server with the cohort's class means."""
        if not isinstance(messages.centroids, Mean):
            return server
        centroids, counts = merge_centroids(server.centroids, server.centroid_counts, messages.centroids)
        return server._replace(centroids=centroids, centroid_counts=counts)

    def targets(self, server: FedASServer, client: FedASClient, data: ClientData) -> tuple[jax.Array, jax.Array]:
        """The targets [n, d], and which examples have one [n]."""
        if self.target == "global_class_mean":
            return server.centroids[data.y], data.mask & (server.centroid_counts[data.y] > 0)
        targets = extract_features(self.model, client.backbone, data)
        if self.target == "class_mean":
            visited = self.training.always_visited(data.mask)
            centroids, _ = class_centroids(targets, data.y, visited, self.model.num_classes)
            targets = centroids[data.y]
        # A client that never trained keeps the initial backbone.
        return targets, data.mask if self.first else data.mask & client.trained

    def distance(self, features: jax.Array, targets: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
        """Distance of features [B, d] to their targets."""
        if self.loss == "class_sum":
            return classwise_alignment(features, targets, labels, mask, self.model.num_classes)
        return feature_alignment(features, targets, mask)

    def fit(self, key: PRNGKey, server: FedASServer, client: FedASClient, data: ClientData) -> Backbone:
        """The received backbone, aligned before the training on labels."""
        targets, has_target = self.targets(server, client, data)

        def loss(backbone, batch):
            labels, targets = batch.y
            return self.distance(self.model.features(backbone, batch.x), targets, labels, batch.mask)

        return self.training.fit(key, server.backbone, data._replace(y=(data.y, targets), mask=has_target), loss)

    def joint_loss(self) -> Loss:
        """Cross entropy plus lam times the distance, over examples y = (labels, targets, has_target)."""

        def loss(params, batch):
            labels, targets, has_target = batch.y
            features = self.model.features(params["backbone"], batch.x)
            risk = cross_entropy(self.model.classify(params["head"], features), labels, batch.mask)
            return risk + self.lam * self.distance(features, targets, labels, batch.mask & has_target)

        return loss


@dataclass(frozen=True)
class _Synchronization:
    """Weights of the clients in the mean of their backbones (Eq. 5-7, Fig. 6a).

    Attributes:
      model: the architecture.
      training: whose mini-batches the released code takes the traces over.
      on: weights from traces; from numbers of examples otherwise.
      normalization, reduction: see `fedas`.
    """

    model: Model
    training: LocalSGD
    on: bool
    normalization: Normalization
    reduction: Reduction

    def trace(self, key: PRNGKey, params: Params, data: ClientData) -> jax.Array:
        """Trace of a client's Fisher information, or what the released code takes for it."""
        if not self.on:
            return jnp.zeros(())
        if self.reduction == "batch_means":
            return batch_fisher_trace(key, self.model, params, data, self.training)
        return fisher_trace(self.model, params, data, reduction=self.reduction)

    def sent(self, backbone: Backbone, trace: jax.Array, data: ClientData) -> Mean | Backbone:
        """What a client sends of its backbone: a mean where its weight is known before the others' traces are."""
        if not self.on:
            return mean_by_size(backbone, data)
        if self.normalization == "proportional":
            return Mean(backbone, jnp.maximum(trace, LEAST_TRACE))
        return backbone

    def weights(self, traces: jax.Array, cohort: Cohort) -> jax.Array:
        """Weights [M] of the cohort, with sum one."""
        if self.on:
            return trace_weights(traces, self.normalization, cohort.present)
        return normalize(cohort.counts.astype(jnp.float32))
