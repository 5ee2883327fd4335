"""The options that every experiment has, whatever its method; presets.py holds their values."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from experiments.config.measures import Protocol
from pfl_jax.data.specs import SPECS, PixelNormalization
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import METHODS
from pfl_jax.networks.models import MODELS
from pfl_jax.primitives.local_sgd import Optimizer

if TYPE_CHECKING:
    MethodName: TypeAlias = str
    ModelName: TypeAlias = str
else:
    # Literals, so that --help lists the choices.
    MethodName = Literal[tuple(METHODS)]
    ModelName = Literal[tuple(MODELS)]

PresetName = Literal["fedpac", "fedas"]
OnNaN = Literal["stop", "skip-client"]
Precision = Literal["float32", "tf32", "bf16"]

MATMUL_PRECISION: dict[str, str] = {"float32": "highest", "tf32": "tensorfloat32", "bf16": "bfloat16"}
"""--precision -> jax_default_matmul_precision."""


@dataclass(frozen=True)
class Options:
    """What is run on which data, and where the results go. Every method has these options."""

    method: MethodName
    """Method to train with; `--method NAME --help` shows that method's own options."""
    preset: PresetName
    """Paper whose settings are the defaults of everything else."""
    model: ModelName
    """Network."""
    rounds: int
    """Communication rounds."""
    num_clients: int
    """Clients of the federation."""
    participation: float
    """Share of the clients that take part in a round, above 0 and at most 1; never fewer than one client."""
    full_last_round: bool = False
    """Everyone takes part in the last round."""
    straggler_fraction: float = 0.0
    """Share of the clients that are stragglers, the same ones in all rounds."""
    straggler_rate: float = 1.0
    """How often a straggler takes part, relative to the other clients, above 0 and at most 1."""
    drop_rate: float = 0.0
    """Share of each round's clients, drawn anew, that train but drop out before they send, at least 0 and below 1."""
    held_out_clients: int = 0
    """How many of the clients, the last ones, never take part; what the method does for such newcomers is measured."""
    partition: Literal["grouped", "pathological", "dirichlet", "iid", "natural"] = "grouped"
    """How examples are divided: groups with common dominant classes, groups with 3/3/5/5/8 classes for a client,
    Dirichlet proportions, at random, or as --client-column says (natural)."""
    s: float = 20.0
    """Percentage of a client's examples that are spread over all classes, 0 to 100 (grouped)."""
    beta: float = 0.1
    """Concentration of the Dirichlet distribution; the smaller, the more clients differ (dirichlet)."""
    dirichlet_protocol: PresetName = "fedas"
    """Whose variant: fedas merges both sets and divides each client's 75/25, fedpac keeps them apart (dirichlet)."""
    pathological_protocol: Literal["random", "clustered"] = "random"
    """Class sets drawn for each client, or one for each group of clients (pathological)."""
    min_size: int | None = None
    """Fewest examples of a client; None is the protocol's own (dirichlet)."""
    train_size: int | None = None
    """Training examples of a client, at most so many with dirichlet; None shares out all there are."""
    size_choices: tuple[int, ...] | None = None
    """Sizes that each client's number of training examples is drawn from, such as 300 600 1200, in place of
    --train-size (not with dirichlet)."""
    test_size: int | None = None
    """Test examples of a client, as --train-size; None is as many as training examples with grouped, pathological."""
    shift: Literal["none", "labels", "rotation"] = "none"
    """How groups of clients differ beyond their classes, in training and test examples: another permutation of the
    labels for each group (concept shift), or images turned by equal steps of a full turn (feature skew)."""
    augment: bool = False
    """Crop and mirror colour images at random in every training batch, as FedPAC's released code does. Heads that are
    trained on features of a fixed backbone (FedPAC, FedRep), statistics and tests see the images as they are."""
    drop_last: bool = False
    """Leave out an epoch's last batch where it is incomplete, unless it is the client's only one."""
    shuffle: bool = True
    """Draw a new order of a client's examples for every local epoch; --no-shuffle takes the same one always."""
    pixel_normalization: PixelNormalization = "fedas"
    """Paper whose released code gives the mean and deviation that CIFAR's pixels are normalised by: 0.5 (fedas), or
    those of CIFAR-10's training pixels (fedpac). The other datasets have one of each."""
    optimizer: Optimizer = "sgd"
    """Optimizer of local training, which starts afresh in every round: sgd as in PyTorch and the papers, adam with its
    own momentum (0.9) or adamw, whose weight decay is apart from the gradient."""
    clip_norm: float | None = None
    """Largest norm of the gradient of a mini-batch, over all parameters; larger ones are scaled down to it."""
    schedule: tuple[str, ...] | None = None
    """Factor of a real-valued hyper-parameter over the rounds, as NAME=KIND, several side by side: lr=cosine or
    lr=cosine:END falls from 1 to END (0) over all rounds, lam=linear:START:END:ROUNDS is linear and then stays at END,
    lr=exponential:FACTOR is FACTOR to the power of the round, lr=step:FACTOR:ROUNDS the same by steps."""
    seed: int = 0
    """Seed of partition, initial weights, cohorts and batches: the same seed gives the same result."""
    source: Literal["auto", "tfds", "files", "embedded"] = "auto"
    """Origin of the data: embedded is pictures of digits in its shape, auto the first that is there, and says which."""
    data_dir: str | None = None
    """Folder of tensorflow-datasets or of the dataset's files; None looks where they usually are."""
    data: str | None = None
    """Your own data (custom): an .npz or .csv file, a folder of images by class, the folder of a Hugging Face dataset,
    or hf:NAME of the hub."""
    label: str | None = None
    """Column of the classes (custom); None is y in .npz files and label elsewhere."""
    client_column: str | None = None
    """Column that says whose row it is: the rows of one hospital, user or writer are a client (custom)."""
    test_data: str | None = None
    """File or folder with the test rows (custom); None takes those in --data, or a share of its rows."""
    test_fraction: float | None = None
    """Share of the rows that become test rows, of each client or else of each class (custom); None is 0.25."""
    normalize: bool = False
    """Subtract the mean of the training rows and divide by their deviation, for each feature or colour channel
    (custom); otherwise inputs are used as they are."""
    data_digest: str | None = None
    """Digest that the data must have (custom); None takes it as it is, and the run's config.json keeps what it was."""
    chunk: int | Literal["auto"] = "auto"
    """Clients trained together on a device: 1 is one after another. auto is 1 for convolutions on CPUs,
    elsewhere the most that waste less than a tenth of the steps because their clients differ in size."""
    devices: int | Literal["auto"] = "auto"
    """Devices that share the clients, those of all processes together; auto takes all there are, on a CPU one for each
    core."""
    mesh: str | None = None
    """The same as a mesh, name=size: clients=8 is --devices 8."""
    distributed: bool = False
    """One of several processes that share the run: start the same command in each, on one machine or many. The
    processes of Slurm and other schedulers find each other by themselves; the first one reports and writes."""
    coordinator: str | None = None
    """HOST:PORT of the first process, where no scheduler tells; with --num-processes and --process-id (distributed)."""
    num_processes: int | None = None
    """How many processes there are (distributed)."""
    process_id: int | None = None
    """Which of them this one is, from 0 (distributed)."""
    state_on: Literal["auto", "device", "host"] = "auto"
    """Memory that keeps the clients' models between rounds; auto is the host where those of all clients would take
    more than a quarter of what is free. The results are the same."""
    precision: Precision = "float32"
    """Precision of the factors of matrix products and convolutions on a GPU; a CPU always has float32."""
    eval_every: int = 1
    """Rounds between two evaluations; the last round always has one."""
    target_accuracy: float | None = None
    """Stop after the first evaluation whose mean accuracy (of --eval-protocol) has reached so many percent."""
    on_nan: OnNaN = "stop"
    """When a client's model, message or loss becomes NaN or infinite: end the run, or leave the client out of the
    round."""
    eval_protocol: Protocol = "received"
    """Accuracy that comes first: after aggregation or right after a client's own training, which are always measured;
    or before_aggregation, measured where it is asked for: a round's clients right after their training, all others
    with what they received in the round before."""
    out: str | None = None
    """New folder for the results; None makes one under runs/."""
    checkpoint_every: int | None = None
    """Rounds between two checkpoints, the last round included; None writes one only when the run is interrupted."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay."""
    resume: str | None = None
    """Folder of an interrupted run, which goes on from its newest checkpoint; no other option is needed."""
    tensorboard: bool = False
    """Write the evaluations for TensorBoard too, into tensorboard/ in the run's folder."""
    wandb: bool = False
    """Send the evaluations to Weights & Biases too, as its own environment variables say; needs pip install wandb."""
    plot: bool = False
    """Draw the accuracies over the rounds at the end, as curves.png in the run's folder."""
    compilation_cache: bool = True
    """Keep compiled programs in ~/.cache/pfl_jax/xla (or $PFL_JAX_CACHE), so that the next run starts sooner."""

    def check(self) -> None:
        """Raises InvalidInput for the first option that is out of its range."""
        for name in (
            *("rounds", "num_clients", "min_size", "train_size", "test_size", "chunk", "devices", "eval_every"),
            *("checkpoint_every", "keep_checkpoints", "num_processes"),
        ):
            value = getattr(self, name)
            if isinstance(value, int):
                _require(value >= 1, name, "must be at least 1", value)
        for name in ("participation", "straggler_rate"):
            value = getattr(self, name)
            _require(0 < value <= 1, name, "must be above 0 and at most 1", value)
        _require(
            0 <= self.straggler_fraction <= 1, "straggler_fraction", "must be between 0 and 1", self.straggler_fraction
        )
        self._check_processes()
        _require(0 <= self.drop_rate < 1, "drop_rate", "must be at least 0 and below 1", self.drop_rate)
        _require(
            # The data says later how many natural clients there are.
            self.held_out_clients >= 0 and (self.partition == "natural" or self.held_out_clients < self.num_clients),
            "held_out_clients",
            f"must leave some of the {self.num_clients} clients",
            self.held_out_clients,
        )
        if self.target_accuracy is not None:
            _require(0 < self.target_accuracy <= 100, "target_accuracy", "is a percentage", self.target_accuracy)
        if self.test_fraction is not None:
            _require(0 < self.test_fraction < 1, "test_fraction", "must be between 0 and 1", self.test_fraction)
        if self.clip_norm is not None:
            _require(0 < self.clip_norm < math.inf, "clip_norm", "must be positive and finite", self.clip_norm)
        if self.size_choices is not None:
            _require(len(self.size_choices) > 0, "size_choices", "needs at least one size", self.size_choices)
            least = min(self.size_choices)
            _require(least >= 1, "size_choices", "must be at least 1 each", least)
        _require(0 <= self.s <= 100, "s", "is a percentage between 0 and 100", self.s)
        _require(math.isfinite(self.beta) and self.beta > 0, "beta", "must be positive", self.beta)
        _require(0 <= self.seed < 2**32, "seed", "must be between 0 and 4294967295", self.seed)

    def _check_processes(self) -> None:
        """Raises InvalidInput unless the processes of --distributed are told whole, or left to be found."""
        names = ("coordinator", "num_processes", "process_id")
        told = [name for name in names if getattr(self, name) is not None]
        if told and not self.distributed:
            raise InvalidInput(f"{flag(told[0])} is for --distributed")
        if told and len(told) < len(names):
            missing = next(name for name in names if name not in told)
            raise InvalidInput(f"{flag(told[0])} needs {flag(missing)} too: give all three, or none under a scheduler")
        if not told or self.coordinator is None or self.num_processes is None or self.process_id is None:
            return
        host, colon, port = self.coordinator.rpartition(":")
        if not host or not colon or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidInput(f"--coordinator is HOST:PORT, such as 10.0.0.1:29500, not {self.coordinator}")
        if not 0 <= self.process_id < self.num_processes:
            raise InvalidInput(
                f"--process-id must be between 0 and {self.num_processes - 1} with --num-processes "
                f"{self.num_processes}, not {self.process_id}"
            )


