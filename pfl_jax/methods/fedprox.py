"""Federated averaging with a proximal term (Li et al. 2020)."""

from pfl_jax.base import LocalResult, Method, Model, Privacy
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import proximal, supervised_loss
from pfl_jax.validation import NotNegative


@method_factory
def fedprox(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    mu: NotNegative = 0.01,
) -> Method:
    """FedProx: FedAvg with a proximal term that keeps clients near the received model.

        w_i = E epochs of SGD from w on  CE(w_i) + (mu / 2) ||w_i - w||^2;   w = sum_i beta_i w_i

    With mu = 0 this is FedAvg.

    Args:
      training: recipe of local training.
      mu: strength of the proximal term.

    Returns:
      A `Method` with the global model as server state and no client state.
      Trees: server model; client nothing.

    Reference:
      Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated Optimization in Heterogeneous Networks. MLSys 2020.
      Algorithm 2.

    Deviations:
      The server weights clients by their number of examples, as in `fedavg`; Algorithm 2 samples clients by size and
      averages them equally. Every client trains for E epochs: the partial work of slow devices is not simulated. The
      papers that compare with FedProx do not state mu; 0.01 is one of the values that FedProx's paper tries.
    """

    def train(key, server, client, data):
        loss = supervised_loss(model, lambda params: mu * proximal(params, server))
        params = training.fit(key, server, data, loss)
        return LocalResult(client=(), message=mean_by_size(params, data), personal=params)

    return fedavg(model, training)._replace(local=train, privacy=Privacy(training.most_passes, (SIZE,), clients=()))
