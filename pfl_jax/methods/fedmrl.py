"""A small shared model beside each client's own, whose features are spliced and nested (Yi et al. 2024)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import Backbone, LocalResult, Method, Model, Params, Privacy, PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.methods.factories import SIZE, method_factory
from pfl_jax.methods.fml import fit_two
from pfl_jax.networks.layers import Dense
from pfl_jax.networks.mixed import with_features
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.streams import PROJECTOR
from pfl_jax.validation import Count


class FedMRLClient(NamedTuple):
    """State of a client: its own model, and the projector, a kernel [d_1 + d, d] and a bias [d]."""

    params: Params
    projector: PyTree


class FedMRLServer(NamedTuple):
    """The small shared model, and the first state of all clients."""

    shared: Params
    initial: FedMRLClient


class FedMRLModel(NamedTuple):
    """Model that a client deploys: the backbone of the shared model, and the client's state."""

    shared: Backbone
    own: FedMRLClient


@method_factory
def fedmrl(model: Model, training: LocalTraining = LocalTraining(), *, small_features: Count | None = None) -> Method:
    r"""FedMRL: features of a small shared model and of a client's own are fused; both heads learn from nested parts.

        r = P_i [g(x), f_i(x)]:   features g(x) [d_1] of the shared model, f_i(x) [d] of the client's, projected to [d]
        E epochs of SGD on  CE(phi_i(r)) + CE(phi_g(r_1 ... r_d_1)),   from the received shared model (g, phi_g)
        (g, phi_g) = sum_i beta_i of the trained shared models

    A client keeps its model and projector, and deploys phi_i(r). The clients' models may have different architectures.

    Args:
      training: recipe of local training of all parameters.
      small_features: features d_1 of the shared model, at most d; None for a quarter of its network's features.

    Returns:
      A `Method` with a `FedMRLServer` as server state and a `FedMRLClient` as client state.
      Trees: server FedMRLServer(shared: 6 arrays, initial: FedMRLClient(params: model, projector: {bias: numbers [d],
      kernel: numbers [21, d]})); client FedMRLClient(params: model, projector: {bias: numbers [d], kernel: numbers [21,
      d]}).

    Reference:
      Yi, Yu, Ren, Wang, Liu, Li. Federated Model Heterogeneous Matryoshka Representation Learning. NeurIPS 2024, with
      both losses weighted by 1, as there.

    Deviations:
      The shared model is `Model.shared_network`, with a dense layer and ReLU to d_1 features unless it has d_1 already.
      The authors' shared model is a convolutional network with a smaller last hidden layer; HtFLlib's
      (github.com/TsingZ0/HtFLlib, commit e959261) pools the features. The authors' code (github.com/LipingYi/FedMRL,
      commit 8b90f41) clips the gradients of each part at norm 50, and has momentum 0.9; both are options here. HtFLlib
      never stores the trained projector, so that every round begins with the first one, and averages clients equally.
      With equal clients, the projector kept and our shared model, three full-batch rounds of three clients agree with
      its code to 1e-6.
    """
    network = model.shared_network
    size = max(1, network.num_features // 4) if small_features is None else small_features
    if size > model.num_features:
        raise InvalidInput(
            f"small_features must be at most {model.num_features}, the features of a client's model, not {size}"
        )
    small = with_features(network, size, layer="to_small_features")
    both, projection = model._replace(shared=small), Dense(model.num_features)

    def fused(projector: PyTree, shared: jax.Array, own: jax.Array) -> jax.Array:
        return jnp.asarray(projection.apply({"params": projector}, jnp.concatenate([shared, own], axis=-1)))

    def value(own, shared, projector, batch):
        (own, own_features), (shared, shared_features) = own, shared
        features = fused(projector, shared_features, own_features)
        outputs = model.classify(own["head"], features), small.classify(shared["head"], features[..., :size])
        own_risk, shared_risk = (model.task.loss(one, batch.y, batch.mask) for one in outputs)
        return own_risk + shared_risk

    def train(key, server, client, data):
        start = client.params, server.shared, client.projector
        params, shared, projector = fit_two(both, training, key, start, data, value)
        client = FedMRLClient(params, projector)
        return LocalResult(client, mean_by_size(shared, data), FedMRLModel(shared["backbone"], client))

    def init_server(key):
        example = jnp.zeros((1, size + model.num_features))
        projector = projection.init(jax.random.fold_in(key, PROJECTOR), example)["params"]
        return FedMRLServer(small.init(key), FedMRLClient(model.init(key), projector))

    def predict(personal, inputs):
        own = model.features(personal.own.params["backbone"], inputs)
        features = fused(personal.own.projector, small.features(personal.shared, inputs), own)
        return model.classify(personal.own.params["head"], features)

    return Method(
        init_server=init_server,
        init_client=lambda key, server, data: server.initial,
        local=train,
        aggregate=lambda key, server, clients, messages, cohort: (server._replace(shared=messages.value), clients, {}),
        personalize=lambda key, server, client, data: FedMRLModel(server.shared["backbone"], client),
        predict=predict,
        download=lambda server, client: server.shared,
        privacy=Privacy(training.most_passes, (SIZE,), clients=()),
    )
