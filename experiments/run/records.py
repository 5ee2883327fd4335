"""Records of an experiment before its first round: configuration, identity and headline."""

import contextlib
import json
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.folder.run_folder import CONFIG
from experiments.folder.version import method_version, source_versions
from experiments.host.jax_config import devices
from experiments.run.build import Experiment
from experiments.spec.hyper_parameters import documented_info, unread_by_method
from experiments.spec.identity import fixed_rounds, relevant_options
from experiments.spec.option_notes import assignments, flag, label
from experiments.spec.options import KINDS, RESULT_NEUTRAL, Options, networks
from experiments.spec.own_code import method_factory
from pfl_jax.base import Info
from pfl_jax.data.federated import class_table
from pfl_jax.errors import InvalidInput
from pfl_jax.schedules import mixture
from pfl_jax.tasks import CLASSIFICATION, Task

MOST_TABLE_ENTRIES = 20_000
"""Maximum size of the table of classes by clients in the configuration."""


def configuration(experiment: Experiment) -> dict[str, Any]:
    """Configuration of a run: everything needed to repeat it."""
    spec, dataset, data, counts = experiment.spec, experiment.dataset, experiment.data, experiment.counts
    table = names = None
    if (mixed := mixture(experiment.method)) is not None:
        names = [networks(spec.model)[one] for one in mixed.networks(data.num_clients)]
    # In a distributed run no process has the labels of all clients.
    if data.mesh is None and 0 < data.num_clients * data.num_classes <= MOST_TABLE_ENTRIES:
        table = class_table(data).tolist()
    record = {
        "dataset": spec.dataset,
        "data": {
            **{name: getattr(dataset, name) for name in ("description", "note", "source", "origin", "is_real")},
            "num_classes": dataset.num_classes,
            **{name: list(getattr(dataset, name)) for name in ("input_shape", "class_names", "client_names")},
        },
        "options": spec.options,
        "hyper_parameters": spec.hyper_parameters,
        "given": sorted(spec.given),
        "info": documented_info(method_factory(spec.method)),
        "train_examples": np.asarray(data.train_count).tolist(),
        "test_examples": counts.test.tolist(),
        "class_table": table,
        "partition_digest": experiment.partition_digest,
        **privacy_record(experiment, experiment.settings.rounds),
        "bytes_per_client_and_round": experiment.traffic._asdict(),
        "chunk": experiment.settings.chunk,
        "device": device_name(spec),
        "versions": _versions(),
        "method_version": method_version(spec.method),
    }
    rest = {
        "own_code": spec.own_code or None,
        "validation_examples": None if counts.validation is None else counts.validation.tolist(),
        "weights_digest": experiment.weights_digest,
        "networks": names,
        "attackers": None if counts.attackers is None else np.flatnonzero(counts.attackers).tolist(),
        "task": None if counts.task.scores == CLASSIFICATION.scores else _task_record(counts.task),
    }
    return record | {name: value for name, value in rest.items() if value is not None}


def _task_record(task: Task) -> dict[str, Any]:
    names, shares = ([one.name for one in some] for some in (task.scores, [one for one in task.scores if one.percent]))
    better = task.primary.higher_is_better
    return {"name": task.name, "scores": names, "in_percent": shares, "higher_is_better": better}


def privacy_record(experiment: Experiment, rounds: int) -> dict[str, Any]:
    """Entry "privacy" with the budgets after a number of rounds; empty without differential privacy."""
    return {"privacy": [budget.record(rounds) for budget in experiment.privacy]} if experiment.privacy else {}


def identity(experiment: Experiment) -> dict[str, Any]:
    """Identity of a run in its checkpoints: its configuration, and versions that affect its results' last bits."""
    spec = experiment.spec
    options = {flag(name): value for name, value in relevant_options(spec).items()}
    if not fixed_rounds(spec):
        del options[flag("rounds")]
    named = {"dataset": spec.dataset, **options, "--seed": spec.seed}
    if experiment.weights_digest is not None:
        named["weights"] = experiment.weights_digest
    versions = {name: version for name, version in _versions().items() if name in ("jax", "jaxlib", *source_versions())}
    return {
        "run": named | {"data": experiment.dataset.description},
        "made_with": {**versions, "device": device_name(spec), "chunk": experiment.settings.chunk},
    }


def check_identity(record: dict[str, Any], experiment: Experiment, folder: Path, notify: Callable[[str], None]) -> None:
    """Raise InvalidInput for a checkpoint's record of another run; notify where only the last bits may differ."""
    stored, own = record["identity"], json.loads(json.dumps(identity(experiment)))
    for name, value in own["run"].items():
        if stored["run"].get(name) != value:
            raise InvalidInput(
                f"the checkpoints in {folder} are of another run: they were written with {name} "
                f"{stored['run'].get(name)}, {CONFIG} has {value}"
            )
    began, now = stored["made_with"], own["made_with"]
    # `resume.record_code` notes other sources.
    names = now.keys() - source_versions()
    changed = [f"{name} {began[name]} then and {now[name]} now" for name in sorted(names) if began[name] != now[name]]
    if changed:
        notify(f"Note: {', '.join(changed)}: results may differ in their last bits from an uninterrupted run's.")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "flax", "optax", "jaxopt", "numpy", "scikit-learn", "tensorflow-datasets"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found | source_versions()


def device_name(options: Options) -> str:
    """Kind and number of devices: "cpu x 2"."""
    used = devices(options)
    processes = len({one.process_index for one in used})
    kind = used[0].device_kind if len(used) == 1 else f"{used[0].device_kind} x {len(used)}"
    return kind if processes == 1 else f"{kind} in {processes} processes"


MOST_INFO_ENTRIES = 10_000
"""Maximum size of an entry of a round's Info in the metrics log."""


def info_record(info: Info) -> dict[str, Any]:
    """Small entries of a round's Info, for JSON: name -> nested lists, to six digits."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): _digits(np.asarray(leaf))
        for path, leaf in jax.tree.leaves_with_path(info)
        if leaf.size <= MOST_INFO_ENTRIES
    }


def _digits(array: np.ndarray) -> Any:
    if array.ndim:
        return [_digits(row) for row in array]
    return float(f"{array:.6g}") if array.dtype.kind == "f" else array.item()


_IN_HEADLINE = {"method", "model", "preset", "rounds", "num_clients", "participation", "partition", "seed"}
"""Options that the headline names in its own words."""


def headline(experiment: Experiment) -> str:
    """One line that describes a run, from the data source to the other options that were given."""
    spec, counts = experiment.spec, np.asarray(experiment.data.train_count)
    sizes = f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
    unread = unread_by_method(spec.method, spec.hyper_parameters)
    values = {k: v for k, v in spec.hyper_parameters.items() if v is not None and k not in unread}
    own = ", ".join(f"{name}={value}" for name, value in values.items())
    others = {name: spec.options[name] for name in sorted(spec.given & KINDS.keys() - RESULT_NEUTRAL - _IN_HEADLINE)}
    procedure = f", procedure {spec.procedure}" if spec.procedure else ""
    return (
        f"{experiment.dataset.description}, preset {spec.preset}{procedure}: "
        f"{label(spec.method)}({own}), {label(spec.model)}, "
        f"{spec.rounds} rounds, {spec.num_clients} clients with {sizes} training examples, "
        f"participation {spec.participation:g}, {label(spec.partition)}, on {device_name(spec)}, chunk "
        f"{experiment.settings.chunk}" + (f", {assignments(others)}" if others else "")
    )
