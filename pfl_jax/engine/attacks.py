"""Clients that attack: labels flipped in their training data, or their updates flipped or replaced by noise.

Which clients attack is a property of the federation, as which of them are stragglers: a fixed draw of the run's key. So
every method, state and placement is the same with attackers and without. An attacker trains as all others do and scores
as all others do; it knows nothing of them.
"""

import itertools
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.random import fold_in

from pfl_jax.base import Client, ClientData, Mean, Message, Method, PRNGKey, Server
from pfl_jax.data.federated import FederatedData, client_data
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.updates import has_means, map_means, received, reference
from pfl_jax.streams import ATTACK, ATTACKERS

Attack: TypeAlias = Literal["labels", "signs", "noise"]
"""Names of the attacks, see `flip_labels` and `perturb`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Attackers:
    """Clients of a run that attack, and how.

    Attributes:
      clients: bool [N].
      attack: what they do.
      scale: factor of the update or noise that they send.
    """

    clients: jax.Array
    attack: Attack = field(metadata={"static": True})
    scale: float = field(metadata={"static": True})


def draw(key: PRNGKey, num_clients: int, attack: Attack | None, share: float, scale: float) -> Attackers | None:
    """Attackers of a run; None if nobody attacks.

    Args:
      key: the run's key.
      num_clients: N.
      attack, scale: see `Attackers`; None for no attack.
      share: share of the clients that attack.
    """
    if attack is None or not round(share * num_clients):
        return None
    return Attackers(attackers(key, num_clients, share), attack, scale)


def training_data(data: FederatedData, client: int | jax.Array, attackers: Attackers | None) -> ClientData:
    """Training examples of a client, with flipped labels if it attacks so.

    Args:
      data: the federation's data, or a device's part of it.
      client: number of the client.
      attackers: of the run.
    """
    train = client_data(data, client, "train")
    if attackers is None or attackers.attack != "labels":
        return train
    return flip_labels(train, attackers.clients[client], data.num_classes)


def sent(
    key: PRNGKey,
    message: Message,
    attackers: Attackers | None,
    index: jax.Array,
    method: Method,
    server: Server,
    client: Client,
) -> Message:
    """Message that leaves a client, which is another one than its method's if it attacks so.

    Args:
      key, message, method, server, client: see `perturb`.
      attackers: of the run.
      index: number of the client.
    """
    if attackers is None or attackers.attack == "labels":
        return message
    attacks = attackers.clients[index]
    return perturb(key, attackers.attack, attackers.scale, message, attacks, method, server, client)


def attackers(key: PRNGKey, num_clients: int, share: float) -> jax.Array:
    """Fixed attackers of a run: bool [N], round(share * N) of them.

    Args:
      key: the run's key.
      num_clients: N.
      share: share of the clients that attack.
    """
    return fixed_share(key, ATTACKERS, num_clients, share)


def fixed_share(key: PRNGKey, stream: int, num_clients: int, share: float) -> jax.Array:
    """Clients of one kind, the same ones in all rounds of a run: bool [N], round(share * N) of them.

    Args:
      key: the run's key.
      stream: of the kind, see `pfl_jax.streams`.
      num_clients: N.
      share: share of the clients that are of this kind.
    """
    ranks = jax.random.permutation(fold_in(key, stream), num_clients)
    return ranks < round(share * num_clients)


def flip_labels(data: ClientData, attacks: jax.Array, num_classes: int | jax.Array) -> ClientData:
    """A client's training data with label K - 1 - y in place of y where it attacks.

    Args:
      data: the client's training examples.
      attacks: bool scalar.
      num_classes: K.
    """
    return data._replace(y=jnp.where(attacks, num_classes - 1 - data.y, data.y))


def perturb(
    key: PRNGKey,
    attack: Attack,
    scale: float | jax.Array,
    message: Message,
    attacks: jax.Array,
    method: Method,
    server: Server,
    client: Client,
) -> Message:
    """Message with an attack on the value of each `Mean`; weights and other parts stay.

        signs: r - scale (v - r);   noise: r + scale rms(v - r) z with standard normal z

    v is the honest value and r the received parameters that the client trained to it, zero for values that have none,
    such as class means; see `pfl_jax.primitives.updates.reference`. rms is the root mean square over an array, so that
    noise with scale 1 is as long as the update that it replaces.

    Args:
      key: key of the client's local training.
      attack: "signs" or "noise".
      scale: factor of the attack.
      message: the honest message.
      attacks: bool scalar; False leaves the message as it is.
      method: the method.
      server: the server's state in this round.
      client: the client's state before its training.

    Raises:
      InvalidInput: the message has no `Mean`.
    """
    if not has_means(message):
        raise InvalidInput(
            f"attack {attack} is for methods that send a Mean, and the messages of this one have none: attack labels "
            "is for all methods"
        )
    known, counter = received(method, server, client), itertools.count()

    def of_array(value, base):
        change = value - base
        if attack == "signs":
            return base - scale * change
        length = jnp.sqrt(jnp.sum(jnp.square(change)) / max(1, change.size))
        noise = jax.random.normal(fold_in(fold_in(key, ATTACK), next(counter)), change.shape, change.dtype)
        return base + scale * length * noise

    def of_mean(part):
        base, _ = reference(part.value, known)
        wrong = jax.tree.map(of_array, part.value, base)
        return Mean(jax.tree.map(lambda a, b: jnp.where(attacks, a, b), wrong, part.value), part.weight)

    return map_means(of_mean, message, rest=lambda leaf: leaf)
