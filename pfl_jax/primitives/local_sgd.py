"""Local training: one recipe, `LocalSGD`, for mini-batch descent on one client's masked examples."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pfl_jax.base import ClientData, Loss, PRNGKey, PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.streams import AUGMENTATION

Optimizer = Literal["sgd", "adam", "adamw"]
"""Names of optimizers, see `LocalSGD.optimizer`."""

Augment = Callable[[PRNGKey, PyTree], PyTree]
"""Random changes to the inputs of a mini-batch: (key, x [B, ...]) -> x of the same shape; hashable."""

FORWARD_BATCH = 200
"""Examples of one forward pass: enough for full speed, few enough for the cache of a CPU."""


def _is_static_zero(value: float | jax.Array) -> bool:
    return isinstance(value, int | float) and value == 0


def _decay(weight_decay: float | jax.Array) -> optax.GradientTransformation:
    # A number that is exactly zero costs nothing; a traced one cannot be known to be zero.
    return optax.identity() if _is_static_zero(weight_decay) else optax.add_decayed_weights(weight_decay)


def sgd(
    lr: float | jax.Array, momentum: float | jax.Array = 0.0, weight_decay: float | jax.Array = 0.0
) -> optax.GradientTransformation:
    """Stochastic gradient descent as PyTorch's SGD applies it, which the papers used.

        g = gradient + weight_decay * params;  v = momentum * v + g;  params = params - lr * v

    Args:
      lr: learning rate, a number or a traced scalar; so are the others.
      momentum: factor of the velocity v, which starts at zero.
      weight_decay: added to the gradient before the velocity.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import local_sgd
      >>> optimizer = local_sgd.sgd(lr=0.1, momentum=0.5)
      >>> params, state = jnp.array(1.0), optimizer.init(jnp.array(1.0))
      >>> for _ in range(2):
      ...     params, state = local_sgd.descend(optimizer, jnp.array(1.0), params, state)
      ...     print(f"{params:.2f}")
      0.90
      0.75
    """
    return optax.chain(
        _decay(weight_decay),
        optax.identity() if _is_static_zero(momentum) else optax.trace(decay=momentum),
        optax.scale_by_learning_rate(lr),
    )


Count = TypeVar("Count", jax.Array, np.ndarray)


def num_steps(count: Count, batch_size: int, epochs: int | jax.Array = 1, *, drop_last: bool = False) -> Count:
    """Number of gradient steps that `LocalSGD.fit` takes on `count` examples.

    The last batch of an epoch may be incomplete; with drop_last it is left out, unless it is the only one.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import local_sgd
      >>> print(local_sgd.num_steps(jnp.array([50, 51]), batch_size=50, epochs=2))
      [2 4]
      >>> print(local_sgd.num_steps(jnp.array([49, 99]), batch_size=50, drop_last=True))
      [1 1]
    """
    steps = count // batch_size
    # One more where examples are left, or with drop_last where they are all there is.
    return cast(Count, epochs * (steps + ((count % batch_size > 0) & (not drop_last or steps == 0))))


FIXED_ORDER = 0
"""Seed of the order that epochs take without shuffling."""


def _epoch_order(key: PRNGKey, mask: jax.Array, length: int) -> jax.Array:
    """Random order of the real rows of mask [n], the first of all [length] entries; the others point at padding."""
    # One draw of 32 bits per row, whose value does not depend on how many rows follow it: so an epoch's
    # order does not depend on how far the client is padded. Sorting by (padding, bits) puts the real rows first.
    (n,) = mask.shape
    bits = jax.random.bits(key, (n,), jnp.uint32)
    _, _, order = jax.lax.sort((~mask, bits, jnp.arange(n, dtype=jnp.int32)), num_keys=2)
    return jnp.pad(order, (0, length - n))


def descend(
    optimizer: optax.GradientTransformation, gradient: PyTree, params: PyTree, opt_state: PyTree
) -> tuple[PyTree, PyTree]:
    """One step of the optimizer along a gradient: the next params and opt_state, the optimizer's state."""
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LocalSGD:
    """Recipe of local training: the optimizer, and how mini-batches are formed. A pytree; numbers may be traced.

    Attributes:
      lr: learning rate.
      momentum: momentum of SGD; Adam has its own decay rates of the moments, 0.9 and 0.999.
      weight_decay: weight decay: added to the gradient (sgd, adam), or to the step by itself (adamw).
      batch_size: examples of a mini-batch.
      epochs: local epochs of a round: passes over a client's examples.
      optimizer: sgd (as PyTorch's SGD), adam or adamw; it starts afresh in every round.
      clip_norm: global norm that the gradient of a mini-batch is scaled down to where it is larger; None for no limit.
      drop_last: leave out an epoch's last batch where it is incomplete, as PyTorch's DataLoader(drop_last=True) does.
        Unlike there, a client that is smaller than a batch keeps the one it has: otherwise it would never train.
      shuffle: draw a new order of the examples for every epoch; False takes one order, the same in all epochs, rounds
        and runs, so that with `drop_last` the same examples are left out always.
      augment: random changes to the inputs of every mini-batch, see `pfl_jax.data.augment`; None for none. Inputs that
        are features of a fixed backbone stay as they are.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from pfl_jax import ClientData, LocalSGD
      >>> from pfl_jax.primitives import losses
      >>> x = jnp.array([1.0, 2.0, 3.0, 0.0])
      >>> data = ClientData(x=x, y=2 * x, mask=jnp.array([True, True, True, False]))
      >>> def loss(w, batch):
      ...     return losses.masked_mean(jnp.square(w * batch.x - batch.y), batch.mask)
      >>> training = LocalSGD(lr=0.05, momentum=0.0, weight_decay=0.0, batch_size=2, epochs=20)
      >>> print(f"{training.fit(jax.random.key(0), jnp.array(0.0), data, loss):.2f}")
      2.00
    """

    lr: float | jax.Array = 0.01
    momentum: float | jax.Array = 0.5
    weight_decay: float | jax.Array = 5e-4
    batch_size: int = field(default=50, metadata={"static": True})
    epochs: int | jax.Array = 5
    optimizer: Optimizer = field(default="sgd", metadata={"static": True})
    clip_norm: float | jax.Array | None = None
    drop_last: bool = field(default=False, metadata={"static": True})
    shuffle: bool = field(default=True, metadata={"static": True})
    augment: Augment | None = field(default=None, metadata={"static": True})

    def replace(self, **changes: Any) -> "LocalSGD":
        """This recipe with other values.

        Args:
          changes: name of a field -> its value.
        """
        return dataclasses.replace(self, **changes)

    def plain(self, **changes: Any) -> "LocalSGD":
        """This recipe without momentum and weight decay, with other values.

        Args:
          changes: name of a field -> its value.
        """
        return dataclasses.replace(self, **{"momentum": 0.0, "weight_decay": 0.0, **changes})

    def transformation(self) -> optax.GradientTransformation:
        """The optimizer as an optax transformation, clipping first.

        Raises:
          InvalidInput: an unknown optimizer.
        """
        if self.optimizer == "sgd":
            steps = sgd(self.lr, self.momentum, self.weight_decay)
        elif self.optimizer == "adam":
            steps = optax.chain(_decay(self.weight_decay), optax.adam(self.lr))
        elif self.optimizer == "adamw":
            steps = optax.adamw(self.lr, weight_decay=self.weight_decay)
        else:
            raise InvalidInput(f"optimizer must be sgd, adam or adamw, not {self.optimizer!r}")
        return steps if self.clip_norm is None else optax.chain(optax.clip_by_global_norm(self.clip_norm), steps)

    def num_steps(self, count: "Count") -> "Count":
        """Gradient steps that `fit` takes on `count` examples, see `num_steps`."""
        return num_steps(count, self.batch_size, self.epochs, drop_last=self.drop_last)

    def fit(
        self,
        key: PRNGKey,
        params: PyTree,
        data: ClientData,
        loss: Loss,
        *,
        transformation: optax.GradientTransformation | None = None,
    ) -> PyTree:
        """Train params on a client's examples. The batches are those of `fold`.

        Freezing a part of a model is closing over it:

            training.fit(key, head, data, lambda head, batch: loss(merge(backbone, head), batch))

        Args:
          key: orders the examples and augments them.
          params: any pytree of float arrays.
          data: examples [n, ...] with their mask [n].
          loss: (params, ClientData of batch_size rows) -> scalar mean over the batch's mask.
          transformation: optimizer in the place of `transformation()`.
        """
        optimizer = self.transformation() if transformation is None else transformation

        def step(carry, batch):
            params, opt_state = carry
            return descend(optimizer, jax.grad(loss)(params, batch), params, opt_state)

        params, _ = self.fold(key, (params, optimizer.init(params)), data, step)
        return params

    def fold(self, key: PRNGKey, carry: Carry, data: ClientData, step: Callable[[Carry, ClientData], Carry]) -> Carry:
        """Fold carry = step(carry, batch) over the mini-batches of all epochs.

        The real examples are reshuffled every epoch; an epoch of a client with m of them takes ceil(m / batch_size)
        steps, the last on the rest, so a small client does not pay for a large one unless both run under one vmap.
        `drop_last` leaves out that last batch, `shuffle` False takes one order for all epochs. Trip counts are
        dynamic, so the result cannot be differentiated in reverse mode. With `augment`, the inputs of every mini-batch
        go through it with a key of their own; the order of the examples is the same.

        Args:
          key: orders the examples and augments them.
          carry: any pytree of arrays.
          data: examples [n, ...] with their mask [n].
          step: (carry, ClientData of batch_size rows) -> the next carry, of the same structure, shapes and types.

        Returns:
          The last carry; the first one where there are no epochs.

        Example:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> from pfl_jax import ClientData, LocalSGD
          >>> data = ClientData(x=jnp.arange(5.0), y=jnp.zeros(5), mask=jnp.array([True, True, True, False, False]))
          >>> def step(carry, batch):
          ...     return carry[0] + 1, carry[1] + jnp.sum(batch.x * batch.mask)
          >>> steps, total = LocalSGD(batch_size=2, epochs=2).fold(jax.random.key(0), (0, 0.0), data, step)
          >>> print(steps, total)  # two steps an epoch; each real example once an epoch
          4 6.0
        """
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
                if self.augment is not None:
                    epoch_key = jax.random.fold_in(jax.random.fold_in(key, AUGMENTATION), epoch_index)
                    batch = batch._replace(x=self.augment(jax.random.fold_in(epoch_key, index), batch.x))
                return step(carry, batch._replace(mask=index * size + jnp.arange(size) < count))

            return jax.lax.fori_loop(0, steps, batch_step, carry)

        return jax.lax.fori_loop(0, self.epochs, epoch, carry)

    def always_visited(self, mask: jax.Array) -> jax.Array:
        """Real examples that every epoch visits: bool [n]; a fixed order that drops its last batch leaves some out.

        Args:
          mask: [n], the real examples.

        Example:
          >>> import jax.numpy as jnp
          >>> from pfl_jax import LocalSGD
          >>> mask = jnp.ones(5, bool)
          >>> print(jnp.sum(LocalSGD(batch_size=2).always_visited(mask)))
          5
          >>> print(jnp.sum(LocalSGD(batch_size=2, drop_last=True, shuffle=False).always_visited(mask)))
          4
        """
        if self.shuffle or not self.drop_last:
            return mask
        (n,) = mask.shape
        count = jnp.sum(mask, dtype=jnp.int32)
        order = _epoch_order(jax.random.key(FIXED_ORDER), mask, n)
        taken = jnp.arange(n) < self.batch_size * num_steps(count, self.batch_size, drop_last=True)
        return jnp.zeros(n, bool).at[order].set(taken) & mask


