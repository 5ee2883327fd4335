"""A run's parts, built from its spec: data, federation, model, method, settings."""

import functools
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from experiments.folder.run_folder import ExampleCounts
from experiments.host.console import print_notice, warnings_as_notes
from experiments.host.distributed import Processes
from experiments.host.jax_config import devices, free_bytes, machine_bytes
from experiments.run.data import divide, load_data, phases_of, shift_of
from experiments.run.models import check_scores, models_of, network_positions, weights_digest
from experiments.spec.choices import CUSTOM, PRETRAINED
from experiments.spec.hyper_parameters import scheduled
from experiments.spec.option_notes import flag, is_own, is_partition_file, label
from experiments.spec.options import KINDS
from experiments.spec.own_code import describe_foreign_error, method_factory
from experiments.spec.spec import Spec, settings_of
from pfl_jax import simulate
from pfl_jax.base import Method, Model
from pfl_jax.data import federated, partition_files
from pfl_jax.data.augment import CropAndFlip
from pfl_jax.data.partition import Partition
from pfl_jax.data.phases import Phases
from pfl_jax.data.sources import Dataset
from pfl_jax.engine import chunking, placement
from pfl_jax.engine.cohort import attackers
from pfl_jax.engine.communication import Traffic, traffic
from pfl_jax.engine.simulate import StateOn
from pfl_jax.engine.store import Federation
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import make_method as method_of
from pfl_jax.networks.mixed import mixed
from pfl_jax.primitives.local_training import LocalTraining
from pfl_jax.primitives.tree import byte_count
from pfl_jax.privacy import Budget
from pfl_jax.privacy import budgets as budgets_of
from pfl_jax.schedules import MethodSchedule, Mixed, at_round

CLIENTS_SHARE = 0.25
"""Share of the free memory that the clients' states may take on the devices; a round may need them twice."""

HOST_SHARE = 0.5
"""Share of the machine's memory that the clients' states may take on the host."""


@dataclass(frozen=True, eq=False)
class Experiment:
    """All parts of a run, built from its spec.

    Attributes:
      spec: spec of the run, with smaller defaults on embedded data.
      dataset, data: all examples, and the examples of each client that takes part.
      partition_digest: see `partition_files.digest_of`.
      method: method with its model and hyper-parameters.
      settings: settings of the simulation.
      newcomers: examples of the clients that never take part; None if all take part.
      phases: data of each phase, and `data`, the examples of each client's first phase; None if the data do not change.
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
        settings, key = self.settings, jax.random.key(self.spec.seed)
        found = np.asarray(attackers(key, self.data.num_clients, settings.attackers)) if settings.attackers else None
        return ExampleCounts(
            test=np.asarray(self.data.test_count),
            validation=_validation_count(self.data),
            newcomers=None if self.newcomers is None else np.asarray(self.newcomers.test_count),
            attackers=found if found is not None and found.any() else None,
            task=at_round(self.method, 0).task,
        )

    def counts_in(self, number: int) -> ExampleCounts:
        """Numbers of examples that the clients are scored on in the round with this number."""
        data = self.data_in(number)
        return self.counts._replace(test=np.asarray(data.test_count), validation=_validation_count(data))

    @functools.cached_property
    def traffic(self) -> Traffic:
        """Bytes that one client sends and receives in a round."""
        return traffic(self.method, self.data)

    @functools.cached_property
    def weights_digest(self) -> str | None:
        """Digest of the file of pretrained weights, which checkpoints leave out; None without such weights."""
        return weights_digest(self.spec) if self.spec.model in PRETRAINED else None

    def state_shapes(self) -> Any:
        """Shapes and types of the state's leaves."""
        engine = simulate.build(self.method, self.settings)
        return jax.eval_shape(engine.init, self.data, jax.random.key(0))

    def state_place(self) -> StateOn:
        """Storage of the clients' states: as requested, or where they fit; several processes do not use the disk."""
        if self.spec.state_on != "auto":
            return self.spec.state_on
        used = [one for one in devices(self.spec) if one.process_index == jax.process_index()]
        # Every device keeps all states, and the devices of a CPU share one memory.
        copies, size = len(used) if jax.default_backend() == "cpu" else 1, byte_count(self.state_shapes().clients)
        if size > HOST_SHARE * machine_bytes() and not self.spec.distributed:
            return "disk"
        return "host" if copies * size > CLIENTS_SHARE * free_bytes(used[0]) else "device"


