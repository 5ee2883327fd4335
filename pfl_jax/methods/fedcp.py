"""Features split between a global and a personal head by a policy network (Zhang et al. 2023)."""

from typing import NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfl_jax.base import Backbone, Head, LocalResult, Method, Model, Privacy, PyTree
from pfl_jax.methods.factories import WHOLE_BATCH, method_factory, needs_vectors
from pfl_jax.networks.layers import Dense
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.features import extract_features
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import loss_of_features
from pfl_jax.primitives.tree import interpolate
from pfl_jax.streams import POLICY
from pfl_jax.validation import NotNegative

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)
"""Bandwidths of the Gaussian kernels whose sum measures the discrepancy of features (released code)."""


class FedCPServer(NamedTuple):
    """State that all clients share: backbone theta, global head, and parameters of the policy network, see `Policy`."""

    backbone: Backbone
    head: Head
    policy: PyTree


class FedCPModel(NamedTuple):
    """Model that a client deploys: the shared parameters and its own head."""

    shared: FedCPServer
    head: Head


class Policy(nn.Module):
    """Policy network: for inputs [B, d], shares r [B, d] of each feature for the personal head.

    An affine layer to 2 d units, layer normalization and ReLU give two numbers for each feature, whose softmax is
    (r, 1 - r).
    """

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        hidden = Dense(2 * inputs.shape[-1])(inputs)
        scores = nn.relu(nn.LayerNorm(1e-5, use_fast_variance=False)(hidden))
        personal, generic = jnp.split(scores, 2, axis=-1)
        return cast(jax.Array, nn.sigmoid(personal - generic))


def context(model: Model, head: Head) -> jax.Array:
    """Client's vector v [d]: the sum over classes of its head's weights, scaled to length 1.

    It is computed as the gradient of the summed logits at features of zero.

    Args:
      model: the architecture.
      head: the client's head.
    """
    total = jax.grad(lambda features: jnp.sum(model.classify(head, features[None])))(jnp.zeros(model.num_features))
    return total / jnp.maximum(jnp.linalg.norm(total), 1e-12)


def discrepancy(left: jax.Array, right: jax.Array, mask: jax.Array) -> jax.Array:
    r"""Squared maximum mean discrepancy: mean over all pairs of examples of k(l, l') + k(r, r') - 2 k(l, r').

        k(a, b) = sum over bandwidths s of exp(-||a - b||^2 / (2 s))

    Args:
      left, right: features [B, d].
      mask: [B], the real examples.
    """

    def kernel(a, b):
        squares = jnp.sum(jnp.square(a[:, None] - b), axis=-1)
        return sum((jnp.exp(-squares / (2 * width)) for width in BANDWIDTHS), jnp.zeros(squares.shape))

    pairs = (mask[:, None] & mask).astype(left.dtype)
    total = jnp.sum(pairs * (kernel(left, left) + kernel(right, right) - 2 * kernel(left, right)))
    return total / jnp.maximum(jnp.sum(pairs), 1)


@method_factory
def fedcp(model: Model, training: LocalTraining = LocalTraining(), *, lam: NotNegative = 5.0) -> Method:
    r"""FedCP: a policy network decides for each example which share of each feature goes to which of two heads.

        r(x) = policy(f(x) v_i) in (0, 1)^d,   v_i = normalized sum over classes of the weights of client i's head
        logits = phi_i(r f(x)) + phi((1 - r) f(x)),   with personal head phi_i and global head phi
        theta_i, phi_i, policy_i = E epochs of SGD on  CE + lambda MMD(f_i(x), f(x)),   phi and the received f fixed
        theta, phi, policy = sum_i beta_i (theta_i, (phi_i + phi) / 2, policy_i);   phi_i stays on the client

    MMD is the `discrepancy` of the features of a mini-batch under the trained and the received backbone.

    Args:
      training: recipe of local training of backbone, personal head and policy.
      lam: strength lambda of the alignment with the received backbone's features.

    Returns:
      A `Method` with a `FedCPServer` as server state; a client keeps its head.
      Trees: server FedCPServer(backbone, head, policy: 4 arrays); client head.

    Reference:
      Zhang, Hua, Wang, Song, Xue, Ma, Guan. FedCP: Separating Feature Information for Personalized Federated Learning
      via Conditional Policy. KDD 2023. The equations follow the released code; lambda = 5 is its value for the CNN on
      MNIST (20 clients, Dirichlet 0.1, batches of 10, learning rate 0.005 without momentum and weight decay).

    Deviations:
      The released code adds Gumbel noise to the policy's scores, in training and in evaluation; here there is none. A
      client that was never trained has the vector v_i of the initial head (released: random numbers). All clients use
      the current global head and policy (released: a client outside the cohort keeps, deploys and later trains from the
      ones of its last round). The released loaders do not shuffle and leave out incomplete mini-batches, as does
      `LocalTraining(drop_last=True, shuffle=False)`. Compared with that code (commit 7110e97), without the noise: two
      rounds of full batches give the same models to 1e-5.
    """
    needs_vectors(model, "fedcp", "it compares those vectors between two models")

    def logits(shared: FedCPServer, head: Head, vector: jax.Array, features: jax.Array) -> jax.Array:
        personal = cast(jax.Array, Policy().apply({"params": shared.policy}, features * vector))
        own = model.classify(head, personal * features)
        return own + model.classify(shared.head, (1 - personal) * features)

    def train(key, server, client, data):
        vector = context(model, client)
        # One forward pass serves all epochs, unless inputs are augmented, which gives each mini-batch new features.
        received = extract_features(model, server.backbone, data) if training.augment is None else None

        def value(params, features, batch):
            backbone, head, policy = params
            labels, targets = batch.y
            if targets is None:
                targets = model.features(server.backbone, batch.x)
            scores = logits(FedCPServer(backbone, server.head, policy), head, vector, features)
            return model.task.loss(scores, labels, batch.mask) + lam * discrepancy(features, targets, batch.mask)

        loss = loss_of_features(model, value, lambda params: params[0])
        start = server.backbone, client, server.policy
        backbone, head, policy = training.fit(key, start, data._replace(y=(data.y, received)), loss)
        message = mean_by_size(FedCPServer(backbone, interpolate(0.5, head, server.head), policy), data)
        personal = FedCPModel(FedCPServer(backbone, server.head, policy), head)
        return LocalResult(client=head, message=message, personal=personal)

    def init_server(key):
        params, example = model.init(key), jnp.zeros((1, model.num_features))
        return FedCPServer(**params, policy=Policy().init(jax.random.fold_in(key, POLICY), example)["params"])

    def predict(personal, inputs):
        features = model.features(personal.shared.backbone, inputs)
        return logits(personal.shared, personal.head, context(model, personal.head), features)

    return Method(
        init_server=init_server,
        init_client=lambda key, server, data: server.head,
        local=train,
        aggregate=lambda key, server, clients, messages, cohort: (messages.value, clients, {}),
        personalize=lambda key, server, client, data: FedCPModel(server, client),
        predict=predict,
        privacy=Privacy(refused=WHOLE_BATCH, clients=()),
    )
