"""Compressed messages with error feedback."""

import itertools
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax.random import fold_in

from pfl_jax.base import Client, LocalResult, Mean, Method, PRNGKey, PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.messages import MEAN_OF_UPDATES, Update, bases, downloaded, map_means, needs_changeable, trained_from
from pfl_jax.primitives import compressors
from pfl_jax.streams import COMPRESSION
from pfl_jax.validation import AboveZero, Range, Words

BITS = 32
"""Bits of a number that is not compressed."""

COMPRESSORS = Words(("none", "sign"), {"topk": AboveZero, "quantize": Annotated[int, Range(2, BITS)]})
"""Values of `Compression.compress`."""


@dataclass(frozen=True)
class Compression:
    """Compression of the messages from clients to the server.

    Attributes:
      compress: encoding of the values that clients send for a mean, with error feedback: none, topk:SHARE (entries of
        largest magnitude), quantize:BITS (2 to 31, rounded at random) or sign (one bit for each entry). The server's
        messages are not compressed.
    """

    compress: Annotated[str, COMPRESSORS] = "none"


class CompressedClient(NamedTuple):
    """State of a client whose messages are compressed.

    Attributes:
      state: state of the client of the plain method.
      memory: tree like the message. In place of each `Mean` is a tree like its value, with the error still to be sent
        for received parameters, and the value that the server has for all others; () for other parts.
    """

    state: Client
    memory: PyTree


def compressed(method: Method, recipe: Compression) -> Method:
    """Method whose clients compress the values of the `Mean`s that they send.

    Parameters v that a client trained from received ones r are sent as a compressed update, and the error of the
    compression is added to the next update:

        c = C(v - r + e);   e <- v - r + e - c;   the server has r + c

    All other values, such as class means, have no such r. They are sent as a compressed change of the value that the
    server has of this client, which starts at zero:

        c = C(v - h);   h <- h + c;   the server has h

    `trained_from` of `pfl_jax.base.Method` says which values were received. Weights, exact means
    (`pfl_jax.base.Exact`), parts of the message that are not a `Mean`, and the server's messages are not compressed.

    Args:
      method: the method to derive from. If its messages have no `Mean`, or only exact ones, it is refused when it runs.
      recipe: the encoding, see `pfl_jax.primitives.compressors`; with none, and with quantize:32, the method is
        returned unchanged.

    Returns:
      A `Method` with a `CompressedClient`; everything else is unchanged.

    Raises:
      InvalidInput: an unknown encoding, or a number out of its range.

    Reference:
      Error feedback: Seide, Fu, Droppo, Li, Yu. 1-Bit Stochastic Gradient Descent. Interspeech 2014; Karimireddy,
      Rebjock, Stich, Jaggi. Error Feedback Fixes SignSGD and other Gradient Compression Schemes. ICML 2019, Algorithm 1
      (EF-SGD), with the update of a round in place of a gradient step. For h: Richtarik, Sokolov, Fatkhullin. EF21.
      NeurIPS 2021, Algorithm 1, without its exact first value. Stochastic rounding: Alistarh, Grubic, Li, Tomioka,
      Vojnovic. QSGD. NeurIPS 2017.

    Deviations:
      A client takes part now and then, and its error waits for its next round. A client that drops out does not know
      that its message is lost: the lost update is not sent again. Changes of h that did not arrive are sent with the
      next change, and counted once.
    """
    encoding = _compressor(*COMPRESSORS.parse(recipe.compress, "compress"))
    if encoding is None:
        return method

    def init_client(key, server, data):
        state = method.init_client(key, server, data)
        # Only its shapes are used.
        message = jax.eval_shape(method.local, key, server, state, data).message
        needs_changeable(message, "compress")

        def zeros(part):
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), part.value)

        return CompressedClient(state, map_means(zeros, message, rest=lambda leaf: ()))

    def local(key, server, client, data):
        result, counter = method.local(key, server, client.state, data), itertools.count()
        known = trained_from(method, server, client.state, result.message)
        rounding = fold_in(key, COMPRESSION)

        def send(part, memory, *known):
            if isinstance(part, Update):
                raise InvalidInput(f"compress cannot be given with client_clip: {MEAN_OF_UPDATES}")
            return _send(encoding, fold_in(rounding, next(counter)), part, memory, *known)

        pairs = map_means(send, result.message, client.memory, *known, rest=lambda leaf, *_: _Sent(leaf, ()))
        message, memory = (
            jax.tree.map(lambda pair, index=index: pair[index], pairs, is_leaf=lambda part: isinstance(part, _Sent))
            for index in range(2)
        )
        return LocalResult(CompressedClient(result.client, memory), message, result.personal)

    def aggregate(key, server, clients, messages, cohort):
        server, states, info = method.aggregate(key, server, clients.state, messages, cohort)
        return server, clients._replace(state=states), info

    def personalize(key, server, client, data):
        return method.personalize(key, server, client.state, data)

    def of_plain(pass_on):
        return lambda key, server, client, data: pass_on(key, server, client.state, data)

    return method._replace(
        init_client=init_client,
        local=local,
        aggregate=aggregate,
        personalize=personalize,
        download=lambda server, client: downloaded(method, server, client.state),
        trained_from=lambda server, client: bases(method, server, client.state),
        encoded=encoding.encoded,
        hand_over=None if method.hand_over is None else method.hand_over.changed(of_plain),
    )


class _Sent(NamedTuple):
    """Part of a message, and the client's memory of it."""

    part: PyTree
    memory: PyTree


def _send(
    encoding: compressors.Compressor, key: PRNGKey, part: Mean, memory: PyTree, base: PyTree, is_received: PyTree
) -> _Sent:
    """`Mean` that the server has after decoding, and its next memory; base and is_received are from `trained_from`."""
    base = _choose(is_received, base, memory)
    error = _choose(is_received, memory, jax.tree.map(jnp.zeros_like, memory))
    change = jax.tree.map(lambda v, r, e: v - r + e, part.value, base, error)
    sent = encoding.decoded(key, change)
    arrived = jax.tree.map(jnp.add, base, sent)
    left = _choose(is_received, jax.tree.map(jnp.subtract, change, sent), arrived)
    return _Sent(part._replace(value=arrived), left)


def _choose(flags: PyTree, left: PyTree, right: PyTree) -> PyTree:
    """Arrays of `left` where the Python bools `flags` are True, of `right` elsewhere."""
    return jax.tree.map(lambda flag, a, b: a if flag else b, flags, left, right)


def _compressor(name: str, number: float | None) -> compressors.Compressor | None:
    """Encoding for a name and its number; None for no compression."""
    if name == "sign":
        return compressors.sign_compressor()
    if name == "topk" and number is not None:
        return compressors.top_k_compressor(number)
    if name == "quantize" and number is not None and number < BITS:
        return compressors.quantizing_compressor(int(number))
    return None
