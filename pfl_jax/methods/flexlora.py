"""Low-rank adapters of a different rank on each client, cut from the mean of all products (Bai et al. 2024)."""

import jax.numpy as jnp

from pfl_jax.base import LocalResult, Method, Model, Privacy
from pfl_jax.lapack import thin_svd
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.primitives.aggregation import mean_by_size, size_weights, weighted_mean
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.low_rank import A, B, draw_rank, keep_ranks, map_adapters, mean_product, within_ranks
from pfl_jax.primitives.tree import merge, split
from pfl_jax.validation import Count


@method_factory(adapters=True)
def flexlora(model: Model, training: LocalTraining = LocalTraining(), *, min_rank: Count = 1) -> Method:
    """FlexLoRA: the products of adapters are averaged, and each client gets the mean's best approximation of its rank.

        A_i = A[:, :r_i],  B_i = B[:r_i],  with r_i drawn once from min_rank to r
        (A_i, B_i, phi_i) = E epochs of SGD from (A_i, B_i, phi)
        U S V' = sum_i beta_i A_i B_i,   A = U[:, :r],   B = S[:r, :r] V'[:r]

    A_i B_i is the best approximation of rank r_i of the mean. On a model without adapters it is FedAvg.

    Args:
      training: recipe of local training.
      min_rank: smallest rank of a client.

    Returns:
      A `Method` with the global model as server state and a client's rank r_i, int32, as client state.
      Trees: server model; client count.

    Reference:
      Bai, Chen, Qian, Yao, Li. Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
      Resources. NeurIPS 2024, Section 3.

    Deviations:
      The paper fixes the clients' ranks by their resources; here they are drawn. The server keeps r ranks of the mean,
      the most that a client has. The head, which is not an adapter, is averaged. All adapters have one scale; in the
      released code (github.com/alibaba/FederatedScope, branch FlexLoRA, commit 1cb1ab7) it is 16 / r_i. Without this
      difference, three rounds in which that code decomposes the products agree to 1e-5 of the update.
    """
    loss = supervised_loss(model)

    def train(key, server, rank, data):
        own_ranks = within_ranks(training.transformation(), rank)
        params = training.fit(key, keep_ranks(server, 0, rank), data, loss, transformation=own_ranks)
        return LocalResult(rank, merge(params["backbone"], mean_by_size(params["head"], data)), params)

    def aggregate(key, server, clients, messages, cohort):
        weights, (sent, head) = size_weights(cohort.weights), split(messages)

        def factors(mean, adapters):
            rank = mean[B].shape[0]
            left, values, right = thin_svd(mean_product(weights, adapters))
            # A layer may have fewer inputs or outputs than ranks.
            missing = max(0, rank - len(values))
            return {
                A: jnp.pad(left[:, :rank], ((0, 0), (0, missing))),
                B: jnp.pad((values[:, None] * right)[:rank], ((0, missing), (0, 0))),
            }

        backbone = map_adapters(factors, weighted_mean(weights, sent), sent)
        return merge(backbone, head.value), clients, {}

    return Method(
        init_server=model.init,
        init_client=lambda key, server, data: draw_rank(key, server, min_rank),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: keep_ranks(server, 0, client),
        predict=model.apply,
        trained_from=lambda server, client: merge(None, server["head"]),
        privacy=Privacy(training.most_passes, (SIZE,)),
    )