PROCESSES = {"distributed", "coordinator", "num_processes", "process_id"}
"""Options that say how this process belongs to others."""


def mesh_devices(text: str) -> int:
    """The devices of --mesh clients=8; InvalidInput where it is anything else."""
    name, equals, size = text.partition("=")
    if name != "clients" or not equals:
        raise InvalidInput(f"--mesh is clients=SIZE, such as clients=8, not {text}: clients are the only axis there is")
    if not size.isdecimal() or int(size) < 1:
        raise InvalidInput(f"--mesh clients={size}: the size must be a whole number of at least 1")
    return int(size)


PARTITION_OPTIONS = {
    "grouped": ("s", "train_size", "size_choices", "test_size"),
    "pathological": ("pathological_protocol", "train_size", "size_choices", "test_size"),
    "dirichlet": ("beta", "dirichlet_protocol", "min_size", "train_size", "test_size"),
    "iid": ("train_size", "size_choices", "test_size"),
    "natural": (),
}
"""partition -> the options that it reads."""


def without_effect(dataset: str, options: Options, given: frozenset[str], backend: str) -> list[str]:
    """Notes about given options that dataset, partition or backend (as JAX names it) do not read."""
    every = {name for names in PARTITION_OPTIONS.values() for name in names}
    idle = sorted((every & given) - set(PARTITION_OPTIONS[options.partition]))
    notes = [f"{flag(name)} has no effect with --partition {options.partition}" for name in idle]
    if "train_size" in given and options.size_choices is not None and "size_choices" not in idle:
        notes.append("--train-size has no effect with --size-choices")
    if "momentum" in given and options.optimizer != "sgd":
        notes.append(f"--momentum has no effect with --optimizer {options.optimizer}, which has its own")
    if backend == "cpu" and options.precision != "float32":
        notes.append(f"--precision {options.precision} has no effect on a CPU, which computes in float32")
    if "pixel_normalization" in given and not reads_pixel_normalization(dataset):
        notes.append(f"--pixel-normalization has no effect on {dataset}, which {_NORMALISED.get(dataset, _ALIKE)}")
    return notes


