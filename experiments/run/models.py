"""Networks of a run: built in, pretrained, or from the user's own file, with task, loss and adapters; and the states of
a pretrained model's frozen layers, which are computed once."""

import dataclasses
import hashlib
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
from rich.console import Console
from rich.progress import Progress

from experiments.folder.run_folder import digest as digest_of
from experiments.host.console import print_line
from experiments.host.jax_config import cache_folder
from experiments.spec.choices import ADAPTERS, PRETRAINED, TARGETS, TEXTS
from experiments.spec.option_notes import is_own, label
from experiments.spec.options import Options, networks, read_with
from experiments.spec.own_code import describe_foreign_error, function, read, weights_file
from experiments.spec.spec import Spec
from pfl_jax.atomic_write import make_folder, write_binary
from pfl_jax.base import Model
from pfl_jax.data.sources import Dataset
from pfl_jax.data.texts import FOLDER, fortunes
from pfl_jax.errors import InvalidInput, describe_value
from pfl_jax.methods import METHODS
from pfl_jax.methods.factories import is_for_adapters
from pfl_jax.methods.fedbn import is_normalization
from pfl_jax.networks import adapters, torch_modules, with_features
from pfl_jax.networks.flax_modules import check_model, from_flax
from pfl_jax.networks.models import MODELS
from pfl_jax.networks.pretrained import bert, bert_states, minilm_folder, read_config
from pfl_jax.networks.split import split
from pfl_jax.networks.vit import vit
from pfl_jax.primitives import find_adapters
from pfl_jax.primitives.metrics import Summary
from pfl_jax.tasks import CLASSIFICATION, TASKS, Task

MOST_STATES = 2**32
"""Bytes that the states of all examples may take; larger states are computed in every step."""


def models_of(options: Options, dataset: Dataset) -> list[Model]:
    """Networks that the clients have, for a dataset."""
    return [_model_of(dataclasses.replace(options, model=name), dataset) for name in networks(options.model)]


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
        model = _pretrained_model(options, dataset, outputs)
    else:
        own = {key: value for key in read_with("model", name) if (value := getattr(options, key)) is not None}
        model = MODELS[name](shape, outputs, **own)
    model = model if task is None else model._replace(task=task)
    if options.features is not None:
        model = with_features(model, options.features)
    model = adapted(options, model, shape, dtype)
    if options.loss is not None:
        model = _with_loss(options.loss, model, shape, dtype, dataset.train_y)
    return model


def _num_outputs(task: str | None, dataset: Dataset) -> int:
    """Number of a model's outputs for one example, or one position, under a task: K for classes and symbols."""
    if task == "binary":
        return 1
    if task == "next_symbol":
        return 1 + max(int(dataset.train_y.max()), int(dataset.test_y.max()))
    return math.prod(dataset.train_y.shape[1:]) if task in TARGETS else dataset.num_classes


def own_model(
    name: str, input_shape: Sequence[int], outputs: int, input_dtype: Any, task: Task | None, head: str | None
) -> Model:
    """Model of FILE.py:NAME, a function (input_shape, num_classes) -> a `Model` or a module, or a PyTorch class.

    `task` replaces the model's own task, unless it is None; `head` names the head of a module.
    """
    try:
        made = _make_own(name, input_shape, outputs)
    except Exception as error:
        raise InvalidInput(
            f"--model {name} fails for inputs of shape {tuple(input_shape)}: {describe_foreign_error(error)}"
        ) from None
    try:
        if not isinstance(made, Model):
            convert, named = from_flax, {} if head is None else {"head": head}
            if torch_modules.is_module(made):
                convert = torch_modules.from_torch
                if _make_own(name, input_shape, outputs) is not made:
                    # Make a new module for each seed.
                    made = lambda seed: _make_own(name, input_shape, outputs)  # noqa: E731
                else:
                    warnings.warn(f"--model {name} makes only one module: all seeds start from it", stacklevel=2)
            options: dict[str, Any] = {"input_dtype": input_dtype, "task": task or CLASSIFICATION, **named}
            return convert(made, input_shape, outputs, **options)
        if head is not None:
            raise InvalidInput("it is a Model, which has its head already: --head is for modules")
        # The data gives the number of classes, but not the number of outputs of a model's own task.
        outputs = outputs if task is not None or made.task.kind == "classes" else made.num_classes
        made = made if task is None else made._replace(task=task)
        check_model(made, input_shape, outputs, input_dtype=input_dtype)
    except InvalidInput as error:
        raise InvalidInput(f"--model {name}: {error}") from None
    return made


