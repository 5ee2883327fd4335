"""Data of a run: loaded, checked against the task, and divided among the clients; options that follow from the data."""

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from experiments.host.console import print_notice, warnings_as_notes
from experiments.run.models import notes_on_model, texts, with_states
from experiments.spec import identity
from experiments.spec.choices import CUSTOM, PRETRAINED, TARGETS, TEXTS, WITH_FILES
from experiments.spec.hyper_parameters import parse_schedule
from experiments.spec.option_notes import assignments, flag, is_partition_file
from experiments.spec.options import Options, read_with
from experiments.spec.spec import Spec
from pfl_jax.data import allocation, own_files, partition, partition_files, phases, sources
from pfl_jax.data.natural import NATURAL, Limits
from pfl_jax.data.partition import Partition
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput
from pfl_jax.networks.text import TEXT_MODELS, vocabulary_of

MAX_CLIENTS_PER_EXAMPLE = {"grouped": 2, "pathological": 2, "iid": 1}
"""Partition -> largest mean number of clients that hold the same training example. FedPAC's 100 clients of 600 examples
need more than CIFAR-10 has, so grouped and pathological partitions reuse the examples of an exhausted class."""

LISTED = 10
"""Maximum number of classes that a note names."""


def load_data(spec: Spec, console: Console) -> tuple[Spec, Dataset]:
    """Load the data, and adapt the run to it, see `on_data`; notices go to the console.

    The states of a pretrained model's frozen layers replace the examples.
    """
    spec, dataset = load_examples(spec, console)
    if spec.model in PRETRAINED:
        dataset = with_states(spec, dataset, console)
    return spec, dataset


def load_examples(spec: Spec, console: Console) -> tuple[Spec, Dataset]:
    """Load the data without states of a pretrained model, see `load_data`."""
    notify = functools.partial(print_notice, console)
    if spec.data_dir is not None and spec.source == "files" and not Path(spec.data_dir).expanduser().exists():
        raise InvalidInput(f"the data folder {spec.data_dir} does not exist")
    if spec.dataset in WITH_FILES:
        with warnings_as_notes(console):
            dataset = _from_files(spec)
    elif spec.dataset == TEXTS:
        dataset = texts(spec)
    else:
        normalization = spec.pixel_normalization
        dataset = sources.load(spec.dataset, spec.source, spec.data_dir, notify=notify, normalization=normalization)
    if is_partition_file(spec.partition):
        partition_files.load(spec.partition, dataset)
    spec, changes = on_data(spec, dataset)
    if changes:
        notify(f"Smaller defaults on {dataset.description}: {assignments(changes)}. The given options are kept.")
    for note in _notes(spec, dataset):
        notify(f"Note: {note}.")
    return spec, dataset


def on_data(spec: Spec, dataset: Dataset) -> tuple[Spec, dict[str, Any]]:
    """Run adapted to this data, and its smaller defaults if the data is embedded."""
    if spec.dataset in WITH_FILES:
        return spec.having(_decided_by_data(spec, dataset)), {}
    return (spec, {}) if dataset.is_real else spec.on_embedded_data()


def _from_files(spec: Spec) -> Dataset:
    """Data of an experiment in WITH_FILES, checked against the task."""
    data = spec.data_path()
    if spec.dataset in NATURAL:
        limits = Limits(spec.num_clients, spec.train_size, spec.test_size, spec.test_fraction or 0.25)
        dataset = NATURAL[spec.dataset](data, limits)
    else:
        same = ("task", "label", "client_column", "time", "impute", "encode", "min_rows")
        same += ("test_data", "test_fraction", "normalize")
        arguments = {name: getattr(spec, name) for name in same}
        for name in ("inputs", "drop"):
            columns = getattr(spec, name)
            arguments[name] = None if columns is None else tuple(column.strip() for column in columns.split(","))
        task = arguments.pop("task")
        dataset = own_files.from_file(data=data, **arguments, num_classes=0 if task in TARGETS else None)
        _check_labels(data, dataset, task)
    if spec.data_digest not in (None, dataset.origin):
        raise InvalidInput(
            f"{spec.data} is not the data of this run, or has changed: its digest is {dataset.origin}, not "
            f"{spec.data_digest}"
        )
    return dataset


