"""Stand-ins for several methods: a function of the round, or a method for clients with several networks."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.base import Method


class Mixed(NamedTuple):
    """Method for clients that have different networks, see `pfl_jax.mixed`.

    All clients send messages of equal shapes. The states of server and clients are tuples with an entry for each
    network g: the state of its method, with leaves [N_g, ...] for its N_g clients. Each network's `Method.aggregate`
    gets the messages of the whole cohort and the states of the network's clients.

    Attributes:
      methods: one method per network.
      network: position in `methods` of each client's network, [N]; None: client i has network i mod len(methods).
    """

    methods: tuple[Method, ...]
    network: tuple[int, ...] | None = None

    def networks(self, num_clients: int) -> np.ndarray:
        """Position in `methods` of the network of each of `num_clients` clients, [N]."""
        return np.arange(num_clients) % len(self.methods) if self.network is None else np.asarray(self.network)

    def members(self, index: int, num_clients: int) -> np.ndarray:
        """Clients, among 0 to `num_clients` - 1, that have the network `index`, ascending."""
        return np.flatnonzero(self.networks(num_clients) == index).astype(np.int32)


MethodSchedule: TypeAlias = Callable[[jax.Array], Method | Mixed] | Mixed
"""Stand-in for several methods: a function round -> method with the real-valued hyper-parameters of that round
(rounds are int32, counted from 0), or the method of several networks."""


def at_round(method: Method | MethodSchedule, index: int | jax.Array, network: int = 0) -> Method:
    """Method of a round.

    Args:
      method: one method for all rounds, or a schedule.
      index: number of the round, from 0; may be traced.
      network: for a `Mixed` method, the position of the network.
    """
    found = method if isinstance(method, Method | Mixed) else method(jnp.asarray(index, jnp.int32))
    return found.methods[network] if isinstance(found, Mixed) else found


def mixture(method: Method | MethodSchedule) -> Mixed | None:
    """The `Mixed` method: the argument itself, or a schedule's method of the first round; None for one network."""
    found = method if isinstance(method, Method | Mixed) else method(jnp.zeros((), jnp.int32))
    return found if isinstance(found, Mixed) else None
