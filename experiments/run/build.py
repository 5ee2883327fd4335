"""An experiment, and how it is built from a spec: data, federation, model, method, settings."""

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from experiments.folder.run_folder import ExampleCounts
from experiments.host.console import print_notice, warnings_as_notes
from experiments.host.distributed import Processes
from experiments.host.jax_config import devices
from experiments.run.changing import phases_of
from experiments.run.models import (
    check_scores,
    model_of,
    models_of,
    network_positions,
    own_task,
    texts,
    weights_digest,
    with_states,
)
from experiments.spec import identity, own_data
from experiments.spec.choices import CUSTOM, PRETRAINED, TEXTS, WITH_FILES
from experiments.spec.hyper_parameters import parse_schedule, scheduled
from experiments.spec.option_notes import assignments, flag, is_own, is_partition_file, label
from experiments.spec.options import Options, read_with
from experiments.spec.own_code import describe_foreign_error, method_factory
from experiments.spec.spec import Spec, settings_of
from pfl_jax import simulate
from pfl_jax.base import Method, Model
from pfl_jax.data import allocation, federated, partition, partition_files, sources
from pfl_jax.data.augment import CropAndFlip
from pfl_jax.data.phases import Phases
from pfl_jax.data.sources import Dataset
from pfl_jax.engine import chunking, placement
from pfl_jax.engine.cohort import attackers
from pfl_jax.engine.communication import Traffic, traffic
from pfl_jax.engine.store import Federation
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import METHODS
from pfl_jax.methods import make_method as method_of
from pfl_jax.methods.factories import is_for_adapters
from pfl_jax.methods.fedbn import is_normalization
from pfl_jax.networks.mixed import mixed
from pfl_jax.primitives import find_adapters
from pfl_jax.privacy import Budget
from pfl_jax.privacy import budgets as budgets_of
from pfl_jax.schedules import MethodSchedule, Mixed, at_round
from pfl_jax.tasks import CLASSIFICATION

MAX_CLIENTS_PER_EXAMPLE = {"grouped": 2, "pathological": 2, "iid": 1}
"""partition -> largest mean number of clients that hold the same training example. FedPAC's 100 clients of 600 examples
hold more than CIFAR-10 has, so grouped and pathological partitions start over with a class that is exhausted."""


@dataclass(frozen=True, eq=False)
class Experiment:
    """All parts of a run, built from its spec.

    Attributes:
      spec: with the smaller defaults on embedded data.
      dataset, data: all examples, and the examples of each client that takes part.
      partition_digest: see `partition_files.digest_of`.
      method: method with its model and hyper-parameters.
      settings: of the simulation.
      newcomers: examples of the clients that never take part; None where all take part.
      phases: data of each round, with `data` of each client's first phase; None if they do not change.
      privacy: budgets of differential privacy; empty without clipping.
    """

    spec: Spec
    dataset: Dataset
    data: Federation
    partition_digest: str
    method: Method | MethodSchedule
    settings: simulate.Settings
    newcomers: Federation | None = None
    privacy: tuple[Budget, ...] = ()
    phases: Phases | None = None

    def data_in(self, number: int) -> Federation:
        """Data of the round with this number, from 1."""
        return self.data if self.phases is None else self.phases.parts[self.phases.phase_of(number - 1)]

    @functools.cached_property
    def counts(self) -> ExampleCounts:
        """Numbers of examples that the clients are scored on."""
        validation, settings, found = self.data.validation_count, self.settings, None
        if settings.attackers:
            key = jax.random.key(self.spec.seed)
            found = np.asarray(attackers(key, self.data.num_clients, settings.attackers))
        return ExampleCounts(
            test=np.asarray(self.data.test_count),
            validation=None if validation is None else np.asarray(validation),
            newcomers=None if self.newcomers is None else np.asarray(self.newcomers.test_count),
            attackers=found if found is not None and found.any() else None,
            task=at_round(self.method, 0).task,
        )

    def counts_in(self, number: int) -> ExampleCounts:
        """Numbers of examples that the clients are scored on in the round with this number."""
        data, counts = self.data_in(number), self.counts
        validation = None if data.validation_count is None else np.asarray(data.validation_count)
        return counts._replace(test=np.asarray(data.test_count), validation=validation)

    @functools.cached_property
    def traffic(self) -> Traffic:
        """Bytes that one client sends and receives in a round."""
        return traffic(self.method, self.data)

    @functools.cached_property
    def weights_digest(self) -> str | None:
        """Digest of the file of pretrained weights, which no checkpoint has; None without."""
        if self.spec.model not in PRETRAINED:
            return None
        return weights_digest(self.spec)

    def state_shapes(self) -> Any:
        """Shapes and types of the state's leaves."""
        engine = simulate.build(self.method, self.settings)
        return jax.eval_shape(engine.init, self.data, jax.random.key(0))


