"""Several models stacked along a leading axis: initialization, and the loss of each on every example."""

import jax
import jax.numpy as jnp

from pfl_jax.base import ClientData, Model, Params, PRNGKey
from pfl_jax.primitives.examples import map_examples


def init_models(model: Model, key: PRNGKey, count: int) -> Params:
    """Stack of `count` independent random models, leaves [count, ...]; the first is always model.init(key).

    The models must differ: methods that choose between models or mix them would treat equal models alike for ever.
    """
    other_keys = [jax.random.fold_in(key, index) for index in range(1, count)]
    return jax.vmap(model.init)(jnp.stack([key, *other_keys]))


def example_losses(model: Model, models: Params, data: ClientData) -> jax.Array:
    """Loss of every example under every model; for classification the cross entropy -log p_m(y_l | x_l).

    Args:
      model: the architecture.
      models: leaves [k, ...].
      data: n examples.

    Returns:
      Losses [n, k]; rows of padding are arbitrary but finite.
    """

    def losses(rows):
        x, y = rows
        outputs = jax.vmap(model.apply, in_axes=(0, None))(models, x)
        return jax.vmap(model.task.example_losses, in_axes=(0, None), out_axes=1)(outputs, y)

    return map_examples(losses, (data.x, data.y), data.mask)
