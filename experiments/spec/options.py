"""All options of a run in one class: the options in `groups`, and options about files and hardware. Their notes decide
the command line and its help, the identity of a run, and which options are read.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_type_hints

from experiments.spec.choices import FromZero, MethodName, PresetName, ProcedureName
from experiments.spec.groups import Data, Evaluation, Federation, Privacy, Robustness, Training
from experiments.spec.option_notes import NotInSweeps, Option, Trait, assignments, flag, label, with_note, with_trait
from pfl_jax.backends import BACKENDS, Precision
from pfl_jax.errors import InvalidInput
from pfl_jax.methods.factories import RECIPES
from pfl_jax.networks.models import HETEROGENEOUS, MODELS
from pfl_jax.validation import Count, ReadWith, check_value, unknown

NEUTRAL, HERE = Trait.NEUTRAL, Trait.NOT_IN_FILES


@dataclass(frozen=True, kw_only=True)
class Output:
    """Output files, and resumption of an interrupted run."""

    out: Annotated[str | None, NEUTRAL, HERE, NotInSweeps("every run has its folder in the sweep's --out")] = None
    """New folder for the results; None creates one under runs/."""
    keep_state: Annotated[Literal["auto", "always", "never"], NEUTRAL] = "auto"
    """Write a checkpoint of the final state of server and clients, for experiments.export, load_run and more rounds;
    auto writes up to 256 MiB, and nothing in commands with many runs."""
    checkpoint_every: Annotated[Count | None, NEUTRAL] = None
    """Rounds between two checkpoints, and one at the end; None writes one at an interruption or for --keep-state."""
    keep_checkpoints: Annotated[Count, NEUTRAL] = 2
    """Number of checkpoints to keep, the newest ones."""
    resume: Annotated[str | None, NEUTRAL, HERE, NotInSweeps("the same command goes on where it was stopped")] = None
    """Folder of an interrupted run to continue from its newest checkpoint; no other options are needed, except
    --method, --model and --loss if these are your own files. A larger --rounds adds rounds, also to a finished run."""
    config: Annotated[str | None, NEUTRAL, HERE] = None
    """File with options, .toml or .json, or the config.json of a run, which is then repeated; options on the command
    line replace the file's."""
    print_config: Annotated[bool, NEUTRAL, HERE, NotInSweeps("it is for single runs")] = False
    """Print all options on which results depend as JSON for --config, and run nothing."""
    plot: Annotated[bool, NEUTRAL] = False
    """Plot the primary score over the rounds at the end, as curves.png in the run's folder."""
    tensorboard: Annotated[bool, NEUTRAL] = False
    """Also write the evaluations for TensorBoard, into tensorboard/ in the run's folder."""
    wandb: Annotated[
        bool, NEUTRAL, HERE, NotInSweeps("its runs go side by side in one process, where W&B has one run at a time")
    ] = False
    """Also send the evaluations to Weights & Biases, configured by its environment variables; needs pip install
    wandb."""
    tracker: Annotated[str | None, NEUTRAL, HERE, Trait.CODE] = None
    """FILE.py:NAME of your own function, which is called with the run's configuration and returns a function
    (round, scores) that gets each evaluation: names such as received/mean -> numbers. It is executed only where a
    command line names it."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Hardware and precision; up to rounding, results do not depend on these options."""

    devices: Annotated[Count | Literal["auto"], NEUTRAL] = "auto"
    """Number of devices that share the clients, in all processes together; auto is all devices, on a CPU one for each
    core."""
    chunk: Annotated[Count | Literal["auto"], NEUTRAL] = "auto"
    """Clients trained together under one vmap on a device; 1 trains one after another. auto is 1 for convolutional
    networks on CPUs, otherwise the largest number for which clients of different sizes waste less than a tenth of the
    gradient steps."""
    state_on: Annotated[
        Literal["auto", "device", "host", "disk"],
        NEUTRAL,
        NotInSweeps("its runs keep their clients' states on the devices"),
    ] = "auto"
    """Storage of the clients' states between rounds: memory of the device or the host, or a file in the run's folder.
    auto is host if the states of all clients would take more than a quarter of the device's free memory, disk if they
    would take more than half of the machine's memory, otherwise device. The results are the same."""
    precision: Precision = BACKENDS["default"].precision
    """Precision of matrix products and convolutions on a GPU; a CPU always uses float32."""
    compilation_cache: Annotated[bool, NEUTRAL] = True
    """Cache compiled programs in ~/.cache/pfl_jax/xla (or $PFL_JAX_CACHE), so that the next run starts faster."""
    distributed: Annotated[bool, NEUTRAL, HERE, NotInSweeps("a command of many runs has one process")] = False
    """Share the run among several processes, on one or more machines: start the same command in each process. Under
    Slurm and other schedulers the processes find each other. The first process reports and writes files."""
    coordinator: Annotated[str | None, NEUTRAL, HERE] = None
    """HOST:PORT of the first process, if there is no scheduler; needs --distributed, --num-processes and
    --process-id."""
    num_processes: Annotated[Count | None, NEUTRAL, HERE] = None
    """Number of processes (only with --distributed)."""
    process_id: Annotated[FromZero | None, NEUTRAL, HERE] = None
    """Number of this process, from 0 (only with --distributed)."""


PROCESSES = ("distributed", "coordinator", "num_processes", "process_id")
"""Options of runs in several processes."""


