"""Generator of features on the server that agrees with the clients' heads and teaches the clients (Zhu et al. 2021)."""

from typing import Annotated, Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import Exact, Head, LocalResult, Mean, Method, Model, Params, Privacy, PRNGKey, PyTree
from pfl_jax.messages import NOT_RECEIVED
from pfl_jax.methods.factories import CLASS_SIZES, SIZE, method_factory, needs_classes
from pfl_jax.networks.layers import Dense, torch_uniform
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.feature_statistics import class_counts
from pfl_jax.primitives.fingerprints import fingerprint, fingerprint_key
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import supervised_loss
from pfl_jax.primitives.tree import merge
from pfl_jax.streams import GENERATOR
from pfl_jax.validation import Count, NotNegative, ReadWith


class FedGenServer(NamedTuple):
    """State of FedGen's server.

    Attributes:
      params: the shared model; with a shared head alone, this head and the initial backbone of all clients.
      generator: parameters of the `Generator`.
      moments: state of the generator's optimizer.
      shares: [K], shares of the classes in the last cohort's examples; zeros before the first round.
      seed: uint32, seed of the labels and the noise that each client draws in each step of the next round.
    """

    params: Params
    generator: PyTree
    moments: PyTree
    shares: jax.Array
    seed: jax.Array


class FedGenMessage(NamedTuple):
    """Trained parameters that are shared, and shares [K] of the classes in the client's examples; two `Mean`s."""

    params: Mean
    shares: Exact


class Generator(nn.Module):
    """Features [B, d] for noise [B, e] and labels [B]: a layer, normalization over the batch, ReLU, a linear layer."""

    num_classes: int
    hidden_size: int
    num_features: int

    @nn.compact
    def __call__(self, noise: jax.Array, labels: jax.Array) -> jax.Array:
        inputs = jnp.concatenate([noise, jax.nn.one_hot(labels, self.num_classes)], axis=1)
        size = inputs.shape[1]
        hidden = inputs @ self.param("hidden", torch_uniform(size), (size, self.hidden_size))
        # Batch normalization without running statistics: each unit's mean and variance over the batch. It cancels a
        # bias before it, so there is no bias: its gradient would be rounding, which Adam scales up to whole steps.
        hidden = nn.LayerNorm(1e-5, reduction_axes=0, use_fast_variance=False, name="norm")(hidden)
        return Dense(self.num_features, name="output")(nn.relu(hidden))


def likeness(noise: jax.Array, features: jax.Array) -> jax.Array:
    """Scalar near 1 if different noise gives equal features; the more these differ, the smaller it is.

        exp(-mean_lm ((1/e) ||noise_l - noise_m||^2 (1/d) |features_l - features_m|_1)),   over all pairs of the batch

    Args:
      noise: [B, e].
      features: [B, d].
    """
    squares = jnp.mean(jnp.square(noise[:, None] - noise), axis=-1)
    return jnp.exp(-jnp.mean(squares * jnp.mean(jnp.abs(features[:, None] - features), axis=-1)))


