"""Personal models that are aligned to class prototypes which the server trains to be far apart (Zhang et al. 2024)."""

from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, LocalResult, Method, Model, Params, Privacy, PRNGKey
from pfl_jax.methods.factories import CLASS_MEANS, CLASS_SIZES, IDENTITY, method_factory, needs_classes
from pfl_jax.methods.fedproto import Prototypes, local_step
from pfl_jax.networks.layers import Dense
from pfl_jax.primitives.fingerprints import fingerprint, order_by_fingerprint
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import cross_entropy
from pfl_jax.primitives.tree import gather
from pfl_jax.streams import PROTOTYPE_GENERATOR
from pfl_jax.validation import Count, Epochs, NotNegative, Positive, ReadWith


class Generator(NamedTuple):
    """Parameters from which the server computes the global prototypes, see `generate`.

    Attributes:
      embeddings: e [K, d], a trained vector for each class.
      hidden: first layer, {"kernel": [d, d], "bias": [d]}.
      output: second layer, of the same shapes.
    """

    embeddings: jax.Array
    hidden: Params
    output: Params


class FedTGPServer(NamedTuple):
    """State of the server.

    Attributes:
      initial: initial model of all clients.
      generator: parameters of the global prototypes.
      prototypes: global prototypes [K, d].
      ready: bool scalar; False until the server has trained the generator on clients' prototypes.
    """

    initial: Params
    generator: Generator
    prototypes: jax.Array
    ready: jax.Array


class FedTGPMessage(NamedTuple):
    """Message of a client: its prototypes, and the fingerprint of its data, by which the server sorts the cohort."""

    prototypes: Prototypes
    identity: jax.Array


class FedTGPModel(NamedTuple):
    """Model that a client deploys: its own, with the global prototypes [K, d] and whether they are ready."""

    params: Params
    prototypes: jax.Array
    ready: jax.Array


def init_generator(key: PRNGKey, num_classes: int, size: int) -> Generator:
    """Random generator with PyTorch's initialization: standard normal embeddings, uniform layers.

    Args:
      key: key of the random numbers.
      num_classes: K.
      size: d, of embeddings, hidden layer and prototypes.
    """
    keys, example = jax.random.split(key, 3), jnp.zeros((1, size))
    hidden, output = (dict(Dense(size).init(layer_key, example)["params"]) for layer_key in keys[1:])
    return Generator(jax.random.normal(keys[0], (num_classes, size)), hidden, output)


def generate(generator: Generator) -> jax.Array:
    """Global prototypes P [K, d]: embeddings through a layer with ReLU and a linear one."""
    hidden = jax.nn.relu(generator.embeddings @ generator.hidden["kernel"] + generator.hidden["bias"])
    return hidden @ generator.output["kernel"] + generator.output["bias"]


def distances(points: jax.Array, prototypes: jax.Array) -> jax.Array:
    """Euclidean distances [B, K] between points [B, d] and prototypes [K, d]; the gradient at distance 0 is 0."""
    squares = jnp.sum(jnp.square(points[:, None] - prototypes), axis=-1)
    positive = squares > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1.0)), 0.0)


def adaptive_margin(prototypes: Prototypes, threshold: float | jax.Array) -> jax.Array:
    r"""Margin delta = min(max_k min_{k' != k} ||Q_k - Q_k'||, threshold), for the clients' mean prototypes Q.

    Args:
      prototypes: each client's centroids [M, K, d] and counts [M, K].
      threshold: largest margin; it is also the margin if fewer than two classes have prototypes.

    Returns:
      A scalar; 0 without prototypes.
    """
    held = (prototypes.counts > 0).astype(jnp.float32)
    sums = jnp.einsum("mk,mkd->kd", held, prototypes.centroids, precision="highest")
    means, present = sums / jnp.maximum(jnp.sum(held, axis=0), 1)[:, None], jnp.any(held > 0, axis=0)
    pairs = present[:, None] & present & ~jnp.eye(present.shape[0], dtype=bool)
    nearest = jnp.min(jnp.where(pairs, distances(means, means), jnp.inf), axis=1)
    return jnp.minimum(jnp.max(jnp.where(present, nearest, 0.0)), threshold)