@dataclass(frozen=True, kw_only=True)
class Options(Engine, Output, Evaluation, Privacy, Training, Robustness, Federation, Data):
    """Options that all methods have; the three fields here determine the defaults of all others."""

    method: Annotated[MethodName, Trait.CODE]
    """Method, built in or FILE.py:NAME of your own factory; `--method NAME --help` shows its own options."""
    preset: PresetName
    """Paper whose settings are the defaults of all other options; on the papers' data sets by default the method's own
    paper."""
    procedure: ProcedureName | None = None
    """Variant of FedAS, as printed in its paper (print) or as in its released code (release), where all clients of a
    cohort align one backbone in turn. It decides the batches of every method, and options of fedas. By default print
    with --preset fedas."""

    def check(self) -> None:
        """Raise InvalidInput for the first option that is out of range, or that lacks another option."""
        for name, kind in KINDS.items():
            check_value(flag(name), getattr(self, name), kind)
        names = networks(self.model)
        if strange := [name for name in names if len(names) > 1 and name not in MODELS]:
            raise InvalidInput(unknown("model in a list", strange[0], MODELS))
        if self.networks is not None and len(names) == 1:
            raise InvalidInput("--networks needs a list of networks as --model, such as fedpac_cnn,mlp")
        for name in ("hidden", "size_choices"):
            if (least := min(getattr(self, name) or [1])) < 1:
                raise InvalidInput(f"{flag(name)} must be at least 1 each, not {least}")
        if self.wandb and importlib.util.find_spec("wandb") is None:
            raise InvalidInput("--wandb needs a package that is not installed: pip install wandb")
        if not 0 <= self.seed < 2**32:
            raise InvalidInput(f"--seed must be between 0 and {2**32 - 1}, not {self.seed}")
        self._check_processes()

    def _check_processes(self) -> None:
        """Raise InvalidInput for options that cannot locate the processes of --distributed."""
        needed = [flag(name) for name in PROCESSES if getattr(self, name) is None or getattr(self, name) is False]
        if needed and any(getattr(self, name) is not None for name in PROCESSES[1:]):
            raise InvalidInput(f"{', '.join(map(flag, PROCESSES))} are given together: {needed[0]} is missing")
        if self.distributed and self.state_on == "disk":
            raise InvalidInput("--state-on disk is for one process: with --distributed give --state-on host")
        host, _, port = (self.coordinator or "localhost:1").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidInput(f"--coordinator is HOST:PORT, such as 10.0.0.1:29500, not {self.coordinator}")
        if (self.process_id or 0) >= (self.num_processes or 1):
            raise InvalidInput(f"--process-id {self.process_id} must be from 0 to {(self.num_processes or 1) - 1}")


_hints = get_type_hints(Options, include_extras=True)
KINDS: dict[str, Any] = {field.name: _hints[field.name] for field in fields(Options)}
"""Types of the options, with their notes."""

COMMON = {field.name: Option(field.name, KINDS[field.name], field.default) for field in fields(Options)}
"""Name -> option that all methods have."""

GROUPS: dict[str, Any] = {
    "data": Data,
    "client": Federation,
    "robustness": Robustness,
    "training": Training,
    "privacy": Privacy,
    "evaluation": Evaluation,
    "result": Output,
    "device": Engine,
}
"""Heading in the help, without the word "options" -> group, whose docstring the help shows too."""

CONDITIONS = with_note(KINDS, ReadWith)
"""Option -> conditions under which it is read, all of which must be met."""
for _recipe in RECIPES:
    CONDITIONS |= with_note(get_type_hints(_recipe, include_extras=True), ReadWith)

RESULT_NEUTRAL = frozenset(with_trait(KINDS, Trait.NEUTRAL, Trait.BY_DIGEST))
"""Options that do not change the results of a run; of --source and --data, only the data that was loaded matters.
`identity.result_neutral` has an exception."""


def names_of(group: type) -> list[str]:
    """Options of a group in the order of the help; hyper-parameters of methods (`of_methods`) come first."""
    return [*getattr(group, "of_methods", ()), *(field.name for field in fields(group))]


def networks(model: str) -> tuple[str, ...]:
    """Names of the networks that a value of --model deals to the clients, from a name, a list A,B,C, or a family."""
    return (model,) if ".py" in model else HETEROGENEOUS.get(model, tuple(model.split(",")))


def read_with(name: str, value: Any) -> list[str]:
    """Options that are read only with some values of the option `name`, this value among them."""
    return [
        option
        for option, conditions in CONDITIONS.items()
        if any(condition.name == name and _is_met(condition, value) for condition in conditions)
    ]


def unread(values: Mapping[str, Any], conditions: Mapping[str, Sequence[ReadWith]] = CONDITIONS) -> dict[str, str]:
    """Options that are not read, given the values of others -> reason, such as "with --manner serial".

    The default `conditions` are for options of all methods, and fields of the wrappers' recipes.
    """
    whys: dict[str, str] = {}
    for name, others in conditions.items():
        for other in others if name in values else ():
            if other.name in values and not _is_met(other, value := values[other.name]):
                is_off = value is None or (value == 0 and not isinstance(value, bool))
                shown = label(value) if isinstance(value, str) else value
                why = f"without {flag(other.name)}" if is_off else f"with {assignments({other.name: shown})}"
                whys.setdefault(name, why)
    return whys


def _is_met(condition: ReadWith, value: Any) -> bool:
    """Whether the value of an option meets a condition; for lora:8 its kind counts, and one of several networks."""
    if not isinstance(value, str):
        return condition.is_met(value)
    words = networks(value) if condition.name == "model" else [value.partition(":")[0]]
    return any(map(condition.is_met, words))
