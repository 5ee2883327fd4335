r"""Batch normalization, whose running statistics are leaves of the backbone.

With the mean m and the biased variance v of a channel over the real examples of a mini-batch, and over all pixels:

    in training    y = scale (x - m) / sqrt(v + epsilon) + bias
                   running mean <- rho mean + (1 - rho) m;   running variance <- rho variance + (1 - rho) v n / (n - 1)
    otherwise      y = scale (x - running mean) / sqrt(running variance + epsilon) + bias

n is the number of values of a channel in the mini-batch. As in PyTorch, whose momentum is 1 - rho, the running variance
is the unbiased one. Padded examples enter no statistic.

The statistics are in the backbone under `pfl_jax.base.STATISTICS`, so a method treats them like other parameters of the
backbone: FedAvg and FedPer average them as part of the model, LG-FedAvg keeps them at the client, and messages count
them. Three things differ:

- They are not parameters of a loss. A pass in training returns their new values beside the features, the loss returns
  them beside its value (`has_aux` of `jax.grad`), and a step writes them into the parameters after the optimizer, see
  `pfl_jax.primitives.tree.with_statistics`. So neither an optimizer nor weight decay moves them.
- Penalties on parameters and similarities between models (`proximal`, `feddyn`, `fedamp`, `fedfomo`, `pfedgraph`) leave
  them out, and a server optimizer takes their mean unchanged. Elsewhere they count as parameters: among the channels of
  `cd2pfed`, and in the models that `pfedhn` generates.
- FedBN keeps them at the client together with scale and bias. FedCAC keeps only the statistics at the client: they are
  never critical entries.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfl_jax.base import STATISTICS
from pfl_jax.errors import InvalidInput


def normalize(
    x: jax.Array,
    scale: jax.Array | float,
    bias: jax.Array | float,
    running: dict[str, jax.Array],
    mask: jax.Array | None,
    *,
    epsilon: float = 1e-5,
    decay: float = 0.9,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Normalize the channels of a mini-batch.

    Args:
      x: [B, ..., C].
      scale, bias: [C].
      running: running mean and variance, {"mean": [C], "var": [C]}.
      mask: [B], the real examples, in training; None to use the running statistics.
      epsilon: number added to the variance.
      decay: share rho that the running statistics keep.

    Returns:
      The normalized channels [B, ..., C], and the next running statistics, which have no gradient.

    Raises:
      InvalidInput: x and the mask have different numbers of rows, or there is only one row: a batch size of 1, or
        gradients of single examples, which differential privacy needs and statistics of a mini-batch rule out.
    """
    if mask is None:
        # An average of models with negative weights may have negative variances.
        mean, variance = running["mean"], jnp.maximum(running["var"], 0.0)
        return (x - mean) * jax.lax.rsqrt(variance + epsilon) * scale + bias, running
    if x.shape[0] != mask.shape[0]:
        raise InvalidInput(
            f"BatchNorm gets {x.shape[0]} rows of a mini-batch of {mask.shape[0]} examples: its input must be "
            "[examples, ..., channels]"
        )
    if mask.shape[0] == 1:
        raise InvalidInput(
            "BatchNorm needs mini-batches of at least two examples: neither gradients of single examples nor "
            "batch_size 1 are possible"
        )
    axes = tuple(range(x.ndim - 1))
    weights = jnp.broadcast_to(mask.reshape(-1, *(1,) * (x.ndim - 1)), (*x.shape[:-1], 1)).astype(x.dtype)
    count = jnp.sum(weights)
    mean = jnp.sum(weights * x, axes) / jnp.maximum(count, 1)
    variance = jnp.sum(weights * jnp.square(x - mean), axes) / jnp.maximum(count, 1)
    unbiased = variance * count / jnp.maximum(count - 1, 1)
    new = {
        "mean": decay * running["mean"] + (1 - decay) * mean,
        "var": decay * running["var"] + (1 - decay) * unbiased,
    }
    return (x - mean) * jax.lax.rsqrt(variance + epsilon) * scale + bias, jax.lax.stop_gradient(new)


def normalizing(mask: jax.Array | None) -> Any:
    """Interceptor of Flax calls that computes every `flax.linen.BatchNorm` by `normalize`.

    Momentum and epsilon are the module's own; its `use_running_average` has no effect, since the mask decides.

    Args:
      mask: [B], the real examples, in training; None to use the running statistics.
    """

    def intercept(call, args, kwargs, context):
        norm = context.module
        if not isinstance(norm, nn.BatchNorm) or context.method_name != "__call__":
            return call(*args, **kwargs)
        if norm.is_initializing():
            said = norm.use_running_average is not None or "use_running_average" in kwargs
            return call(*args, **kwargs) if said else call(*args, use_running_average=True, **kwargs)
        if norm.axis != -1:
            raise InvalidInput(f"BatchNorm with axis={norm.axis} is not supported: channels must be the last axis")
        scale = norm.get_variable("params", "scale") if norm.use_scale else 1.0
        bias = norm.get_variable("params", "bias") if norm.use_bias else 0.0
        running = {name: norm.get_variable(STATISTICS, name) for name in ("mean", "var")}
        y, running = normalize(args[0], scale, bias, running, mask, epsilon=norm.epsilon, decay=norm.momentum)
        for name, value in running.items():
            norm.put_variable(STATISTICS, name, value)
        return y

    return intercept
