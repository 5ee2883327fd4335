"""Local training: one recipe, `LocalTraining`, for mini-batch descent on one client's masked examples."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, cast, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pfl_jax import hyper_parameters
from pfl_jax.base import ClientData, Loss, PRNGKey, PyTree, TrainingLoss
from pfl_jax.errors import InvalidInput
from pfl_jax.hyper_parameters import MOMENTUM, Count, Epochs, NotNegative, Positive
from pfl_jax.primitives.optimizers import add_weight_decay, sgd
from pfl_jax.primitives.optimizers import descend as descend
from pfl_jax.primitives.private_gradients import private_gradient
from pfl_jax.primitives.tree import map_statistics, register_unchecked, running_statistics
from pfl_jax.streams import AUGMENTATION, DROPOUT, EXAMPLE_NOISE

Optimizer = Literal["sgd", "adam", "adamw"]
"""Names of optimizers, see `LocalTraining.optimizer`."""

MakeOptimizer = Callable[[float | jax.Array], optax.GradientTransformation]
"""Function of the learning rate to an optimizer, such as optax.lion; hashable."""

Augment = Callable[[PRNGKey, PyTree], PyTree]
"""Random changes to the inputs of a mini-batch: (key, x [B, ...]) -> x of the same shape; hashable."""

Counts = TypeVar("Counts", jax.Array, np.ndarray)


def num_steps(count: Counts, batch_size: int, epochs: int | jax.Array = 1, *, drop_last: bool = False) -> Counts:
    """Number of gradient steps that `LocalTraining.fit` takes on `count` examples.

    The last batch of an epoch may be incomplete; with drop_last it is left out, unless it is the only one.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import local_training
      >>> print(local_training.num_steps(jnp.array([50, 51]), batch_size=50, epochs=2))
      [2 4]
      >>> print(local_training.num_steps(jnp.array([49, 99]), batch_size=50, drop_last=True))
      [1 1]
    """
    steps = count // batch_size
    # One more step for the remaining examples; with drop_last only if there is no complete batch.
    return cast(Counts, epochs * (steps + ((count % batch_size > 0) & (not drop_last or steps == 0))))


FIXED_ORDER = 0
"""Seed of the fixed order of the examples without shuffling."""


def _epoch_order(key: PRNGKey, mask: jax.Array, length: int) -> jax.Array:
    """Row numbers [length] that start with the real rows of mask [n] in random order.

    Then come the other rows, and row 0 again where length is above n; the caller's masks exclude all of these.
    """
    # The 32 random bits of a row do not depend on the number of rows, so the order does not depend on the amount of
    # padding. Sorting by (padding, bits) puts the real rows first.
    (n,) = mask.shape
    bits = jax.random.bits(key, (n,), jnp.uint32)
    _, _, order = jax.lax.sort((~mask, bits, jnp.arange(n, dtype=jnp.int32)), num_keys=2)
    return jnp.pad(order, (0, length - n))


Carry = TypeVar("Carry")

Step = Callable[[Carry, ClientData, PRNGKey], Carry]
"""Step on a mini-batch: (carry, mini-batch, key of its loss) -> the next carry."""


@register_unchecked
@dataclass(frozen=True)
class LocalTraining:
    """Recipe of local training: the optimizer and the mini-batches. A pytree, whose numbers may be traced.

    Attributes:
      lr: learning rate.
      momentum: momentum of SGD; other optimizers have their own. The moments of Adam and AdamW decay with rates 0.9 and
        0.999.
      weight_decay: weight decay, decoupled from the gradient by adamw, added to it by all others.
      batch_size: examples in a mini-batch.
      epochs: local epochs in a round, that is passes over a client's examples; phases of a method may have none.
      optimizer: sgd (as PyTorch's SGD), adam, adamw, or a function of the learning rate to an optax optimizer, such as
        optax.lion; its state is initialized anew in every round. One that needs the value of the loss, such as
        optax.polyak_sgd, gets that of the mini-batch, but not with dp_clip, nor in methods with steps of their own.
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

    lr: NotNegative | jax.Array = 0.01
    momentum: Annotated[float | jax.Array, MOMENTUM] = 0.5
    weight_decay: NotNegative | jax.Array = 5e-4
    batch_size: Count = field(default=50, metadata={"static": True})
    epochs: Epochs | jax.Array = 5
    optimizer: Optimizer | MakeOptimizer = field(default="sgd", metadata={"static": True})
    clip_norm: Positive | jax.Array | None = None
    drop_last: bool = field(default=False, metadata={"static": True})
    shuffle: bool = field(default=True, metadata={"static": True})
    augment: Augment | None = field(default=None, metadata={"static": True})
    dp_clip: Positive | jax.Array | None = None
    dp_noise: NotNegative | jax.Array = 0.0

    def __post_init__(self) -> None:
        """Raise InvalidInput for a value that no recipe can have; traced numbers pass."""
        if isinstance(self.optimizer, optax.GradientTransformation):
            raise InvalidInput(
                "optimizer must be a function of the learning rate, such as optax.adam, not what it returns: lr is the "
                "learning rate"
            )
        hyper_parameters.check(vars(self), _kinds())
        if self.dp_clip is None and isinstance(self.dp_noise, int | float) and self.dp_noise > 0:
            raise InvalidInput("dp_noise needs a dp_clip: noise alone does not make a gradient private")

    def replace(self, **changes: Any) -> "LocalTraining":
        """Copy of this recipe with other values.

        Args:
          changes: name of a field -> its new value.
        """
        return dataclasses.replace(self, **changes)

    def plain(self, **changes: Any) -> "LocalTraining":
        """Copy of this recipe without momentum and weight decay, and with other values.

        Args:
          changes: name of a field -> its new value.
        """
        return dataclasses.replace(self, **{"momentum": 0.0, "weight_decay": 0.0, **changes})

    def transformation(self) -> optax.GradientTransformation:
        """Optimizer as an optax gradient transformation; clipping comes first."""
        if self.optimizer == "sgd":
            steps = sgd(self.lr, self.momentum, self.weight_decay)
        elif self.optimizer == "adamw":
            steps = optax.adamw(self.lr, weight_decay=self.weight_decay)
        else:
            make = optax.adam if self.optimizer == "adam" else self.optimizer
            steps = optax.chain(add_weight_decay(self.weight_decay), make(self.lr))
        return steps if self.clip_norm is None else optax.chain(optax.clip_by_global_norm(self.clip_norm), steps)

    def num_steps(self, count: Counts) -> Counts:
        """Number of gradient steps that `fit` takes on `count` examples, see `num_steps`."""
        return num_steps(count, self.batch_size, self.epochs, drop_last=self.drop_last)

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
          loss: (params, ClientData of batch_size rows, key) -> scalar mean over the batch's mask; with dp_clip, of any
            number of rows. The key is another one in every step. A backbone with batch normalization needs a
            `TrainingLoss`, such as `pfl_jax.primitives.losses.supervised_loss`.
          transformation: optimizer to use in place of `transformation()`.

        Raises:
          InvalidInput: the optimizer needs more than a step has, or params has running statistics and loss gives none.
        """
        optimizer = optax.with_extra_args_support(self.transformation() if transformation is None else transformation)

        start, clip = (params, optimizer.init(params)), self.dp_clip

        def value_and_statistics(params, batch, key):
            # The old statistics have no gradient, also if a penalty is on all parameters.
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
            # Those of a mini-batch are not private: here they stay.
            return *descend(optimizer, gradient, running_statistics(params), params, opt_state), index + 1

        return self._fold(key, (*start, jnp.zeros((), jnp.int32)), data, private_step)[0]

    def fold(self, key: PRNGKey, carry: Carry, data: ClientData, step: Step[Carry]) -> Carry:
        """Fold carry = step(carry, batch, key) over the mini-batches of all epochs.

        The real examples are shuffled anew in every epoch. An epoch of a client with m real examples takes
        ceil(m / batch_size) steps, the last one on the remaining examples, so a small client costs less than a large
        one unless both run under one vmap. `drop_last`, `shuffle` and `augment` apply as described in `LocalTraining`;
        augmentation and losses have keys of their own, and do not change the order of the examples; all that makes
        steps (`lr`, `optimizer`, `clip_norm`) is the caller's. Trip counts are dynamic, so under jit the result cannot
        be differentiated in reverse mode: use `jax.jvp`.

        Args:
          key: key of the order of the examples, of the augmentation and of the steps' keys, see `pfl_jax.streams`.
          carry: any pytree of arrays.
          data: examples [n, ...] with their mask [n].
          step: (carry, ClientData of batch_size rows, key) -> the next carry, of the same structure, shapes and types.

        Returns:
          The last carry; the initial one if there are no epochs.

        Raises:
          InvalidInput: the recipe has a dp_clip, which only `fit` heeds.

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
                "dp_clip=None, dp_noise=0.0) for what need not be private"
            )
        return self._fold(key, carry, data, step)

    def _fold(self, key: PRNGKey, carry: Carry, data: ClientData, step: Step[Carry]) -> Carry:
        (n,) = data.mask.shape
        size = self.batch_size
        count = jnp.sum(data.mask, dtype=jnp.int32)
        padded_length = -(-n // size) * size
        steps = num_steps(count, size, drop_last=self.drop_last)
        fixed = None if self.shuffle else _epoch_order(jax.random.key(FIXED_ORDER), data.mask, padded_length)

        def epoch(epoch_index, carry):
            order = fixed
            if order is None:
                order = _epoch_order(jax.random.fold_in(key, epoch_index), data.mask, padded_length)

            def batch_step(index, carry):
                rows = jax.lax.dynamic_slice(order, (index * size,), (size,))
                batch = jax.tree.map(lambda leaf: leaf.at[rows].get(mode="promise_in_bounds"), data)

                def step_key(stream):
                    return jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, stream), epoch_index), index)

                if self.augment is not None:
                    batch = batch._replace(x=self.augment(step_key(AUGMENTATION), batch.x))
                batch = batch._replace(mask=index * size + jnp.arange(size) < count)
                return step(carry, batch, step_key(DROPOUT))

            return jax.lax.fori_loop(0, steps, batch_step, carry)

        return jax.lax.fori_loop(0, self.epochs, epoch, carry)

    def always_visited(self, mask: jax.Array) -> jax.Array:
        """Real examples that every epoch visits: bool [n]. A fixed order with `drop_last` always leaves some out.

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
        if self.shuffle or not self.drop_last:
            return mask
        (n,) = mask.shape
        count = jnp.sum(mask, dtype=jnp.int32)
        order = _epoch_order(jax.random.key(FIXED_ORDER), mask, n)
        visited = jnp.arange(n) < self.batch_size * num_steps(count, self.batch_size, drop_last=True)
        return jnp.zeros(n, bool).at[order].set(visited) & mask


@functools.cache
def _kinds() -> dict[str, Any]:
    """Annotation of each field of `LocalTraining`."""
    return get_type_hints(LocalTraining, include_extras=True)
