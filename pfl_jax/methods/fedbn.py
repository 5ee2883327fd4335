"""Federated averaging of everything but the normalization layers (Li et al. 2021)."""

from collections.abc import Callable
from typing import TypeAlias

import jax

from pfl_jax.base import STATISTICS, LocalResult, Method, Model, Params, Privacy
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss

Leaves: TypeAlias = list[jax.Array]
"""Some of the arrays of a model, in the order of `jax.tree.leaves`."""


def is_normalization(params: Params) -> list[bool]:
    """Which leaves are parameters of normalization layers, in the order of `jax.tree.leaves`.

    A part of the tree with a leaf named `scale` is a normalization, as in Flax: all leaves of the part count, which are
    scale and bias of a BatchNorm, GroupNorm, LayerNorm, InstanceNorm or RMSNorm. So do the running statistics of batch
    normalization.

    Example:
      >>> from pfl_jax.methods.fedbn import is_normalization
      >>> is_normalization({"dense": {"bias": 0.0, "kernel": 0.0}, "norm": {"bias": 0.0, "scale": 0.0}})
      [False, False, True, True]
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    parts = {path[:-1] for path in paths if jax.tree_util.keystr(path[-1:], simple=True) == "scale"}
    return [path[:-1] in parts or STATISTICS in (getattr(key, "key", None) for key in path) for path in paths]


def shared_but(is_kept: Callable[[Params], list[bool]], model: Model, training: LocalTraining) -> Method:
    """FedAvg in which each client keeps some leaves of its model; on the server these keep their initial values.

    Args:
      is_kept: params -> which leaves a client keeps, in the order of `jax.tree.leaves`.
      model: the model that clients train.
      training: recipe of local training.
    """
    loss = supervised_loss(model)

    def parted(params: Params) -> tuple[Leaves, Leaves]:
        pairs = list(zip(jax.tree.leaves(params), is_kept(params), strict=True))
        return [leaf for leaf, kept in pairs if kept], [leaf for leaf, kept in pairs if not kept]

    def joined(params: Params, own: Leaves, shared: Leaves) -> Params:
        kept_leaves, other_leaves = iter(own), iter(shared)
        leaves = [next(kept_leaves if kept else other_leaves) for kept in is_kept(params)]
        return jax.tree.unflatten(jax.tree.structure(params), leaves)

    def received(server, client):
        return joined(server, client, parted(server)[1])

    def train(key, server, client, data):
        params = training.fit(key, received(server, client), data, loss)
        own, shared = parted(params)
        return LocalResult(client=own, message=mean_by_size(shared, data), personal=params)

    def aggregate(key, server, clients, messages, cohort):
        return joined(server, parted(server)[0], messages.value), clients, {}

    return fedavg(model, training)._replace(
        init_client=lambda key, server, data: parted(server)[0],
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: received(server, client),
        # Clients need the initial leaves that they keep only before their first round.
        download=lambda server, client: parted(server)[1],
        privacy=Privacy(training.most_passes, (SIZE,), clients=()),
    )


@method_factory
def fedbn(model: Model, training: LocalTraining = LocalTraining()) -> Method:
    """FedBN: clients keep the parameters of their normalization layers and share all others.

        (w_i, a_i) = E epochs of SGD from (w, a_i) on CE;   w = sum_i beta_i w_i

    a_i are scale and offset of all normalization layers, and the running statistics of batch normalization; w are all
    other parameters. In a model without normalization layers nothing is personal, and this is FedAvg.

    Args:
      training: recipe of local training.

    Returns:
      A `Method`. The server keeps a whole model, whose normalization layers keep their initial values; a client keeps
      the leaves of its normalization layers, at their initial values until it is trained.
      Trees: server model; client nothing.

    Reference:
      Li, Jiang, Zhang, Kamp, Dou. FedBN: Federated Learning on Non-IID Features via Local Batch Normalization.
      ICLR 2021. Algorithm 1.

    Deviations:
      The paper has batch normalization (`resnet8_bn`, `resnet18_bn`, Flax modules); here group, layer and instance
      normalization stay at the client too. Clients are weighted by their numbers of examples; the paper, whose clients
      have equal numbers, takes the plain mean. For equal sizes, the aggregation agrees with the released function
      (github.com/med-air/FedBN, commit 2fa38ad) to 1e-6.
    """
    return shared_but(is_normalization, model, training)
