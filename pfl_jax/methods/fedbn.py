"""Federated averaging of everything but the normalization layers (Li et al. 2021)."""

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

    Those are the leaves of every part that has one named `scale`, as the normalizations of Flax call it: scale and bias
    of a BatchNorm, GroupNorm, LayerNorm, InstanceNorm or RMSNorm; and of batch normalization the running statistics.

    Example:
      >>> from pfl_jax.methods.fedbn import is_normalization
      >>> is_normalization({"dense": {"bias": 0.0, "kernel": 0.0}, "norm": {"bias": 0.0, "scale": 0.0}})
      [False, False, True, True]
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    parts = {path[:-1] for path in paths if jax.tree_util.keystr(path[-1:], simple=True) == "scale"}
    return [path[:-1] in parts or STATISTICS in (getattr(key, "key", None) for key in path) for path in paths]


def split_normalization(params: Params) -> tuple[Leaves, Leaves]:
    """Leaves of the normalization layers, and all others."""
    pairs = list(zip(jax.tree.leaves(params), is_normalization(params), strict=True))
    return [leaf for leaf, own in pairs if own], [leaf for leaf, own in pairs if not own]


def join_normalization(params: Params, normalization: Leaves | None = None, others: Leaves | None = None) -> Params:
    """Copy of params with other leaves in its normalization layers, or everywhere else, as `split_normalization` gives.

    Args:
      params: a whole model.
      normalization: leaves of the normalization layers; None keeps those of params.
      others: all other leaves; None keeps those of params.
    """
    kept = split_normalization(params)
    own, rest = iter(kept[0] if normalization is None else normalization), iter(kept[1] if others is None else others)
    leaves = [next(own if mine else rest) for mine in is_normalization(params)]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


@method_factory
def fedbn(model: Model, training: LocalTraining = LocalTraining()) -> Method:
    """FedBN: clients keep the parameters of their normalization layers and share all others.

        (w_i, a_i) = E epochs of SGD from (w, a_i) on CE;   w = sum_i beta_i w_i

    a_i are scale and offset of all normalization layers, and the running statistics of batch normalization; w are all
    other parameters. In a model without normalization layers nothing is personal, and this is FedAvg.

    Args:
      training: recipe of local training.

    Returns:
      A `Method`. The server keeps a whole model, whose normalization layers stay the initial ones; a client the leaves
      of its own. A client that was never trained has the initial ones.

    Reference:
      Li, Jiang, Zhang, Kamp, Dou. FedBN: Federated Learning on Non-IID Features via Local Batch Normalization.
      ICLR 2021. Algorithm 1.

    Deviations:
      The paper has batch normalization (`resnet8_bn`, `resnet18_bn`, Flax modules); here group, layer and instance
      normalization stay at the client too. Clients are weighted by their numbers of examples; the paper, whose clients
      have equally many, takes the plain mean. For equal sizes, the aggregation agrees with the released function
      (github.com/med-air/FedBN, commit 2fa38ad) to 1e-6.
    """
    loss = supervised_loss(model)

    def receive(server, client):
        return join_normalization(server, normalization=client)

    def train(key, server, client, data):
        params = training.fit(key, receive(server, client), data, loss)
        normalization, others = split_normalization(params)
        return LocalResult(client=normalization, message=mean_by_size(others, data), personal=params)

    def aggregate(key, server, clients, messages, cohort):
        return join_normalization(server, others=messages.value), clients, {}

    return fedavg(model, training)._replace(
        init_client=lambda key, server, data: split_normalization(server)[0],
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: receive(server, client),
        # Clients need the initial normalization layers only before their first round.
        download=lambda server, client: split_normalization(server)[1],
        privacy=Privacy(training.most_passes, (SIZE,), clients=()),
    )
