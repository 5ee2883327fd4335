"""Optimizer steps: SGD with PyTorch's update rule, and a step with any optimizer."""

import jax
import optax

from pfl_jax.base import PyTree
from pfl_jax.errors import InvalidInput, first_line
from pfl_jax.primitives.tree import with_statistics


def _is_static_zero(value: float | jax.Array) -> bool:
    return isinstance(value, int | float) and value == 0


def add_weight_decay(weight_decay: float | jax.Array) -> optax.GradientTransformation:
    """Step that adds weight_decay times the parameters to a gradient."""
    # A Python zero leaves the step out; whether a traced number is zero is not known.
    return optax.identity() if _is_static_zero(weight_decay) else optax.add_decayed_weights(weight_decay)


def sgd(
    lr: float | jax.Array, momentum: float | jax.Array = 0.0, weight_decay: float | jax.Array = 0.0
) -> optax.GradientTransformation:
    """Stochastic gradient descent with the update rule of PyTorch's SGD, as in the papers.

        g = gradient + weight_decay * params;  v = momentum * v + g;  params = params - lr * v

    Args:
      lr: learning rate; a number or a traced scalar, like the other arguments.
      momentum: factor of the velocity v, which starts at zero.
      weight_decay: factor of params in the gradient g, before the momentum.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import optimizers
      >>> optimizer = optimizers.sgd(lr=0.1, momentum=0.5)
      >>> params, state = jnp.array(1.0), optimizer.init(jnp.array(1.0))
      >>> for _ in range(2):
      ...     params, state = optimizers.descend(optimizer, jnp.array(1.0), (), params, state)
      ...     print(f"{params:.2f}")
      0.90
      0.75
    """
    return optax.chain(
        add_weight_decay(weight_decay),
        optax.identity() if _is_static_zero(momentum) else optax.trace(decay=momentum),
        optax.scale_by_learning_rate(lr),
    )


def initial_state(optimizer: optax.GradientTransformation, params: PyTree) -> PyTree:
    """First state of an optimizer for the parameters that it will move.

    Args:
      optimizer: as in optax.
      params: any pytree of float arrays.

    Raises:
      InvalidInput: the optimizer is for parameters of another structure, such as a whole model's.
    """
    try:
        return optimizer.init(params)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"the optimizer cannot start from the parameters that are trained ({first_line(error)}): methods also "
            "train parts of a model, so labels and masks must be functions of the parameters"
        ) from error


def descend(
    optimizer: optax.GradientTransformation,
    gradient: PyTree,
    statistics: PyTree,
    params: PyTree,
    opt_state: PyTree,
    *,
    value: jax.Array | None = None,
) -> tuple[PyTree, PyTree]:
    """One optimizer step for a gradient; returns the next params and the optimizer's next state `opt_state`.

        gradient, statistics = jax.grad(loss, has_aux=True)(params, batch)
        params, opt_state = descend(optimizer, gradient, statistics, params, opt_state)

    Args:
      optimizer, gradient, params, opt_state: as in optax.
      statistics: new running statistics of batch normalization, which the loss returns beside its value; () for none.
        They replace the old statistics, whatever the optimizer does to those.
      value: value of the loss, for an `optax.GradientTransformationExtraArgs`; None if the training has none.

    Raises:
      InvalidInput: the optimizer needs more than it is given, or the params have other statistics.
    """
    given = {} if value is None else {"value": value}
    try:
        updates, opt_state = optimizer.update(gradient, opt_state, params, **given)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise InvalidInput(
            f"the optimizer needs more than this training gives it, a gradient{' and a value' if given else ''} "
            f"({first_line(error)}): choose another one"
        ) from error
    return with_statistics(optax.apply_updates(params, updates), statistics), opt_state