def _check_labels(data: str, dataset: Dataset, task: str | None) -> None:
    """Raise InvalidInput for labels that do not fit a task."""
    y, found = dataset.train_y, dataset.num_classes
    labels = f"{data}: labels {y.dtype} [{', '.join(['P', *map(str, y.shape[1:])])}]"
    if task not in TARGETS and not found:
        raise InvalidInput(
            f"{labels} are not classes: give an integer or a word for each row, or one of --task {', '.join(TARGETS)}"
        )
    if task == "binary" and found != 2:
        raise InvalidInput(f"{data}: --task binary is for 2 classes, and there are {found}")
    if task == "multi_label" and not (y.ndim == 2 and all(np.isin(one, (0, 1)).all() for one in (y, dataset.test_y))):
        raise InvalidInput(f"{labels} are not several flags, 0 or 1, for each row, as --task multi_label needs")
    if task == "next_symbol" and not (y.ndim == 2 and y.dtype.kind == "i"):
        raise InvalidInput(f"{labels} are not a symbol's number at each position, as --task next_symbol needs")


def _decided_by_data(spec: Spec, dataset: Dataset) -> dict[str, Any]:
    """Options that follow from the data: its digest, its paths, and its numbers of clients and tokens, if any.

    Paths become absolute, because a run may be exported and resumed from other folders.
    """
    found: dict[str, Any] = {"data_digest": dataset.origin, "data": spec.data_path()}
    for name, path in {"data": found["data"], "test_data": spec.test_data}.items():
        if is_file(path):
            found[name] = str(Path(str(path)).expanduser().absolute())
    if spec.model in TEXT_MODELS and np.any(dataset.train_x % 1):
        how = ": leave out --normalize" if spec.normalize else ""
        raise InvalidInput(f"--model {spec.model} is for tokens, and the inputs are not whole numbers{how}")
    is_tokens = np.issubdtype(dataset.train_x.dtype, np.integer) and dataset.mean is None
    if spec.model in TEXT_MODELS and spec.vocabulary is None and is_tokens:
        found["vocabulary"] = vocabulary_of(dataset.train_x)
    if spec.partition == "natural":
        found["num_clients"] = number = len(dataset.client_names)
        if "num_clients" in spec.given and spec.num_clients != number:
            raise InvalidInput(
                f"--num-clients {spec.num_clients}: {spec.client_column} names {number} clients, leave it out"
            )
    return found


def is_file(data: str | None) -> bool:
    """Whether a value of --data or --test-data names a file or folder, not a Hugging Face dataset."""
    return data is not None and not data.startswith(own_files.HUB)


def _notes(spec: Spec, dataset: Dataset) -> list[str]:
    """Remarks on options of a run that may be mistakes on this data."""
    given = spec.given | {parse_schedule(text).name for text in spec.schedule or ()}
    notes = identity.notes(spec, given, jax.default_backend())
    if spec.target_accuracy is not None and spec.val_fraction is None and not is_partition_file(spec.partition):
        notes.append("--target-accuracy is compared with scores on test examples, without --val-fraction")
    if spec.dataset == CUSTOM:
        notes += _notes_on_rows(dataset)
    return notes + notes_on_model(spec, dataset)


