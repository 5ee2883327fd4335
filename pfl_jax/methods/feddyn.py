"""Federated learning with a regularizer that each client adapts from round to round (Acar et al. 2021)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pfl_jax.base import LocalResult, Mean, Method, Model, Params, Privacy
from pfl_jax.methods.factories import method_factory
from pfl_jax.methods.fedavg import fedavg
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import proximal, supervised_loss
from pfl_jax.primitives.tree import map_statistics
from pfl_jax.validation import NotNegative


class FedDynServer(NamedTuple):
    """State of the FedDyn server.

    Attributes:
      params: the model w that clients receive.
      drift: -h / lambda, the mean of the r_i of all N clients of a plain federation.
    """

    params: Params
    drift: Params


class FedDynClient(NamedTuple):
    """State of a client.

    Attributes:
      drift: r_i, as included in the server's r.
      trained: r_i after its last training, which becomes r_i when its message arrives.
    """

    drift: Params
    trained: Params


@method_factory
def feddyn(model: Model, training: LocalTraining = LocalTraining(momentum=0.0), *, lam: NotNegative = 0.01) -> Method:
    r"""FedDyn: the clients' regularizers change so that their minima agree with the minimum of the mean loss.

        w_i = E epochs of SGD from w on  CE(w_i) + lambda <r_i, w_i> + (lambda / 2) ||w_i - w||^2
        r_i <- r_i + w_i - w
        r <- r + (M / N) (mean_i w_i - w);   w <- mean_i w_i + r

    r_i and r start at zero. -lambda r_i is the gradient of the client's loss at its last local minimum, and -lambda r
    is the paper's h. The means over the cohort are unweighted, so r is the mean of the r_i of all N clients, unless
    messages are compressed or late, or the server takes a robust mean. A client whose message does not arrive keeps its
    r_i.

    Without the linear term this is FedProx with a step of the server beyond the mean. No lambda gives FedAvg: w moves
    by r for the smallest lambda too.

    Args:
      training: recipe of local training.
      lam: strength lambda of both regularizers, the paper's alpha.

    Returns:
      A `Method` with a `FedDynServer` as server state and a `FedDynClient` as client state. Clients deploy w.
      Trees: server FedDynServer(params: model, drift: model); client FedDynClient(drift: model, trained: model).

    Reference:
      Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama. Federated Learning Based on Dynamic Regularization.
      ICLR 2021. Algorithm 1. lambda = 0.01 is the released value on CIFAR-10; the paper tries 0.1, 0.01 and 0.001.

    Deviations:
      r_i and r are the paper's gradients and h divided by -lambda, as in the released code: with lambda = 0 these stay
      defined, and lambda may change with the round. The local minimum is approximated by E epochs of SGD (in the
      released code, with clipping at norm 10 and weight decay 1e-3; see --clip-norm and --weight-decay). In the
      released code lambda is divided by a client's number of examples relative to the mean over clients; here, as in
      Algorithm 1, it is the same for all clients. The released figures show the mean of the clients' latest models
      instead of w. Three full-batch rounds of three clients of equal size agree with the released functions, without
      clipping (github.com/alpemreacar/FedDyn, commit 48a19fa), to 1e-6.
    """

    def init_server(key):
        params = model.init(key)
        return FedDynServer(params, jax.tree.map(jnp.zeros_like, params))

    def train(key, server, client, data):
        def penalty(params):
            return lam * (optax.tree.vdot(client.drift, params) + proximal(params, server.params))

        params = training.fit(key, server.params, data, supervised_loss(model, penalty))
        trained = jax.tree.map(lambda sums, new, old: sums + (new - old), client.drift, params, server.params)
        return LocalResult(FedDynClient(client.drift, trained), Mean(params, np.float32(1)), params)

    def aggregate(key, server, clients, messages, cohort):
        # (M / N) times the cohort's mean: each of its clients moves the mean of all N by 1 / N of its change.
        share = messages.weight / cohort.num_clients
        drift = jax.tree.map(lambda r, mean, old: r + share * (mean - old), server.drift, messages.value, server.params)
        drift = map_statistics(jnp.zeros_like, drift)
        server = FedDynServer(jax.tree.map(jnp.add, messages.value, drift), drift)
        return server, FedDynClient(clients.trained, clients.trained), {}

    return fedavg(model, training)._replace(
        init_server=init_server,
        init_client=lambda key, server, data: FedDynClient(server.drift, server.drift),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: server.params,
        download=lambda server, client: server.params,
        server_is_mean=False,
        privacy=Privacy(training.most_passes, clients=()),
    )