def counting(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Optimizer for (parameters, number of steps so far, a float scalar that no gradient moves)."""
    optimizer = optax.with_extra_args_support(optimizer)

    def update(updates, state, params=None, **extra_args):
        step, state = optimizer.update(updates[0], state, None if params is None else params[0], **extra_args)
        return (step, jnp.ones_like(updates[1])), state

    return optax.GradientTransformationExtraArgs(lambda params: optimizer.init(params[0]), update)


@method_factory(version=2)
def fedgen(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    alpha: NotNegative = 1.0,
    shared: Literal["model", "head"] = "model",
    server_lr: Annotated[NotNegative, ReadWith("alpha")] = 3e-4,
    server_steps: Annotated[Count, ReadWith("alpha")] = 50,
    diversity: Annotated[NotNegative, ReadWith("alpha")] = 1.0,
    noise_size: Annotated[Count, ReadWith("alpha")] = 32,
    hidden_size: Annotated[Count, ReadWith("alpha")] = 256,
) -> Method:
    r"""FedGen: the server trains a generator G of features for labels on the clients' heads, and clients learn from it.

        w_i = E epochs of SGD from w on  CE(w_i) + alpha E[CE(phi_i(G(noise, y)), y)];   w = sum_i beta_i w_i
        G:  server_steps of Adam on  E[CE(phi(G(noise, y)), y)] + diversity likeness(noise, G(noise, y))

    Labels y are drawn by the shares of the classes in the examples of the last cohort, noise is normal; each step draws
    batch_size new pairs. Clients learn from G after the first round, when it is trained. With shared="head" clients
    keep their backbones, which then may have different architectures. With alpha = 0 this is `fedavg`, or `lg_fedavg`.

    Args:
      training: recipe of local training.
      alpha: weight of the generated features in the clients' loss.
      shared: part that the clients share besides the generator, the whole model or its head.
      server_lr: learning rate of the generator.
      server_steps: steps of the generator's training in a round.
      diversity: weight of the term that keeps features of different noise apart.
      noise_size: length of the noise vector for each feature vector.
      hidden_size: width of the generator's hidden layer.

    Returns:
      A `Method` with a `FedGenServer` as server state; a client keeps nothing, or with shared="head" its backbone.
      Trees: server FedGenServer(params: model, generator: 5 arrays, moments: 11 arrays, shares: numbers [K], seed:
      count); client nothing.

    Info:
      shares: [K], shares of the classes in the examples of the cohort.

    Reference:
      Zhu, Hong, Zhou. Data-Free Knowledge Distillation for Heterogeneous Federated Learning. ICML 2021. Its text was
      not available: the equations are common to all released code; the values and the diversity are the authors' for
      MNIST (github.com/zhuangdizhu/FedGen, commit 67f2cd7).

    Deviations:
      G learns from the mean head, whose logits are the mean of the clients' logits for heads that are one dense layer;
      so the server sees no client's head. In the authors' code G learns from the mean of the clients' cross entropies,
      weighted by their numbers of examples of each class. That code also has a second term that pulls outputs toward
      the outputs for generated features, weights of 10 that decay, uniform noise, weight decay of the generator, and
      running statistics of its normalization. PFLlib (github.com/TsingZ0/PFLlib, commit d832e76) and HtFLlib
      (github.com/TsingZ0/HtFLlib, commit e959261), which shares the head, train on generated features from the first
      round, draw labels by the examples of all clients, draw uniform noise, and have no diversity term; HtFLlib
      initializes Adam again in every round. With these choices and the same draws, three full-batch rounds of three
      clients agree with PFLlib's code, for the whole model and for heads alone, to 1e-5 of the update.
    """
    needs_classes(model, "fedgen", "its generator makes features of classes")
    network = Generator(model.num_classes, hidden_size, model.num_features)
    supervised, optimizer = supervised_loss(model), optax.adam(server_lr)

    def draw(key: PRNGKey, generator: PyTree, shares: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        """Labels [B], noise [B, e] and features [B, d]."""
        label_key, noise_key = jax.random.split(key)
        labels = jax.random.categorical(label_key, jnp.log(shares), shape=(training.batch_size,))
        noise = jax.random.normal(noise_key, (training.batch_size, noise_size))
        return labels, noise, network.apply({"params": generator}, noise, labels)

    def risk(head: Head, features: jax.Array, labels: jax.Array) -> jax.Array:
        return model.task.loss(model.classify(head, features), labels, jnp.ones(labels.shape, bool))

    def received(server: FedGenServer, client: PyTree) -> Params:
        return server.params if shared == "model" else merge(client, server.params["head"])

    def sent(params: Params) -> PyTree:
        return params if shared == "model" else params["head"]

    def kept(params: Params) -> PyTree:
        return () if shared == "model" else params["backbone"]

    def train(key, server, client, data):
        weight = jnp.where(jnp.any(server.shares > 0), alpha, 0.0)
        # By the data, so that draws do not depend on how clients are numbered.
        own_key = fingerprint_key(jax.random.key(server.seed), fingerprint(data))

        def loss(counted, batch, key):
            params, steps = counted
            value, statistics = supervised(params, batch, key)
            step_key = jax.random.fold_in(own_key, steps.astype(jnp.int32))
            labels, _, features = draw(step_key, server.generator, server.shares)
            return value + weight * risk(params["head"], features, labels), statistics

        start, steps = (received(server, client), jnp.zeros(())), counting(training.transformation())
        params, _ = training.fit(key, start, data, loss, transformation=steps)
        counts = class_counts(data.y, data.mask, model.num_classes)
        shares = Exact(*mean_by_size(counts / jnp.maximum(jnp.sum(counts), 1), data))
        return LocalResult(kept(params), FedGenMessage(mean_by_size(sent(params), data), shares), params)

    def aggregate(key, server, clients, messages, cohort):
        mean, shares = messages.params.value, messages.shares.value
        params = mean if shared == "model" else merge(server.params["backbone"], mean)

        def loss(generator, key):
            labels, noise, features = draw(key, generator, shares)
            return risk(params["head"], features, labels) + diversity * likeness(noise, features)

        def step(carry, key):
            generator, moments = carry
            updates, moments = optimizer.update(jax.grad(loss)(generator, key), moments)
            return (optax.apply_updates(generator, updates), moments), ()

        start = server.generator, server.moments
        step_key, seed_key = jax.random.split(key)
        (generator, moments), _ = jax.lax.scan(step, start, jax.random.split(step_key, server_steps))
        seed = jax.random.bits(seed_key, (), jnp.uint32)
        return FedGenServer(params, generator, moments, shares, seed), clients, {"shares": shares}

    def init_server(key):
        example = jnp.zeros((1, noise_size)), jnp.zeros(1, jnp.int32)
        generator = network.init(jax.random.fold_in(key, GENERATOR), *example)["params"]
        no_draws = jnp.zeros(model.num_classes), jnp.zeros((), jnp.uint32)
        return FedGenServer(model.init(key), generator, optimizer.init(generator), *no_draws)

    return Method(
        init_server=init_server,
        init_client=lambda key, server, data: kept(server.params),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: received(server, client),
        predict=model.apply,
        download=lambda server, client: (sent(server.params), server.generator, server.shares, server.seed),
        trained_from=lambda server, client: FedGenMessage(sent(server.params), NOT_RECEIVED),
        privacy=Privacy(
            training.most_passes,
            (SIZE, CLASS_SIZES, "fingerprint of the examples: the draws of generated features in the loss"),
        ),
    )
