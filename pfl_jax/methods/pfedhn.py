"""Hypernetwork on the server that generates each client's model (Shamsian et al. 2021)."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from pfl_jax.base import LocalResult, Method, Model, Params, Privacy, PRNGKey, PyTree
from pfl_jax.methods.factories import IDENTITY, method_factory
from pfl_jax.primitives.fingerprints import fingerprint, fingerprint_key
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.streams import EMBEDDINGS
from pfl_jax.validation import BelowOne, Count, NotNegative


class PFedHNServer(NamedTuple):
    """State of the server.

    Attributes:
      hypernetwork: its parameters, a list of (kernel [in, out], bias [out]).
      velocity: velocity of its momentum, in the same form.
      seed: uint32, seed from which the clients' embeddings are drawn.
    """

    hypernetwork: list[tuple[jax.Array, jax.Array]]
    velocity: list[tuple[jax.Array, jax.Array]]
    seed: jax.Array


def generate(hypernetwork: list[tuple[jax.Array, jax.Array]], embedding: jax.Array) -> jax.Array:
    """Flat weights h(v) [P] of the client with embedding v [e]; the hypernetwork has ReLU between its layers."""
    *hidden, (kernel, bias) = hypernetwork
    activation = embedding
    for inner_kernel, inner_bias in hidden:
        activation = jax.nn.relu(activation @ inner_kernel + inner_bias)
    return activation @ kernel + bias


def init_hypernetwork(
    key: PRNGKey, embedding_size: int, hidden: Sequence[int], params: Params
) -> list[tuple[jax.Array, jax.Array]]:
    """Random hypernetwork whose initial outputs scatter around a given model.

    The hidden activations add noise to this model: with the sizes of `pfedhn` about 0.05 (standard deviation) to every
    weight, of which about 0.025 differs between embeddings.

    Args:
      key: key of the random weights.
      embedding_size: number of inputs.
      hidden: units of each hidden layer.
      params: the model, which becomes the bias of the output layer.

    Returns:
      (kernel [in, out], bias [out]) of each layer, uniform in +-1 / sqrt(in) except for the last bias.
    """
    start, _ = ravel_pytree(params)
    layers = []
    for index, (inputs, outputs) in enumerate(itertools.pairwise([embedding_size, *hidden, start.shape[0]]), start=1):
        bound = inputs**-0.5
        layers.append(
            tuple(
                jax.random.uniform(layer_key, shape, minval=-bound, maxval=bound)
                for layer_key, shape in zip(
                    jax.random.split(jax.random.fold_in(key, index)), ((inputs, outputs), (outputs,)), strict=True
                )
            )
        )
    return [*layers[:-1], (layers[-1][0], start)]


def params_of(model: Model) -> Callable[[jax.Array], Params]:
    """Function from flat weights [P], as `generate` returns them, to the params of a `model`."""
    return ravel_pytree(jax.tree.map(jnp.zeros_like, jax.eval_shape(model.init, jax.random.key(0))))[1]


@method_factory(version=2)
def pfedhn(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    server_lr: NotNegative = 0.01,
    embedding_lr: NotNegative = 0.01,
    server_momentum: BelowOne = 0.9,
    embedding_size: Count = 32,
    hidden_size: Count = 100,
    hidden_layers: Count = 3,
) -> Method:
    r"""pFedHN: a hypernetwork h on the server generates each client's model from a learned embedding v_i.

        w_i = h(v_i; phi);   w'_i = E epochs of SGD from w_i;   the client returns d_i = w'_i - w_i
        phi <- phi + server_lr sum_i (dw_i/dphi)^T d_i  (with momentum);   v_i <- v_i + embedding_lr (dw_i/dv_i)^T d_i

    One round is one step of phi for a cohort of M clients: the sum of the M steps that the paper takes one client at a
    time, here all from the same phi. T steps of the paper correspond to T / M rounds.

    Args:
      training: recipe of local training.
      server_lr: learning rate of the hypernetwork.
      embedding_lr: learning rate of the embeddings.
      server_momentum: momentum of the hypernetwork's descent.
      embedding_size: size of a client's embedding.
      hidden_size: units of each of the hypernetwork's hidden layers.
      hidden_layers: number of hidden layers of the hypernetwork.

    Returns:
      A `Method`. The server keeps a `PFedHNServer`. The embedding v_i [embedding_size] is stored as client i's state,
      although only the server uses it; it is initialized with standard normal numbers.
      Trees: server PFedHNServer(hypernetwork: 8 arrays, velocity: 8 arrays, seed: count); client numbers [32].

    Info:
      change: [M], Euclidean norm of each client's d_i.

    Reference:
      Shamsian, Navon, Fetaya, Chechik. Personalized Federated Learning using Hypernetworks. ICML 2021. The
      algorithm of pFedHN. server_lr = 0.01 is FedPAC's (Appendix B.3), where the clients' learning rate is 0.01 too;
      embedding_lr = 0.01 is from the released code.

    Deviations:
      One step serves all clients of a round, see above. The bias of the output layer starts as an ordinary
      initialization of the model, to which the hidden activations add noise of about 0.05 (standard deviation) to every
      weight, of which about 0.025 differs between clients; in the released code this bias is drawn like the bias of any
      layer. v_i is drawn by the run's key and a hash of the client's data, so that results do not depend on how clients
      are numbered. Differences from the released code: it chooses the embedding size by the number of clients, which is
      fixed here. Its momentum of 0.9 and weight decay of 1e-3 apply to hypernetwork and embeddings, once for every
      client; here momentum applies to the hypernetwork only, once a round, and there is no weight decay. It clips the
      gradient norms of clients and server at 50; here neither is clipped. It has one output layer for each array of the
      model, without ReLU before them; here there is one output layer after a ReLU. Its 3 hidden layers come in addition
      to the first layer.
    """
    loss = supervised_loss(model)
    unravel = params_of(model)

    def init_server(key):
        layers = init_hypernetwork(key, embedding_size, [hidden_size] * hidden_layers, model.init(key))
        seed = jax.random.bits(jax.random.fold_in(key, EMBEDDINGS), (), jnp.uint32)
        return PFedHNServer(layers, jax.tree.map(jnp.zeros_like, layers), seed)

    def init_client(key, server, data):
        # By the client's data, so that the embeddings do not depend on how clients are numbered.
        return jax.random.normal(fingerprint_key(jax.random.key(server.seed), fingerprint(data)), (embedding_size,))

    def receive(server: PFedHNServer, embedding: jax.Array) -> PyTree:
        return unravel(generate(server.hypernetwork, embedding))

    def train(key, server, client, data):
        start = receive(server, client)
        params = training.fit(key, start, data, loss)
        change, _ = ravel_pytree(jax.tree.map(jnp.subtract, params, start))
        return LocalResult(client=client, message=change, personal=params)

    def aggregate(key, server, clients, messages, cohort):
        # One pullback for the cohort: summed over clients for the hypernetwork, separate for each embedding.
        _, pullback = jax.vjp(jax.vmap(generate, in_axes=(None, 0)), server.hypernetwork, clients)
        ascent, embedding_ascent = pullback(messages)
        velocity = jax.tree.map(lambda v, g: server_momentum * v + g, server.velocity, ascent)
        hypernetwork = jax.tree.map(lambda leaf, v: leaf + server_lr * v, server.hypernetwork, velocity)
        embeddings = clients + embedding_lr * embedding_ascent
        changed = PFedHNServer(hypernetwork, velocity, server.seed)
        return changed, embeddings, {"change": jnp.linalg.norm(messages, axis=1)}

    return Method(
        init_server=init_server,
        init_client=init_client,
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: receive(server, client),
        predict=model.apply,
        download=lambda server, client: receive(server, client),
        privacy=Privacy(training.most_passes, (IDENTITY,)),
    )
