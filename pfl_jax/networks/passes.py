"""Passes of flax.linen modules: in training with batch normalization by the mini-batch and dropout, or deployed."""

from contextlib import ExitStack
from typing import Any

import flax.linen as nn
import jax

from pfl_jax.base import STATISTICS, Backbone, PRNGKey, PyTree
from pfl_jax.networks.batch_norm import normalizing

DROPOUT_LAYERS = (nn.Dropout, nn.MultiHeadDotProductAttention)
"""Layers of Flax that drop out values, and have the attribute `deterministic`."""


def dropping(training: bool) -> Any:
    """Interceptor of Flax calls in which layers of `DROPOUT_LAYERS` drop out values only in training.

    Their `deterministic` has no effect, neither as attribute nor as argument.

    Args:
      training: whether this is a pass in training.
    """

    def intercept(call, args, kwargs, context):
        layer = context.module
        if not isinstance(layer, DROPOUT_LAYERS) or context.method_name != "__call__":
            return call(*args, **kwargs)
        # Flax refuses an argument beside the attribute. The layer is a copy for this pass, not the user's own.
        object.__setattr__(layer, "deterministic", None)
        args = args[:1] if isinstance(layer, nn.Dropout) else args
        return call(*args, **{**kwargs, "deterministic": not training})

    return intercept


def one_pass(mask: jax.Array | None, *, training: bool) -> ExitStack:
    """Context of a pass of a Flax module, with batch normalization and dropout set for training or deployment.

    Args:
      mask: [B], the real examples, in training; None to use the running statistics.
      training: whether to apply dropout.
    """
    stack = ExitStack()
    stack.enter_context(nn.intercept_methods(normalizing(mask)))
    stack.enter_context(nn.intercept_methods(dropping(training)))
    return stack


def init_backbone(module: nn.Module, key: PRNGKey, x: jax.Array) -> Backbone:
    """Initial parameters of a Flax module, with its running statistics.

    Args:
      module: module whose call takes only the inputs.
      key: key of the random parameters.
      x: inputs [B, ...].
    """
    with one_pass(None, training=False):
        variables = module.init(key, x)
    return to_backbone(variables)


def to_backbone(variables: Any) -> Backbone:
    """Parameters of Flax variables, and the running statistics, if any, under `STATISTICS`."""
    params = dict(variables["params"])
    return params | {STATISTICS: variables[STATISTICS]} if STATISTICS in variables else params


def apply_backbone(
    module: nn.Module,
    backbone: Backbone,
    x: jax.Array,
    mask: jax.Array | None = None,
    key: PRNGKey | None = None,
) -> tuple[jax.Array, PyTree]:
    """Output of a Flax module, and its next running statistics.

    Args:
      module: module whose call takes only the inputs.
      backbone: from `init_backbone`.
      x: inputs [B, ...].
      mask: [B], the real examples, in training; None to use the running statistics, which then stay unchanged.
      key: key of dropout in training; None for no dropout.
    """
    params = dict(backbone)
    statistics = jax.lax.stop_gradient(params.pop(STATISTICS, {}))
    with one_pass(mask, training=key is not None):
        variables = {"params": params, STATISTICS: statistics}
        output, changed = module.apply(variables, x, rngs=key, mutable=[STATISTICS])
    return output, changed.get(STATISTICS, {})
