"""A `Model` from a PyTorch module: PyTorch's export writes its computation as a graph, which runs in JAX."""

import copy
import sys
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from pfl_jax.base import STATISTICS, Model, Params
from pfl_jax.errors import InvalidInput, describe_value, imported
from pfl_jax.frozen import Frozen
from pfl_jax.networks import module_checks
from pfl_jax.networks.flax_modules import check_model
from pfl_jax.networks.torch_graph import to_array
from pfl_jax.networks.torch_operations import Image
from pfl_jax.networks.torch_reading import MISSING, ROWS, quiet, read_module
from pfl_jax.tasks import CLASSIFICATION, Task


def from_torch(
    module: Any,
    input_shape: Sequence[int],
    num_classes: int,
    *,
    head: str = "fc",
    input_dtype: Any = jnp.float32,
    task: Task = CLASSIFICATION,
) -> Model:
    """Model from a torch.nn.Module, whose call maps inputs [B, ...] to logits [B, K], or to other outputs of the task.

    Its operations are read once for training and once for deployment, and then run in JAX; code that depends on the
    values of inputs, or on their number, cannot be read. Images [H, W, C] reach the module in PyTorch's order,
    [B, C, H, W], all other inputs [B, ...] unchanged.

    Batch normalization and dropout work as in `from_flax`: statistics leave out padded examples, and each step drops
    out different values. Parameters with `requires_grad=False` are frozen, see `Model.frozen`; buffers never change.
    Integers have 32 bits instead of PyTorch's 64: larger results wrap around.

    Args:
      module: a torch.nn.Module, from whose parameters every seed starts; or a function seed -> module, so that each
        seed starts from its own parameters. The function may ignore the seed, which PyTorch's generator gets too.
        Frozen parameters and buffers come from seed 0.
      input_shape: shape of one input, without the batch.
      num_classes: K, or the number of outputs of another task.
      head: name of the part that gives the logits, "fc" or "classifier.1": the last step, called once.
      input_dtype: int32 for tokens, which reach the module as int64.
      task: meaning of the outputs.

    Returns:
      The model. Its parameters have PyTorch's names, except "kernel" for the weight of a dense layer [in, out] or of a
      convolution [..., in, out], and "scale" for the weight of a normalization.

    Raises:
      InvalidInput: PyTorch is not installed; the module has no such head, or does more after it; its code cannot be
        read, or has operations that are not supported, all of which are named; it has its own gradients, or hooks on
        gradients; it changes buffers, views of tensors that it reads again, or in no_grad tensors from
        outside; head and backbone share a parameter; the head has BatchNorm or dropout; rows depend on each other;
        pooling has no channels; or integers are beyond 32 bits.

    Example:
      >>> import jax
      >>> import torch  # doctest: +SKIP
      >>> from pfl_jax import networks
      >>> net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))  # doctest: +SKIP
      >>> model = networks.from_torch(net, (8,), num_classes=3, head="2")  # doctest: +SKIP
      >>> jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(model.init, jax.random.key(0)))  # doctest: +SKIP
      {'backbone': {'0': {'bias': (16,), 'kernel': (8, 16)}}, 'head': {'bias': (3,), 'kernel': (16, 3)}}
    """
    imported("torch", MISSING)
    head, is_image = head.replace("/", "."), len(input_shape) == 3
    inputs = jax.ShapeDtypeStruct((ROWS, *input_shape), input_dtype)
    with module_checks.applied(inputs, "the module cannot be read for inputs"), quiet():
        whole = _made(module, 0)
        places = _places(whole, head)
        _refuse_shared(whole, head)
        initial = _arrays(whole)
        read = read_module(whole, head, inputs)
    if unknown := set().union(*(program.unknown for program in read.programs)):
        raise InvalidInput(f"the module has operations that are not supported: {', '.join(sorted(unknown))}")
    read.refuse_random_head(head, initial)
    running = read.backbone.statistics | read.backbone_in_training.statistics
    used = set().union(*(program.inputs for program in read.programs)) - places.keys() - running
    frozen_names = used & {name for name, _ in whole.named_parameters()}
    frozen = Frozen({name: jnp.asarray(initial[name]) for name in frozen_names}) if frozen_names else None
    constants = {name: initial[name] for name in used - frozen_names}

    def tree(arrays: Mapping[str, np.ndarray]) -> Params:
        flat = {place.path: arrays[name].transpose(place.axes) for name, place in places.items()}
        flat |= {("backbone", STATISTICS, *name.split(".")): arrays[name] for name in running}
        return {"backbone": {}, "head": {}} | unflatten_dict(flat)

    def values(part: str, params: Any) -> dict[str, Any]:
        flat: dict[Any, Any] = dict(flatten_dict({part: params}))
        found = {
            name: flat[place.path].transpose(np.argsort(place.axes))
            for name, place in places.items()
            if place.path[0] == part
        }
        statistics = {name: flat[part, STATISTICS, *name.split(".")] for name in running if part == "backbone"}
        return constants | (frozen.read() if frozen else {}) | found | statistics

    start = tree(initial)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), start)

    def init_from_seed(key):
        def make(seed):
            return tree(_arrays(_made(module, int(seed))))

        return jax.pure_callback(make, shapes, jax.random.bits(key, (), jnp.uint32), vmap_method="sequential")

    # Without a reference to the module, so that the model can be pickled without PyTorch.
    init = (lambda key: jax.tree.map(jnp.asarray, start)) if is_module(module) else init_from_seed

    def batch_features(backbone, x, mask=None, key=None):
        program = read.backbone if key is None else read.backbone_in_training
        x = Image(x) if is_image else x
        features, new = program(values("backbone", backbone), x, mask, key)
        return features, unflatten_dict({tuple(name.split(".")): value for name, value in new.items()})

    def features(backbone, x):
        return batch_features(backbone, x)[0]

    def classify(head, features):
        return read.head(values("head", head), features)[0]

    num_features = read.features.shape[-1] if read.features.shape else 0
    in_training = None if read.backbone.same(read.backbone_in_training) else batch_features
    model = Model(init, features, classify, num_features, num_classes, in_training, task, frozen)
    check_model(model, input_shape, num_classes, input_dtype=input_dtype)
    return model


