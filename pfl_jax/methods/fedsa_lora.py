"""Federated averaging of one factor of low-rank adapters, while clients keep the other (Guo et al. 2025)."""

import jax

from pfl_jax.base import Method, Model, Params
from pfl_jax.methods.factories import method_factory
from pfl_jax.methods.fedbn import shared_but
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.low_rank import B


def is_kept(params: Params) -> list[bool]:
    """Which leaves are the B of an adapter or belong to the head, in the order of `jax.tree.leaves`."""
    names = [[getattr(key, "key", None) for key in path] for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return [path[0] == "head" or path[-1] == B for path in names]


@method_factory(adapters=True)
def fedsa_lora(model: Model, training: LocalTraining = LocalTraining()) -> Method:
    """FedSA-LoRA: the factors A of low-rank adapters are averaged, each client keeps its factors B and its head.

        (A_i, B_i, phi_i) = E epochs of SGD from (A, B_i, phi_i);   A = sum_i beta_i A_i

    On a model without adapters it is FedPer.

    Args:
      training: recipe of local training.

    Returns:
      A `Method`. The server keeps a whole model, whose B and head keep their initial values; a client keeps its own B
      and head.
      Trees: server model; client (numbers [K], numbers [d, K]).

    Reference:
      Guo, Zeng, Wang, Fan, Wang, Qu. Selective Aggregation for Low-Rank Adaptation in Federated Learning. ICLR 2025,
      Section 4.

    Deviations:
      Clients are weighted by their numbers of examples, as in the released code; the paper averages equally. Three
      rounds in which that code averages the parameters (github.com/Pengxin-Guo/FedSA-LoRA, commit fc276b5) agree to
      1e-6 of the update.
    """
    return shared_but(is_kept, model, training)
