"""FedAS that reports a client's trace by each definition; which one weighs the client is an option.

A run's own code (`--method FILE.py:NAME`): the runs of `premise` hold only as long as this text stays as it is.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from pfl_jax.base import Mean, Method, Model
from pfl_jax.methods.fedas import FEDAS_TRAINING, MIN_TRACE, fedas
from pfl_jax.primitives import losses
from pfl_jax.primitives.fisher import batch_fisher_trace, fisher_trace
from pfl_jax.primitives.local_training import LocalTraining

LABELS = 20_001
"""Number that makes a client's key that of the labels drawn."""


def fedas_measured(
    model: Model,
    training: LocalTraining = FEDAS_TRAINING,
    *,
    weighed_by: Literal["example", "batch_means", "model", "size"] = "example",
) -> Method:
    """FedAS as printed, with the traces of three definitions of the Fisher information.

    Args:
      training: recipe of local training.
      weighed_by: what a client's backbone is weighed by: the mean of the squared norms of its examples' gradients
        (example), the released code's sum over batches (batch_means), the first with labels drawn from the model
        (model), which is the Fisher information itself, or the number of examples (size).

    Info:
      weights: [M], weight of each client's backbone.
      example: [M], trace of each client by its examples.
      batch_means: [M], trace of each client by batches.
      model: [M], trace of each client with labels drawn from the model.
    """
    base, likelihood = fedas(model, training), losses.negative_log_likelihood(model)

    def local(key, server, client, data):
        result = base.local(key, server, client, data)
        params = result.personal
        drawn = jax.random.categorical(jax.random.fold_in(key, LABELS), model.apply(params, data.x))
        measured = {
            "example": result.message.trace,
            "batch_means": batch_fisher_trace(key, likelihood, params, data, training),
            "model": fisher_trace(likelihood, params, data._replace(y=drawn)),
        }
        weight = jnp.sum(data.mask, dtype=jnp.float32) if weighed_by == "size" else measured[weighed_by]
        weight = jnp.maximum(weight, MIN_TRACE)
        message = result.message._replace(backbone=Mean(params["backbone"], weight), trace=weight)
        return result._replace(message=(message, measured))

    def aggregate(key, server, clients, messages, cohort):
        message, measured = messages
        server, clients, info = base.aggregate(key, server, clients, message, cohort)
        return server, clients, {"weights": info["weights"], **measured}

    return base._replace(local=local, aggregate=aggregate)