def map_examples(
    fn: Callable[[PyTree], PyTree], x: PyTree, mask: jax.Array, *, batch_size: int = FORWARD_BATCH
) -> PyTree:
    """Apply fn to the rows of x in batches, so that memory does not grow with the client.

    Stops after the last real row, so a client pays for its own size, not for the padding.

    Args:
      fn: rows [batch, ...] -> rows [batch, ...], each output row a function of its input row alone.
      x: pytree of leaves [n, ...].
      mask: [n], the real rows.
      batch_size: rows of one call of fn, fewer if n is smaller.

    Returns:
      fn's rows [n, ...]; those of batches with padding only are zero.

    Example:
      >>> import jax.numpy as jnp
      >>> from pfl_jax.primitives import local_sgd
      >>> mask = jnp.arange(5) < 3
      >>> print(local_sgd.map_examples(lambda x: x + 1.0, jnp.zeros(5), mask, batch_size=2))  # the last batch: padding
      [1. 1. 1. 1. 0.]
    """
    (n,) = mask.shape
    size = min(batch_size, n)

    def rows(start):
        return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), x)

    shapes = jax.eval_shape(lambda: fn(rows(0)))
    outputs = jax.tree.map(lambda shape: jnp.zeros((n, *shape.shape[1:]), shape.dtype), shapes)

    def body(index, outputs):
        # The last slice moves back to end at n; its first rows are then computed twice, to the same values.
        start = jnp.minimum(index * size, n - size)
        return jax.tree.map(
            lambda output, new: jax.lax.dynamic_update_slice_in_dim(output, new, start, 0), outputs, fn(rows(start))
        )

    end = jnp.max(jnp.where(mask, jnp.arange(1, n + 1), 0))
    return jax.lax.fori_loop(0, (end + size - 1) // size, body, outputs)
