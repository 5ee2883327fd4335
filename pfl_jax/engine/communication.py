"""Communication cost of a round, computed from shapes without running it."""

from typing import NamedTuple

import jax
import numpy as np

from pfl_jax.base import Info, Method
from pfl_jax.data.federated import client_data
from pfl_jax.engine.build import build
from pfl_jax.engine.cohort import RoundSettings
from pfl_jax.engine.store import Federation
from pfl_jax.messages import downloaded, has_means, is_mean, may_change
from pfl_jax.primitives.tree import byte_count, gather
from pfl_jax.schedules import MethodSchedule, at_round


class Traffic(NamedTuple):
    """Bytes sent by one client and in one round.

    Attributes:
      up: bytes of the message, `LocalResult.message`, and, if the method has a `Method.hand_over`, of the download that
        a client passes on to the next one.
      down: bytes of the download, `Method.download`.
    """

    up: int
    down: int


def traffic(method: Method | MethodSchedule, data: Federation) -> Traffic:
    """Bytes that one client sends and receives in a round; scalar weights of a `Mean` are not counted.

    A client's message is counted in the form that `Method.encoded` gives it, everything else uncompressed. Without a
    server these are the bytes over one link, see `bytes_of_round`.

    Args:
      method: the federation's method.
      data: the federation's data; only shapes are read. If the message grows with the number of examples, the result is
        for the largest client.
    """
    method, key = at_round(method, 0), jax.random.key(0)

    def exchange(data):
        state = build(method, RoundSettings()).init(data, key)
        client = gather(state.clients, 0)
        result = method.local(key, state.server, client, client_data(data.on_device(), 0, "train"))
        return result.message, downloaded(method, state.server, client)

    message, download = jax.eval_shape(exchange, data.with_frozen(method.frozen))

    if method.encoded is not None and not has_means(message):
        message = jax.eval_shape(method.encoded, message)

    def counted(part):
        if not is_mean(part):
            return part
        encoded = method.encoded if may_change(part) else None
        value = part.value if encoded is None else jax.eval_shape(encoded, part.value)
        return (value, part.weight) if part.weight.ndim else value

    up = byte_count(jax.tree.map(counted, message, is_leaf=is_mean))
    return Traffic(up if method.hand_over is None else up + byte_count(download), byte_count(download))


def bytes_of_round(one: Traffic, arrived: np.ndarray, info: Info) -> tuple[int, int]:
    """Bytes that all clients of a round sent and received.

    A message goes once to the server. Without a server it goes over each link of its client, which `Info` counts as
    `links`; it is counted as sent, once per link.

    Args:
      one: bytes of one client.
      arrived: [M], bool; clients whose messages arrived.
      info: the round's `Info`.
    """
    messages = int(np.sum(info.get("links", arrived)))
    return one.up * messages, one.down * len(arrived)
