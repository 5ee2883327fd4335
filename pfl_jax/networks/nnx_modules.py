"""Models from flax.nnx modules; this module is imported only if one is given, because importing flax.nnx takes long."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pfl_jax.base import STATISTICS, Model, PRNGKey, PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.networks import module_checks
from pfl_jax.networks.batch_norm import normalize
from pfl_jax.networks.layers import NNX_INTERCEPTOR


class _Pass(nnx.Module):
    """Stand-in for a head that returns the features unchanged."""

    def __init__(self, record: Callable[[jax.Array], None]):
        self.record = record

    def __call__(self, x: jax.Array) -> jax.Array:
        self.record(x)
        return x


class _MaskedBatchNorm(nnx.BatchNorm):
    """Batch normalization whose statistics leave out padded examples."""

    examples: jax.Array | None = None

    def __call__(self, x, use_running_average=None, *, mask=None):
        scale, bias = (1.0 if self.scale is None else self.scale[...]), (0.0 if self.bias is None else self.bias[...])
        running = {"mean": self.mean[...], "var": self.var[...]}
        y, running = normalize(x, scale, bias, running, self.examples, epsilon=self.epsilon, decay=self.momentum)
        self.mean[...], self.var[...] = running["mean"], running["var"]
        return y


@functools.cache
def _intercepted(kind: type) -> type:
    """Subclass of a class of modules whose calls go to `NNX_INTERCEPTOR`."""

    class Intercepted(kind):
        def __call__(self, *args, **kwargs):
            def call(*args):
                return kind.__call__(self, *args, **kwargs)

            return self.interceptor(call, self, self.path, args)

    return Intercepted


class _Part(NamedTuple):
    """Part of a module, without its values.

    Attributes:
      graph: definition of the module.
      params, statistics, random: shapes of its parameters, of its running statistics and of its random streams.
    """

    graph: Any
    params: Any
    statistics: Any
    random: Any

    def module(self, values: PyTree, mask: jax.Array | None, key: PRNGKey | None) -> Any:
        """The module with these values: in training if there is a key, otherwise deployed.

        Args:
          values: parameters, and the running statistics, if any, under `STATISTICS`.
          mask: [B], the real examples, in training.
          key: key of all random streams; None for a deployed module.
        """
        values = dict(values)
        statistics = jax.lax.stop_gradient(values.pop(STATISTICS, {}))
        random = jax.tree.leaves(self.random)
        for index, leaf in enumerate(random):
            own = jax.random.fold_in(jax.random.key(0) if key is None else key, index)
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            random[index] = jax.random.split(own, leaf.shape) if is_key else jnp.zeros(leaf.shape, leaf.dtype)
        streams = jax.tree.unflatten(jax.tree.structure(self.random), random)
        filled = _filled(self.params, values), _filled(self.statistics, statistics), streams
        module: Any = nnx.merge(self.graph, *filled)
        (module.eval if key is None else module.train)()
        part: Any
        for path, part in nnx.iter_modules(module):
            if isinstance(part, _MaskedBatchNorm):
                part.examples = mask
            elif path and (interceptor := NNX_INTERCEPTOR.get()) is not None:
                part.path, part.interceptor = tuple(map(str, path)), interceptor
                part.__class__ = _intercepted(type(part))
        return module


def from_nnx(
    make: Callable[[nnx.Rngs], nnx.Module], inputs: jax.ShapeDtypeStruct, num_classes: int, path: Sequence[str]
) -> Model:
    """Model from a function that makes flax.nnx modules, see `pfl_jax.networks.from_flax`.

    Args:
      make: the function.
      inputs: shape and type of two inputs.
      num_classes: K.
      path: path of the head in the module.

    Raises:
      InvalidInput: the module cannot become a `Model`.
    """
    seen: list[jax.Array] = []
    calls: list[tuple[int, bool]] = []
    name = "/".join(path)

    def record(x: jax.Array) -> None:
        # At most two are kept: their arrays belong to finished traces.
        seen.append(x)
        del seen[:-2]

    def split(rngs: nnx.Rngs) -> tuple[nnx.Module, Any]:
        return _without_head(make(rngs), path, record)

    backbone_part, head_part = (_part_of(module) for module in nnx.eval_shape(lambda: split(nnx.Rngs(0))))
    module_checks.refuse_dropout(name, bool(jax.tree.leaves(head_part.random)))
    if jax.tree.leaves(head_part.statistics):
        raise InvalidInput(f"the head {name} has BatchNorm, which only a backbone can have")

    def batch_features(backbone, x, mask=None, key=None):
        module = backbone_part.module(backbone, mask, key)
        return module(x), nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))

    def features(backbone, x):
        return batch_features(backbone, x)[0]

    def classify(head, features):
        return head_part.module(head, None, None)(features)

    def init(key):
        backbone, head = split(nnx.Rngs(key))
        statistics = nnx.to_pure_dict(nnx.state(backbone, nnx.BatchStat))
        params, head_params = (nnx.to_pure_dict(nnx.state(part, nnx.Param)) for part in (backbone, head))
        return {"backbone": params | ({STATISTICS: statistics} if statistics else {}), "head": head_params}

    def probe(params, x):
        seen.clear()
        module = backbone_part.module(params, None, None)
        before = jax.tree.leaves(nnx.state(module, nnx.RngCount))
        result = module(x)
        calls.append((len(seen), bool(seen) and seen[-1] is result))
        after = jax.tree.leaves(nnx.state(module, nnx.RngCount))
        if any(new is not old for new, old in zip(after, before, strict=True)):
            raise InvalidInput("the module draws random numbers when deployed too: let its dropout be deterministic")
        return result

    params = jax.eval_shape(init, jax.random.key(0))
    found = jax.eval_shape(probe, params["backbone"], inputs)
    module_checks.require_one_last_call(name, *calls[-1])
    # `check_model` refuses features of another shape than [2, d].
    num_features = getattr(found, "shape", (0,))[-1]
    return Model(init, features, classify, num_features, num_classes, batch_features)


def _part_of(module: Any) -> _Part:
    """Shapes of a module, whose BatchNorm becomes `_MaskedBatchNorm`.

    Raises:
      InvalidInput: the module keeps variables other than parameters, random streams and the statistics of BatchNorm.
    """
    for _, part in nnx.iter_modules(module):
        if type(part) is nnx.BatchNorm:
            if part.axis != -1:
                raise InvalidInput(f"BatchNorm with axis={part.axis} is not supported: channels must be the last axis")
            # Changed in place, since the part may occur in several other parts.
            part.__class__ = _MaskedBatchNorm
        elif any(isinstance(value, nnx.BatchStat) for value in vars(part).values()):
            raise InvalidInput(
                f"{type(part).__name__} keeps statistics of its own: only those of BatchNorm are supported"
            )
    graph, params, statistics, random, others = nnx.split(module, nnx.Param, nnx.BatchStat, nnx.RngState, ...)
    module_checks.refuse_variables({type(leaf).__name__ for _, leaf in nnx.to_flat_state(others)})
    return _Part(graph, params, statistics, random)


def _filled(shapes: Any, values: PyTree) -> Any:
    """A state of these shapes with values from a dictionary."""
    state = jax.tree.map(lambda leaf: leaf, shapes)
    nnx.replace_by_pure_dict(state, values)
    return state


def _without_head(module: Any, path: Sequence[str], record: Callable[[jax.Array], None]) -> tuple[nnx.Module, Any]:
    """An nnx module with `_Pass` in place of its head, and the head.

    Raises:
      InvalidInput: `module` is not an nnx module, or has no such part.
    """
    if not isinstance(module, nnx.Module):
        raise InvalidInput(f"the function of rngs gives a {type(module).__name__}, not a flax.nnx module")
    owner: Any = module
    for part in path[:-1]:
        owner = _part(owner, part)
    head = _part(owner, path[-1]) if owner is not None else None
    module_checks.require_part(path, _nnx_parts(module), there=isinstance(head, nnx.Module))
    if isinstance(owner, list | nnx.List):
        owner[int(path[-1])] = _Pass(record)
    else:
        setattr(owner, path[-1], _Pass(record))
    return module, head


def _part(owner: Any, name: str) -> Any:
    """Part of an nnx module: an attribute or an entry of a list; None if there is no such part."""
    if isinstance(owner, list | tuple | nnx.List) and name.isdecimal() and int(name) < len(owner):
        return owner[int(name)]
    return getattr(owner, name, None)


def _nnx_parts(module: nnx.Module) -> list[str]:
    """Paths of all parts of a module."""
    return ["/".join(map(str, path)) for path, part in nnx.iter_modules(module) if path]
