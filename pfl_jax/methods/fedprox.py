"""Federated averaging with a proximal term (Li et al. 2020)."""

from pfl_jax.base import LocalResult, Method, Model
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_sgd import fit, sgd
from pfl_jax.primitives.losses import cross_entropy, proximal


def fedprox(
    model: Model,
    *,
    mu: float = 0.01,
    lr: float = 0.01,
    momentum: float = 0.5,
    weight_decay: float = 5e-4,
    batch_size: int = 50,
    epochs: int = 5,
) -> Method:
    """FedProx: FedAvg whose clients are held near the received model.

        w_i = E epochs of SGD from w on  CE(w_i) + (mu / 2) ||w_i - w||^2;   w = sum_i beta_i w_i

    With mu = 0 this is FedAvg.

    Args:
      mu: strength of the proximal term.
      lr: learning rate.
      momentum: momentum of SGD.
      weight_decay: weight decay of SGD.
      batch_size: examples of a mini-batch.
      epochs: local epochs of a round.

    Returns:
      A `Method` with the global model as server state and no client state.

    Reference:
      Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated Optimization in Heterogeneous Networks. MLSys 2020.
      Algorithm 2.

    Deviations:
      The server averages by numbers of examples, as FedAvg here; Algorithm 2 draws clients by size and averages them
      equally. Every client works E epochs: the partial work of slow devices is not simulated. The papers that
      compare with FedProx do not name mu; 0.01 is one of the values that its own paper tunes over.
    """
    optimizer = sgd(lr, momentum, weight_decay)

    def train(key, server, client, data):
        def loss(params, batch):
            return cross_entropy(model.apply(params, batch.x), batch.y, batch.mask) + mu * proximal(params, server)

        params = fit(key, server, data, loss, optimizer=optimizer, epochs=epochs, batch_size=batch_size)
        return LocalResult(client=(), message=mean_by_size(params, data), personal=params)

    base = fedavg(model, lr=lr, momentum=momentum, weight_decay=weight_decay, batch_size=batch_size, epochs=epochs)
    return base._replace(local=train)
