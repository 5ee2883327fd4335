"""Alignment of the received backbone, and aggregation weighted by Fisher information (Yang et al. 2024)."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, Cohort, HandOver, LocalResult, Mean, Method, Model, Privacy, PRNGKey, PyTree
from pfl_jax.messages import NOT_RECEIVED
from pfl_jax.methods.factories import method_factory, needs_classes
from pfl_jax.primitives import losses
from pfl_jax.primitives.aggregation import mean_by_size, normalize_weights, weighted_mean
from pfl_jax.primitives.feature_statistics import class_centroids, merge_centroids
from pfl_jax.primitives.features import extract_features
from pfl_jax.primitives.fisher import batch_fisher_trace, fisher_trace, trace_weights
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.tree import merge
from pfl_jax.validation import Count, Epochs, NotNegative, ReadWith

FEDAS_TRAINING = LocalTraining(lr=5e-3, momentum=0.0, weight_decay=0.0, batch_size=16)
"""Local training in FedAS's experiments (Section 4.1, which mentions neither momentum nor weight decay)."""

ALIGNED = ReadWith("alignment")
BEFORE = (ALIGNED, ReadWith("manner", ("serial", "in_turn")))
Manner: TypeAlias = Literal["serial", "in_turn", "parallel"]
Target: TypeAlias = Literal["example", "class_mean", "global_class_mean"]
AlignmentLoss: TypeAlias = Literal["mean", "class_sum"]
Normalization: TypeAlias = Literal["proportional", "softmax", "min_max"]
Reduction: TypeAlias = Literal["mean", "sum", "batch_means"]


class FedASServer(NamedTuple):
    """State of the FedAS server.

    Attributes:
      backbone: theta.
      head: initial head of all clients.
      centroids: class means over the clients of the last round [K, d], if clients are aligned with them; or ().
      centroid_counts: examples in each centroid [K], or ().
    """

    backbone: PyTree
    head: PyTree
    centroids: Any = ()
    centroid_counts: Any = ()


class FedASClient(NamedTuple):
    """State of a FedAS client: its model after its previous local training.

    Attributes:
      backbone: theta_i.
      head: phi_i.
      trained: bool scalar; False until the first local training.
    """

    backbone: PyTree
    head: PyTree
    trained: jax.Array


class FedASMessage(NamedTuple):
    """Message of a FedAS client.

    Attributes:
      backbone: theta_i; a `Mean`, except with normalizations that need the traces of the whole cohort first.
      trace: trace alpha_i of the client's Fisher information.
      centroids: class means under theta_i [K, d] and class counts [K], if clients are aligned with them; or ().
    """

    backbone: Mean | PyTree
    trace: jax.Array
    centroids: Mean | tuple[()] = ()


MIN_TRACE = 1e-30
"""Lower bound on a client's weight: weights are equal if all traces are zero."""


