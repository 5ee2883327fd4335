"""Networks of a run's options, for a dataset."""

import dataclasses
import math

import numpy as np

from experiments.choices import PRETRAINED, TARGETS, networks
from experiments.options import Options, read_with
from experiments.own_code import make_model, with_loss
from pfl_jax.base import Model
from pfl_jax.data.sources import Dataset
from pfl_jax.networks import with_features
from pfl_jax.tasks import TASKS


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
    own = {name: value for name in read_with("model", options.model) if (value := getattr(options, name)) is not None}
    task = None if options.task is None else TASKS[options.task]
    outputs = _num_outputs(options.task, dataset)
    if options.model in PRETRAINED:
        from experiments.run import pretrained

        model = pretrained.model_of(options, dataset, outputs)
        model = model if task is None else model._replace(task=task)
    else:
        model = make_model(options.model, dataset.input_shape, outputs, dtype, task=task, head=options.head, **own)
    if options.features is not None:
        model = with_features(model, options.features)
    if options.adapter != "none" or options.personal is not None:
        from experiments.run import pretrained

        model = pretrained.adapted(options, model, dataset.input_shape, dtype)
    if options.loss is None:
        return model
    return with_loss(options.loss, model, dataset.input_shape, dtype, dataset.train_y)


def _num_outputs(task: str | None, dataset: Dataset) -> int:
    """Number of a model's outputs for one example, or one place, under a task: K for classes and symbols."""
    if task == "binary":
        return 1
    if task == "next_symbol":
        return 1 + max(int(dataset.train_y.max()), int(dataset.test_y.max()))
    return math.prod(dataset.train_y.shape[1:]) if task in TARGETS else dataset.num_classes