def _notes_on_rows(dataset: Dataset) -> list[str]:
    """Remarks on possible mistakes in the user's own data."""
    found = []
    if dataset.num_classes:
        counts = np.bincount(np.concatenate([dataset.train_y, dataset.test_y]), minlength=dataset.num_classes)
        names = dataset.class_names or tuple(map(str, range(dataset.num_classes)))
        order = np.argsort(counts, kind="stable")
        listed = ", ".join(f"{names[number]} ({counts[number]})" for number in order[:LISTED])
        if len(order) > LISTED:
            listed += f" and {len(order) - LISTED} more, up to {names[order[-1]]} ({counts[order[-1]]})"
        found.append(f"rows of the {len(names)} classes, the fewest first: {listed}")
        if single := int(np.sum(counts == 1)):
            found.append(f"{single} of {len(names)} classes have one row only")
    train, test = (np.fromiter((hash(row.tobytes()) for row in x), np.int64) for x in (dataset.train_x, dataset.test_x))
    if again := int(np.isin(test, train).sum()):
        found.append(f"{again} of {len(test)} test rows have the inputs of a training row")
    if dataset.mean is None and dataset.train_x.dtype == "uint8" and dataset.train_x.max() > 1:
        found.append("inputs are bytes from 0 to 255 and are not scaled; --normalize scales them")
    if dataset.train_client is not None and dataset.num_classes:
        pairs = np.unique(np.stack([dataset.train_client, dataset.train_y]), axis=1)[0]
        if alone := int(np.sum(np.bincount(pairs) == 1)):
            found.append(f"{alone} of {len(dataset.client_names)} clients have training rows of one class only")
    return found


def divide(options: Options, dataset: Dataset) -> Partition:
    """Partition that the options request; InvalidInput if clients would mostly train on each other's examples."""
    if is_partition_file(options.partition):
        parts = partition_files.load(options.partition, None)
    else:
        named = {name: getattr(options, name) for name in read_with("partition", options.partition)}
        for protocol in ("dirichlet_protocol", "pathological_protocol"):
            if protocol in named:
                named["protocol"] = named.pop(protocol)
        if named.pop("size_choices", None) is not None:
            named["train_size"] = allocation.draw_sizes(options.size_choices or (), options.num_clients, options.seed)
        sizes, available = named.get("train_size"), len(dataset.train_y)
        total = int(np.broadcast_to(0 if sizes is None else sizes, options.num_clients).sum())
        # With dirichlet, sizes are upper bounds, and examples never run out. Clients may share test examples, and all
        # examples of a stand-in.
        if dataset.is_real and total > MAX_CLIENTS_PER_EXAMPLE.get(options.partition, math.inf) * available:
            raise InvalidInput(
                f"{options.num_clients} clients with {total} training examples in all are more than the {available} of "
                f"{dataset.description} can serve: use fewer clients, or a smaller --train-size"
            )
        parts = partition.make(options.partition, dataset, options.num_clients, seed=options.seed, **named)
    if options.val_fraction is None:
        return parts
    return partition.with_validation(parts, options.val_fraction, seed=options.seed)


def shift_of(options: Options, dataset: Dataset) -> dict[str, Any]:
    """Shift between groups of clients, as arguments of `federated.federate`."""
    # Without classes each client is its own group.
    number = dataset.num_classes and partition.num_groups(options.partition, dataset.num_classes)
    return {"shift": options.shift, "num_groups": number or options.num_clients}


def phases_of(spec: Spec, dataset: Dataset, parts: Partition, shift: Mapping[str, Any]) -> phases.Phases | None:
    """Data of each phase, all of equal length; None if the data do not change. `shift` comes from `shift_of`."""
    number = spec.phases
    if number is None:
        return None
    for name in ("held_out_clients", "dp_clip", "distributed", "patience", "client_clip"):
        if spec.values.get(name):
            raise InvalidInput(f"{flag(name)} cannot be given with --phases")
    if spec.rounds < number:
        raise InvalidInput(f"--phases {number} needs as many --rounds at least, not {spec.rounds}")
    datasets, partitions = [dataset], [parts] * number
    if spec.change == "rotation":
        datasets = [phases.rotated(dataset, 360 * index / number) for index in range(number)]
    elif spec.change == "classes":
        partitions = phases.classes(dataset, parts, number, spec.seed)
    else:
        partitions = phases.clients(parts, number, spec.seed)
    ends = np.diff(np.arange(number + 1) * spec.rounds // number)
    inputs = datasets if len(datasets) > 1 else dataset
    return phases.federate_phases(inputs, partitions, ends.tolist(), **shift, seed=spec.seed)