@method_factory
def fedas(
    model: Model,
    training: LocalTraining = FEDAS_TRAINING,
    *,
    align_lr: Annotated[NotNegative, *BEFORE] = 0.01,
    align_batch_size: Annotated[Count, *BEFORE] = 16,
    align_epochs: Annotated[Epochs, *BEFORE] = 1,
    alignment: bool = True,
    synchronization: bool = True,
    manner: Annotated[Manner, ALIGNED] = "serial",
    lam: Annotated[NotNegative, ALIGNED, ReadWith("manner", ("parallel",))] = 1.0,
    target: Annotated[Target, ALIGNED] = "example",
    align_loss: Annotated[AlignmentLoss, ALIGNED] = "mean",
    first_alignment: Annotated[bool, ALIGNED, ReadWith("target", ("example", "class_mean"))] = False,
    normalization: Annotated[Normalization, ReadWith("synchronization")] = "proportional",
    reduction: Annotated[Reduction, ReadWith("synchronization")] = "mean",
) -> Method:
    """FedAS: parameter alignment on the client, synchronization by Fisher traces on the server.

    A client that receives theta
      1. aligns it with its own previous backbone theta_i by SGD on (1/d) ||f(theta, x) - H_i(x)||^2, where
         H_i(x) = f(theta_i, x) is computed once (Eq. 2-4);
      2. trains theta and phi_i together for E epochs on the loss of the task;
      3. sends theta_i and alpha_i = tr(diag F_i), the mean over its examples of the squared norm of the gradient of
         log p(y|x), the likelihood of the model's task, with respect to all parameters (Eq. 5-6).
    The server adds sum_i alpha'_i (theta_i - theta) to theta, with alpha' = alpha / sum alpha (Eq. 7-8).
    Without alignment and synchronization this is FedPer.

    Args:
      training: recipe of local training. The alignment uses the same optimizer, without momentum, weight decay and
        augmentation; the parallel manner compares augmented examples with targets of the original ones.
      align_lr: learning rate of the alignment.
      align_batch_size: examples in a mini-batch of the alignment.
      align_epochs: epochs of the alignment.
      alignment: whether to align the received backbone with the client's previous one.
      synchronization: whether clients are weighted by their Fisher trace; if not, by their number of examples.
      manner: alignment before the training on labels, of each client's own copy (serial) or of one copy in turn, by
        client number (in_turn); or alignment by an additional term of the training's loss (parallel).
      lam: strength of that additional term.
      target: target of the alignment of an example: its own previous embedding, the mean previous embedding of its
        class, or the mean embedding of its class over all clients after the last round (global_class_mean).
      align_loss: distance to the targets as a mean over the examples of a batch, or as the sum over its classes of the
        means over their examples (class_sum).
      first_alignment: whether clients that were never trained are aligned too, with the initial backbone.
      normalization: how traces are converted to weights.
      reduction: mean or sum of the examples' squared gradient norms (the sum grows with the client's size), or the sum
        of the squared norms of mini-batch gradients (batch_means), see `pfl_jax.primitives.fisher`.

    Returns:
      A `Method` with `FedASServer` and `FedASClient`. Under `received` a client deploys the received backbone, aligned
      unless the manner is parallel, with its own head; under `trained`, as in the released code, its trained model.
      Trees: server FedASServer(backbone, head); client FedASClient(backbone, head, trained: flag).

    Info:
      trace: [M], Fisher trace of each client's trained model on its own examples; 0 without synchronization.
      weights: [M], weight of each client's backbone in the mean, which sum to 1.

    Reference:
      Yang, Huang, Ye. FedAS: Bridging Inconsistency in Personalized Federated Learning. CVPR 2024. Algorithm 1.

    Deviations:
      As in the released code, the squared distance of Eq. 4 is divided by the number d of features. Eq. 3 has no
      learning rate, batch size or epochs: the defaults come from the released code. Delta theta of Algorithm 1 contains
      the alignment, as in the released code, and a client without a previous backbone does not align: the paper leaves
      both open. Eq. 5 as printed squares the gradient of the log-likelihood of all of a client's data, in which the
      gradients of its examples cancel; here the gradient of every example is squared, as in the Fisher information. The
      division by m in Eq. 8 is left out, as in the released code: the weights already sum to 1. The weights (alpha -
      min) / (max - min) of Fig. 6a are normalized to sum to 1. The released code corresponds to `target="class_mean"`,
      `align_loss="class_sum"`, `first_alignment=True`, `reduction="batch_means"` and `manner="in_turn"` with
      `LocalTraining(drop_last=True, shuffle=False)`: the clients of a cohort align the server's own copy of the
      backbone, in the order of their numbers. It scores clients that never trained with the initial model; here
      `trained` has no score for them. As in the released code, clients are weighted by their numbers of examples
      without synchronization (equally in Eq. 1), and Eq. 6 sums over all parameters (over the head's d_w in Section
      3.1). The paper gives no equations for the other alignments of Fig. 4b: here the parallel manner adds lam times
      the loss above to the cross entropy, and the global targets are FedPAC's (Eq. 17, 19) for classes that have
      occurred in a cohort. Its "6-layer CNN" is `fedavg_cnn`. The "learning rate decay value" is left out.
    """
    if alignment and (target != "example" or align_loss == "class_sum"):
        needs_classes(model, "fedas", "target and align_loss are given by classes; choose example and mean")
    # The targets are embeddings of the original images.
    before = training.plain(align_lr, batch_size=align_batch_size, epochs=align_epochs, augment=None)
    serial, in_turn, parallel = (alignment and manner == name for name in get_args(Manner))
    visits = training if parallel else before
    aligner = _Alignment(model, visits, alignment, target, align_loss, lam, first_alignment)
    weighting = _Synchronization(model, training, synchronization, normalization, reduction)

    def align(key, server, client, data):
        return server._replace(backbone=aligner.fit(key, server, client, data))

    def receive(key, server, client, data):
        return merge((align(key, server, client, data) if serial else server).backbone, client.head)

    def train(key, server, client, data):
        align_key, train_key = jax.random.split(key)
        params = receive(align_key, server, client, data)
        if parallel:
            examples = data._replace(y=(data.y, *aligner.targets(server, client, data)))
            params = training.fit(train_key, params, examples, aligner.joint_loss())
        else:
            params = training.fit(train_key, params, data, losses.supervised_loss(model))
        # Training uses the numbers below most_passes.
        trace = weighting.trace(jax.random.fold_in(train_key, training.most_passes), params, data)
        return LocalResult(
            client=FedASClient(params["backbone"], params["head"], jnp.ones((), bool)),
            message=FedASMessage(
                weighting.backbone_part(params["backbone"], trace, data), trace, aligner.message_part(params, data)
            ),
            personal=params,
        )

    def aggregate(key, server, clients, messages, cohort):
        weights = weighting.weights(messages.trace, cohort)
        # The weights sum to 1, so theta + sum_i w_i (theta_i - theta) is the weighted mean of the theta_i.
        sent = messages.backbone
        server = server._replace(backbone=sent.value if isinstance(sent, Mean) else weighted_mean(weights, sent))
        return aligner.update_server(server, messages), clients, {"trace": messages.trace, "weights": weights}

    return Method(
        init_server=lambda key: aligner.init_server(model.init(key)),
        init_client=lambda key, server, data: FedASClient(server.backbone, server.head, jnp.zeros((), bool)),
        local=train,
        aggregate=aggregate,
        personalize=receive,
        predict=model.apply,
        # Clients need the server's head only before their first round.
        download=lambda server, client: server._replace(head=()),
        trained_from=lambda server, client: FedASMessage(server.backbone, *[NOT_RECEIVED] * 2),
        privacy=Privacy(
            training.most_passes + (align_epochs if serial or in_turn else 0),
            (
                "trace of the Fisher information, or number of examples: sent, weight of the client in the mean",
                "mean feature of each class: with target class_mean a target of training, with global_class_mean sent",
            ),
            refused=aligner.not_private(parallel),
            deployment=align_epochs if serial or in_turn else 0,
        ),
        hand_over=HandOver(lambda key, *rest: align(jax.random.split(key)[0], *rest), align) if in_turn else None,
    )