def _validation_count(data: Federation) -> np.ndarray | None:
    return None if data.validation_count is None else np.asarray(data.validation_count)


def build_experiment(spec: Spec, console: Console, processes: Processes | None = None) -> Experiment:
    """Load the data and build federation, model and method; each process keeps its own clients' examples."""
    processes = processes or Processes()
    spec, dataset = processes.first_then_others(lambda: load_data(spec, console))
    with processes.synchronized():
        # Not on the devices, which get only their own clients' examples.
        on_host = jax.local_devices(backend="cpu")[0] if spec.distributed else None
        with jax.default_device(on_host), warnings_as_notes(console):
            parts, shift = divide(spec, dataset), shift_of(spec, dataset)
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


def assemble(
    spec: Spec,
    dataset: Dataset,
    data: federated.FederatedData,
    parts: Partition,
    mesh: Mesh | None = None,
    phases: Phases | None = None,
) -> Experiment:
    """Assemble the experiment over an existing federation, whose clients are placed on a mesh if there is one."""
    changes = "" if phases is None else f" {spec.change} in {spec.phases} phases of {spec.rounds} rounds"
    # Options decide which rows of a user's file are test rows, and partitions count the rows after that.
    own: Any = (dataset.train_y, dataset.test_y, dataset.test_rows) if spec.dataset == CUSTOM else ()
    rows = sha256(b"".join(one.tobytes() for one in own)).hexdigest() if own else ""
    digest = partition_files.digest_of(parts, spec.shift + changes + rows)
    newcomers: Any = None
    if spec.held_out_clients:
        data, newcomers = federated.hold_out(data, spec.held_out_clients)
    counts, method, settings = np.asarray(data.train_count), make_method(spec, dataset), settings_of(spec)
    check_scores(at_round(method, 0).task, spec.target_accuracy)
    if spec.patience is not None and is_partition_file(spec.partition) and data.validation_count is None:
        raise InvalidInput("--patience needs validation examples, and the partition has none: give --val-fraction 0.1")
    prepared = [flag(name) for name in ("normalize", "impute", "encode") if getattr(spec, name)]
    own = (f"inputs: prepared from the rows of all clients ({', '.join(prepared)})",) if prepared else ()
    key, factory = jax.random.key(spec.seed), method_factory(spec.method)
    budgets = budgets_of(factory, _values(spec), settings, counts, key, spec.dp_delta)
    budgets = tuple(budget._replace(uncovered=budget.uncovered + own) for budget in budgets)
    settings = chunking.resolved(settings, method, counts, devices=len(devices(spec)))
    frozen = at_round(method, 0).frozen

    def finished(data: federated.FederatedData) -> Federation:
        return (data if mesh is None else placement.place(data, mesh)).with_frozen(frozen)

    newcomers = None if newcomers is None else finished(newcomers)
    if phases is not None:
        phases = replace(phases, parts=tuple(part.with_frozen(frozen) for part in phases.parts))
    return Experiment(spec, dataset, finished(data), digest, method, settings, newcomers, budgets, phases)


def _values(spec: Spec) -> dict[str, Any]:
    """Hyper-parameters and fields of the recipe of local training; without epochs if --local-steps is given."""
    # As an option, `augment` is a switch, and in the recipe a function.
    names = sorted({one.name for one in fields(LocalTraining)} & KINDS.keys() - {"augment"})
    own = {name: value for name, value in spec.hyper_parameters.items() if name != "epochs" or value is not None}
    return {name: getattr(spec, name) for name in names} | own


def augmentation(dataset: Dataset) -> CropAndFlip:
    """Augmentation of a data set's images, whose border is black."""
    # Floats of a user's own images are normalized already, by their preparation.
    scale: Any = dataset if dataset.mean is not None or dataset.preparation is None else dataset.preparation
    return CropAndFlip.normalized(dataset.input_shape, scale.mean, scale.std)


def make_method(spec: Spec, dataset: Dataset, **values: Any) -> Method | MethodSchedule:
    """Method of a run, or a schedule if hyper-parameters change with the round; `values` replace hyper-parameters."""
    models, factory, positions = models_of(spec, dataset), method_factory(spec.method), network_positions(spec)
    hyper_parameters = _values(spec) | values
    augment = augmentation(dataset) if spec.augment else None

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