def _make_own(name: str, input_shape: Sequence[int], outputs: int) -> Any:
    """Model or module that FILE.py:NAME makes; a PyTorch class gets the argument num_classes, if it has one."""
    make = function("model", name)
    if not torch_modules.is_module_class(make):
        return make(tuple(input_shape), outputs)
    return make(num_classes=outputs) if "num_classes" in inspect.signature(make).parameters else make()


def notes_on_model(spec: Spec, dataset: Dataset) -> list[str]:
    """Remarks on a model that does not fit the task or the method of a run."""
    notes = []
    if is_own(spec.model) and spec.task is not None:
        made = _make_own(spec.model, dataset.input_shape, models_of(spec, dataset)[0].num_classes)
        own = (made.task if isinstance(made, Model) else CLASSIFICATION).name
        if own not in (spec.task, CLASSIFICATION.name):
            notes.append(f"--task {spec.task} replaces the model's own task, {own}, and its scores")
    of_adapters = spec.method in METHODS and is_for_adapters(METHODS[spec.method])
    for is_for, find, why in (
        (spec.method == "fedbn", is_normalization, "normalization layers, so fedbn is fedavg"),
        (of_adapters, find_adapters, "low-rank adapters, which this method is for"),
    ):
        if is_for and not any(find(jax.eval_shape(models_of(spec, dataset)[0].init, jax.random.key(0)))):
            notes.append(f"--model {label(spec.model)} has no {why}")
    return notes