def build_experiment(spec: Spec, console: Console, processes: Processes | None = None) -> Experiment:
    """Load the data and build federation, model and method; each process keeps its own clients' examples."""
    processes = processes or Processes()
    spec, dataset = processes.first_then_others(lambda: load_data(spec, console))
    with processes.synchronized():
        # Not on the devices: those get their own clients' examples.
        on_host = jax.local_devices(backend="cpu")[0] if spec.distributed else None
        with jax.default_device(on_host):
            parts, shift = divide_and_tell(spec, dataset, console), shift_of(spec, dataset)
            phases = phases_of(spec, dataset, parts, shift)
            data = federated.federate(dataset, parts, **shift, seed=spec.seed) if phases is None else phases.first
        largest, batch_size = max(map(len, parts.train)), spec.hyper_parameters.get("batch_size", 0)
        if "batch_size" in spec.given and batch_size > largest:
            print_notice(
                console,
                f"Note: --batch-size {batch_size} is more than the {largest} training examples of any client: each "
                "step takes all of a client's examples (whole-batch gradient descent, one step per epoch).",
            )
        if not spec.distributed:
            return assemble(spec, dataset, data, parts, phases=phases)
        return assemble(spec, placement.without_inputs(dataset), data, parts, simulate.client_mesh(devices(spec)))


def load_data(spec: Spec, console: Console) -> tuple[Spec, Dataset]:
    """Load the data, and adapt the run to it, see `on_data`; notices go to the console.

    States below frozen layers of a pretrained model take the place of its examples.
    """
    spec, dataset = load_examples(spec, console)
    if spec.model in PRETRAINED:
        dataset = with_states(spec, dataset, console)
    return spec, dataset


def load_examples(spec: Spec, console: Console) -> tuple[Spec, Dataset]:
    """Load the data without states of a pretrained model, see `load_data`."""
    notify = functools.partial(print_notice, console)
    folder = spec.data_dir
    if folder is not None and spec.source == "files" and not Path(folder).expanduser().exists():
        raise InvalidInput(f"the data folder {folder} is not there")
    if spec.dataset in WITH_FILES:
        with warnings_as_notes(console):
            dataset = own_data.load(spec.dataset, own_data.with_installed(spec))
    elif spec.dataset == TEXTS:
        dataset = texts(spec)
    else:
        dataset = sources.load(
            *(spec.dataset, spec.source, spec.data_dir),
            notify=notify,
            normalization=spec.pixel_normalization,
        )
    if is_partition_file(spec.partition):
        partition_files.load(spec.partition, dataset)
    spec, changes = on_data(spec, dataset)
    if changes:
        notify(f"Smaller defaults on {dataset.description}: {assignments(changes)}. Options given stay as they are.")
    for note in _notes(spec, dataset):
        notify(f"Note: {note}.")
    return spec, dataset


def on_data(spec: Spec, dataset: Dataset) -> tuple[Spec, dict[str, Any]]:
    """Run adapted to this data, and the defaults that are smaller because the data is embedded."""
    if spec.dataset in WITH_FILES:
        return own_data.fitted(own_data.with_installed(spec), dataset), {}
    return (spec, {}) if dataset.is_real else spec.on_embedded_data()


def _notes(spec: Spec, dataset: Dataset) -> list[str]:
    """Remarks on options of a run on this data that may be mistakes."""
    given = spec.given | {parse_schedule(text).name for text in spec.schedule or ()}
    notes = identity.notes(spec, given, jax.default_backend())
    if spec.target_accuracy is not None and spec.val_fraction is None and not is_partition_file(spec.partition):
        notes.append("--target-accuracy is compared with scores on test examples: --val-fraction 0.1 sets others apart")
    if spec.dataset == CUSTOM:
        notes += own_data.notes(dataset)
    if is_own(spec.model) and spec.task is not None:
        own = own_task(spec.model, dataset.input_shape, model_of(spec, dataset).num_classes)
        if own not in (spec.task, CLASSIFICATION.name):
            notes.append(f"--task {spec.task} takes the place of the model's own task, {own}, and of its scores")
    for is_for, there, why in (
        (spec.method == "fedbn", is_normalization, "normalization layers, so fedbn is fedavg"),
        (
            is_for_adapters(METHODS.get(spec.method, METHODS["local"])),
            find_adapters,
            "low-rank adapters, for which this method is",
        ),
    ):
        if is_for and not any(there(jax.eval_shape(model_of(spec, dataset).init, jax.random.key(0)))):
            notes.append(f"--model {label(spec.model)} has no {why}")
    return notes


