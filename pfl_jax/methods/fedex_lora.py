"""Federated averaging of low-rank adapters whose products are averaged exactly (Singhal et al. 2025)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import ClientData, LocalResult, Method, Model, Params, Privacy, PRNGKey
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.primitives.aggregation import mean_by_size, size_weights, weighted_mean
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.low_rank import RESIDUAL, A, B, adapter_product, find_adapters, map_adapters, mean_product
from pfl_jax.primitives.tree import merge, split


class ExactParams(NamedTuple):
    """A model with adapters, and the residuals that are added to the frozen kernels beside them.

    Attributes:
      params: adapters A, B, and the head.
      residuals: R [inputs, outputs] of each adapter, in the order of `pfl_jax.primitives.find_adapters`.
    """

    params: Params
    residuals: list[jax.Array]


def with_residuals(exact: ExactParams) -> Params:
    """Parameters whose adapters hold their residuals."""
    following = iter(exact.residuals)
    backbone, head = split(exact.params)
    return merge(map_adapters(lambda adapter: adapter | {RESIDUAL: next(following)}, backbone), head)


def train_adapters(
    model: Model,
    training: LocalTraining,
    key: PRNGKey,
    start: ExactParams,
    data: ClientData,
    optimizer: optax.GradientTransformation | None = None,
) -> LocalResult:
    """Result of local training of adapters and head with fixed residuals, for a client without a state.

    Args:
      model: model with adapters.
      training: recipe of local training.
      key: key of local training.
      start: parameters and residuals from which the training starts.
      data: the client's examples.
      optimizer: optimizer to use in place of the recipe's.
    """
    risk = supervised_loss(model)

    def loss(params, batch, key):
        return risk(with_residuals(start._replace(params=params)), batch, key)

    params = training.fit(key, start.params, data, loss, transformation=optimizer)
    message = merge(params["backbone"], mean_by_size(params["head"], data))
    return LocalResult((), message, start._replace(params=params))


@method_factory(adapters=True)
def fedex_lora(model: Model, training: LocalTraining = LocalTraining()) -> Method:
    """FedEx-LoRA: FedAvg of low-rank adapters; the error of averaging A and B apart is added to the frozen kernels.

        (A_i, B_i, phi_i) = E epochs of SGD from (A, B, phi), with kernels W + R + A B
        A = sum_i beta_i A_i,   B = sum_i beta_i B_i,   R <- R + sum_i beta_i A_i B_i - A B

    so that W + R + A B is exactly the mean of the clients' kernels. On a model without adapters it is FedAvg.

    Args:
      training: recipe of local training.

    Returns:
      A `Method` with an `ExactParams` as server state and no client state.
      Trees: server ExactParams(params: model); client nothing.

    Info:
      residual: [], norm of all residuals after the round.

    Reference:
      Singhal, Ponkshe, Vepakomma. FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation
      Models. ACL 2025, Section 4.

    Deviations:
      Clients are weighted by their numbers of examples, as in FedAvg; the paper averages equally. A client receives R
      as matrices; the paper sends the last change of R as factors of rank M r.
    """

    def init_server(key):
        params = model.init(key)
        sizes = [(one[A].shape[0], one[B].shape[1]) for one in find_adapters(params["backbone"])]
        return ExactParams(params, [jnp.zeros(size) for size in sizes])

    def aggregate(key, server, clients, messages, cohort):
        weights, (sent, head) = size_weights(cohort.weights), split(messages)
        backbone = weighted_mean(weights, sent)

        def moved(residual, rows, mean):
            return residual + mean_product(weights, rows) - adapter_product(mean)

        residuals = list(map(moved, server.residuals, find_adapters(sent), find_adapters(backbone)))
        norm = jnp.sqrt(sum((jnp.sum(one**2) for one in residuals), jnp.zeros(())))
        return ExactParams(merge(backbone, head.value), residuals), clients, {"residual": norm}

    return Method(
        init_server=init_server,
        init_client=lambda key, server, data: (),
        local=lambda key, server, client, data: train_adapters(model, training, key, server, data),
        aggregate=aggregate,
        personalize=lambda key, server, client, data: server,
        predict=lambda personal, inputs: model.apply(with_residuals(personal), inputs),
        trained_from=lambda server, client: merge(None, server.params["head"]),
        privacy=Privacy(training.most_passes, (SIZE,)),
    )