@method_factory(version=2)
def fedtgp(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    lam: NotNegative = 10.0,
    margin: Positive = 100.0,
    server_lr: Annotated[NotNegative, ReadWith("server_epochs")] = 0.01,
    server_batch_size: Annotated[Count, ReadWith("server_epochs")] = 10,
    server_epochs: Epochs = 100,
    inference: Literal["prototype", "head"] = "prototype",
) -> Method:
    r"""FedTGP: clients align features to class prototypes that the server trains contrastively, with a margin.

        w_i = E epochs of SGD from the client's previous w_i on  CE + lambda mean_l (1/d) ||f(x_l) - P_{y_l}||^2
        c_ik = mean feature of class k on client i under the trained w_i
        server:  P_k = g(e_k), a two-layer network g of trained embeddings e_k; server_epochs of SGD on the mean of
                 -log( exp(-d_ikk - delta) / (exp(-d_ikk - delta) + sum_{k' != k} exp(-d_ikk')) )  over all c_ik,
                 d_ikk' = ||c_ik - P_k'||;  delta = min(max_k min_{k' != k} ||Q_k - Q_k'||, margin),  Q_k = mean_i c_ik

    In the first round there are no prototypes and no alignment. With lambda = 0 and inference by the head this is
    `local`.

    Args:
      training: recipe of local training.
      lam: strength lambda of the alignment with the prototypes; 10 is for ten classes. With many classes and few of
        them at each client it can keep the accuracy at chance, where 1 trains: tune it.
      margin: largest margin tau between classes in the server's training.
      server_lr: learning rate of the server's training, plain SGD.
      server_batch_size: clients' prototypes in a mini-batch of the server's training.
      server_epochs: epochs of the server's training in a round.
      inference: prototype predicts the class of the nearest global prototype, with -||f(x) - P_k|| as logits (before
        there are any, the head predicts); head always predicts with the client's classifier, as `fedproto_g` does.

    Returns:
      A `Method` with a `FedTGPServer` as server state; a client keeps its model.
      Trees: server FedTGPServer(initial: model, generator: Generator(embeddings: numbers [K, d], hidden: {bias: numbers
      [d], kernel: numbers [d, d]}, output: {bias: numbers [d], kernel: numbers [d, d]}), prototypes: numbers [K, d],
      ready: flag); client model.

    Info:
      margin: [], the margin delta.
      server_loss: [], the server's mean loss on the cohort's prototypes after its training.

    Reference:
      Zhang, Liu, Hua, Cao. FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for
      Data and Model Heterogeneity in Federated Learning. AAAI 2024. The equations follow the authors' slides and their
      released code; lambda = 10, tau = 100 and 100 server epochs are its command for CIFAR-10 (20 clients, batches of
      10, learning rate 0.01 on clients and server).

    Deviations:
      The margin of a class is its distance to the nearest other class, as in the slides and in the released code; the
      maximum over all pairs of classes would be larger. The released client computes its prototypes before it saves its
      trained model, so they belong to the model before the round's training; here they belong to the trained model. All
      clients have the same architecture and start from the same model. The alignment compares each example with its
      prototype, as the released code does. With the order of saving corrected, two rounds of full batches of that code
      (commit c77cbbb) give the same models and prototypes to 1e-5.
    """
    needs_classes(model, "fedtgp", "its prototypes are mean features of classes")
    step, num_classes = local_step(model, training, lam), model.num_classes
    # The server has its own recipe: options of the clients' optimizer and of augmentation do not apply.
    server_training = LocalTraining(server_lr, 0.0, 0.0, server_batch_size, server_epochs)

    def train(key, server, client, data):
        known = Prototypes(server.prototypes, jnp.broadcast_to(server.ready, (num_classes,)))
        params, own = step(key, client, known, data)
        personal = FedTGPModel(params, server.prototypes, server.ready)
        return LocalResult(client=params, message=FedTGPMessage(own, fingerprint(data)), personal=personal)

    def aggregate(key, server, clients, messages, cohort):
        own = gather(messages.prototypes, order_by_fingerprint(messages.identity, cohort.present))
        delta = adaptive_margin(own, margin)
        examples = ClientData(
            x=own.centroids.reshape(-1, model.num_features),
            y=jnp.broadcast_to(jnp.arange(num_classes), own.counts.shape).reshape(-1),
            mask=own.counts.reshape(-1) > 0,
        )

        def loss(generator, batch, key):
            scores = distances(batch.x, generate(generator)) + delta * jax.nn.one_hot(batch.y, num_classes)
            return cross_entropy(-scores, batch.y, batch.mask)

        generator = server_training.fit(key, server.generator, examples, loss)
        ready = server.ready | jnp.any(examples.mask)
        info = {"margin": delta, "server_loss": loss(generator, examples, key)}
        return FedTGPServer(server.initial, generator, generate(generator), ready), clients, info

    def init_server(key):
        # The model has the run's key, so that all methods start from the same model.
        generator = init_generator(jax.random.fold_in(key, PROTOTYPE_GENERATOR), num_classes, model.num_features)
        return FedTGPServer(model.init(key), generator, generate(generator), jnp.zeros((), bool))

    def predict(personal, inputs):
        features = model.features(personal.params["backbone"], inputs)
        scores = model.classify(personal.params["head"], features)
        if inference == "head":
            return scores
        return jnp.where(personal.ready, -distances(features, personal.prototypes), scores)

    return Method(
        init_server=init_server,
        init_client=lambda key, server, data: server.initial,
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: FedTGPModel(client, server.prototypes, server.ready),
        predict=predict,
        download=lambda server, client: server.prototypes,
        privacy=Privacy(training.most_passes, (IDENTITY, CLASS_SIZES, CLASS_MEANS)),
    )