def assemble(
    spec: Spec,
    dataset: Dataset,
    data: federated.FederatedData,
    parts: partition.Partition,
    mesh: Mesh | None = None,
    phases: Phases | None = None,
) -> Experiment:
    """Assemble the experiment over an existing federation, whose clients are placed on a mesh if there is one."""
    changes = "" if phases is None else f" {spec.change} in {spec.phases} phases of {spec.rounds} rounds"
    digest = partition_files.digest_of(parts, spec.shift + changes)
    settings = settings_of(spec)
    newcomers: Any = None
    if spec.held_out_clients:
        data, newcomers = federated.hold_out(data, spec.held_out_clients)
    counts = np.asarray(data.train_count)
    method = make_method(spec, dataset)
    check_scores(at_round(method, 0).task, spec.target_accuracy)
    if spec.patience is not None and is_partition_file(spec.partition) and data.validation_count is None:
        raise InvalidInput("--patience needs validation examples, and the partition has none: give --val-fraction 0.1")
    factory, key = method_factory(spec.method), jax.random.key(spec.seed)
    prepared = [flag(name) for name in ("normalize", "impute", "encode") if getattr(spec, name)]
    own = (f"inputs: prepared from the rows of all clients ({', '.join(prepared)})",) if prepared else ()
    budgets = budgets_of(factory, _values(spec), settings, counts, key, spec.dp_delta)
    budgets = tuple(one._replace(uncovered=one.uncovered + own) for one in budgets)
    settings = chunking.resolved(settings, method, counts, devices=len(devices(spec)))
    frozen = at_round(method, 0).frozen

    def finished(data: federated.FederatedData) -> Federation:
        return (data if mesh is None else placement.place(data, mesh)).with_frozen(frozen)

    newcomers = None if newcomers is None else finished(newcomers)
    if phases is not None:
        phases = replace(phases, parts=tuple(part.with_frozen(frozen) for part in phases.parts))
    return Experiment(spec, dataset, finished(data), digest, method, settings, newcomers, budgets, phases)


def _values(spec: Spec) -> dict[str, Any]:
    """Hyper-parameters and fields of the recipe of local training, without epochs where --local-steps take their
    place."""
    names = ("optimizer", "clip_norm", "local_steps", "drop_last", "shuffle", "dp_clip", "dp_noise")
    own = {name: value for name, value in spec.hyper_parameters.items() if name != "epochs" or value is not None}
    return {name: getattr(spec, name) for name in names} | own


def make_method(spec: Spec, dataset: Dataset, **values: Any) -> Method | MethodSchedule:
    """Method of a run, a schedule where hyper-parameters change with the round; `values` are in their place."""
    models, factory = models_of(spec, dataset), method_factory(spec.method)
    positions = network_positions(spec)
    hyper_parameters = _values(spec) | values
    augment = CropAndFlip.normalized(dataset.input_shape, dataset.mean, dataset.std) if spec.augment else None

    def make(**changing: Any) -> Method | Mixed:
        def of_model(model: Model) -> Method:
            return method_of(factory, model, augment=augment, **hyper_parameters | changing)

        return of_model(models[0]) if len(models) == 1 else mixed(of_model, models, positions)

    try:
        method = make()
    except ValueError as error:
        raise InvalidInput(f"{label(spec.method)} refuses its options: {error}") from None
    except Exception as error:
        if not is_own(spec.method):
            raise
        raise InvalidInput(f"--method {spec.method} fails: {describe_foreign_error(error)}") from None
    if not isinstance(method, Method | Mixed):
        raise InvalidInput(f"--method {spec.method} returns a {type(method).__name__}, not a Method")
    schedules = spec.schedule
    if not schedules:
        return method
    return lambda index: make(**scheduled(schedules, hyper_parameters, index, spec.rounds))


def shift_of(options: Options, dataset: Dataset) -> dict[str, Any]:
    """Shift between groups of clients, as `federated.federate` takes it."""
    # Without classes each client is a group of its own.
    of_classes = dataset.num_classes and partition.num_groups(options.partition, dataset.num_classes)
    return {"shift": options.shift, "num_groups": of_classes or options.num_clients}


def divide_and_tell(options: Options, dataset: Dataset, console: Console) -> partition.Partition:
    """Partition as of `divide`, whose warnings are notices; a Dirichlet draw that had to be completed gives one."""
    with warnings_as_notes(console):
        return divide(options, dataset)


def divide(options: Options, dataset: Dataset) -> partition.Partition:
    """Partition that the options ask for; InvalidInput where clients would mostly train on each other's examples."""
    if is_partition_file(options.partition):
        return _with_validation(options, partition_files.load(options.partition, None))
    named = {name: getattr(options, name) for name in read_with("partition", options.partition)}
    for protocol in ("dirichlet_protocol", "pathological_protocol"):
        if protocol in named:
            named["protocol"] = named.pop(protocol)
    if named.pop("size_choices", None) is not None:
        named["train_size"] = allocation.draw_sizes(options.size_choices or (), options.num_clients, options.seed)
    sizes, there = named.get("train_size"), len(dataset.train_y)
    total = int(np.broadcast_to(0 if sizes is None else sizes, options.num_clients).sum())
    # Sizes are upper bounds with dirichlet, which never runs out. Shared may be test examples, and all of a stand-in.
    if dataset.is_real and total > MAX_CLIENTS_PER_EXAMPLE.get(options.partition, math.inf) * there:
        raise InvalidInput(
            f"{options.num_clients} clients with {total} training examples in all are more than the {there} of "
            f"{dataset.description} can serve: use fewer clients, or a smaller --train-size"
        )
    parts = partition.make(options.partition, dataset, options.num_clients, seed=options.seed, **named)
    return _with_validation(options, parts)


def _with_validation(options: Options, parts: partition.Partition) -> partition.Partition:
    """Partition with the validation examples that the options ask for."""
    if options.val_fraction is None:
        return parts
    return partition.with_validation(parts, options.val_fraction, seed=options.seed)
