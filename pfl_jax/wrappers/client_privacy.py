"""Differential privacy for whole clients: clipped updates, and noise that the server adds to their sum."""

from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pfl_jax.base import Mean, Message, Method, PyTree, Server
from pfl_jax.errors import InvalidInput
from pfl_jax.messages import MEAN_OF_UPDATES, Update, bases, trained_from
from pfl_jax.streams import CLIENT_NOISE
from pfl_jax.validation import NotNegative, Positive, ReadWith


@dataclass(frozen=True)
class ClientPrivacy:
    """Recipe of differential privacy for whole clients, for methods whose server takes a mean of parameters.

    Attributes:
      client_clip: largest norm of a client's update, the difference between the parameters that it sends and those that
        it received; larger updates are scaled down to it. All clients have equal weights. None for no privacy.
      client_noise: standard deviation of the noise that the server adds to the sum of the updates, in units of
        client_clip. The sum is divided by the size of the cohort, whoever drops out.
    """

    client_clip: Positive | None = None
    client_noise: Annotated[NotNegative, ReadWith("client_clip")] = 0.0


def private_clients(method: Method, recipe: ClientPrivacy) -> Method:
    r"""Method whose server learns the sum of its clients' clipped updates, with noise.

        u_i = w_i - w;   w' = w + ( sum_i u_i min(1, C / ||u_i||) + C noise N(0, I) ) / M

    where w are the parameters that a client received, w_i those that it sends, and M is the size of the drawn cohort.
    The server of `method` gets w' in the place of the weighted mean of the w_i. The clients' states and the models that
    they deploy are neither clipped nor noised.

    Args:
      method: the method to derive from. Its message is one `Mean`, or has a field `backbone` that is one; other fields
        are sent unchanged. According to `Method.trained_from`, every client received the whole value of this `Mean`,
        the same for all.
      recipe: clipping and noise; without clipping the method is returned unchanged.

    Raises:
      InvalidInput: noise without clipping, or a `Method.hand_over`, which nothing clips; a message without such a
      `Mean` is detected when the method runs.

    Reference:
      McMahan, Ramage, Talwar, Zhang. Learning Differentially Private Recurrent Language Models. ICLR 2018. Algorithm 1
      with flat clipping, equal weights and a fixed divisor.

    Deviations:
      Cohorts have a fixed size, where the paper draws each client independently.
    """
    clip, noise = recipe.client_clip, recipe.client_noise
    if clip is None:
        if isinstance(noise, int | float) and noise > 0:
            raise InvalidInput("client_noise needs a client_clip: noise alone does not make an update private")
        return method
    if method.hand_over is not None:
        raise InvalidInput("client_clip is for methods whose clients hand nothing over to each other")
    if method.encoded is not None:
        raise InvalidInput(f"client_clip cannot be given with compress: {MEAN_OF_UPDATES}")

    def local(key, server, client, data):
        result = method.local(key, server, client, data)
        mean, known = _mean_of(result.message), _received(method, result.message, server)
        update = jax.tree.map(jnp.subtract, mean.value, known)
        factor = clip / jnp.maximum(optax.tree.norm(update), clip)
        clipped = Update(jax.tree.map(lambda leaf: factor * leaf, update), np.float32(1))
        return result._replace(message=_with_mean(result.message, clipped))

    def aggregate(key, server, clients, messages, cohort):
        mean, known = _mean_of(messages), _received(method, messages, server)
        leaves, structure = jax.tree.flatten(mean.value)
        keys = jax.random.split(jax.random.fold_in(key, CLIENT_NOISE), len(leaves))
        size = cohort.clients.shape[0]
        moved = [
            old + (mean.weight * leaf + noise * clip * jax.random.normal(one, leaf.shape, leaf.dtype)) / size
            for one, leaf, old in zip(keys, leaves, jax.tree.leaves(known), strict=True)
        ]
        private = Mean(jax.tree.unflatten(structure, moved), mean.weight)
        return method.aggregate(key, server, clients, _with_mean(messages, private), cohort)

    return method._replace(
        local=local,
        aggregate=aggregate,
        # A clipped update is a change already.
        trained_from=lambda server, client: jax.tree.map(jnp.zeros_like, bases(method, server, client)),
    )


def _mean_of(message: Message) -> Mean:
    """The `Mean` of parameters in a message."""
    part = message if isinstance(message, Mean) else getattr(message, "backbone", None)
    # Neither a clipped update nor a value for another statistic.
    if type(part) is not Mean:
        raise InvalidInput("client_clip is for methods whose server takes a mean of parameters")
    return part


def _with_mean(message: Message, mean: Mean) -> Message:
    """The message with another `Mean` of parameters."""
    return mean if isinstance(message, Mean) else message._replace(backbone=mean)


def _received(method: Method, message: Message, server: Server) -> PyTree:
    """Parameters that a client received, as a tree like the parameters that it sends."""
    # These methods send the same parameters to every client.
    known, found = trained_from(method, server, (), message)
    if isinstance(message, Mean):
        others = False
    else:
        others = any(jax.tree.leaves(found._replace(backbone=())))
        known, found = known.backbone, found.backbone
    if others or not all(jax.tree.leaves(found)):
        raise InvalidInput("client_clip is for methods whose clients send the parameters that they received")
    return known
