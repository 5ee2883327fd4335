"""Methods whose server keeps an additional state, such as momentum."""

from collections.abc import Callable
from typing import NamedTuple

from pfl_jax.base import Method, PyTree, Server, Survey
from pfl_jax.messages import bases, downloaded


class ExtendedServer(NamedTuple):
    """State of a server that keeps more than the server of the plain method.

    Attributes:
      plain: state of the server of the plain method, the only part that clients see.
      extra: the additional state.
    """

    plain: Server
    extra: PyTree


def with_server_state(
    method: Method,
    init: Callable[[Server], PyTree],
    step: Callable[[PyTree, Server, Server], tuple[Server, PyTree]],
) -> Method:
    """Method whose server takes an additional step after each round of the plain method, with a state for it.

        w' = the plain server's state after a round that began at w;   w, e <- step(e, w, w')

    Clients see w alone: their functions, their downloads, the survey before the first round and the `Privacy` are as in
    `method`.

    Args:
      method: the method to derive from; it may itself come from this function or another wrapper.
      init: w at the start -> e.
      step: (e, w, w') -> (next w, next e). It sees only the server's values.

    Returns:
      A `Method` with an `ExtendedServer`, which keeps more than parameters: it is not `server_is_mean`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from pfl_jax import make_method, models
      >>> from pfl_jax.wrappers import with_server_state
      >>> def init(server):  # how far the server moved in the last round
      ...     return jnp.zeros(())
      >>> def step(moved, old, new):
      ...     return new, optax.tree.norm(jax.tree.map(jnp.subtract, new, old))
      >>> method = with_server_state(make_method("fedavg", models.mlp((8, 8, 1), 10)), init, step)
      >>> method.init_server(jax.random.key(0)).extra.shape
      ()
    """

    def init_server(key):
        server = method.init_server(key)
        return ExtendedServer(server, init(server))

    def aggregate(key, server, clients, messages, cohort):
        after, clients, info = method.aggregate(key, server.plain, clients, messages, cohort)
        return ExtendedServer(*step(server.extra, server.plain, after)), clients, info

    def wrapped(survey: Survey) -> Survey:
        return Survey(
            lambda key, server, data: survey.local(key, server.plain, data),
            lambda server, means: server._replace(plain=survey.aggregate(server.plain, means)),
        )

    def begun_by(pass_on):
        return lambda key, server, client, data: server._replace(plain=pass_on(key, server.plain, client, data))

    return method._replace(
        init_server=init_server,
        init_client=lambda key, server, data: method.init_client(key, server.plain, data),
        local=lambda key, server, client, data: method.local(key, server.plain, client, data),
        aggregate=aggregate,
        personalize=lambda key, server, client, data: method.personalize(key, server.plain, client, data),
        download=lambda server, client: downloaded(method, server.plain, client),
        trained_from=lambda server, client: bases(method, server.plain, client),
        survey=None if method.survey is None else wrapped(method.survey),
        server_is_mean=False,
        hand_over=None if method.hand_over is None else method.hand_over.changed(begun_by),
        privacy=method.privacy,
    )
