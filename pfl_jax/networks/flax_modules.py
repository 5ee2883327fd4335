"""A `Model` from any Flax module: its head is one of its parts, its backbone everything else."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfl_jax.base import STATISTICS, ClientData, Model, Params
from pfl_jax.errors import InvalidInput, describe_value
from pfl_jax.networks import module_checks
from pfl_jax.networks.passes import DROPOUT_LAYERS, apply_backbone, init_backbone, one_pass
from pfl_jax.tasks import CLASSIFICATION, Task

if TYPE_CHECKING:
    from flax import nnx


def from_flax(
    module: "nn.Module | Callable[[nnx.Rngs], nnx.Module]",
    input_shape: Sequence[int],
    num_classes: int,
    *,
    head: str = "head",
    input_dtype: Any = jnp.float32,
    task: Task = CLASSIFICATION,
) -> Model:
    """Model from a Flax module, whose call maps inputs [B, ...] to logits [B, K], or to other outputs of the task.

    The head is the part of the module that gives its logits; its input is the features. Everything else belongs to the
    backbone, including the running statistics of BatchNorm: in local training it normalizes by the mini-batch,
    otherwise by its running statistics, see `pfl_jax.networks.batch_norm`. Dropout drops out values only in local
    training, with a new mask in every step. For flax.linen this holds whatever `use_running_average` and
    `deterministic` are; for flax.nnx unless a call gives them.

    Args:
      module: a flax.linen module; or for flax.nnx a function rngs -> module, since each seed starts from its own
        parameters. Its call takes only the inputs: set `train` or `deterministic` as attributes.
      input_shape: shape of one input, without the batch.
      num_classes: K, or the number of outputs of another task.
      head: name of the part, "Dense_2" or "classifier"; slashes separate nested parts: "decoder/out".
      input_dtype: int32 for tokens.
      task: meaning of the outputs.

    Returns:
      The model; its parameters keep the module's own names and structure.

    Raises:
      InvalidInput: the module has no such part, or the part is not its last step; it keeps variables besides its
        parameters and the statistics of BatchNorm; it has BatchNorm or dropout in its head; or it cannot be called.

    Example:
      >>> import flax.linen as nn
      >>> import jax
      >>> from pfl_jax import networks
      >>> net = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(3)])
      >>> model = networks.from_flax(net, (8,), num_classes=3, head="layers_2")
      >>> jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(model.init, jax.random.key(0)))
      {'backbone': {'layers_0': {'bias': (16,), 'kernel': (8, 16)}}, 'head': {'bias': (3,), 'kernel': (16, 3)}}
    """
    inputs = jax.ShapeDtypeStruct((2, *input_shape), input_dtype)
    if _is_nnx_module(module):
        raise InvalidInput(
            "a flax.nnx module has its parameters already: give a function rngs -> module, so that each seed starts "
            "from its own parameters"
        )
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise InvalidInput(f"{module.__name__} is a class: give an instance of it, such as {module.__name__}()")
    if isinstance(module, type) and callable(module):
        raise InvalidInput(
            f"{module.__name__} is a class: give a flax.linen module, or for flax.nnx a function rngs -> module, such "
            f"as lambda rngs: {module.__name__}(rngs=rngs)"
        )
    if not callable(module):
        raise InvalidInput(
            f"{describe_value(module)} is neither a Model nor a flax.linen module nor a function rngs -> flax.nnx "
            "module"
        )
    with module_checks.applied(inputs, "the module cannot be called with nothing but inputs"):
        model = _from_module(module, inputs, num_classes, head.split("/"))._replace(task=task)
    check_model(model, input_shape, num_classes, input_dtype=input_dtype)
    return model


def to_flax(params: Params, head: str = "head") -> dict[str, Any]:
    """Variables for the `apply` of a flax.linen module, from the parameters of the model that `from_flax` made.

    Args:
      params: {"backbone": ..., "head": ...}.
      head: the `head` of `from_flax`.

    Returns:
      {"params": ...} and, with BatchNorm, {"batch_stats": ...} beside it.

    Example:
      >>> import flax.linen as nn
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from pfl_jax import networks
      >>> net = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(3)])
      >>> model = networks.from_flax(net, (8,), num_classes=3, head="layers_2")
      >>> params, x = model.init(jax.random.key(0)), jnp.ones((2, 8))
      >>> bool((net.apply(networks.to_flax(params, "layers_2"), x) == model.apply(params, x)).all())
      True
    """
    # Copied, since the head is added to it.
    tree = jax.tree.map(lambda leaf: leaf, dict(params["backbone"]))
    statistics = {STATISTICS: tree.pop(STATISTICS)} if STATISTICS in tree else {}
    *folders, last = head.split("/")
    place = tree
    for folder in folders:
        place = place.setdefault(folder, {})
    place[last] = params["head"]
    return {"params": tree} | statistics


def check_model(model: Model, input_shape: Sequence[int], num_classes: int, *, input_dtype: Any = jnp.float32) -> None:
    """Raise InvalidInput unless a model fits inputs and classes; nothing is computed.

    Args:
      model: any model.
      input_shape: shape of one input.
      num_classes: K.
      input_dtype: type of the inputs.
    """
    inputs = jax.ShapeDtypeStruct((2, *input_shape), input_dtype)
    with module_checks.applied(inputs):
        params = jax.eval_shape(model.init, jax.random.key(0))
        features = jax.eval_shape(model.features, params["backbone"], inputs)
        batch = ClientData(inputs, jnp.zeros(2, jnp.int32), jnp.ones(2, bool))
        jax.eval_shape(model.training_features, params["backbone"], batch, jax.random.key(0))
        logits = jax.eval_shape(model.classify, params["head"], features)
    if set(params) != {"backbone", "head"}:
        raise InvalidInput(f"the model's parameters are {sorted(params)}, not backbone and head")
    places = tuple(getattr(features, "shape", ())[1:2]) if model.task.kind == "sequences" else ()
    if getattr(features, "shape", None) != (2, *places, model.num_features):
        wanted = [2, *places, model.num_features]
        raise InvalidInput(
            f"two inputs have features {describe_value(features)}, not {wanted}: flatten before the head"
        )
    if logits.shape != (2, *places, num_classes) or model.num_classes != num_classes:
        what = f"{num_classes} classes" if model.task.kind == "classes" else f"the task {model.task.name}"
        raise InvalidInput(
            f"two inputs have logits {describe_value(logits)}, not {[2, *places, num_classes]} for {what}"
        )


def _is_nnx_module(module: Any) -> bool:
    # A user who has not imported flax.nnx has no such module.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(module, nnx.Module)


def _from_module(module: Any, inputs: jax.ShapeDtypeStruct, num_classes: int, path: Sequence[str]) -> Model:
    if isinstance(module, nn.Module):
        return _from_linen(module, inputs, num_classes, tuple(path))
    from pfl_jax.networks.nnx_modules import from_nnx

    return from_nnx(module, inputs, num_classes, path)


def _from_linen(module: nn.Module, inputs: jax.ShapeDtypeStruct, num_classes: int, path: tuple[str, ...]) -> Model:
    head_module, num_features = _linen_head(module, inputs, path)

    def init(key):
        params = init_backbone(module, key, jnp.zeros((1, *inputs.shape[1:]), inputs.dtype))
        return {"backbone": _without(params, path), "head": _lookup(params, path)}

    def batch_features(backbone, x, mask=None, key=None):
        seen = []

        def stop(call, args, kwargs, context):
            if context.module.path == path and context.method_name == "__call__":
                seen.append(args[0])
                return jnp.zeros((*args[0].shape[:-1], num_classes), args[0].dtype)
            return call(*args, **kwargs)

        with nn.intercept_methods(stop):
            _, statistics = apply_backbone(module, backbone, x, mask, key)
        return seen[0], statistics

    def features(backbone, x):
        return batch_features(backbone, x)[0]

    def classify(head, features):
        return cast(jax.Array, head_module.apply({"params": head}, features))

    return Model(init, features, classify, num_features, num_classes, batch_features)


def _linen_head(module: nn.Module, inputs: jax.ShapeDtypeStruct, path: tuple[str, ...]) -> tuple[nn.Module, int]:
    """Head of a module as a separate module, and its number of input features.

    Raises:
      InvalidInput: the module has no such part, the part cannot be a head, or there are variables besides parameters.
    """
    name = "/".join(path)
    found: list[tuple[nn.Module, Any, Any]] = []
    norms: set[tuple[str, ...]] = set()
    last: list[bool] = []

    def record(call, args, kwargs, context):
        result = call(*args, **kwargs)
        if isinstance(context.module, nn.BatchNorm):
            norms.add(context.module.path)
        if isinstance(context.module, DROPOUT_LAYERS) and context.module.path[: len(path)] == path:
            rates = (getattr(context.module, field, 0.0) for field in ("rate", "dropout_rate"))
            module_checks.refuse_dropout(name, any(rate > 0 for rate in rates))
        if context.module.path == path and context.method_name == "__call__":
            if len(args) != 1 or kwargs:
                raise InvalidInput(f"{name} takes more than the features: a head has one input")
            found.append((context.module.clone(parent=None, name=None), args[0], result))
        return result

    def first_call(key, x):
        with nn.intercept_methods(record), one_pass(None, training=False):
            result, variables = module.init_with_output(key, x)
        # Whether the head's result is used further is decided by identity: both are tracers here.
        last.append(bool(found) and result is found[-1][2])
        return result, variables

    _, variables = jax.eval_shape(first_call, jax.random.key(0), inputs)
    module_checks.refuse_variables(set(variables) - {"params", STATISTICS})
    _refuse_statistics(variables.get(STATISTICS, {}), norms, path)
    params = variables.get("params", {})
    module_checks.require_part(path, _linen_parts(params), there=_lookup(params, path) is not None)
    module_checks.require_one_last_call(name, len(found), last[-1])
    head, features, _ = found[0]
    # `check_model` refuses features of another shape than [2, d].
    return head, getattr(features, "shape", (0,))[-1]


def _refuse_statistics(statistics: Any, norms: set[tuple[str, ...]], head: tuple[str, ...]) -> None:
    """Raise InvalidInput for statistics in a head, and for statistics of modules other than BatchNorm."""
    for keys, _ in jax.tree_util.tree_leaves_with_path(statistics):
        path = tuple(key.key for key in keys[:-1])
        if path not in norms:
            raise InvalidInput(f"{'/'.join(path)} keeps statistics of its own: only those of BatchNorm are supported")
        if path[: len(head)] == head:
            raise InvalidInput(f"the head {'/'.join(head)} has BatchNorm, which only a backbone can have")


def _linen_parts(params: Any, prefix: str = "") -> list[str]:
    """Paths of all parts that have parameters."""
    found = []
    for name, inner in params.items():
        if hasattr(inner, "items"):
            found += [prefix + name, *_linen_parts(inner, f"{prefix}{name}/")]
    return found


def _lookup(params: Any, path: Sequence[str]) -> Any:
    """Parameters of a part; None if there is no such part."""
    for part in path:
        params = params.get(part) if hasattr(params, "get") else None
    return params


def _without(params: Any, path: Sequence[str]) -> dict[str, Any]:
    """Parameters without a part, and without folders that this leaves empty."""
    first, *rest = path
    kept = {name: inner for name, inner in params.items() if name != first}
    inner = _without(params[first], rest) if rest else {}
    return kept | ({first: inner} if inner else {})
