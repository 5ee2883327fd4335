"""Low-rank adapters of a different rank on each client (Cho et al. 2024)."""

import jax
import jax.numpy as jnp

from pfl_jax.base import LocalResult, Mean, Method, Model, Privacy
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.low_rank import (
    A,
    B,
    adapter_squared_norm,
    draw_rank,
    find_adapters,
    is_adapter,
    keep_ranks,
    within_ranks,
)
from pfl_jax.primitives.tree import merge
from pfl_jax.validation import Count, Fraction, NotNegative


@method_factory(adapters=True)
def hetlora(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    min_rank: Count = 1,
    gamma: Fraction = 0.99,
    lam: NotNegative = 0.005,
) -> Method:
    """HetLoRA: each client has the first r_i of the adapters' r ranks, and gives up the last ones that stay small.

        A_i = A[:, :r_i],  B_i = B[:r_i],  with r_i drawn from min_rank to r
        (A_i, B_i, phi_i) = E epochs of SGD on CE + lambda s_i
        s_i = sum over adapters of ||A_i[:, t:]|| ||B_i[t:]||,  t = gamma r_i
        r_i <- t, but at least min_rank, if s_i is less than before the training
        A = sum_i p_i A_i,  B = sum_i p_i B_i,  padded with zeros;  p_i = ||A_i B_i|| / sum_j ||A_j B_j||

    Each adapter has its own p_i. On a model without adapters it is FedAvg.

    Args:
      training: recipe of local training.
      min_rank: smallest rank of a client.
      gamma: share of a client's ranks that it never gives up in one round; their number is rounded down.
      lam: strength lambda of the penalty on the last ranks.

    Returns:
      A `Method` with the global model as server state and a client's rank r_i, int32, as client state.
      Trees: server model; client count.

    Info:
      rank: [M], rank of each client after the round.

    Reference:
      Cho, Liu, Xu, Fahrezi, Joshi. Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models. EMNLP
      2024, Section 3.

    Deviations:
      The paper fixes the clients' first ranks by their devices; here they are drawn. The head, which is not an adapter,
      is averaged by the numbers of examples.
    """
    loss = supervised_loss(model)

    def kept_ranks(rank):
        # The small constant: 0.53 times 100 is less than 53 in float32.
        return jnp.floor(gamma * rank + 1e-3)

    def last_ranks(params, rank):
        # The small constant gives a gradient of zero where the norm is zero, as for no ranks at all.
        ends = find_adapters(keep_ranks(params, kept_ranks(rank), rank))
        norms = [jnp.sqrt(jnp.sum(one[A] ** 2) * jnp.sum(one[B] ** 2) + 1e-12) for one in ends]
        return sum(norms, jnp.zeros(()))

    def train(key, server, rank, data):
        start = keep_ranks(server, 0, rank)

        def penalized(params, batch, key):
            value, statistics = loss(params, batch, key)
            return value + lam * last_ranks(params, rank), statistics

        own_ranks = within_ranks(training.transformation(), rank)
        params = training.fit(key, start, data, penalized, transformation=own_ranks)
        fewer = jnp.minimum(jnp.maximum(kept_ranks(rank), min_rank), rank).astype(jnp.int32)
        rank = jnp.where(last_ranks(params, rank) < last_ranks(start, rank), fewer, rank)
        params = keep_ranks(params, 0, rank)

        def sent(part):
            if not is_adapter(part):
                return mean_by_size(part, data)
            # Before any training all norms are zero; then all clients have equal weights.
            return Mean(part, jnp.sqrt(adapter_squared_norm(part)) + 1e-12)

        backbone = jax.tree.map(sent, params["backbone"], is_leaf=is_adapter)
        return LocalResult(rank, merge(backbone, mean_by_size(params["head"], data)), params)

    def aggregate(key, server, clients, messages, cohort):
        values = jax.tree.map(lambda mean: mean.value, messages, is_leaf=lambda part: isinstance(part, Mean))
        return values, clients, {"rank": clients}

    return Method(
        init_server=model.init,
        init_client=lambda key, server, data: draw_rank(key, server, min_rank),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: keep_ranks(server, 0, client),
        predict=model.apply,
        # A client trains from its own ranks alone, and sends zeros in the others.
        trained_from=lambda server, client: keep_ranks(server, 0, client),
        privacy=Privacy(training.most_passes, (SIZE, "norm of an adapter: weight of the client in its mean")),
    )
