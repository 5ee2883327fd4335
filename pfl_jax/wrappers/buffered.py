"""Buffered asynchronous aggregation: messages of clients that trained from an earlier state of the server."""

import jax
import jax.numpy as jnp

from pfl_jax.base import Mean, Method, PyTree, Server
from pfl_jax.errors import InvalidInput
from pfl_jax.messages import has_means, map_means, trained_from
from pfl_jax.wrappers.server_state import ExtendedServer, with_server_state


def with_versions(method: Method, versions: int) -> Method:
    """Method whose server also keeps its states before the last `versions` rounds.

    Args:
      method: the method to derive from.
      versions: S; with none the method is returned as it is.

    Returns:
      A `Method` with an `ExtendedServer`, whose `extra` has leaves [S, ...], the latest of the earlier states first.
    """
    if not versions:
        return method

    def init(server):
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (versions, *jnp.shape(leaf))), server)

    def step(past, before, after):
        return after, jax.tree.map(lambda old, leaf: jnp.concatenate([leaf[None], old[:-1]]), past, before)

    return with_server_state(method, init, step)


def stale(method: Method, staleness: jax.Array) -> Method:
    """Method of one client that trained from an earlier state of the server.

    It sends, in place of the value v of a `Mean` that it trained from received parameters,

        r + s (v - r');   s = 1 / sqrt(1 + staleness)

    where r' are the parameters that it received and r those that it would receive now, see `trained_from` of
    `pfl_jax.base.Method`. A `Mean` without received parameters, such as class means, has s times its weight instead.
    Arrays without any, beside others that were received, exact means (`pfl_jax.base.Exact`) and parts that are no
    `Mean` are sent as they are. A client that is not stale sends what that of `method` does, bit for bit.

    Args:
      method: one of `with_versions`, as a client follows it.
      staleness: int32 scalar, server steps since the client's download; at most the number of versions.

    Returns:
      A `Method` with the states of `method`; its `local` raises InvalidInput if the messages have no `Mean`.

    Reference:
      Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba. Federated Learning with Buffered Asynchronous Aggregation.
      AISTATS 2022. Algorithm 1 (FedBuff), with updates scaled by 1 / sqrt(1 + staleness).

    Deviations:
      The mean has the weights of `method`, most often numbers of examples, where the paper's is unweighted. The
      server's learning rate is that of `pfl_jax.wrappers.server_optimizer`, by default 1.
    """

    def local(key, server: ExtendedServer, client, data):
        def version(now, past):
            return jnp.where(staleness > 0, past[jnp.maximum(staleness - 1, 0)], now)

        begun: Server = server._replace(plain=jax.tree.map(version, server.plain, server.extra))
        result = method.local(key, begun, client, data)
        if not has_means(result.message):
            raise InvalidInput(
                "asynchronous rounds are for methods that send a Mean, and the messages of this one have none"
            )
        old, found = trained_from(method, begun, client, result.message)
        new, _ = trained_from(method, server, client, result.message)
        factor = jax.lax.rsqrt(1 + staleness.astype(jnp.float32))

        def of_mean(part: Mean, found: PyTree, old: PyTree, new: PyTree) -> Mean:
            if not any(jax.tree.leaves(found)):
                return part._replace(weight=factor * part.weight)

            def moved(flag, value, old, new):
                return jnp.where(staleness > 0, new + factor * (value - old), value) if flag else value

            return part._replace(value=jax.tree.map(moved, found, part.value, old, new))

        return result._replace(message=map_means(of_mean, result.message, found, old, new, rest=lambda leaf, *_: leaf))

    return method._replace(local=local, privacy=method.privacy)
