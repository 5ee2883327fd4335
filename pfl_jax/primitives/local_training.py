"""Local training: one recipe, `LocalTraining`, for mini-batch descent on one client's masked examples."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_type_hints

import jax
import jax.numpy as jnp
import optax

from pfl_jax.base import ClientData, Loss, PRNGKey, PyTree, TrainingLoss
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.mini_batches import Augment, Carry, Counts, Step, first_in_fixed_order, fold_batches
from pfl_jax.primitives.mini_batches import num_steps as num_steps
from pfl_jax.primitives.optimizers import add_weight_decay, initial_state, sgd
from pfl_jax.primitives.optimizers import descend as descend
from pfl_jax.primitives.private_gradients import private_gradient
from pfl_jax.primitives.tree import map_statistics, register_unchecked, running_statistics
from pfl_jax.streams import EXAMPLE_NOISE
from pfl_jax.validation import BelowOne, Count, Epochs, NotNegative, Positive, check_values

Optimizer = Literal["sgd", "adam", "adamw"]
"""Names of optimizers, see `LocalTraining.optimizer`."""

MakeOptimizer = Callable[[float | jax.Array], optax.GradientTransformation]
"""Function of the learning rate to an optimizer, such as optax.lion; hashable."""

RATES = {"lr": 0.01, "momentum": 0.5, "weight_decay": 5e-4}
"""Numbers of an optimizer that a recipe makes, with their defaults; a given optimizer has its own numbers."""

NOT_GIVEN: Any = None
"""Placeholder for a number that has a default, until `LocalTraining.__post_init__`."""

EPOCHS = 5
"""Default number of local epochs."""


@register_unchecked
@dataclass(frozen=True)
class LocalTraining:
    """Recipe of local training: the optimizer and the mini-batches. A pytree, whose numbers may be traced.

    Attributes:
      lr: learning rate, 0.01 by default; None beside an optimizer with its own learning rate.
      momentum: momentum of SGD, 0.5 by default; other optimizers have their own. The moments of Adam and AdamW decay
        with rates 0.9 and 0.999.
      weight_decay: weight decay, 5e-4 by default, decoupled from the gradient by adamw, added to it by all others.
      batch_size: examples in a mini-batch.
      epochs: local epochs in a round, that is passes over a client's examples, 5 by default; phases of a method may
        have none. None beside local_steps.
      local_steps: gradient steps of every client in a round in place of epochs, on the mini-batches of one reshuffled
        epoch after another.
      optimizer: sgd (as PyTorch's SGD), adam, adamw; any optimizer of optax, such as optax.adam(1e-3), which has its
        own lr, momentum and weight_decay; or a function of the learning rate to one, such as optax.lion. Its state is
        initialized anew for each client in every round and phase, so a schedule in it starts again from step 0 there.
        An optimizer that needs the value of the loss, such as optax.polyak_sgd, gets the mini-batch's, except with
        dp_clip and in methods that compute their steps themselves.
      clip_norm: largest global norm of a mini-batch's gradient; larger gradients are scaled down to it. None for no
        limit.
      drop_last: whether to leave out an incomplete last batch of an epoch, as PyTorch's DataLoader(drop_last=True)
        does. Unlike there, a client with less than one complete batch keeps its only batch, so that it trains.
      shuffle: whether every epoch has a new random order of the examples. Without it the order is the same in all
        epochs, rounds and runs, and with `drop_last` the same examples are always left out.
      augment: random augmentation of the inputs of every mini-batch, see `pfl_jax.data.augment`; None for none. It does
        not apply to precomputed features.
      dp_clip: largest norm of a single example's gradient over all parameters that are trained together, with which
        `fit` takes the steps of DP-SGD, see `pfl_jax.primitives.private_gradients`; None for ordinary steps. The sum of
        a mini-batch is divided by batch_size, also where it has fewer examples.
      dp_noise: standard deviation of the noise on that sum, in units of dp_clip.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from pfl_jax import ClientData, LocalTraining
      >>> from pfl_jax.primitives import losses
      >>> x = jnp.array([1.0, 2.0, 3.0, 0.0])
      >>> data = ClientData(x=x, y=2 * x, mask=jnp.array([True, True, True, False]))
      >>> def loss(w, batch, key):
      ...     return losses.masked_mean(jnp.square(w * batch.x - batch.y), batch.mask)
      >>> training = LocalTraining(lr=0.05, momentum=0.0, weight_decay=0.0, batch_size=2, epochs=20)
      >>> print(f"{training.fit(jax.random.key(0), jnp.array(0.0), data, loss):.2f}")
      2.00
    """

    lr: NotNegative | jax.Array = NOT_GIVEN
    momentum: BelowOne | jax.Array = NOT_GIVEN
    weight_decay: NotNegative | jax.Array = NOT_GIVEN
    batch_size: Count = field(default=50, metadata={"static": True})
    epochs: Epochs | jax.Array = NOT_GIVEN
    local_steps: Count | jax.Array | None = field(default=None, kw_only=True)
    optimizer: Optimizer | MakeOptimizer | optax.GradientTransformation = field(
        default="sgd", metadata={"static": True}
    )
    clip_norm: Positive | jax.Array | None = None
    drop_last: bool = field(default=False, metadata={"static": True})
    shuffle: bool = field(default=True, metadata={"static": True})
    augment: Augment | None = field(default=None, metadata={"static": True})
    dp_clip: Positive | jax.Array | None = None
    dp_noise: NotNegative | jax.Array = 0.0

    def __post_init__(self) -> None:
        """Raise InvalidInput for a value that no recipe can have; traced numbers pass."""
        if all(getattr(self, field.name) is field.default for field in dataclasses.fields(self)):
            object.__setattr__(self, "_says_nothing", True)
        for name, default in RATES.items():
            given = getattr(self, name) is not None
            if given and self.has_own_optimizer:
                raise InvalidInput(
                    f"{name} would have no effect beside an optimizer that has its own: give the optimizer alone, or a "
                    "function of the learning rate, such as optimizer=optax.adam with lr=1e-3"
                )
            if not given and not self.has_own_optimizer:
                object.__setattr__(self, name, default)
        if self.local_steps is None and self.epochs is None:
            object.__setattr__(self, "epochs", EPOCHS)
        elif self.local_steps is not None and self.epochs is not None:
            raise InvalidInput("epochs and local_steps exclude each other: local_steps counts mini-batches, not passes")
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        check_values({name: value for name, value in given.items() if value is not None}, _kinds())
        if self.dp_clip is None and isinstance(self.dp_noise, int | float) and self.dp_noise > 0:
            raise InvalidInput("dp_noise needs a dp_clip: noise alone does not make a gradient private")

    @property
    def says_nothing(self) -> bool:
        """Whether this recipe was made without any value, as LocalTraining()."""
        return vars(self).get("_says_nothing", False)

    def replace(self, **changes: Any) -> "LocalTraining":
        """Copy of this recipe with other values.

        Args:
          changes: name of a field -> its new value. An optimizer that has its own learning rate replaces the numbers of
            RATES too; epochs replace local_steps, and the other way round.
        """
        if changes.get("local_steps") is not None:
            changes = {"epochs": NOT_GIVEN} | changes
        elif changes.get("epochs") is not None:
            changes = {"local_steps": None} | changes
        if isinstance(changes.get("optimizer"), optax.GradientTransformation):
            changes = dict.fromkeys(RATES, NOT_GIVEN) | changes
        return dataclasses.replace(self, **changes)

    @property
    def has_own_optimizer(self) -> bool:
        """Whether the optimizer has its own learning rate, not `lr`."""
        return isinstance(self.optimizer, optax.GradientTransformation)

    def phase(self, lr: float | jax.Array, **changes: Any) -> "LocalTraining":
        """Recipe of another phase of a method, with another learning rate.

        It has this recipe's optimizer or, if that has its own learning rate, SGD with the default momentum and weight
        decay.

        Args:
          lr: learning rate.
          changes: name of a field -> its new value.
        """
        steps = {"optimizer": "sgd"} if self.has_own_optimizer else {}
        return self.replace(**{**steps, "lr": lr, **changes})

    def plain(self, lr: float | jax.Array, **changes: Any) -> "LocalTraining":
        """Recipe of another `phase` without momentum and weight decay.

        Args:
          lr: learning rate.
          changes: name of a field -> its new value.
        """
        return self.phase(lr, **{"momentum": 0.0, "weight_decay": 0.0, **changes})

    def require_lr(self, use: str) -> None:
        """Raise InvalidInput for an optimizer with its own learning rate, where a method uses `lr` itself.

        Args:
          use: the part of the method that uses `lr`.
        """
        if self.has_own_optimizer:
            raise InvalidInput(
                f"{use} needs lr, which a recipe does not have beside an optimizer with its own learning rate: give a "
                "function of the learning rate, such as optimizer=optax.adam with lr=1e-3"
            )

    def transformation(self) -> optax.GradientTransformation:
        """Optimizer as an optax gradient transformation; clipping comes first."""
        if isinstance(self.optimizer, optax.GradientTransformation):
            steps = self.optimizer
        elif self.optimizer == "sgd":
            steps = sgd(self.lr, self.momentum, self.weight_decay)
        elif self.optimizer == "adamw":
            steps = optax.adamw(self.lr, weight_decay=self.weight_decay)
        else:
            make = optax.adam if self.optimizer == "adam" else self.optimizer
            steps = optax.chain(add_weight_decay(self.weight_decay), make(self.lr))
        return steps if self.clip_norm is None else optax.chain(optax.clip_by_global_norm(self.clip_norm), steps)

    def num_steps(self, count: Counts) -> Counts:
        """Number of gradient steps that `fit` takes on `count` examples, see `num_steps`."""
        if self.local_steps is not None:
            return cast(Counts, self.local_steps * (count > 0))
        return num_steps(count, self.batch_size, self.epochs, drop_last=self.drop_last)

    @property
    def most_passes(self) -> int | jax.Array:
        """Largest number of passes over a client's examples in a round: local_steps if one batch has all examples."""
        return self.epochs if self.local_steps is None else self.local_steps

    def fit(
        self,
        key: PRNGKey,
        params: PyTree,
        data: ClientData,
        loss: Loss | TrainingLoss,
        *,
        transformation: optax.GradientTransformation | None = None,
    ) -> PyTree:
        """Train params on a client's examples, with the mini-batches of `fold`.

        To freeze a part of a model, close over it:

            training.fit(key, head, data, lambda head, batch, key: loss(merge(backbone, head), batch, key))

        Args:
          key: key of the order of the examples, of the augmentation, of the noise and of the losses.
          params: any pytree of float arrays.
          data: examples [n, ...] with their mask [n].
          loss: (params, ClientData of at most batch_size rows, key) -> scalar mean over the batch's mask. The key
            differs in every step. A backbone with batch normalization needs a `TrainingLoss`, such as
            `pfl_jax.primitives.losses.supervised_loss`.
          transformation: optimizer to use in place of `transformation()`.

        Raises:
          InvalidInput: the optimizer cannot start from params or needs more than a step has, or params has running
            statistics and loss gives none.
        """
        optimizer = optax.with_extra_args_support(self.transformation() if transformation is None else transformation)

        start, clip = (params, initial_state(optimizer, params)), self.dp_clip

        def value_and_statistics(params, batch, key):
            # The old statistics have no gradient, even if a penalty covers all parameters.
            result = loss(map_statistics(jax.lax.stop_gradient, params), batch, key)
            return result if isinstance(result, tuple) else (result, ())

        def step(carry, batch, key):
            params, opt_state = carry
            (value, statistics), gradient = jax.value_and_grad(value_and_statistics, has_aux=True)(params, batch, key)
            return descend(optimizer, gradient, statistics, params, opt_state, value=value)

        if clip is None:
            return self._fold(key, start, data, step)[0]

        def value(params, batch, key):
            return value_and_statistics(params, batch, key)[0]

        def private_step(carry, batch, _):
            params, opt_state, index = carry
            noise_key = jax.random.fold_in(jax.random.fold_in(key, EXAMPLE_NOISE), index)
            gradient = private_gradient(
                noise_key, value, params, batch, clip=clip, noise=self.dp_noise, size=self.batch_size
            )
            # A mini-batch's statistics are not private: the old ones stay.
            return *descend(optimizer, gradient, running_statistics(params), params, opt_state), index + 1

        return self._fold(key, (*start, jnp.zeros((), jnp.int32)), data, private_step)[0]

    def fold(self, key: PRNGKey, carry: Carry, data: ClientData, step: Step[Carry]) -> Carry:
        """Fold carry = step(carry, batch, key) over the mini-batches of all epochs.

        The real examples are shuffled anew in every epoch. An epoch of a client with m real examples takes
        ceil(m / batch_size) steps, the last one on the remaining examples, so a small client costs less than a large
        one unless both run under one vmap. With `local_steps` the last epoch may be incomplete. `drop_last`, `shuffle`
        and `augment` apply as described in `LocalTraining`; augmentation and losses have separate keys, and do not
        change the order of the examples. The caller's `step` has to apply `lr`, `optimizer` and `clip_norm`. The result
        has derivatives in both modes; reverse mode needs numbers of epochs or steps that are not traced.

        Args:
          key: key of the order of the examples, of the augmentation and of the steps' keys, see `pfl_jax.streams`.
          carry: any pytree of arrays.
          data: examples [n, ...] with their mask [n].
          step: (carry, ClientData, key) -> the next carry, of the same structure, shapes and types. A mini-batch has
            batch_size rows, or n if that is less. After the last whole batch of n rows it has only the rows that are
            left, if that saves a fifth of the rows of an epoch: 60 examples in batches of 50 are 50 rows and 10.

        Returns:
          The last carry; the initial one if there are no epochs.

        Raises:
          InvalidInput: the recipe has a dp_clip, which only `fit` applies.

        Example:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> from pfl_jax import ClientData, LocalTraining
          >>> data = ClientData(x=jnp.arange(5.0), y=jnp.zeros(5), mask=jnp.array([True, True, True, False, False]))
          >>> def step(carry, batch, key):
          ...     return carry[0] + 1, carry[1] + jnp.sum(batch.x * batch.mask)
          >>> steps, total = LocalTraining(batch_size=2, epochs=2).fold(jax.random.key(0), (0, 0.0), data, step)
          >>> print(steps, total)  # two steps an epoch; each real example once an epoch
          4 6.0
        """
        if self.dp_clip is not None:
            raise InvalidInput(
                "fold takes no private steps, and the recipe has a dp_clip: train by LocalTraining.fit, or replace("
                "dp_clip=None, dp_noise=0.0) if it need not be private"
            )
        return self._fold(key, carry, data, step)

    def _fold(self, key: PRNGKey, carry: Carry, data: ClientData, step: Step[Carry]) -> Carry:
        names = ("batch_size", "epochs", "local_steps", "drop_last", "shuffle", "augment")
        return fold_batches(key, carry, data, step, **{name: getattr(self, name) for name in names})

    def always_visited(self, mask: jax.Array) -> jax.Array:
        """Real examples that a round may visit: bool [n].

        A fixed order with `drop_last`, or with fewer steps than an epoch has, always leaves out the same examples.

        Args:
          mask: [n], the real examples.

        Example:
          >>> import jax.numpy as jnp
          >>> from pfl_jax import LocalTraining
          >>> mask = jnp.ones(5, bool)
          >>> print(jnp.sum(LocalTraining(batch_size=2).always_visited(mask)))
          5
          >>> print(jnp.sum(LocalTraining(batch_size=2, drop_last=True, shuffle=False).always_visited(mask)))
          4
        """
        if self.shuffle:
            return mask
        steps = num_steps(jnp.sum(mask, dtype=jnp.int32), self.batch_size, drop_last=self.drop_last)
        if self.local_steps is not None:
            steps = jnp.minimum(steps, self.local_steps)
        return first_in_fixed_order(mask, self.batch_size * steps)


@functools.cache
def _kinds() -> dict[str, Any]:
    """Annotation of each field of `LocalTraining`."""
    return get_type_hints(LocalTraining, include_extras=True)
