"""Layers of PyTorch in JAX: matrix products, embeddings, normalizations, attention, recurrent networks, and dropout."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfl_jax.errors import InvalidInput
from pfl_jax.networks.torch_spatial import affine, normalized


def cast(x: Any, dtype: Any = None) -> jax.Array:
    """x as an array of the type `dtype`, or of its own type if `dtype` is not a type."""
    return jnp.asarray(x) if not isinstance(dtype, str) else jnp.asarray(x).astype(dtype)


def drop(key: jax.Array | None, x: jax.Array, rate: float, shared: int = 0) -> jax.Array:
    """Dropout.

    Args:
      key: random key; None where dropout is not allowed.
      x: any shape.
      rate: share of the values that become 0.
      shared: number of last axes along which values are dropped together.
    """
    if rate == 0:
        return x
    kept = bernoulli(key, jnp.zeros(x.shape[: x.ndim - shared] + (1,) * shared, x.dtype), 1 - rate)
    return x * kept / (1 - rate) if rate < 1 else x * 0


def bernoulli(key: jax.Array | None, like: jax.Array, probability: float = 0.5, **_: Any) -> jax.Array:
    """Random zeros and ones in the shape of an array."""
    if key is None:
        raise InvalidInput(
            "the module draws random numbers when deployed too: let it do so only in training, as "
            "functional.dropout(x, p, training=self.training) does"
        )
    return jax.random.bernoulli(key, probability, like.shape).astype(like.dtype)


def _linear(x, weight, bias=None):
    return affine(x @ weight.T, None, bias)


def _product_and(x, a, b, *, beta=1, alpha=1):
    # With beta=0 even NaN in x does not count.
    return (beta * x if beta else 0) + alpha * (a @ b)


def _weight_norm(direction, length, axis=0):
    others = tuple(i for i in range(direction.ndim) if i != axis)
    return direction * (length / jnp.sqrt(jnp.sum(jnp.square(direction), others, keepdims=True)))


def rows(take: Callable[..., jax.Array], x: Any, axis: int, index: Any) -> jax.Array:
    """Entries of an axis by `jnp.take` or `jnp.take_along_axis`.

    Beyond the axis, where PyTorch raises an error, they are NaN, or the least integer; negative numbers, which would
    count from the end, are beyond it too.
    """
    return take(x, jnp.where(index < 0, x.shape[axis], index), axis, mode="fill")


def _embedding(weight, index, padding=-1, by_frequency=False, *_):
    if by_frequency:
        raise InvalidInput("Embedding with scale_grad_by_freq is not supported: make it without it")
    found = rows(jnp.take, weight, 0, index)
    # The row of padding has no gradient.
    return found if padding < 0 else jnp.where((index == padding)[..., None], lax.stop_gradient(found), found)


def _layer_norm(x, shape, scale=None, bias=None, epsilon=1e-5, *_):
    return affine(normalized(x, tuple(range(-len(shape), 0)), epsilon), scale, bias)


def _rms_norm(x, shape, scale=None, epsilon=None):
    squares = jnp.square(x).mean(tuple(range(-len(shape), 0)), keepdims=True)
    return affine(x * lax.rsqrt(squares + (np.finfo(np.float32).eps if epsilon is None else epsilon)), scale, None)


def _softmax(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, axis, dtype=None, *_: function(cast(x, dtype), axis)


def _attention(key, q, k, v, mask=None, dropout=0.0, causal=False, *, scale=None, enable_gqa=False):
    if enable_gqa:
        k, v = (jnp.repeat(one, q.shape[-3] // one.shape[-3], -3) for one in (k, v))
    scores = q @ jnp.swapaxes(k, -1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == bool else scores + mask
    # A row of which the mask leaves nothing is zero, as in PyTorch.
    empty = mask is not None and jnp.all(scores == -jnp.inf, -1, keepdims=True)
    weights = jnp.where(empty, 0, jax.nn.softmax(jnp.where(empty, 0, scores), -1))
    return drop(key, weights, dropout) @ v


def _recurrent(cell: Callable[..., Any]) -> Callable[..., Any]:
    """Layers of a recurrent network; cell: (states, part from the input, part from the last output) -> states."""

    def layers(key, x, hidden, params, biases, depth, dropout, train, both_ways, batch_first=False):
        hidden = list(hidden) if isinstance(hidden, list | tuple) else [hidden]
        x, ways, ends = jnp.swapaxes(x, 0, 1) if batch_first else x, 2 if both_ways else 1, []
        each = len(params) // (depth * ways)
        for layer in range(depth):
            outputs = []
            for way in range(ways):
                number = layer * ways + way
                own = list(params[number * each :][:each])
                projection = own.pop() if each in (3, 5) else None
                of_input, of_output = own[2:] if biases else (0.0, 0.0)

                def step(states, inputs, weight=own[1], bias=of_output, projection=projection):
                    states = cell(states, inputs, states[0] @ weight.T + bias)
                    states = states if projection is None else (states[0] @ projection.T, *states[1:])
                    return states, states[0]

                start = tuple(one[number] for one in hidden)
                end, output = lax.scan(step, start, x @ own[0].T + of_input, reverse=bool(way))
                ends.append(end)
                outputs.append(output)
            x = jnp.concatenate(outputs, -1)
            if train and layer < depth - 1:
                x = drop(None if key is None else jax.random.fold_in(key, layer), x, dropout)
        return jnp.swapaxes(x, 0, 1) if batch_first else x, *map(jnp.stack, zip(*ends, strict=True))

    return layers


def _lstm_cell(states, own, back):
    i, f, g, o = jnp.split(own + back, 4, -1)
    memory = jax.nn.sigmoid(f) * states[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(memory), memory


def _gru_cell(states, own, back):
    (r, z, n), (r_back, z_back, n_back) = jnp.split(own, 3, -1), jnp.split(back, 3, -1)
    z, n = jax.nn.sigmoid(z + z_back), jnp.tanh(n + jax.nn.sigmoid(r + r_back) * n_back)
    return ((1 - z) * n + z * states[0],)


LAYERS: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    **dict.fromkeys(("addmm", "baddbmm"), _product_and),
    **dict.fromkeys(("matmul", "mm", "bmm"), jnp.matmul),
    "einsum": lambda text, operands, **_: jnp.einsum(text, *operands),
    "outer": jnp.outer,
    "embedding": _embedding,
    "_weight_norm": _weight_norm,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "softmax": _softmax(jax.nn.softmax),
    "_softmax": _softmax(jax.nn.softmax),
    "log_softmax": _softmax(jax.nn.log_softmax),
    "glu": lambda x, axis=-1: jax.nn.glu(x, axis),
    "prelu": lambda x, slope: jnp.where(x > 0, x, x * slope.reshape(-1, *(1,) * max(x.ndim - 2, 0))),
}
"""Functions of arrays, as in PyTorch."""

RANDOM: dict[str, Callable[..., Any]] = {
    "dropout": lambda key, x, rate, train: drop(key, x, rate if train else 0.0),
    "feature_dropout": lambda key, x, rate, train: drop(key, x, rate if train else 0.0, x.ndim - 2),
    "bernoulli": bernoulli,
    "scaled_dot_product_attention": _attention,
    "lstm": _recurrent(_lstm_cell),
    "gru": _recurrent(_gru_cell),
    "rnn_tanh": _recurrent(lambda _, own, back: (jnp.tanh(own + back),)),
    "rnn_relu": _recurrent(lambda _, own, back: (jax.nn.relu(own + back),)),
}
"""Functions with a random key, or None, as their first argument."""
