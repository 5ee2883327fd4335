"""Models from flax.nnx modules, imported where one is given: importing flax.nnx takes its time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from pfl_jax.base import Model, PyTree
from pfl_jax.errors import InvalidInput
from pfl_jax.networks import module_checks


class _Pass(nnx.Module):
    """In the place of a head: the features as they are."""

    def __init__(self, record: Callable[[jax.Array], None]):
        self.record = record

    def __call__(self, x: jax.Array) -> jax.Array:
        self.record(x)
        return x


def from_nnx(
    make: Callable[[nnx.Rngs], nnx.Module], inputs: jax.ShapeDtypeStruct, num_classes: int, path: Sequence[str]
) -> Model:
    """Model from a function that makes flax.nnx modules, see `pfl_jax.networks.from_flax`.

    Args:
      make: the function.
      inputs: shape and type of two inputs.
      num_classes: K.
      path: of the head in the module.

    Raises:
      InvalidInput: the module cannot become a `Model`.
    """
    seen: list[jax.Array] = []
    calls: list[tuple[int, bool]] = []

    def record(x: jax.Array) -> None:
        # Two at most are kept: their arrays belong to traces that are over.
        seen.append(x)
        del seen[:-2]

    def split(rngs: nnx.Rngs) -> tuple[nnx.Module, Any]:
        return _without_head(make(rngs), path, record)

    graphs = [nnx.split(part) for part in nnx.eval_shape(lambda: split(nnx.Rngs(0)))]
    kinds = {type(leaf) for _, state in graphs for _, leaf in nnx.to_flat_state(state)}
    others = {kind.__name__ for kind in kinds if not issubclass(kind, nnx.Param)}
    if any(issubclass(kind, nnx.BatchStat) for kind in kinds):
        raise InvalidInput(
            "BatchNorm in a flax.nnx module is not supported: write the module in flax.linen, or use GroupNorm"
        )
    module_checks.refuse_variables(others)

    def apply(which: int, params: PyTree, x: jax.Array) -> Any:
        graph, shapes = graphs[which]
        state = jax.tree.map(lambda leaf: leaf, shapes)
        nnx.replace_by_pure_dict(state, params)
        module: Any = nnx.merge(graph, state)
        return module(x)

    def init(key):
        backbone, head = (nnx.to_pure_dict(nnx.state(part)) for part in split(nnx.Rngs(key)))
        return {"backbone": backbone, "head": head}

    def probe(params, x):
        seen.clear()
        result = apply(0, params, x)
        calls.append((len(seen), bool(seen) and seen[-1] is result))
        return result

    params = jax.eval_shape(init, jax.random.key(0))
    features = jax.eval_shape(probe, params["backbone"], inputs)
    module_checks.require_one_last_call("/".join(path), *calls[-1])
    num_features = module_checks.num_features(features)
    return Model(init, functools.partial(apply, 0), functools.partial(apply, 1), num_features, num_classes)


def _without_head(module: Any, path: Sequence[str], record: Callable[[jax.Array], None]) -> tuple[nnx.Module, Any]:
    """An nnx module with `_Pass` in the place of its head, and the head.

    Raises:
      InvalidInput: it is no module, or has no such part.
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
    """Part of an nnx module, an attribute or a place in a list; None without one."""
    if isinstance(owner, list | tuple | nnx.List) and name.isdecimal() and int(name) < len(owner):
        return owner[int(name)]
    return getattr(owner, name, None)


def _nnx_parts(module: nnx.Module) -> list[str]:
    """Paths of all parts of a module."""
    return ["/".join(map(str, path)) for path, part in nnx.iter_modules(module) if path]