_ALIKE = "both papers' settings normalise alike"
_NORMALISED = {"custom": "--normalize normalises"}


def reads_pixel_normalization(dataset: str) -> bool:
    """Whether the papers' released code normalises a dataset in different ways."""
    return dataset in SPECS and SPECS[dataset].fedpac is not None


def check_hyper_parameters(values: dict[str, Any]) -> None:
    """Raises InvalidInput for what no method can work with: the ranges that follow from an argument's name.

    Args:
      values: name -> value; batch sizes and epochs by the ends of their names, as all methods name them.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        _require(math.isfinite(value), name, "must be finite", value)
        if name == "epochs" or name.endswith("batch_size"):
            _require(value >= 1, name, "must be at least 1", value)
        elif name.endswith("lr"):
            _require(value > 0, name, "must be positive", value)
        elif name.endswith("momentum"):
            _require(0 <= value < 1, name, "must be at least 0 and below 1", value)
        elif name in ("alpha", "share", "held_out", "mixing", "epsilon"):
            _require(0 <= value <= 1, name, "must be between 0 and 1", value)
        elif name in ("lam", "mu", "threshold") or name.endswith(("_decay", "_epochs", "_rounds")):
            # Epochs of single steps may be 0: that leaves the step out.
            _require(value >= 0, name, "must not be negative", value)
        elif isinstance(value, int):
            _require(value >= 1, name, "must be at least 1", value)


def flag(name: str) -> str:
    """How an option is written: --train-size."""
    return "--" + name.replace("_", "-")


def _require(condition: bool, name: str, rule: str, value: Any) -> None:
    if not condition:
        raise InvalidInput(
            f"{flag(name)} {rule}, not {value:g}" if isinstance(value, float) else f"{flag(name)} {rule}, not {value}"
        )
