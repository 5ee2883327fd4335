"""Graphs that `torch.export` makes of a module, and their results in JAX."""

import importlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from pfl_jax.errors import InvalidInput
from pfl_jax.networks import torch_operations
from pfl_jax.networks.batch_norm import normalize
from pfl_jax.networks.torch_operations import Image, channels_first, channels_last

TYPES = {"float32": "float32", "float64": "float32", "float16": "float32", "bfloat16": "float32", "int64": "int32"}
TYPES |= {name: name for name in ("int32", "int16", "int8", "uint8", "bool")}
"""Types of PyTorch -> types of their arrays in JAX."""

IGNORED = {"_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range_for_size", "sym_constrain_range"}
"""Operations that compute nothing."""

MAY_ALIAS = {"reshape", "flatten", "contiguous", "to", "type_as", "dropout", "feature_dropout", "expand_as", "identity"}
"""Operations whose result may be a view of their first argument, besides those whose schema says so."""

INPUT = "inputs"


class Value(NamedTuple):
    """Result of an earlier step, or an input, referred to by name."""

    name: str


class Step(NamedTuple):
    """One operation of a graph.

    Attributes:
      result: name of the result.
      operation: a name of `torch_operations.NAMES`, or a function of numbers.
      args, kwargs: numbers, names of types, `Value`s, and lists of these.
    """

    result: str
    operation: str | Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Program:
    """Computation of a module with one input.

    Attributes:
      steps: operations in order; their inputs are INPUT, and the module's parameters and buffers by their names.
      result: result of the program.
      constants: arrays inside the graph itself, by name.
    """

    steps: tuple[Step, ...]
    result: Any
    constants: dict[str, np.ndarray]

    @property
    def statistics(self) -> set[str]:
        """Names of the buffers with running statistics of batch normalization."""
        norms = [step.args for step in self.steps if step.operation == "batch_norm"]
        return {one.name for args in norms for one in args[3:5] if one is not None}

    @property
    def inputs(self) -> set[str]:
        """Names of all parameters and buffers that the program reads."""
        read = _names(self.result).union(*(_names((step.args, step.kwargs)) for step in self.steps))
        return {name for name in read if not name.startswith("%")} - self.constants.keys() - {INPUT}

    def same(self, other: "Program") -> bool:
        """Whether another program is the same computation."""
        constants = self.constants.keys() == other.constants.keys() and all(
            np.array_equal(value, other.constants[name]) for name, value in self.constants.items()
        )
        return constants and (self.steps, self.result) == (other.steps, other.result)

    @property
    def unknown(self) -> set[str]:
        """Names of operations without an implementation here."""
        names = {step.operation for step in self.steps if isinstance(step.operation, str)}
        return names - torch_operations.NAMES - {"stop_gradient"}

    def __call__(
        self,
        values: Mapping[str, Any],
        x: jax.Array | Image,
        mask: jax.Array | None = None,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The module's output, and the new running statistics by the names of their buffers.

        Args:
          values: parameters and buffers.
          x: the input, an array or an `Image`.
          mask: [B], the real examples, in training.
          key: key of random numbers in training.
        """
        found: dict[str, Any] = {**self.constants, **values, INPUT: x}
        statistics: dict[str, jax.Array] = {}
        for number, step in enumerate(self.steps):
            args, kwargs = _filled((list(step.args), step.kwargs), found)
            if step.operation == "batch_norm":
                found[step.result], new = _batch_norm(*args, mask=mask)
                statistics |= {name.name: value for name, value in zip(step.args[3:5], new, strict=True)}
                # If a module is called twice, the second call continues from the first one's statistics.
                found |= statistics
            elif step.operation == "stop_gradient":
                found[step.result] = lax.stop_gradient(channels_first(args[0]))
            elif isinstance(step.operation, str):
                own = None if key is None else jax.random.fold_in(key, number)
                found[step.result] = torch_operations.apply(step.operation, args, kwargs, own)
            else:
                found[step.result] = step.operation(*args, **kwargs)
        return channels_first(_filled(self.result, found)), statistics


def _filled(value: Any, found: Mapping[str, Any]) -> Any:
    """Arguments with arrays in place of their names."""
    return jax.tree.map(
        lambda one: found[one.name] if isinstance(one, Value) else one,
        value,
        is_leaf=lambda one: isinstance(one, Value | slice | None),
    )


def _batch_norm(x, scale, bias, mean, variance, training, momentum, epsilon, *_, mask):
    if mean is None or (training and mask is None):
        raise InvalidInput(
            "BatchNorm without running statistics is not supported: rows of a deployed model would depend on each other"
        )
    scale, bias = 1.0 if scale is None else scale, 0.0 if bias is None else bias
    running = {"mean": lax.stop_gradient(mean), "var": lax.stop_gradient(variance)}
    y, new = normalize(
        channels_last(x), scale, bias, running, mask if training else None, epsilon=epsilon, decay=1 - momentum
    )
    return Image(y), (new["mean"], new["var"])


def read_program(exported: Any, full_name: Callable[[str], str]) -> Program:
    """Program from the result of `torch.export.export`.

    Args:
      exported: the export of a module with one input.
      full_name: name of a parameter or buffer in the module -> its name in the values given to the program.

    Raises:
      InvalidInput: the graph changes buffers or views of arrays, or its output is not a single array.
    """
    given, constants = [], {}
    for spec in exported.graph_signature.input_specs:
        kind = spec.kind.name
        name = INPUT if kind == "USER_INPUT" else spec.target
        if kind in ("PARAMETER", "BUFFER"):
            name = full_name(name)
        elif kind != "USER_INPUT":
            name = f"constant {name}"
            constants[name] = to_array(name, exported.constants[spec.target])
        given.append(Value(name))
    reader = _Reader()
    outputs = reader.read(exported.graph_module, given)
    reader.refuse_changed_views({one.name for one in given}, outputs)
    if len(outputs) != 1 or not isinstance(outputs[0], Value):
        raise InvalidInput(f"the module gives {len(outputs)} results, not one tensor")
    return Program(tuple(reader.steps), outputs[0], constants)


class _Reader:
    """Steps of a graph and of the graphs inside it.

    Attributes:
      steps: steps read so far.
      base: name of a value -> name of the value whose memory it may share.
      changes: (number of the step that changes a value in place, name of the value, name of the operation).
      stopped: names of the values that are made without gradients.
    """

    def __init__(self):
        self.steps: list[Step] = []
        self.base: dict[str, str] = {}
        self.changes: list[tuple[int, str, str]] = []
        self.stopped: set[str] = set()

    def read(self, module: Any, given: list[Any]) -> Any:
        """Read a graph with these inputs; returns its result."""
        torch: Any = importlib.import_module("torch")
        values: dict[Any, Any] = {}
        inputs = iter(given)

        def argument(value: Any) -> Any:
            if isinstance(value, torch.fx.Node):
                return values[value]
            if isinstance(value, torch.dtype):
                return TYPES.get(str(value).removeprefix("torch."), str(value))
            if isinstance(value, torch.device | torch.layout | torch.memory_format):
                return None
            if isinstance(value, list | tuple):
                return [argument(one) for one in value]
            return value

        for node in module.graph.nodes:
            args, target = argument(node.args), node.target
            kwargs = {key: argument(value) for key, value in node.kwargs.items() if key not in ("device", "layout")}
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "get_attr":
                values[node] = getattr(module, target)
            elif node.op == "output":
                return args[0]
            elif isinstance(target, torch._ops.OpOverload):
                values[node] = self._operation(target, args, kwargs)
            elif target is operator.getitem and isinstance(args[0], list):
                values[node] = args[0][args[1]]
            elif target is operator.getitem:
                values[node] = self._add(target, args, kwargs)
                self._share(values[node], args[0])
            elif isinstance(target, torch._ops.HigherOrderOperator):
                values[node] = self._inside(target.name(), args)
            else:
                # A computation with numbers, such as the number of rows.
                values[node] = self._add(target, args, kwargs)
        return None

    def _add(self, operation: Any, args: Any, kwargs: dict[str, Any], result: Value | None = None) -> Value:
        """Add a step; returns its result."""
        result = result or Value(f"%{len(self.steps)}")
        self.steps.append(Step(result.name, operation, tuple(args), kwargs))
        return result

    def _operation(self, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Value | None:
        schema = target._schema
        # Operations outside of PyTorch's own library, aten, keep their full names, which nothing here has.
        name = schema.name.removeprefix("aten::")
        if name in IGNORED:
            return None
        if schema.is_mutable and isinstance(args[0], Value):
            self.changes.append((len(self.steps), args[0].name, name))
            return self._add(name.removesuffix("_"), args, kwargs, args[0])
        if name == "bernoulli" and target._overloadname == "default":
            # Its argument is the probabilities, not only an array of the wanted shape.
            args = [args[0], args[0]]
        # Recurrent networks take other arguments for packed sequences.
        result = self._add(f"{name}.data" if target._overloadname == "data" else name, args, kwargs)
        if name in MAY_ALIAS or any(one.alias_info is not None for one in schema.returns):
            self._share(result, args[0])
        return result

    def _share(self, result: Value, of: Any) -> None:
        if isinstance(of, Value):
            self.base[result.name] = self.base.get(of.name, of.name)

    def _inside(self, name: str, args: list[Any]) -> Any:
        """Read the graph inside a context; returns its results."""
        if name == "wrap_with_set_grad_enabled":
            enabled, inner, *rest = args
        elif name == "wrap_with_autocast":
            _, _, enabled, _, inner, *rest = args
            if enabled:
                raise InvalidInput("the module computes in lower precision (torch.autocast): leave that out")
            enabled = True
        else:
            raise InvalidInput(f"the module has operations that are not supported: {name}")
        first, results = len(self.steps), self.read(inner, rest)
        if enabled:
            return results
        self.stopped |= {f"%{number}" for number in range(first, len(self.steps))}
        stopped = [self._add("stop_gradient", [one], {}) for one in results]
        for new, one in zip(stopped, results, strict=True):
            self._share(new, one)
        return stopped

    def refuse_changed_views(self, inputs: set[str], outputs: Any) -> None:
        """Raise InvalidInput if a value is read after its memory was changed through another value, or if it has a
        gradient of which such a change was no part.
        """
        reads = [_names((step.args, step.kwargs)) for step in self.steps] + [_names(outputs)]
        for number, changed, operation in self.changes:
            base = self.base.get(changed, changed)
            is_count = base.endswith("num_batches_tracked")
            if base in inputs and base != INPUT and not is_count:
                raise InvalidInput(f"the module changes {base} when it is called ({operation}), which a Model cannot")
            if f"%{number}" in self.stopped and base not in self.stopped and not is_count:
                raise InvalidInput(
                    f"the module changes a tensor without gradients ({operation} in torch.no_grad) that it made with "
                    "them: let it make a new tensor"
                )
            made_later = {f"%{later}" for later in range(number, len(self.steps))}
            others = set().union(*reads[number + 1 :]) - made_later - {changed}
            if any(self.base.get(name, name) == base for name in others):
                raise InvalidInput(
                    f"the module changes a tensor in its place ({operation}) and then reads another view of it: let it "
                    "make a new tensor"
                )


def _names(value: Any) -> set[str]:
    leaves = jax.tree.leaves(value, is_leaf=lambda one: isinstance(one, Value))
    return {one.name for one in leaves if isinstance(one, Value)}


def to_array(name: str, tensor: Any) -> np.ndarray:
    """A tensor of a module as an array with a type of JAX.

    Args:
      name: name for errors.
      tensor: a parameter, buffer or constant.

    Raises:
      InvalidInput: the type is not supported here, or integers do not fit.
    """
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in TYPES:
        raise InvalidInput(f"{name} of the module is {kind}, which is not supported")
    tensor = tensor.detach().cpu()
    array = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if kind == "int64" and array.size and np.abs(array).max() > np.iinfo(np.int32).max:
        raise InvalidInput(f"{name} of the module has integers beyond 32 bits")
    return np.array(array, TYPES[kind])