def check_scores(task: Task, target: float | None) -> None:
    """Raise InvalidInput for scores of a task with equal or reserved names, or an impossible target."""
    names, fixed = [score.name for score in task.scores], Summary._fields
    if taken := [name for name in names if name in fixed or names.count(name) > 1]:
        raise InvalidInput(
            f"the score {taken[0]} of the task {task.name} needs a unique name, not one of {', '.join(fixed)}"
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
        values, why = f"{describe_value(outputs)} and y {describe_value(labels)}", describe_foreign_error(error)
        raise InvalidInput(f"--loss {name} fails for outputs {values}: {why}") from None
    if getattr(found, "shape", None) != () or not jnp.issubdtype(found.dtype, jnp.floating):
        raise InvalidInput(
            f"--loss {name} gives {describe_value(found)}, not one number, the mean over the real examples"
        )
    return model._replace(task=model.task._replace(loss=loss))


def network_positions(options: Options) -> list[int] | None:
    """Position of each client's network, from the file of --networks; None without this option."""
    if options.networks is None:
        return None
    name, number = options.networks, len(networks(options.model))
    try:
        found = json.loads(read(Path(name).expanduser()))
    except ValueError:
        raise InvalidInput(f"--networks {name} is not JSON") from None
    if not isinstance(found, list) or not all(type(one) is int and 0 <= one < number for one in found):
        raise InvalidInput(f"--networks {name} is not a list of numbers from 0 to {number - 1}, one for each client")
    if len(found) != (clients := options.num_clients - options.held_out_clients):
        raise InvalidInput(f"--networks {name} has {len(found)} entries, and there are {clients} clients")
    return found


def texts(options: Options) -> Dataset:
    """Short texts as tokens of the model."""
    if options.source not in ("auto", "files"):
        raise InvalidInput(f"--source {options.source}: {TEXTS} are read from files, apt-get install fortunes")
    return fortunes(weights_of(options).parent / "tokenizer.json", folder=options.data_dir or FOLDER)


def weights_of(options: Options) -> Path:
    """File of the pretrained weights."""
    return weights_file(str(minilm_folder()) if options.weights is None else options.weights)


def weights_digest(options: Options) -> str:
    """Digest of the file of the pretrained weights, 16 hexadecimal digits."""
    return digest_of(read(weights_of(options)))


def _pretrained_model(options: Options, dataset: Dataset, outputs: int) -> Model:
    """Pretrained model for the examples of a dataset: images, tokens [T], or states [T, d] of `with_states`."""
    if options.model == "vit":
        if options.weights is None:
            raise InvalidInput("--model vit needs --weights, a file of timm or big_vision")
        return vit(dataset.input_shape, outputs, path=options.weights)
    if len(dataset.input_shape) == 2:
        return bert(weights_of(options), dataset.input_shape[0], outputs, first=frozen_layers(options))
    if len(dataset.input_shape) != 1 or dataset.train_x.dtype.kind not in "iu":
        raise InvalidInput(
            f"--model {options.model} is for tokens, integers [T], not for inputs {dataset.train_x.dtype} "
            f"{list(dataset.input_shape)}"
        )
    return bert(weights_of(options), dataset.input_shape[0], outputs)


def adapted(options: Options, model: Model, input_shape: tuple[int, ...], dtype: Any) -> Model:
    """Model with the adapters and the split of the options."""
    kind, number = ADAPTERS.parse(options.adapter, "--adapter")
    size, rest = int(number or 0), {"input_dtype": dtype, "frozen_dtype": options.frozen_dtype}
    where: dict[str, Any] = rest | {"targets": options.targets or ""}
    if kind == "linear_probe":
        model = adapters.linear_probe(model, input_shape, **rest)
    elif kind == "prompts":
        if options.model != "bert":
            raise InvalidInput(f"--adapter prompts is for --model bert, not {options.model}")
        model = adapters.prompts(model, input_shape, tokens=size, **rest)
    elif kind == "bottleneck":
        model = adapters.bottleneck(model, input_shape, size=size, **where)
    elif kind != "none":
        # Equal for all seeds, like everything that is frozen: the runs of a sweep share it.
        frozen = jax.random.key(0) if kind == "ffa_lora" else None
        model = adapters.lora(model, input_shape, rank=size, frozen_a=frozen, **where)
    return model if options.personal is None else split(model, personal=options.personal)


def frozen_layers(options: Options) -> int:
    """Number of layers of the pretrained model below the lowest adapter, which no training changes."""
    if options.adapter in ("none", "linear_probe"):
        return 0 if options.adapter == "none" else read_config(weights_of(options)).layers
    model = adapted(options, bert(weights_of(options), 1, 2), (1,), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(shapes)]
    names = [name for path in paths for name in path.split("/")]
    layers = [int(name.removeprefix("layer_")) for name in names if name.startswith("layer_")]
    return 0 if "embeddings" in names or not layers else min(layers)


def with_states(options: Options, dataset: Dataset, console: Console) -> Dataset:
    """Dataset with states below the lowest adapter as inputs, computed once and cached; other datasets unchanged."""
    if options.model != "bert" or len(dataset.input_shape) != 1:
        return dataset
    layers, path, tokens = frozen_layers(options), weights_of(options), [dataset.train_x, dataset.test_x]
    cache, tokens = cache_folder(), np.concatenate(tokens)
    if not layers or cache is None or tokens.size * 4 * read_config(path).width > MOST_STATES:
        return dataset
    dtype = options.frozen_dtype
    key = hashlib.sha256(tokens.tobytes() + f"{weights_digest(options)}{dtype}".encode()).hexdigest()[:16]
    stored = cache.parent / "states" / f"{key}-{layers}.npy"
    if stored.is_file():
        states = np.load(stored, mmap_mode="r")
    else:
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(f"States of {layers} frozen layers", total=len(tokens))
            notify = lambda done: bar.update(task, completed=done)  # noqa: E731
            states = bert_states(path, tokens, layers, frozen_dtype=dtype, notify=notify)
        make_folder(stored.parent)
        write_binary(stored, lambda file: np.save(file, states))
        print_line(console, f"States of {layers} frozen layers: {states.nbytes / 2**20:,.0f} MiB in {stored}")
    number = len(dataset.train_x)
    return dataset._replace(train_x=states[:number], test_x=states[number:])
