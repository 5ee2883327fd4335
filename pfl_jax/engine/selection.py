"""Choice of the clients of a round: the weights of their draw, and its effect on the server's means."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp

from pfl_jax.base import Cohort, Exact, Mean, Message, Method, PRNGKey
from pfl_jax.data.federated import FederatedData
from pfl_jax.errors import InvalidInput
from pfl_jax.messages import is_mean
from pfl_jax.primitives.tree import choose
from pfl_jax.validation import Count, Words, check_arguments

Weights: TypeAlias = Callable[[PRNGKey, jax.Array, jax.Array, jax.Array, int], jax.Array]
"""(key of the round, round from 0, counts [N], losses [N], size M) -> nonnegative weights [N] of the draw.

counts are training examples. losses are the task's loss of each client's model right after its last local training, on
its training examples; infinity for clients that were never trained, and for all if the `Selection` reads no losses. M
clients are drawn without replacement, in proportion to their weights among the remaining ones. Clients of weight zero
or NaN are drawn only if others do not suffice: nonzero weights of exactly M clients choose them.
"""

FIRST = 1e30
"""Weight of clients that are drawn before all others with usual weights, in random order."""


@dataclass(frozen=True)
class Selection:
    """Choice of a round's clients, for `Settings.select`.

    Attributes:
      weights: see `Weights`.
      losses: whether `weights` reads losses, which are then measured for every client that trains.
      equal: whether a client's weight in the server's means is divided by its number of examples, because the client is
        drawn in proportion to that number: the expectation is then the mean over all clients with the method's weights.
        Servers that weigh parts that are not a `Mean` get `Cohort.weights`. Unchanged are constant weights of NumPy,
        such as np.float32(1), in means that count all clients of a cohort equally; rounds in which all active clients
        take part; and exact means (`pfl_jax.base.Exact`) with a weight for each class.
    """

    weights: Weights
    losses: bool = True
    equal: bool = False


def _uniform(key, round_index, counts, losses, size):
    return jnp.ones(counts.shape, jnp.float32)


def _by_size(key, round_index, counts, losses, size):
    return counts.astype(jnp.float32)


def _by_loss(key, round_index, counts, losses, size):
    return jnp.where(jnp.isfinite(losses), losses, FIRST)


def _round_robin(key, round_index, counts, losses, size):
    (clients,) = counts.shape
    return jnp.float32((jnp.arange(clients) - round_index * size) % clients < size)


uniform = Selection(_uniform, losses=False)
"""All clients alike, as without a selection."""

by_size = Selection(_by_size, losses=False, equal=True)
"""In proportion to numbers of examples, with equal weights in the means (Li et al. 2020, Scheme I, with replacement).

Li, Huang, Yang, Wang, Zhang. On the Convergence of FedAvg on Non-IID Data. ICLR 2020. Here no client is drawn twice, so
that large clients are drawn a little less often than in proportion.
"""

by_loss = Selection(_by_loss)
"""In proportion to last training losses; clients that were never trained come first."""

round_robin = Selection(_round_robin, losses=False)
"""The next M clients in the order of their numbers: all have taken part after ceil(N / M) rounds."""


@functools.cache
@check_arguments
def power_of_choice(candidates: Count) -> Selection:
    """The M clients of largest loss among d that are drawn in proportion to size, with equal weights in the means.

    Args:
      candidates: number of candidates d, at least M; N if there are fewer clients.

    Raises:
      InvalidInput: in the first round, if there are fewer candidates than a round has clients.

    Reference:
      Cho, Wang, Joshi. Client Selection in Federated Learning: Convergence Analysis and Power-of-Choice Selection
      Strategies. arXiv 2010.01243, 2020. The variant rpow-d, in which candidates report losses of their last training.

    Deviations:
      The loss is measured right after the client's last local training; the paper takes the mean over the
      mini-batches of that training. In both, clients that never took part have an infinite loss.
    """

    def weights(key, round_index, counts, losses, size):
        (clients,) = counts.shape
        if candidates < size:
            raise InvalidInput(f"power_of_choice:{candidates} has fewer candidates than the {size} clients of a round")
        drawn = jax.random.gumbel(key, (clients,), jnp.float32) + jnp.log(counts.astype(jnp.float32))
        _, found = jax.lax.top_k(drawn, min(candidates, clients))
        # Clients without examples, such as absent ones, come last.
        losses = jnp.where(counts > 0, losses, -jnp.inf)
        # Stable: equal losses, such as infinite ones, stay in the random order.
        chosen = found[jnp.argsort(-losses[found], stable=True)[:size]]
        return jnp.zeros(clients, jnp.float32).at[chosen].set(1.0)

    return Selection(weights, equal=True)


PLAIN = {"uniform": uniform, "by_size": by_size, "by_loss": by_loss, "round_robin": round_robin}
"""Names of selections without a number."""

SELECTIONS = Words(tuple(PLAIN), {"power_of_choice": Count})
"""Texts for selections, see `named`."""


def named(text: str) -> Selection:
    """Selection for a text such as "by_size" or "power_of_choice:10"; InvalidInput for any other."""
    name, number = SELECTIONS.parse(text, "select")
    return PLAIN[name] if number is None else power_of_choice(int(number))


def of_present(method: Method) -> Method:
    """`method` with a server that stays the same in a round in which no message arrives: all means would be zero."""

    def aggregate(key, server, clients, messages, cohort):
        after, clients, info = method.aggregate(key, server, clients, messages, cohort)
        if jax.tree.structure(after) == jax.tree.structure(server):
            # In the new types: that a method changes a type is for `pfl_jax.testing.check_method` to find.
            before = jax.tree.map(lambda old, new: jnp.asarray(old, jnp.result_type(new)), server, after)
            after = choose(jnp.any(cohort.present), after, before)
        return after, clients, info

    return method._replace(aggregate=aggregate)


def method_in_cohort(method: Method, cohort: Cohort, data: FederatedData, client: jax.Array | int) -> Method:
    """Method of a client in a cohort, with the weights of `Selection.equal`; a client that pauses sends zeros.

    Args:
      method: the method.
      cohort: the cohort.
      data: the federation, as a device has it.
      client: number of the client.
    """
    active = None if data.active is None else data.active[client]
    if active is None and cohort.equal is None:
        return method

    def local(key, server, client, data):
        result = method.local(key, server, client, data)
        if cohort.equal is not None:
            count = jnp.maximum(jnp.sum(data.mask, dtype=jnp.float32), 1.0)
            result = result._replace(message=_divided(result.message, jnp.where(cohort.equal, count, 1.0)))
        if active is None:
            return result
        kept = choose(active, (result.client, result.message), (client, jax.tree.map(jnp.zeros_like, result.message)))
        return result._replace(client=kept[0], message=kept[1])

    return method._replace(local=local)


def _divided(message: Message, count: jax.Array) -> Message:
    """Message with weights that are divided by a number, see `Selection.equal`."""

    def divided(part):
        # JAX makes arrays of its own of all weights that are computed from something.
        is_constant = not isinstance(part, Mean) or not isinstance(part.weight, jax.Array)
        if is_constant or (isinstance(part, Exact) and part.weight.ndim):
            return part
        return part._replace(weight=part.weight / count)

    return jax.tree.map(divided, message, is_leaf=is_mean)
