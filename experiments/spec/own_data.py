"""A user's own data: the options of a run that follow from it, and remarks on likely mistakes."""

import dataclasses
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from experiments.spec.choices import TARGETS
from experiments.spec.options import Options
from experiments.spec.spec import Spec
from pfl_jax.data import own_files, sites
from pfl_jax.data.natural import NATURAL, Limits
from pfl_jax.data.sources import Dataset
from pfl_jax.errors import InvalidInput
from pfl_jax.networks.text import TEXT_MODELS, vocabulary_of

LISTED = 10
"""Most classes that a note names."""


def digest(options: Options) -> str:
    """Digest of the data: --data-digest, or else the digest of the files now."""
    return options.data_digest or own_files.digest(_data(options), options.test_data)


def load(name: str, options: Options) -> Dataset:
    """The data of an experiment, one of WITH_FILES."""
    if name in NATURAL:
        limits = Limits(options.num_clients, options.train_size, options.test_size, options.test_fraction or 0.25)
        dataset = NATURAL[name](_data(options), limits)
    else:
        dataset = _read(**_arguments(options))
    if options.data_digest not in (None, dataset.origin):
        raise InvalidInput(
            f"{options.data} is not the data of this run, or has changed: its digest is {dataset.origin}, not "
            f"{options.data_digest}"
        )
    return dataset


def with_installed(spec: Spec) -> Spec:
    """Run with the file of an installed package as --data, where its data set has one and none is given."""
    if spec.dataset not in sites.INSTALLED or spec.data is not None:
        return spec
    return dataclasses.replace(spec, data=str(sites.installed(spec.dataset)))


def _read(task: str | None, **arguments: Any) -> Dataset:
    dataset = own_files.from_file(**arguments, num_classes=0 if task in TARGETS else None)
    y, num_classes = dataset.train_y, dataset.num_classes
    labels = f"{arguments['data']}: labels {y.dtype} [{', '.join(['P', *map(str, y.shape[1:])])}]"
    if task not in TARGETS and not num_classes:
        raise InvalidInput(
            f"{labels} are no classes: give an integer or a word for each row, or one of --task {', '.join(TARGETS)}"
        )
    if task == "binary" and num_classes != 2:
        raise InvalidInput(f"{arguments['data']}: --task binary is for 2 classes, and there are {num_classes}")
    both = y, dataset.test_y
    if task == "multi_label" and not (y.ndim == 2 and all(np.isin(flags, (0, 1)).all() for flags in both)):
        raise InvalidInput(f"{labels} are not several flags, 0 or 1, for each row, as --task multi_label wants them")
    if task == "next_symbol" and not (y.ndim == 2 and y.dtype.kind == "i"):
        raise InvalidInput(f"{labels} are not a number of a symbol at each place, as --task next_symbol wants them")
    return dataset


def is_file(data: str | None) -> TypeGuard[str]:
    """Whether --data or --test-data names a file or folder, not a Hugging Face dataset or nothing."""
    return data is not None and not data.startswith(own_files.HUB)


def fitted(spec: Spec, dataset: Dataset) -> Spec:
    """Run with the digest of the data, and with the numbers of the data's clients and tokens, where it has them.

    Paths of files are absolute from here on: a run is exported and resumed from other folders too.
    """
    found: dict[str, Any] = {"data_digest": dataset.origin}
    for name in ("data", "test_data"):
        if is_file(path := getattr(spec, name)):
            found[name] = str(Path(path).expanduser().absolute())
    is_tokens = np.issubdtype(dataset.train_x.dtype, np.integer) and dataset.mean is None
    if spec.model in TEXT_MODELS and np.any(dataset.train_x % 1):
        how = ": leave out --normalize" if spec.normalize else ""
        raise InvalidInput(f"--model {spec.model} is for tokens, and the inputs are no whole numbers{how}")
    if spec.model in TEXT_MODELS and spec.vocabulary is None and is_tokens:
        found["vocabulary"] = vocabulary_of(dataset.train_x)
    if spec.partition == "natural":
        found["num_clients"] = number = len(dataset.client_names)
        if "num_clients" in spec.given and spec.num_clients != number:
            raise InvalidInput(
                f"--num-clients {spec.num_clients}: {spec.client_column} names {number} clients, leave it out"
            )
    return dataclasses.replace(spec, **found)


def notes(dataset: Dataset) -> list[str]:
    """Remarks on the user's own data that can be used, and may hold a mistake."""
    found = _notes_on_classes(dataset) if dataset.num_classes else []
    if again := int(np.isin(_hashes(dataset.test_x), _hashes(dataset.train_x)).sum()):
        found.append(f"{again} of {len(dataset.test_y)} test rows have the inputs of a training row")
    if dataset.mean is None and dataset.train_x.dtype == "uint8" and dataset.train_x.max() > 1:
        found.append("inputs are bytes from 0 to 255 and stay so; --normalize scales them")
    if dataset.train_client is not None and dataset.num_classes:
        pairs = np.unique(np.stack([dataset.train_client, dataset.train_y]), axis=1)[0]
        if alone := int(np.sum(np.bincount(pairs) == 1)):
            found.append(f"{alone} of {len(dataset.client_names)} clients have training rows of one class only")
    return found


def _notes_on_classes(dataset: Dataset) -> list[str]:
    counts = np.bincount(np.concatenate([dataset.train_y, dataset.test_y]), minlength=dataset.num_classes)
    names = dataset.class_names or tuple(map(str, range(dataset.num_classes)))
    order = np.argsort(counts, kind="stable")
    listed = ", ".join(f"{names[number]} ({counts[number]})" for number in order[:LISTED])
    if len(order) > LISTED:
        listed += f" and {len(order) - LISTED} more, up to {names[order[-1]]} ({counts[order[-1]]})"
    found = [f"rows of the {len(names)} classes, the fewest first: {listed}"]
    if single := int(np.sum(counts == 1)):
        found.append(f"{single} of {len(names)} classes have one row only")
    return found


def _hashes(x: Any) -> np.ndarray:
    """A number [P] for each row that equal rows share."""
    return np.fromiter((hash(row.tobytes()) for row in x), np.int64, len(x))


def _arguments(options: Options) -> dict[str, Any]:
    """Arguments of `own_files.from_file`."""
    names = ("task", "label", "client_column", "time", "impute", "encode", "min_rows")
    names = (*names, "test_data", "test_fraction", "normalize")
    arguments = {name: getattr(options, name) for name in names}
    lists = {name: _listed(getattr(options, name)) for name in ("inputs", "drop")}
    return {"data": _data(options)} | arguments | lists


def _listed(names: str | None) -> tuple[str, ...] | None:
    """Names of columns between commas."""
    return None if names is None else tuple(name.strip() for name in names.split(","))


def _data(options: Options) -> str:
    if options.data is None:
        raise InvalidInput(f"give --data: {own_files.FORMATS}")
    return options.data
