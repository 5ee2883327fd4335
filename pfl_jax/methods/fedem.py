"""Mixtures of a few shared models, with weights of each client, by expectation maximization (Marfoq et al. 2021)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import LocalResult, Method, Model, Params, Privacy
from pfl_jax.methods.factories import SIZE, method_factory, needs_classes
from pfl_jax.primitives.aggregation import mean_by_size
from pfl_jax.primitives.ensembles import example_losses, init_models
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.losses import masked_mean
from pfl_jax.validation import Count


class Mixture(NamedTuple):
    """Model that a FedEM client deploys: the shared models, leaves [L, ...], and the logs of their weights [L]."""

    models: Params
    log_weights: jax.Array


@method_factory
def fedem(
    model: Model,
    training: LocalTraining = LocalTraining(),
    *,
    learners: Count = 3,
) -> Method:
    r"""FedEM: L models that all clients share, and mixture weights pi_i of each client.

        E-step:  q_l(m) proportional to pi_im exp(-CE(w_m; x_l, y_l)),  for every example l
        M-step:  pi_im = mean_l q_l(m);   w_im = E epochs of SGD from w_m on  mean_l q_l(m) CE(w_im; x_l, y_l)
        server:  w_m = sum_i beta_i w_im,  beta_i = n_i / sum_j n_j

    A client predicts sum_m pi_im softmax(w_m(x)), a mixture of probabilities, not of logits. With one learner this is
    FedAvg.

    Args:
      training: recipe of local training; each model has its own optimizer, and clip_norm limits the norm of each
        model's gradient.
      learners: number L of shared models.

    Returns:
      A `Method` with the models, leaves [L, ...], as server state; a client keeps the logarithms of pi_i [L], which are
      equal at the start.
      Trees: server 3 x model; client numbers [3].

    Info:
      mixture: [M, L], pi: row i has the weights of the models for client i after the round.

    Reference:
      Marfoq, Neglia, Bellet, Kameni, Vidal. Federated Multi-Task Learning under a Mixture of Distributions. NeurIPS
      2021. The algorithm FedEM; L = 3 and 5 are FedPAC's (Table 4).

    Deviations:
      There is one E-step per round, before training and with the received models, as in the released code. All models
      of a client are trained on its examples in the same order. With partial participation the released code adds
      sum_i (n_i / n) (w_im - w_m) over the cohort to w_m, where n counts the examples of all clients; here the weights
      of a cohort sum to 1.
    """
    needs_classes(model, "fedem", "its prediction mixes probabilities of classes")
    # Separate optimizers: each model's gradient is clipped by its own norm.
    one_model = training.transformation()
    steps = optax.GradientTransformation(jax.vmap(one_model.init), jax.vmap(one_model.update))

    def loss(models, batch, key):
        labels, responsibilities = batch.y

        def one(params, responsibility, key):
            features, statistics = model.training_features(params["backbone"], batch, key)
            logits = model.classify(params["head"], features)
            losses = model.task.example_losses(logits, labels)
            return masked_mean(responsibility * losses, batch.mask), statistics

        keys = jax.random.split(key, responsibilities.shape[1])
        losses, statistics = jax.vmap(one, in_axes=(0, 1, 0))(models, responsibilities, keys)
        # A sum, so that the gradient of each model is independent of the others.
        return jnp.sum(losses), statistics

    def train(key, server, client, data):
        responsibilities = jax.nn.softmax(client - example_losses(model, server, data), axis=-1)
        mixture = jax.vmap(masked_mean, in_axes=(1, None))(responsibilities, data.mask)
        # A weight never becomes zero, so that a later E-step can raise it again.
        log_mixture = jnp.log(jnp.maximum(mixture, jnp.finfo(jnp.float32).tiny))
        weighted = data._replace(y=(data.y, responsibilities))
        models = training.fit(key, server, weighted, loss, transformation=steps)
        return LocalResult(
            client=log_mixture, message=mean_by_size(models, data), personal=Mixture(models, log_mixture)
        )

    def aggregate(key, server, clients, messages, cohort):
        return messages.value, clients, {"mixture": jnp.exp(clients)}

    def predict(personal, inputs):
        models, log_mixture = personal
        log_probabilities = jax.nn.log_softmax(jax.vmap(model.apply, in_axes=(0, None))(models, inputs))
        return jax.nn.logsumexp(log_mixture[:, None, None] + log_probabilities, axis=0)

    return Method(
        init_server=lambda key: init_models(model, key, learners),
        init_client=lambda key, server, data: jnp.zeros(learners) - jnp.log(learners),
        local=train,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: Mixture(server, client),
        predict=predict,
        server_is_mean=True,
        privacy=Privacy(
            training.most_passes,
            (SIZE, "losses on the examples: the mixture's weights and those of the examples in the loss"),
            clients=(),
        ),
    )
