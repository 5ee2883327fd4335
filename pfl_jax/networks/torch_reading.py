"""Reading of PyTorch modules as graphs, and refusal of modules for which no graph exists."""

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfl_jax.errors import InvalidInput, imported
from pfl_jax.networks import module_checks
from pfl_jax.networks.torch_graph import Program, read_program

MISSING = "a PyTorch module needs PyTorch: pip install torch --index-url https://download.pytorch.org/whl/cpu"

ROWS = 3
"""Number of examples in the calls by which a module is read; its graphs hold for any number."""


class Reading(NamedTuple):
    """Programs of a module, and the shape of the features of ROWS inputs."""

    backbone: Program
    backbone_in_training: Program
    head: Program
    head_in_training: Program
    features: jax.ShapeDtypeStruct

    @property
    def programs(self) -> tuple[Program, ...]:
        return self[:4]

    def refuse_random_head(self, name: str, values: Mapping[str, np.ndarray]) -> None:
        """Raise InvalidInput for a head with dropout or BatchNorm."""
        if self.head_in_training.statistics:
            raise InvalidInput(f"the head {name} has BatchNorm, which only a backbone can have")

        def outputs(x, key=None):
            return self.head_in_training(values, x, key=key)[0]

        try:
            jax.eval_shape(outputs, self.features)
        except InvalidInput:
            # Fails again unless only random numbers are missing.
            jax.eval_shape(outputs, self.features, jax.random.key(0))
            module_checks.refuse_dropout(name, there=True)


def read_module(whole: Any, head: str, inputs: jax.ShapeDtypeStruct) -> Reading:
    """Read a module; the module is changed."""
    torch = imported("torch", MISSING)
    parts = dict(whole.named_modules())
    names = [name for name, part in parts.items() if name and next(part.parameters(), None) is not None]
    module_checks.require_part([head], names, there=head in names)
    shape = inputs.shape
    if len(shape) == 4:
        shape = (shape[0], shape[3], *shape[1:3])
    is_float = jnp.issubdtype(inputs.dtype, jnp.floating)
    example = torch.ones(shape, dtype=torch.float32 if is_float else torch.int64)
    tensors = {}
    for name, value in (*whole.named_parameters(remove_duplicate=False), *whole.named_buffers(remove_duplicate=False)):
        tensors.setdefault(id(value), []).append(name)
    first = {name: same[0] for same in tensors.values() for name in same}
    features = [_features(whole.train(training), head, example) for training in (False, True)]
    with _unchanging(parts[head]):
        backbones = [
            read_program(_export(whole, example, training), lambda name: first[name]) for training in (False, True)
        ]
    heads = [
        read_program(_export(parts[head], features[0], training), lambda name: first[f"{head}.{name}"])
        for training in (False, True)
    ]
    _refuse_dependent_rows(whole, example)
    shape = jax.ShapeDtypeStruct(tuple(features[0].shape), jnp.float32)
    return Reading(backbones[0], backbones[1], heads[0], heads[1], shape)


def _features(whole: Any, head: str, example: Any) -> Any:
    """Input of the head, which is called once and whose output is the module's output."""
    torch = imported("torch", MISSING)
    calls: list[tuple[Any, Any]] = []
    handle = whole.get_submodule(head).register_forward_hook(lambda _, given, output: calls.append((given, output)))
    output = whole(example)
    handle.remove()
    if not isinstance(output, torch.Tensor):
        raise InvalidInput(
            f"the module gives a {type(output).__name__}, not a tensor of logits: wrap it in a module that does"
        )
    module_checks.require_one_last_call(head, len(calls), bool(calls) and calls[-1][1] is output)
    given, _ = calls[0]
    if len(given) != 1 or not isinstance(given[0], torch.Tensor):
        raise InvalidInput(f"{head} takes other arguments than the features: a head has one input")
    _refuse_own_gradients(output)
    return given[0].detach()


def _refuse_own_gradients(output: Any) -> None:
    """Raise InvalidInput for a function with its own gradient, which a graph does not contain."""
    torch = imported("torch", MISSING)
    left, seen = [output.grad_fn], set()
    while left:
        function = left.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if isinstance(function, torch.autograd.function.BackwardCFunction):
            name = type(function).__name__.removesuffix("Backward")
            raise InvalidInput(f"the module uses {name}, an autograd.Function with its own gradient")
        left += [before for before, _ in function.next_functions]


@contextlib.contextmanager
def _unchanging(part: Any) -> Iterator[None]:
    """Context in which a part of a module returns its input."""
    part.forward = lambda x: x
    try:
        yield
    finally:
        del part.forward


def _refuse_dependent_rows(whole: Any, example: Any) -> None:
    """Raise InvalidInput if a deployed module computes a row from other rows, some of which are padding."""
    torch = imported("torch", MISSING)
    mixed = example.clone()
    mixed[0] = 0
    results = []
    for x in (example, 0 * example, mixed):
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            results.append(copy.deepcopy(whole).eval()(x))
    ones, zeros, found = results
    # All rows count: cumulated sums keep the first one, and a difference from one row keeps that.
    if not torch.allclose(torch.cat([zeros[:1], ones[1:]]), found, rtol=1e-4, atol=1e-4, equal_nan=True):
        raise InvalidInput("the module computes rows of its output from other rows of its input: a row is an example")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context without printing, and without operations that exist only on CPUs and CUDA."""
    torch = imported("torch", MISSING)
    fast_path, level = torch.backends.mha.get_fastpath_enabled(), logging.root.manager.disable
    torch.backends.mha.set_fastpath_enabled(False)
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        logging.disable(level)


def _export(module: Any, example: Any, training: bool) -> Any:
    """Graph of a module for any number of examples."""
    torch = imported("torch", MISSING)
    rows = ({0: torch.export.Dim.DYNAMIC},)
    return torch.export.export(module.train(training), (example,), dynamic_shapes=rows, strict=False)
