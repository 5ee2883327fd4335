"""Optimizers of a server that takes a mean of parameters (Reddi et al. 2021)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import Method, Params
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.optimizers import sgd
from pfl_jax.primitives.tree import map_statistics
from pfl_jax.validation import BelowOne, NotNegative, Positive, ReadWith
from pfl_jax.wrappers.server_state import with_server_state

ServerRule: TypeAlias = Literal["sgd", "adam", "yogi", "adagrad"]
"""Names of the server's optimizers, see `ServerOptimizer`."""

SECOND_MOMENT_DECAY = 0.99
"""beta2 of `ServerOptimizer`, the value in all experiments of its paper."""


class AdaptiveState(NamedTuple):
    """State of an adaptive optimizer: first moment m and second moment v of the gradients, entry by entry."""

    first: Params
    second: Params


def adaptive(
    second_moment: Callable[[jax.Array, jax.Array], jax.Array], decay: float | jax.Array, tau: float | jax.Array
) -> optax.GradientTransformation:
    """Adaptive gradient scaling of Reddi et al. (2021), Algorithm 2, without a correction for bias of the moments.

        m <- decay m + (1 - decay) g;   v <- second_moment(v, g^2);   the scaled gradient is m / (sqrt(v) + tau)

    Args:
      second_moment: next v from v and g^2, entry by entry; v starts at tau^2.
      decay: decay of the first moment, the paper's beta1.
      tau: degree of adaptivity; small values adapt more.
    """

    def init(params):
        start = jnp.square(jnp.asarray(tau, jnp.float32))
        full = jax.tree.map(lambda leaf: jnp.full_like(leaf, start), params)
        return AdaptiveState(jax.tree.map(jnp.zeros_like, params), full)

    def update(updates, state, params=None):
        first = jax.tree.map(lambda m, g: decay * m + (1 - decay) * g, state.first, updates)
        second = jax.tree.map(lambda v, g: second_moment(v, jnp.square(g)), state.second, updates)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + tau), first, second), AdaptiveState(first, second)

    return optax.GradientTransformation(init, update)


@dataclass(frozen=True)
class ServerOptimizer:
    """Recipe of the server's steps, for methods whose server only takes a mean of parameters.

    Attributes:
      server_optimizer: optimizer of the server, for which the difference between its parameters and the clients' mean
        is a gradient: sgd (with momentum this is FedAvgM), adam, yogi or adagrad. None takes the mean unchanged.
      server_lr: learning rate of the server's optimizer; None for 1 with sgd and 0.01 with the others.
      server_momentum: momentum of the server's sgd, or the decay of the first moment of the others; None for 0.9 with
        adam and yogi and 0 with sgd and adagrad.
      server_tau: degree of adaptivity of the server's adam, yogi and adagrad; smaller values adapt more.
    """

    server_optimizer: ServerRule | None = None
    server_lr: Annotated[NotNegative | None, ReadWith("server_optimizer")] = None
    server_momentum: Annotated[BelowOne | None, ReadWith("server_optimizer")] = None
    server_tau: Annotated[Positive, ReadWith("server_optimizer", ("adam", "yogi", "adagrad"))] = 1e-3

    def transformation(self) -> optax.GradientTransformation:
        """The optimizer as an optax gradient transformation.

        Raises:
          InvalidInput: an unknown optimizer, or none.
        """
        rule, beta2 = self.server_optimizer, SECOND_MOMENT_DECAY
        usual_lr, usual_momentum = 1.0 if rule == "sgd" else 0.01, 0.9 if rule in ("adam", "yogi") else 0.0
        lr = usual_lr if self.server_lr is None else self.server_lr
        momentum = usual_momentum if self.server_momentum is None else self.server_momentum
        if rule == "sgd":
            return sgd(lr, momentum)
        second_moments: dict[str | None, Callable[[jax.Array, jax.Array], jax.Array]] = {
            "adam": lambda v, square: beta2 * v + (1 - beta2) * square,
            "yogi": lambda v, square: v - (1 - beta2) * square * jnp.sign(v - square),
            "adagrad": lambda v, square: v + square,
        }
        if rule not in second_moments:
            raise InvalidInput(f"server_optimizer must be sgd, adam, yogi or adagrad, not {rule!r}")
        return optax.chain(adaptive(second_moments[rule], momentum, self.server_tau), optax.scale_by_learning_rate(lr))


def server_optimized(method: Method, recipe: ServerOptimizer) -> Method:
    """Method whose server takes an optimizer's step toward the plain method's next parameters.

        g = w - w';   w <- w + the optimizer's update for the gradient g

    w' are the parameters that the server of `method` would have after the round. With sgd, a learning rate of 1 and no
    momentum this is `method`, bit for bit; with momentum it is FedAvgM (Hsu, Qi, Brown 2019).

    Args:
      method: the method to derive from, one that is `server_is_mean`.
      recipe: the optimizer; without one the method is returned unchanged.

    Returns:
      A `Method` with the optimizer's state as additional server state, see `pfl_jax.wrappers.server_state`.

    Raises:
      InvalidInput: an unknown optimizer, a number without an optimizer, or a method that is not
        `server_is_mean`.

    Reference:
      Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan. Adaptive Federated Optimization. ICLR 2021.
      Algorithm 2: FedAdagrad, FedYogi and FedAdam, with beta2 = 0.99. tau = 1e-3 is the paper's default.

    Deviations:
      v starts at tau^2, the smallest value that the paper allows. The weights of the mean are as in `method`.
    """
    if recipe.server_optimizer is None:
        given = [name for name in ("server_lr", "server_momentum") if getattr(recipe, name) is not None]
        # A traced value may be the default.
        if isinstance(recipe.server_tau, int | float) and recipe.server_tau != ServerOptimizer.server_tau:
            given.append("server_tau")
        if given:
            raise InvalidInput(f"{given[0]} needs a server_optimizer")
        return method
    optimizer = recipe.transformation()
    if not method.server_is_mean:
        raise InvalidInput("server_optimizer is for methods whose server keeps the parameters of a model only")

    def step(opt_state, params, target):
        gradient = jax.tree.map(jnp.subtract, params, target)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        # Equal to params + update, and with the update -gradient exactly the target.
        params = jax.tree.map(lambda new, update, g: new + (update + g), target, updates, gradient)
        # No optimizer moves the statistics of batch normalization.
        return map_statistics(lambda _, mean: mean, params, target), opt_state

    return with_server_state(method, optimizer.init, step)
