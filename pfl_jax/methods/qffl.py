"""Fair federated averaging: clients with larger losses count more (Li et al. 2020)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, Exact, LocalResult, Mean, Method, Model, Params, Privacy
from pfl_jax.messages import NOT_RECEIVED
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.ensembles import example_losses
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import masked_mean, proximal
from pfl_jax.validation import NotNegative

TINY = 1e-10
"""Number added to losses before powers of them are taken (released code)."""


class QFFLMessage(NamedTuple):
    """Message of a client: F^q L (w_i - w), and h = q F^(q-1) ||L (w_i - w)||^2 + L F^q."""

    change: Mean
    curvature: Mean


def risk_of(model: Model, params: Params, data: ClientData) -> jax.Array:
    """Mean loss of a model over all examples of a client, as the model is deployed.

    Args:
      model: the architecture.
      params: its parameters.
      data: the client's examples.
    """
    losses = example_losses(model, jax.tree.map(lambda leaf: leaf[None], params), data)
    return masked_mean(losses[:, 0], data.mask)


@method_factory
def qffl(model: Model, training: LocalTraining = LocalTraining(), *, q: NotNegative = 0.1) -> Method:
    """q-FedAvg: one model, in whose objective larger losses of clients count more.

        minimize  sum_i beta_i F_i^(q+1) / (q + 1),   F_i the mean loss of client i
        w_i = E epochs of SGD from w on client i;   D_i = L (w_i - w),   L = 1 / lr
        w <- w + sum_i beta_i F_i(w)^q D_i / sum_i beta_i (q F_i(w)^(q-1) ||D_i||^2 + L F_i(w)^q)

    With q = 0 this is `fedavg`; the larger q, the more the clients with the largest losses count, and the shorter the
    step: for a single client it is 1 / (1 + q L ||w_i - w||^2 / F_i) of FedAvg's step.

    Args:
      training: recipe of local training; its learning rate also gives L.
      q: power of the losses, from 0 on: how much fairness counts. The paper's are 0.001 to 5, by data set.

    Returns:
      A `Method` with the global model as server state and no client state.
      Trees: server model; client nothing.

    Info:
      step: [], length of the server's step in units of L, 1 / sum_i beta_i h_i.

    Reference:
      Li, Sanjabi, Beirami, Smith. Fair Resource Allocation in Federated Learning. ICLR 2020. Algorithm 2, q-FedAvg.

    Deviations:
      The paper draws clients with probabilities proportional to their sizes and counts them equally; here they are
      drawn as for every method and weighted by their sizes. The released code (github.com/litian96/fair_flearn, commit
      f097971) draws and counts all equally: three full-batch rounds of six clients of equal sizes agree with its
      functions of the server to 3e-7 of an update.
    """
    training.require_lr("q-FedAvg")
    base = fedavg(model, training)

    def train(key, server, client, data):
        trained = base.local(key, server, (), data).personal
        # A rate of zero, which trains nothing, sends zeros.
        scale, loss = 1 / jnp.maximum(training.lr, TINY), risk_of(model, server, data) + TINY
        change = jax.tree.map(lambda new, old: loss**q * scale * (new - old), trained, server)
        steepness = 2 * scale**2 * proximal(trained, server)
        curvature = q * loss ** (q - 1) * steepness + scale * loss**q
        size = jnp.sum(data.mask, dtype=jnp.float32)
        return LocalResult((), QFFLMessage(mean_by_size(change, data), Exact(curvature, size)), trained)

    def aggregate(key, server, clients, messages, cohort):
        change, curvature = messages
        step = 1 / jnp.where(curvature.weight > 0, curvature.value, 1.0)
        moved = jax.tree.map(lambda w, direction: w + step * direction, server, change.value)
        return moved, clients, {"step": step}

    return base._replace(
        local=train,
        aggregate=aggregate,
        # The message is a change already.
        trained_from=lambda server, client: QFFLMessage(jax.tree.map(jnp.zeros_like, server), NOT_RECEIVED),
        server_is_mean=False,
        privacy=Privacy(training.most_passes, (SIZE, "loss on the examples: weight of the change, which is sent")),
    )
