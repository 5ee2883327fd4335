"""Networks of a run: built in, pretrained, or of the user's own file, with the task, loss and adapters asked for."""

import dataclasses
import inspect
import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.spec.choices import PRETRAINED, TARGETS, networks
from experiments.spec.option_notes import is_own
from experiments.spec.options import Options, read_with
from experiments.spec.own_code import describe_foreign_error, function, read
from pfl_jax.base import Model
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput, describe_value
from pfl_jax.networks import torch_modules, with_features
from pfl_jax.networks.flax_modules import check_model, from_flax
from pfl_jax.networks.models import MODELS
from pfl_jax.primitives.metrics import Summary
from pfl_jax.tasks import CLASSIFICATION, TASKS, Task


def models_of(options: Options, dataset: Dataset) -> list[Model]:
    """Networks that the clients have, for a dataset."""
    names = networks(options.model)
    return [_model_of(dataclasses.replace(options, model=name), dataset) for name in names]


def model_of(options: Options, dataset: Dataset) -> Model:
    """Network that the clients have for a dataset; the first one, if there are several."""
    return models_of(options, dataset)[0]


def _model_of(options: Options, dataset: Dataset) -> Model:
    """Network of the options for a dataset."""
    # Integers that are not normalized, such as tokens, stay integers.
    kind = dataset.train_x.dtype if dataset.mean is None else np.float32
    dtype = np.int32 if np.issubdtype(kind, np.integer) else np.float32
    name, shape, outputs = options.model, dataset.input_shape, _num_outputs(options.task, dataset)
    task = None if options.task is None else TASKS[options.task]
    if is_own(name):
        model = own_model(name, shape, outputs, dtype, task, options.head)
    elif name in PRETRAINED:
        from experiments.run import pretrained

        model = pretrained.model_of(options, dataset, outputs)
    else:
        own = {one: value for one in read_with("model", name) if (value := getattr(options, one)) is not None}
        model = MODELS[name](shape, outputs, **own)
    model = model if task is None else model._replace(task=task)
    if options.features is not None:
        model = with_features(model, options.features)
    if options.adapter != "none" or options.personal is not None:
        from experiments.run import pretrained

        model = pretrained.adapted(options, model, shape, dtype)
    return model if options.loss is None else _with_loss(options.loss, model, shape, dtype, dataset.train_y)


def _num_outputs(task: str | None, dataset: Dataset) -> int:
    """Number of a model's outputs for one example, or one place, under a task: K for classes and symbols."""
    if task == "binary":
        return 1
    if task == "next_symbol":
        return 1 + max(int(dataset.train_y.max()), int(dataset.test_y.max()))
    return math.prod(dataset.train_y.shape[1:]) if task in TARGETS else dataset.num_classes


def own_model(
    name: str, input_shape: Sequence[int], outputs: int, input_dtype: Any, task: Task | None, head: str | None
) -> Model:
    """Model of FILE.py:NAME, a function (input_shape, num_classes) -> a `Model` or a module, or a PyTorch class.

    Its task is `task`, None for its own one; `head` names the head of a module.
    """
    try:
        made = _made(name, input_shape, outputs)
    except Exception as error:
        raise InvalidInput(
            f"--model {name} fails for inputs of shape {tuple(input_shape)}: {describe_foreign_error(error)}"
        ) from None
    try:
        if not isinstance(made, Model):
            own_task = task or CLASSIFICATION
            named: dict[str, Any] = {} if head is None else {"head": head}
            if torch_modules.is_module(made):
                if _made(name, input_shape, outputs) is not made:
                    # Made anew for each seed.
                    made = lambda seed: _made(name, input_shape, outputs)  # noqa: E731
                else:
                    warnings.warn(f"--model {name} makes one module: all seeds start from its parameters", stacklevel=2)
                return torch_modules.from_torch(
                    made, input_shape, outputs, input_dtype=input_dtype, task=own_task, **named
                )
            return from_flax(made, input_shape, outputs, input_dtype=input_dtype, task=own_task, **named)
        if head is not None:
            raise InvalidInput("it is a Model, which has its head already: --head is for modules")
        # The data says how many classes there are, but not how many outputs a model's own task has.
        outputs = outputs if task is not None or made.task.kind == "classes" else made.num_classes
        made = made if task is None else made._replace(task=task)
        check_model(made, input_shape, outputs, input_dtype=input_dtype)
    except InvalidInput as error:
        raise InvalidInput(f"--model {name}: {error}") from None
    return made


def _made(name: str, input_shape: Sequence[int], outputs: int) -> Any:
    """What FILE.py:NAME makes; a PyTorch class gets the argument num_classes, if it has one."""
    make = function("model", name)
    if not torch_modules.is_module_class(make):
        return make(tuple(input_shape), outputs)
    return make(num_classes=outputs) if "num_classes" in inspect.signature(make).parameters else make()


def own_task(name: str, input_shape: Sequence[int], num_classes: int) -> str:
    """Name of the task that the user's model brings; `own_model` has found no fault with the model."""
    made = _made(name, input_shape, num_classes)
    return (made.task if isinstance(made, Model) else CLASSIFICATION).name


def check_scores(task: Task, target: float | None) -> None:
    """Raise InvalidInput for scores of a task that files cannot tell apart, or a target that is none of the primary."""
    names, fixed = [one.name for one in task.scores], Summary._fields
    if taken := [name for name in names if name in fixed or names.count(name) > 1]:
        raise InvalidInput(
            f"the score {taken[0]} of the task {task.name} needs a name of its own, none of {', '.join(fixed)}"
        )
    if target is not None and task.primary.percent and not 0 < target <= 100:
        raise InvalidInput(f"--target-accuracy is a percentage of {task.primary.name}, not {target:g}")


def _with_loss(name: str, model: Model, input_shape: Sequence[int], input_dtype: Any, y: np.ndarray) -> Model:
    """Model with the loss FILE.py:NAME, a function (outputs, y, mask) -> scalar, in its task."""
    loss = function("loss", name)
    x = jax.ShapeDtypeStruct((2, *input_shape), input_dtype)
    labels = jax.ShapeDtypeStruct((2, *y.shape[1:]), y.dtype)
    outputs = jax.eval_shape(lambda x: model.apply(model.init(jax.random.key(0)), x), x)
    try:
        found = jax.eval_shape(loss, outputs, labels, jax.ShapeDtypeStruct((2,), bool))
    except Exception as error:
        what, why = f"{describe_value(outputs)} and y {describe_value(labels)}", describe_foreign_error(error)
        raise InvalidInput(f"--loss {name} fails for outputs {what}: {why}") from None
    if getattr(found, "shape", None) != () or not jnp.issubdtype(found.dtype, jnp.floating):
        raise InvalidInput(
            f"--loss {name} gives {describe_value(found)}, not one number, the mean over the real examples"
        )
    return model._replace(task=model.task._replace(loss=loss))


def networks_file(options: Options) -> list[int] | None:
    """Position of each client's network, of the file of --networks; None without one."""
    if options.networks is None:
        return None
    name, number = options.networks, len(networks(options.model))
    try:
        found = json.loads(read(Path(name).expanduser()))
    except ValueError:
        raise InvalidInput(f"--networks {name} is no JSON") from None
    if not isinstance(found, list) or not all(type(one) is int and 0 <= one < number for one in found):
        raise InvalidInput(f"--networks {name} is no list of numbers from 0 to {number - 1}, one for each client")
    if len(found) != (there := options.num_clients - options.held_out_clients):
        raise InvalidInput(f"--networks {name} has {len(found)} entries, and there are {there} clients")
    return found
