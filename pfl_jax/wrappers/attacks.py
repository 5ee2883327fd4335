"""Attacks of a client: flipped labels in its training data, or an update that is flipped or replaced by noise.

An attacker trains and is scored like all other clients, and knows nothing of them. `pfl_jax.Settings` determines which
clients attack: this is a property of the federation, so that every method is attacked by the same clients.
"""

import itertools
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.random import fold_in

from pfl_jax.base import Client, Message, Method, PRNGKey, Server
from pfl_jax.errors import InvalidInput
from pfl_jax.messages import map_means, needs_changeable, trained_from
from pfl_jax.streams import ATTACK

Attack: TypeAlias = Literal["labels", "signs", "noise"]
"""Names of the attacks, see `attacked`."""


def attacked(
    method: Method, attack: Attack, attacks: jax.Array, *, scale: float | jax.Array, num_classes: int | jax.Array
) -> Method:
    """Method of one client, which attacks if `attacks` says so.

    With "labels", the client trains on label K - 1 - y in place of y. With the other attacks it sends, in place of the
    value v of each `Mean`,

        signs: r - scale (v - r);   noise: r + scale rms(v - r) z with standard normal z

    where r are the received parameters from which it trained v, zero for values without, such as class means; see
    `trained_from` of `pfl_jax.base.Method`. rms is the root mean square over an array, so that noise with scale 1 is as
    long as the update that it replaces. Weights, exact means (`pfl_jax.base.Exact`) and other parts of its messages do
    not change.

    Args:
      method: the method to derive from.
      attack: name of the attack.
      attacks: bool scalar; False for an honest client.
      scale: factor of the update or noise.
      num_classes: K, for "labels".

    Returns:
      A `Method` with the states of `method`; its `local` raises InvalidInput if the messages have no `Mean`, or only
      exact ones, unless the attack is "labels".

    Raises:
      InvalidInput: "labels" for a task other than classification.
    """
    if attack == "labels":
        if method.task.kind != "classes":
            raise InvalidInput(f"attack labels is for classification, and the model's task is {method.task.name}")

        def flipped(data):
            return data._replace(y=jnp.where(attacks, num_classes - 1 - data.y, data.y))

        def misled(pass_on):
            return lambda key, server, client, data: pass_on(key, server, client, flipped(data))

        survey = method.survey
        if survey is not None:
            ask = survey.local
            survey = survey._replace(local=lambda key, server, data: ask(key, server, flipped(data)))
        return method._replace(
            init_client=lambda key, server, data: method.init_client(key, server, flipped(data)),
            local=lambda key, server, client, data: method.local(key, server, client, flipped(data)),
            personalize=lambda key, server, client, data: method.personalize(key, server, client, flipped(data)),
            survey=survey,
            hand_over=None if method.hand_over is None else method.hand_over.changed(misled),
        )

    def local(key, server, client, data):
        result = method.local(key, server, client, data)
        return result._replace(message=_perturbed(key, attack, scale, result.message, attacks, method, server, client))

    return method._replace(local=local)


def _perturbed(
    key: PRNGKey,
    attack: Attack,
    scale: float | jax.Array,
    message: Message,
    attacks: jax.Array,
    method: Method,
    server: Server,
    client: Client,
) -> Message:
    """Message of a client that flips signs or sends noise, see `attacked`."""
    needs_changeable(message, f"attack {attack}", ": attack labels is for all methods")
    (known, _), counter = trained_from(method, server, client, message), itertools.count()

    def of_array(value, base):
        change = value - base
        if attack == "signs":
            return base - scale * change
        length = jnp.sqrt(jnp.sum(jnp.square(change)) / max(1, change.size))
        noise = jax.random.normal(fold_in(fold_in(key, ATTACK), next(counter)), change.shape, change.dtype)
        return base + scale * length * noise

    def of_mean(part, base):
        wrong = jax.tree.map(of_array, part.value, base)
        return part._replace(value=jax.tree.map(lambda a, b: jnp.where(attacks, a, b), wrong, part.value))

    return map_means(of_mean, message, known, rest=lambda leaf, _: leaf)
