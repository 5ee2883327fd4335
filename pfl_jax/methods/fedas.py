"""Align the received backbone with the client's last one, weight clients by Fisher information (Yang et al. 2024)."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import Backbone, Head, LocalResult, Mean, Method, Model
from pfl_jax.primitives.aggregation import mean_by_size, normalize, weighted_mean
from pfl_jax.primitives.feature_statistics import class_centroids, merge_centroids
from pfl_jax.primitives.fisher import batch_fisher_trace, fisher_trace
from pfl_jax.primitives.local_sgd import always_visited, fit, map_examples, sgd
from pfl_jax.primitives.losses import classwise_alignment, cross_entropy, feature_alignment
from pfl_jax.primitives.tree import merge


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
    *,
    lr: float = 5e-3,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    batch_size: int = 16,
    epochs: int = 5,
    align_lr: float = 0.01,
    align_batch_size: int = 16,
    align_epochs: int = 1,
    alignment: bool = True,
    synchronization: bool = True,
    manner: Literal["serial", "parallel"] = "serial",
    lam: float = 1.0,
    target: Literal["example", "class_mean", "global_class_mean"] = "example",
    align_loss: Literal["mean", "class_sum"] = "mean",
    first_alignment: bool = False,
    normalization: Literal["proportional", "softmax", "min_max"] = "proportional",
    reduction: Literal["mean", "sum", "batch_means"] = "mean",
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
      lr: learning rate.
      momentum: momentum of SGD.
      weight_decay: weight decay of SGD.
      batch_size: examples of a mini-batch.
      epochs: local epochs of a round.
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
      A `Method`. The server keeps the shared backbone, the head that every client starts from and, where clients are
      aligned with them, the global class means and the examples behind them; a client keeps a `FedASClient`. Info
      holds the cohort's traces and weights. What a client deploys under `received` is the backbone, aligned if the
      manner is serial, with its own head; under `trained`, its model after local training, which is what the released
      code evaluates.

    Reference:
      Yang, Huang, Ye. FedAS: Bridging Inconsistency in Personalized Federated Learning. CVPR 2024. Algorithm 1.

    Deviations:
      Eq. 8 divides by m once more although the weights already sum to one, which would shrink every step m-fold;
      that factor is dropped, as in the released code. A client that has never trained has no previous backbone, and
      the text does not say what it does: here it takes the received backbone as it is.
      The released code is `target="class_mean"`, `align_loss="class_sum"`, `first_alignment=True` and
      `reduction="batch_means"`, on data with `Batches(drop_last=True, shuffle=False)`. Moreover it
      aligns one shared model in place, client after client, where here every client aligns its own copy: that is no
      method of single clients any more, and `python -m experiments.fedas_released` runs it. The other ways to align of
      Fig. 4b have no equations: the parallel manner adds the loss of Eq. 4, times lam, to the cross entropy; the global
      target is FedPAC's (Eq. 17, 19), and classes that no cohort has held yet are left out.
    """
    optimizer = sgd(lr, momentum, weight_decay)
    align_optimizer = sgd(align_lr)
    shares_centroids = alignment and target == "global_class_mean"

    def loss(params, batch):
        return cross_entropy(model.apply(params, batch.x), batch.y, batch.mask)

    def distance(features, targets, labels, mask):
        if align_loss == "class_sum":
            return classwise_alignment(features, targets, labels, mask, model.num_classes)
        return feature_alignment(features, targets, mask)

    def alignment_loss(backbone, batch):
        labels, targets = batch.y
        return distance(model.features(backbone, batch.x), targets, labels, batch.mask)

    def joint_loss(params, batch):
        labels, targets, has_target = batch.y
        features = model.features(params["backbone"], batch.x)
        fitted = cross_entropy(model.classify(params["head"], features), labels, batch.mask)
        return fitted + lam * distance(features, targets, labels, batch.mask & has_target)

    def embeddings(backbone, data):
        return map_examples(lambda x: model.features(backbone, x), data.x, data.mask)

    def targets_of(server, client, data):
        """The targets [n, d], and which examples have one [n]."""
        if target == "global_class_mean":
            return server["centroids"][data.y], data.mask & (server["centroid_counts"][data.y] > 0)
        targets = embeddings(client.backbone, data)
        if target == "class_mean":
            visited = always_visited(data, align_batch_size if manner == "serial" else batch_size)
            centroids, _ = class_centroids(targets, data.y, visited, model.num_classes)
            targets = centroids[data.y]
        # A client that never trained keeps the initial backbone.
        return targets, data.mask if first_alignment else data.mask & client.trained

    def receive(key, server, client, data):
        backbone = server["backbone"]
        if alignment and manner == "serial":
            targets, has_target = targets_of(server, client, data)
            backbone = fit(
                key,
                backbone,
                data._replace(y=(data.y, targets), mask=has_target),
                alignment_loss,
                optimizer=align_optimizer,
                epochs=align_epochs,
                batch_size=align_batch_size,
            )
        return merge(backbone, client.head)

    def trace_of(key, params, data):
        if reduction == "batch_means":
            return batch_fisher_trace(key, model, params, data, batch_size=batch_size)
        return fisher_trace(model, params, data, reduction=reduction)

    def send(backbone, trace, data):
        if not synchronization:
            return mean_by_size(backbone, data)
        if normalization == "proportional":
            return Mean(backbone, jnp.maximum(trace, LEAST_TRACE))
        return backbone

    def train(key, server, client, data):
        align_key, train_key = jax.random.split(key)
        params = receive(align_key, server, client, data)
        objective, examples = loss, data
        if alignment and manner == "parallel":
            objective, examples = joint_loss, data._replace(y=(data.y, *targets_of(server, client, data)))
        params = fit(train_key, params, examples, objective, optimizer=optimizer, epochs=epochs, batch_size=batch_size)
        # The epochs of the training have the keys before this one.
        trace = trace_of(jax.random.fold_in(train_key, epochs), params, data) if synchronization else jnp.zeros(())
        centroids = ()
        if shares_centroids:
            features = embeddings(params["backbone"], data)
            centroids = Mean(*class_centroids(features, data.y, data.mask, model.num_classes))
        return LocalResult(
            client=FedASClient(params["backbone"], params["head"], jnp.ones((), bool)),
            message=FedASMessage(send(params["backbone"], trace, data), trace, centroids),
            personal=params,
        )

    def init_server(key):
        server = model.init(key)
        if shares_centroids:
            server["centroids"] = jnp.zeros((model.num_classes, model.num_features))
            server["centroid_counts"] = jnp.zeros(model.num_classes)
        return server

    def aggregate(key, server, clients, messages, cohort):
        if synchronization:
            weights = trace_weights(messages.trace, normalization, cohort.present)
        else:
            weights = normalize(cohort.counts.astype(jnp.float32))
        # The weights sum to one: theta + sum_i w_i (theta_i - theta) is the weighted mean itself.
        sent = messages.backbone
        server = {**server, "backbone": sent.value if isinstance(sent, Mean) else weighted_mean(weights, sent)}
        if shares_centroids:
            server["centroids"], server["centroid_counts"] = merge_centroids(
                server["centroids"], server["centroid_counts"], messages.centroids
            )
        return server, clients, {"trace": messages.trace, "weights": weights}

    return Method(
        init_server=init_server,
        init_client=lambda key, server, data: FedASClient(server["backbone"], server["head"], jnp.zeros((), bool)),
        local=train,
        aggregate=aggregate,
        personalize=receive,
        predict=model.apply,
        # The head is where clients start, once.
        download=lambda server, client: {name: leaf for name, leaf in server.items() if name != "head"},
    )
