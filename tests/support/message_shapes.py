"""Shapes of what every method sends, traced once in a process for all tests that read them."""

import functools

import jax
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from pfl_jax.data import client_data
from pfl_jax.messages import has_means, trained_from
from pfl_jax.methods import make_method


@functools.cache
def message_shapes(name, **options):
    """Of a method on the tiny problem: shapes of (server, client, message), and the flags of `trained_from`."""
    method, one = (
        make_method(name, tiny_model(), **HYPER_PARAMETERS, **options),
        client_data(tiny_federation(), 0, "train"),
    )

    flags = {}

    def trace(key):
        server = method.init_server(key)
        client = method.init_client(key, server, one)
        message = method.local(key, server, client, one).message
        if has_means(message):
            _, flags["found"] = trained_from(method, server, client, message)
        return server, client, message

    return *jax.eval_shape(trace, jax.random.key(0)), flags.get("found")
