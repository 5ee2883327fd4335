"""Messages of every method as wrappers change them, from one local training of all clients, and what is refused.

A wrapper sees of a method the states of server and client and what the client sends: here all of it is computed before.
"""

import functools

import jax
import jax.numpy as jnp
from problems import HYPER_PARAMETERS, received, tiny_federation, usual_model

from pfl_jax import Cohort, InvalidInput
from pfl_jax.data import client_data
from pfl_jax.engine import simulate
from pfl_jax.engine.asynchronous import stale, with_versions
from pfl_jax.frozen import use
from pfl_jax.methods import METHODS, make_method
from pfl_jax.methods.factories import recipes_of
from pfl_jax.primitives.tree import gather
from pfl_jax.wrappers.attacks import attacked
from pfl_jax.wrappers.client_privacy import ClientPrivacy, private_clients
from pfl_jax.wrappers.compression import Compression, compressed
from pfl_jax.wrappers.server_mean import ServerMean, robust
from pfl_jax.wrappers.server_optimizer import ServerOptimizer

SIZES = (9, 20, 14, 5)
COHORT = Cohort(jnp.arange(len(SIZES)), jnp.array(SIZES), jnp.ones(len(SIZES), bool), len(SIZES))


def _attack(kind, scale):
    return lambda method: attacked(method, kind, jnp.array(True), scale=scale, num_classes=3)


def _late(steps):
    return lambda method: stale(with_versions(method, 1), jnp.int32(steps))


WRAPPERS = {
    "--compress": {
        text: lambda method, text=text: compressed(method, Compression(text))
        for text in ("topk:1.0", "sign", "quantize:2", "topk:0.2")
    },
    "--server-mean": {
        text: lambda method, text=text: robust(method, ServerMean(text))
        for text in ("trimmed:0", "multi_krum:0", "median", "trimmed:0.3", "krum", "geometric_median")
    },
    "--attack": {
        "signs, scale -1": _attack("signs", -1.0),
        "signs": _attack("signs", 3.0),
        "noise": _attack("noise", 3.0),
    },
    "asynchronous": {"of the whole cohort": _late(0), "late": _late(1)},
    "--client-clip": {
        "1e9": lambda method: private_clients(method, ClientPrivacy(1e9)),
        "0.01": lambda method: private_clients(method, ClientPrivacy(0.01)),
    },
}
"""Option -> its values -> the wrapper."""

NEUTRAL = ("topk:1.0", "trimmed:0", "multi_krum:0", "signs, scale -1", "of the whole cohort", "1e9")
"""Values that change nothing, but that all clients count alike where their updates are clipped."""

USUAL = ("topk:1.0", "sign", "multi_krum:0", "median", "signs, scale -1", "noise", "of the whole cohort", "late", "1e9")
"""Values for the default tests, which compile all of them."""

OPTIONS = (*WRAPPERS, "--dp-clip", "--server-optimizer")
NO_OPTION = "no such option"


@functools.cache
def made(name):
    """The method, made for the tiny problem."""
    return make_method(name, usual_model(name), **HYPER_PARAMETERS)


def first_round(method, data):
    """State before the first round, and results of its clients."""
    key = jax.random.key(3)
    state = simulate.build(method, simulate.Settings(rounds=1)).init(data, key)

    def one(number):
        own = gather(state.clients, number)
        return method.local(jax.random.fold_in(key, number), state.server, own, client_data(data, number, "train"))

    with use(method.frozen, data.frozen):
        return state.server, state.clients, jax.lax.map(one, jnp.arange(data.num_clients))


@functools.cache
def trained(name, *, shapes=False):
    """Server, clients and their results in the first round; or only their shapes."""
    method = made(name)
    play, data = functools.partial(first_round, method), tiny_federation(SIZES).with_frozen(method.frozen)
    return jax.eval_shape(play, data) if shapes else jax.jit(play)(data)


def wrapped_round(method, wrapper, server, clients, results):
    """Messages of wrapped clients, and as the aggregation of the method gets them."""
    given = method._replace(
        init_server=lambda server: server,
        init_client=lambda key, server, data: data[0],
        local=lambda key, server, client, data: data[1],
        aggregate=lambda key, server, clients, messages, cohort: (messages, clients, {}),
        survey=None,
    )
    wrapped = wrapper(given)
    server = wrapped.init_server(server)
    if hasattr(server, "extra"):
        # Earlier states, which are others.
        earlier = jax.tree.map(lambda leaf: leaf + jnp.asarray(0.25, leaf.dtype), server.extra)
        server = server._replace(extra=earlier)

    def one(client, result, number):
        data, key = (client, result), jax.random.fold_in(jax.random.key(5), number)
        return wrapped.local(key, server, wrapped.init_client(key, server, data), data)

    found = jax.vmap(one)(clients, results, COHORT.clients)
    after, _, _ = wrapped.aggregate(jax.random.key(6), server, found.client, received(found.message), COHORT)
    return found.message, getattr(after, "plain", after)


def at_server(name, wrappers):
    """Messages of the first round as the method's aggregation gets them from clients with each of some wrappers."""

    def play(*arguments):
        return [wrapped_round(made(name), wrapper, *arguments)[1] for wrapper in wrappers]

    # One program: compiling is all the work.
    return jax.jit(play)(*trained(name))


@functools.cache
def refusal(name, option):
    """Why a method does not take an option, in the words of the error; "" if it does."""
    of_option = {"--client-clip": ClientPrivacy, "--server-optimizer": ServerOptimizer}
    if option in of_option and of_option[option] not in recipes_of(METHODS[name]):
        return NO_OPTION
    if option == "--server-optimizer":
        return ""
    try:
        if option == "--dp-clip":
            make_method(name, usual_model(name), **HYPER_PARAMETERS, dp_clip=1.0)
        else:
            *_, wrapper = WRAPPERS[option].values()
            jax.eval_shape(functools.partial(wrapped_round, made(name), wrapper), *trained(name, shapes=True))
    except InvalidInput as error:
        return str(error)
    return ""