def to_torch(params: Params, module: Any, head: str = "fc") -> Any:
    """PyTorch module with the parameters of a model that `from_torch` made from a module of the same kind.

    Args:
      params: {"backbone": ..., "head": ...}, with the running statistics of BatchNorm.
      module: a torch.nn.Module, which is changed; frozen parameters and other buffers stay unchanged.
      head: the `head` of `from_torch`.

    Returns:
      The module.

    Raises:
      InvalidInput: the parameters do not fit the module.

    Example:
      >>> net = networks.to_torch(params, Net())  # doctest: +SKIP
    """
    torch = imported("torch", MISSING)
    flat = flatten_dict(params)
    places = _places(module, head.replace("/", "."))
    found = {name: (place.path, np.argsort(place.axes)) for name, place in places.items()}
    for name, buffer in module.named_buffers():
        if (path := ("backbone", STATISTICS, *name.split("."))) in flat:
            found[name] = path, np.arange(buffer.ndim)
    if odd := flat.keys() ^ {path for path, _ in found.values()}:
        missing, name = "model" if next(iter(odd)) not in flat else "module", "/".join(min(odd))
        raise InvalidInput(f"the parameters are not those of this module: the {missing} has no {name}")
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, (path, axes) in found.items():
        value = np.asarray(flat[path])
        if (there := tuple(tensors[name].shape)) != (given := tuple(value.shape[axis] for axis in axes)):
            raise InvalidInput(f"{name} of the module is {list(there)}, and the model's {list(given)}")
        with torch.no_grad():
            tensors[name].copy_(torch.tensor(value.transpose(axes)))
    return module


def is_module_class(found: Any) -> bool:
    """Whether an object is a class of PyTorch modules.

    Args:
      found: any object.
    """
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(found, type) and issubclass(found, torch.nn.Module)


