"""Global features from which a stored bias of each client has been removed (Zhang et al. 2023)."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, LocalResult, Method, Model, Params, Privacy, PRNGKey, Survey
from pfl_jax.methods.factories import OWN_GRADIENTS, method_factory, needs_vectors
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.optimizers import descend, initial_state
from pfl_jax.validation import NotNegative, Range


class FedDBEServer(NamedTuple):
    """State of the FedDBE server.

    Attributes:
      params: the global model.
      consensus: mean feature of all clients before the first round [d].
    """

    params: Params
    consensus: jax.Array


class FedDBEModel(NamedTuple):
    """Model that a client trains and deploys: its parameters, and the bias of its features [d]."""

    params: Params
    bias: jax.Array


@method_factory
def feddbe(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    kappa: NotNegative = 50.0,
    mean_rate: Annotated[float, Range(0, 1, above=True)] = 1.0,
) -> Method:
    r"""FedDBE: FedAvg on features without the clients' biases, which each client stores and adds before the head.

    In every step on a mini-batch B of client i:

        m <- (1 - mu) sg(m) + mu mean_B f(x),   m = 0 at the start of local training
        (theta, phi, b_i) by SGD on  CE(phi(f(x) + b_i)) + kappa (1/d) (1/2) ||m - g||^2

    sg() stops the gradient. The server averages theta and phi with weights beta. The consensus g is computed once:
    before the first round every client trains the initial model on CE(phi(f(x))) for the usual epochs and sends its
    last m; g is their mean with weights beta. The trained models are discarded.

    Args:
      training: recipe of local training.
      kappa: strength of the regularization of the mean feature toward the consensus.
      mean_rate: weight mu of a mini-batch in the running mean m, in (0, 1]; 1 takes the mini-batch alone.

    Returns:
      A `Method`. The server keeps a `FedDBEServer`, a client its bias b_i [d], which starts at zero.
      Trees: server FedDBEServer(params: model, consensus: numbers [d]); client numbers [d].

    Reference:
      Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan. Eliminating Domain Bias for Federated Learning in Representation
      Space. NeurIPS 2023. FedAvg+DBE. kappa = 50 and mu = 1 are the released values for a CNN on Fashion-MNIST.

    Deviations:
      Momentum and weight decay of the recipe apply to b_i too; the released code has plain SGD for everything. A client
      that joins later does not change g. Two full-batch rounds of three clients and the consensus agree with the
      released clients (github.com/TsingZ0/PFLlib, commit d832e76, whose FedDBE is the authors') to 1e-6.
    """
    needs_vectors(model, "feddbe", "its bias is added to that vector")
    optimizer = training.transformation()

    def fit(key: PRNGKey, start: FedDBEModel, data: ClientData, consensus: jax.Array | None):
        """Trained parts and the last running mean m; without a consensus, b_i is neither used nor trained."""

        def loss(parts, batch, mean, key):
            features, statistics = model.training_features(parts.params["backbone"], batch, key)
            count = jnp.maximum(jnp.sum(batch.mask), 1)
            now = jnp.sum(jnp.where(batch.mask[:, None], features, 0), axis=0) / count
            mean = (1 - mean_rate) * mean + mean_rate * now
            shifted = features if consensus is None else features + parts.bias
            risk = model.task.loss(model.classify(parts.params["head"], shifted), batch.y, batch.mask)
            if consensus is None:
                return risk, (statistics, mean)
            return risk + kappa * jnp.mean(0.5 * jnp.square(mean - consensus)), (statistics, mean)

        def step(carry, batch, key):
            parts, opt_state, mean = carry
            gradient, (statistics, mean) = jax.grad(loss, has_aux=True)(parts, batch, mean, key)
            return *descend(optimizer, gradient, statistics, parts, opt_state), mean

        parts, _, mean = training.fold(
            key, (start, initial_state(optimizer, start), jnp.zeros(model.num_features)), data, step
        )
        return parts, mean

    def mean_feature(key, server, data):
        _, mean = fit(key, FedDBEModel(server.params, server.consensus), data, None)
        return mean_by_size(mean, data)

    def train(key, server, client, data):
        parts, _ = fit(key, FedDBEModel(server.params, client), data, server.consensus)
        return LocalResult(client=parts.bias, message=mean_by_size(parts.params, data), personal=parts)

    def aggregate(key, server, clients, messages, cohort):
        return server._replace(params=messages.value), clients, {}

    def predict(personal, inputs):
        features = model.features(personal.params["backbone"], inputs)
        return model.classify(personal.params["head"], features + personal.bias)

    return Method(
        init_server=lambda key: FedDBEServer(model.init(key), jnp.zeros(model.num_features)),
        init_client=lambda key, server, data: jnp.zeros(model.num_features),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: FedDBEModel(server.params, client),
        predict=predict,
        # Clients need the consensus only before their first round.
        download=lambda server, client: server.params,
        survey=Survey(mean_feature, lambda server, means: server._replace(consensus=means.value)),
        privacy=Privacy(refused=OWN_GRADIENTS, clients=("mean feature before the first round: sent",)),
    )
