"""Agnostic federated learning: one model for the worst mixture of the clients (Mohri, Sivek, Suresh 2019)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import LocalResult, Mean, Method, Model, Privacy
from pfl_jax.messages import NOT_RECEIVED
from pfl_jax.methods.factories import method_factory
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.methods.qffl import risk_of
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.tree import choose
from pfl_jax.validation import NotNegative


class AFLMessage(NamedTuple):
    """Message of a client: the model that it trained, and the loss of the model that it received."""

    params: Mean
    loss: jax.Array


@method_factory
def afl(model: Model, training: LocalTraining = LocalTraining(), *, weight_lr: NotNegative = 0.1) -> Method:
    """AFL: one model for the mixture of clients with the largest loss, which the server seeks as it trains.

        minimize over w, maximize over lambda on the simplex:  sum_i lambda_i F_i(w),   F_i the mean loss of client i
        w_i = E epochs of SGD from w on client i;   w <- sum_i lambda_i w_i
        lambda <- projection onto the simplex of  lambda_i + weight_lr F_i(w),  w as received

    With weight_lr = 0 all clients count equally: with equal sizes this is `fedavg`.

    Args:
      training: recipe of local training.
      weight_lr: step of the weights lambda, from 0 on.

    Returns:
      A `Method` with the global model as server state, and as client state the number N lambda_i, 1 at first.
      Trees: server model; client number.

    Info:
      weights: [M], lambda_i of the next round, times the number N of clients.

    Reference:
      Mohri, Sivek, Suresh. Agnostic Federated Learning. ICML 2019. The algorithm Stochastic-AFL.

    Deviations:
      Clients take E epochs between two averages, the paper one step. The weights of absent clients do not change, and
      those of a round's clients keep their sum. lambda takes losses on all examples of a client, as in the released
      code of q-FedAvg for whole batches (github.com/litian96/fair_flearn, commit f097971). Clients deploy the last w;
      the paper and that code average the w of all rounds.
    """
    base = fedavg(model, training)

    def train(key, server, client, data):
        trained = base.local(key, server, (), data).personal
        return LocalResult(client, AFLMessage(Mean(trained, client), risk_of(model, server, data)), trained)

    def aggregate(key, server, clients, messages, cohort):
        total = jnp.sum(jnp.where(cohort.present, clients, 0.0))
        moved = clients + cohort.num_clients * weight_lr * messages.loss
        highest = jnp.max(jnp.where(cohort.present, moved, -jnp.inf))
        # A weight that is more than `total` below the highest is zero.
        moved = jnp.where(cohort.present, moved - highest, -2 * total)
        weights = optax.projections.projection_simplex(moved / jnp.where(total > 0, total, 1.0)) * total
        return choose(messages.params.weight > 0, messages.params.value, server), weights, {"weights": weights}

    return base._replace(
        init_client=lambda key, server, data: jnp.ones(()),
        local=train,
        aggregate=aggregate,
        download=lambda server, client: (server, client),
        trained_from=lambda server, client: AFLMessage(server, NOT_RECEIVED),
        server_is_mean=False,
        privacy=Privacy(training.most_passes, ("loss on the examples: weight of the client, which is sent",)),
    )
