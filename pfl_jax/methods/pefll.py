"""Hypernetwork that makes each client's model from a network's description of its data (Scott et al. 2024)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from pfl_jax.base import Backbone, ClientData, LocalResult, Mean, Method, Model, Privacy, PyTree
from pfl_jax.messages import NOT_RECEIVED
from pfl_jax.methods.factories import method_factory, needs_classes
from pfl_jax.methods.pfedhn import generate, init_hypernetwork, params_of
from pfl_jax.primitives.features import extract_features
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import masked_mean, supervised_loss
from pfl_jax.primitives.mini_batches import epoch_order
from pfl_jax.primitives.optimizers import descend, initial_state, sgd
from pfl_jax.primitives.tree import gather, map_statistics, running_statistics
from pfl_jax.streams import DESCRIPTORS
from pfl_jax.validation import BelowOne, Count, NotNegative


class Embedding(NamedTuple):
    """Embedding network: a backbone like the model's, and a linear layer (kernel [d + K, e], bias [e]) on its features
    and the label.
    """

    backbone: Backbone
    kernel: jax.Array
    bias: jax.Array


class PeFLLServer(NamedTuple):
    """State of the server: hypernetwork, as in `pfedhn`, embedding network, and state of their optimizer."""

    hypernetwork: list[tuple[jax.Array, jax.Array]]
    embedding: Embedding
    optimizer: PyTree


class PeFLLMessage(NamedTuple):
    """Message of a client: ascent direction of the embedding network, its descriptor [e], change of its model [P]."""

    embedding: Mean
    descriptor: jax.Array
    change: jax.Array


def describe(embedding: Embedding, features: jax.Array, data: ClientData) -> jax.Array:
    """Descriptor v [e] of a client: the mean over examples of [f(x), one-hot y] kernel + bias, for features [n, d]."""
    labels = jax.nn.one_hot(data.y, embedding.kernel.shape[0] - features.shape[1])
    means = jax.vmap(masked_mean, in_axes=(1, None))(jnp.concatenate([features, labels], axis=1), data.mask)
    return means @ embedding.kernel + embedding.bias


@method_factory
def pefll(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    server_lr: NotNegative = 0.1,
    server_momentum: BelowOne = 0.9,
    embedding_size: Count = 32,
    hidden_size: Count = 100,
    hidden_layers: Count = 3,
) -> Method:
    r"""PeFLL: an embedding network describes a client's data, from which a hypernetwork makes the client's model.

        v_i = mean of g(x, y; psi) over a mini-batch of client i;   w_i = h(v_i; phi);   w'_i = E epochs of SGD from w_i
        (phi, psi) <- (phi, psi) + server_lr (1/M) sum_i (dw_i / d(phi, psi))^T (w'_i - w_i),  with momentum
        deployed:  h(v_i; phi), with v_i from all training examples

    A client keeps nothing, and a client that never took part gets its own model without training. h is the hypernetwork
    of `pfedhn`; where it gives everyone the same model, w_i = phi, this is `fedavg` of equal clients (server_lr = 1,
    server_momentum = 0).

    Args:
      training: recipe of local training; the mini-batch of the descriptor has its batch_size.
      server_lr: learning rate of the hypernetwork and of the embedding network.
      server_momentum: momentum of both.
      embedding_size: size of a client's descriptor.
      hidden_size: units of each of the hypernetwork's hidden layers.
      hidden_layers: number of hidden layers of the hypernetwork.

    Returns:
      A `Method` with a `PeFLLServer` as server state and no client state.
      Trees: server PeFLLServer(hypernetwork: 8 arrays, embedding: Embedding(backbone, kernel: numbers [30, 32], bias:
      numbers [32]), optimizer: 12 arrays); client nothing.

    Info:
      change: [M], Euclidean norm of each client's w'_i - w_i.

    Reference:
      Scott, Zakerinia, Lampert. PeFLL: Personalized Federated Learning by Learning to Learn. ICLR 2024. Its algorithms
      for prediction and training. A round has two exchanges: the client sends v_i and gets w_i, sends w'_i - w_i and
      gets the gradient of v_i, from which it computes its gradient of psi.

    Deviations:
      Only the paper's abstract and the released code (github.com/jonnyascott/PeFLL, commit 18659a1) were available. Its
      embedding network is a LeNet with the label as further channels of the image, or a linear layer on the label
      alone; here it is the model's backbone, with the label beside its features, so that it takes any input. The last
      bias of the hypernetwork starts as an ordinary initialization of the model, and there is one output layer after a
      ReLU, as in `pfedhn`. The code's default optimizer is Adam with a learning rate of 2e-4, the alternative is SGD
      with the momentum that is the default here; server_lr = 0.1 is a guess, not tuned. The code clips gradients of
      clients and server at norm 50. Its descriptors are divided by twice the number of mini-batches in place of the
      number of examples, and all are shifted and scaled by the mean and standard deviation of the entries of the first
      one. Three full-batch steps of that code with networks like the ones here, SGD, descriptors that are means, and no
      momentum of the clients agree to 3e-6 of an update.
    """
    needs_classes(model, "pefll", "its embedding network takes the label as one of several classes")
    steps, loss = sgd(server_lr, server_momentum), supervised_loss(model)
    unravel = params_of(model)

    def init_server(key):
        backbone_key, kernel_key, bias_key = jax.random.split(jax.random.fold_in(key, DESCRIPTORS), 3)
        width = model.num_features + model.num_classes
        kernel, bias = (
            jax.random.uniform(one, shape, minval=-(width**-0.5), maxval=width**-0.5)
            for one, shape in ((kernel_key, (width, embedding_size)), (bias_key, (embedding_size,)))
        )
        embedding = Embedding(model.init(backbone_key)["backbone"], kernel, bias)
        hypernetwork = init_hypernetwork(key, embedding_size, [hidden_size] * hidden_layers, model.init(key))
        return PeFLLServer(hypernetwork, embedding, initial_state(steps, (hypernetwork, embedding)))

    def train(key, server, client, data):
        batch_key, key = jax.random.split(key)
        rows = epoch_order(batch_key, data.mask, data.mask.shape[0])[: training.batch_size]
        batch = gather(data, rows)

        def descriptor_of(embedding):
            # Running statistics are not parameters.
            backbone = map_statistics(jax.lax.stop_gradient, embedding.backbone)
            return describe(embedding, model.features(backbone, batch.x), batch)

        descriptor, to_embedding = jax.vjp(descriptor_of, server.embedding)
        flat, to_descriptor = jax.vjp(lambda v: generate(server.hypernetwork, v), descriptor)
        params = training.fit(key, unravel(flat), data, loss)
        change = ravel_pytree(params)[0] - flat
        (ascent,) = to_embedding(*to_descriptor(change))
        return LocalResult(client, PeFLLMessage(Mean(ascent, np.float32(1)), descriptor, change), params)

    def aggregate(key, server, clients, messages, cohort):
        _, pullback = jax.vjp(
            lambda hypernetwork: jax.vmap(generate, in_axes=(None, 0))(hypernetwork, messages.descriptor),
            server.hypernetwork,
        )
        (sums,) = pullback(messages.change)
        present = jnp.maximum(jnp.sum(cohort.present), 1)
        descent = jax.tree.map(
            jnp.negative, (jax.tree.map(lambda leaf: leaf / present, sums), messages.embedding.value)
        )
        networks = server.hypernetwork, server.embedding
        networks, optimizer = descend(steps, descent, running_statistics(networks), networks, server.optimizer)
        hypernetwork, embedding = networks
        return (
            PeFLLServer(hypernetwork, embedding, optimizer),
            clients,
            {"change": jnp.linalg.norm(messages.change, axis=1)},
        )

    def personalize(key, server, client, data):
        features = extract_features(model, server.embedding.backbone, data)
        return unravel(generate(server.hypernetwork, describe(server.embedding, features, data)))

    return Method(
        init_server=init_server,
        init_client=lambda key, server, data: (),
        local=train,
        aggregate=aggregate,
        personalize=personalize,
        predict=model.apply,
        # The model has the shape of the last bias; the descriptor's gradient has the shape of the embedding's bias.
        download=lambda server, client: (server.embedding, server.hypernetwork[-1][1], server.embedding.bias),
        trained_from=lambda server, client: PeFLLMessage(
            jax.tree.map(jnp.zeros_like, server.embedding), NOT_RECEIVED, NOT_RECEIVED
        ),
        privacy=Privacy(
            training.most_passes, ("descriptor: sent, and the gradient of the embedding network that follows from it",)
        ),
    )
