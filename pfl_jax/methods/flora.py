"""Low-rank adapters of a different rank on each client, which the server stacks (Wang et al. 2024)."""

import jax

from pfl_jax.base import Method, Model, Privacy
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.methods.fedex_lora import ExactParams, fedex_lora, train_adapters
from pfl_jax.primitives.aggregation import size_weights, weighted_mean
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.low_rank import draw_rank, find_adapters, keep_ranks, map_adapters, mean_product, within_ranks
from pfl_jax.primitives.tree import merge, split
from pfl_jax.streams import NEW_ADAPTERS
from pfl_jax.validation import Count


@method_factory(adapters=True)
def flora(model: Model, training: LocalTraining = LocalTraining(), *, min_rank: Count = 1) -> Method:
    """FLoRA: clients train new adapters in every round, and the sum of their products is added to the frozen kernels.

        A_i new of rank r_i, B_i = 0, with r_i drawn once from min_rank to r
        (A_i, B_i, phi_i) = E epochs of SGD from (A_i, B_i, phi), with kernels W + R + A_i B_i
        R <- R + A B,   A = [beta_1 A_1, ..., beta_M A_M],   B = [B_1; ...; B_M]

    The stacked A B is sum_i beta_i A_i B_i, so that W + R is exactly the mean of the clients' kernels, whatever their
    ranks. On a model without adapters it is FedAvg.

    Args:
      training: recipe of local training.
      min_rank: smallest rank of a client.

    Returns:
      A `Method` with an `ExactParams` as server state, whose adapters add nothing, and a client's rank r_i, int32, as
      client state.
      Trees: server ExactParams(params: model); client count.

    Reference:
      Wang, Shen, He, Sun, Wang, Lyu, Li. FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
      Adaptations. NeurIPS 2024, Section 3.

    Deviations:
      The paper fixes the clients' ranks by their resources; here they are drawn. A client receives R as matrices; the
      paper sends the stacks A and B. The head, which is not an adapter, is averaged. Three rounds in which the released
      code stacks the adapters (github.com/ATP-1010/FederatedLLM, commit 7bea158) agree to 1e-6 of the update.
    """
    base = fedex_lora(model, training)

    def train(key, server, rank, data):
        drawn = model.init(jax.random.fold_in(key, NEW_ADAPTERS))
        new = map_adapters(lambda _, adapter: adapter, server.params, drawn)
        start = server._replace(params=keep_ranks(new, 0, rank))
        own_ranks = within_ranks(training.transformation(), rank)
        return train_adapters(model, training, key, start, data, own_ranks)._replace(client=rank)

    def aggregate(key, server, clients, messages, cohort):
        weights, (sent, head) = size_weights(cohort.weights), split(messages)
        stacked = [mean_product(weights, one) for one in find_adapters(sent)]
        # R contains the clients' training now. The server's adapters keep their initial values, which add nothing.
        mean = weighted_mean(weights, sent)
        backbone = map_adapters(lambda _, initial: initial, mean, server.params["backbone"])
        residuals = [before + change for before, change in zip(server.residuals, stacked, strict=True)]
        return ExactParams(merge(backbone, head.value), residuals), clients, {}

    return base._replace(
        init_client=lambda key, server, data: draw_rank(key, server.params, min_rank),
        local=train,
        aggregate=aggregate,
        privacy=Privacy(training.most_passes, (SIZE,)),
    )