def is_module(found: Any) -> bool:
    """Whether an object is a PyTorch module; PyTorch is not imported for the test.

    Args:
      found: any object.
    """
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(found, torch.nn.Module)


def _made(module: Any, seed: int) -> Any:
    """Module for a seed, on the host and in float32: a copy of the module, or the result of the function."""
    torch = imported("torch", MISSING)
    if isinstance(module, type):
        raise InvalidInput(
            f"{module.__name__} is a class: give a function seed -> module, such as lambda seed: {module.__name__}()"
        )
    made: Any = module
    if not is_module(module):
        if not callable(module):
            raise InvalidInput(f"{describe_value(module)} is neither a torch.nn.Module nor a function seed -> module")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = module(seed)
        if not is_module(made):
            raise InvalidInput(f"the function of a seed gives a {type(made).__name__}, not a torch.nn.Module")
    _refuse_hooks(made)
    return copy.deepcopy(made).cpu().float()


def _refuse_hooks(module: Any) -> None:
    """Raise InvalidInput for hooks on gradients, which a graph does not contain, and for unsupported modules."""
    torch = imported("torch", MISSING)
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise InvalidInput(f"{name or 'the module'} has hooks of gradients, which are not supported")
        is_norm = isinstance(part, torch.nn.modules.batchnorm._NormBase)
        if is_norm and part.momentum is None and part.track_running_stats:
            raise InvalidInput(f"{name}: batch normalization with momentum=None is not supported: give it a number")
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise InvalidInput(f"{name} has hooks of gradients, which are not supported")


class _Place(NamedTuple):
    """Place of a PyTorch parameter in the model's parameters.

    Attributes:
      path: keys; the first is "backbone" or "head".
      axes: axes of the tensor, in the order of the array.
    """

    path: tuple[str, ...]
    axes: tuple[int, ...]


def _places(module: Any, head: str) -> dict[str, _Place]:
    """Place of each trained parameter, by its first name."""
    torch = imported("torch", MISSING)
    convolutions = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    found = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        *folders, last = name.split(".")
        owner, dims = module.get_submodule(".".join(folders)), parameter.ndim
        axes, taken = tuple(range(dims)), dict(owner.named_parameters(recurse=False))
        if last == "weight" and isinstance(owner, torch.nn.Linear):
            last, axes = _unless(taken, "kernel"), (1, 0)
        elif last == "weight" and isinstance(owner, convolutions):
            last, axes = _unless(taken, "kernel"), (*range(2, dims), 1, 0)
        elif last == "weight" and _is_normalization(owner, dims):
            # FedBN finds normalizations by this name.
            last = _unless(taken, "scale")
        path = (*folders, last)
        of_head = head.split(".")
        is_head = list(path[: len(of_head)]) == of_head
        found[name] = _Place(("head", *path[len(of_head) :]) if is_head else ("backbone", *path), axes)
    return found


def _is_normalization(layer: Any, dims: int) -> bool:
    """Whether a layer's weight with some axes scales features; a matrix of a user's own layer does something else."""
    is_own = not type(layer).__module__.startswith("torch.")
    return "norm" in type(layer).__name__.lower() and not (is_own and dims > 1)


def _unless(taken: Container[str], name: str) -> str:
    """Another name for "weight", unless the layer has a parameter of that name."""
    return "weight" if name in taken else name


def _arrays(module: Any) -> dict[str, np.ndarray]:
    """All parameters and buffers by their first names."""
    return {name: to_array(name, value) for name, value in (*module.named_parameters(), *module.named_buffers())}


def _refuse_shared(module: Any, head: str) -> None:
    """Raise InvalidInput if head and backbone have a parameter in common."""
    owners: dict[int, tuple[str, bool]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first, in_head = owners.setdefault(id(parameter), (name, name.startswith(f"{head}.")))
        if in_head != name.startswith(f"{head}."):
            raise InvalidInput(f"{first} and {name} are the same parameter, in the backbone and in the head {head}")