@dataclass(frozen=True)
class _Alignment:
    """Alignment of a received backbone with embeddings of a client's examples (Eq. 2-4, Fig. 4b).

    Attributes:
      model: the architecture.
      training: recipe of the steps that visit the aligned examples.
      enabled: whether there is any alignment.
      target, loss, lam, first_alignment: see target, align_loss, lam and first_alignment of `fedas`.
    """

    model: Model
    training: LocalTraining
    enabled: bool
    target: Target
    loss: AlignmentLoss
    lam: float | jax.Array
    first_alignment: bool

    def not_private(self, parallel: bool) -> str:
        """Reason why the steps that align cannot be private; "" if they can."""
        if self.enabled and self.loss == "class_sum":
            return "align_loss class_sum weights an example by the others of its class: use mean"
        why = "with manner parallel, target global_class_mean averages over the examples that have a target"
        return why if parallel and self.shares_centroids else ""

    @property
    def shares_centroids(self) -> bool:
        """Whether clients are aligned with class means over all clients."""
        return self.enabled and self.target == "global_class_mean"

    def init_server(self, params: PyTree) -> FedASServer:
        """State of the server before the first round, without class means."""
        server, classes = FedASServer(params["backbone"], params["head"]), self.model.num_classes
        means = {"centroids": jnp.zeros((classes, self.model.num_features)), "centroid_counts": jnp.zeros(classes)}
        return server._replace(**means) if self.shares_centroids else server

    def message_part(self, params: PyTree, data: ClientData) -> Mean | tuple[()]:
        """Class means in a client's message."""
        if not self.shares_centroids:
            return ()
        features = extract_features(self.model, params["backbone"], data)
        return Mean(*class_centroids(features, data.y, data.mask, self.model.num_classes))

    def update_server(self, server: FedASServer, messages: FedASMessage) -> FedASServer:
        """State of the server with the cohort's class means."""
        if not isinstance(messages.centroids, Mean):
            return server
        centroids, counts = merge_centroids(server.centroids, server.centroid_counts, messages.centroids)
        return server._replace(centroids=centroids, centroid_counts=counts)

    def targets(self, server: FedASServer, client: FedASClient, data: ClientData) -> tuple[jax.Array, jax.Array]:
        """Targets [n, d] of a client's examples, and which examples have one, bool [n]."""
        if self.target == "global_class_mean":
            return server.centroids[data.y], data.mask & (server.centroid_counts[data.y] > 0)
        targets = extract_features(self.model, client.backbone, data)
        if self.target == "class_mean":
            visited = self.training.always_visited(data.mask)
            centroids, _ = class_centroids(targets, data.y, visited, self.model.num_classes)
            targets = centroids[data.y]
        # The stored backbone of a client that was never trained is the initial one.
        return targets, data.mask if self.first_alignment else data.mask & client.trained

    def distance(self, features: jax.Array, labels: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """Distance of features [B, d] to their targets."""
        if self.loss == "class_sum":
            return losses.classwise_alignment(features, targets, labels, mask, self.model.num_classes)
        return losses.feature_alignment(features, targets, mask)

    def fit(self, key: PRNGKey, server: FedASServer, client: FedASClient, data: ClientData) -> PyTree:
        """Align the received backbone before the training on labels."""
        targets, has_target = self.targets(server, client, data)

        def value(backbone, features, batch):
            labels, targets = batch.y
            return self.distance(features, labels, targets, batch.mask)

        loss = losses.loss_of_features(self.model, value, lambda backbone: backbone)
        return self.training.fit(key, server.backbone, data._replace(y=(data.y, targets), mask=has_target), loss)

    def joint_loss(self) -> losses.TrainingLoss:
        """Loss of the task plus lam times the distance, for examples with y = (labels, targets, has_target)."""

        def value(params, features, batch):
            labels, targets, has_target = batch.y
            risk = self.model.task.loss(self.model.classify(params["head"], features), labels, batch.mask)
            return risk + self.lam * self.distance(features, labels, targets, batch.mask & has_target)

        return losses.loss_of_features(self.model, value)


@dataclass(frozen=True)
class _Synchronization:
    """Weights of the clients in the mean of their backbones (Eq. 5-7, Fig. 6a).

    Attributes:
      model: the architecture.
      training: recipe that defines the mini-batches of the reduction batch_means.
      enabled: whether weights are computed from traces; if not, from numbers of examples.
      normalization, reduction: see `fedas`.
    """

    model: Model
    training: LocalTraining
    enabled: bool
    normalization: Normalization
    reduction: Reduction

    def trace(self, key: PRNGKey, params: PyTree, data: ClientData) -> jax.Array:
        """Trace of a client's Fisher information, or its replacement in the released code (batch_means)."""
        if not self.enabled:
            return jnp.zeros(())
        if self.reduction == "batch_means":
            return batch_fisher_trace(key, losses.negative_log_likelihood(self.model), params, data, self.training)
        return fisher_trace(losses.negative_log_likelihood(self.model), params, data, reduction=self.reduction)

    def backbone_part(self, backbone: PyTree, trace: jax.Array, data: ClientData) -> Mean | PyTree:
        """PyTree in a client's message: a `Mean` if the client's weight does not depend on other clients' traces."""
        if not self.enabled:
            return mean_by_size(backbone, data)
        if self.normalization == "proportional":
            return Mean(backbone, jnp.maximum(trace, MIN_TRACE))
        return backbone

    def weights(self, traces: jax.Array, cohort: Cohort) -> jax.Array:
        """Weights [M] of the cohort's clients, which sum to 1."""
        if self.enabled:
            return trace_weights(traces, self.normalization, cohort.present)
        return normalize_weights(cohort.weights.astype(jnp.float32))
