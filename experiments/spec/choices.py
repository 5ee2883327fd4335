"""Words that options accept as values, and names of experiments that differ from the others."""

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pfl_jax.data.natural import NATURAL
from pfl_jax.data.partition import PARTITIONS
from pfl_jax.methods import METHODS
from pfl_jax.networks.models import HETEROGENEOUS, MODELS
from pfl_jax.tasks import TASKS
from pfl_jax.validation import Count, Range, Words

PRETRAINED = ("bert", "vit")
"""Models that start from the weights of --weights; they are not in MODELS."""

if TYPE_CHECKING:
    MethodName: TypeAlias = str
    ModelName: TypeAlias = str
    PartitionName: TypeAlias = str
    TaskName: TypeAlias = str
else:
    # Literal types, so that --help lists the choices. Beside a Literal, str stands for FILE.py:NAME.
    MethodName = Literal[tuple(METHODS)] | str
    ModelName = Literal[(*MODELS, *HETEROGENEOUS, *PRETRAINED)] | str
    PartitionName = Literal[(*PARTITIONS, "natural")] | str
    TaskName = Literal[tuple(TASKS)]


PresetName = Literal["fedpac", "fedas"]
ProcedureName = Literal["release", "print"]
OnNaN = Literal["stop", "skip-client"]

ADAPTERS = Words(("none", "linear_probe"), {"lora": Count, "ffa_lora": Count, "bottleneck": Count, "prompts": Count})
"""Values of --adapter: kind and rank, width or number of tokens."""
LAYER_ADAPTERS = ("lora", "ffa_lora", "bottleneck")
"""Kinds of --adapter that are added to layers."""
SIZED = ("grouped", "pathological", "dirichlet", "iid")
"""Partitions that are drawn, with sizes of the clients as options."""

FromZero = Annotated[int, Range(0)]
Share = Annotated[float, Range(0, 1, above=True, below=True)]

CUSTOM = "custom"
"""Experiment on the user's own data."""
WITH_FILES = (CUSTOM, *NATURAL)
"""Experiments on files that --data names."""
TEXTS = "fortunes"
"""Experiment on short texts."""
TARGETS = ("regression", "multi_label", "next_symbol")
"""Values of --task whose labels are not classes."""

Protocol = Literal["received", "trained", "before_aggregation"]
ALWAYS: tuple[Protocol, ...] = ("received", "trained")
"""Evaluation protocols of every run."""
PROTOCOLS: tuple[Protocol, ...] = (*ALWAYS, "before_aggregation")
"""All evaluation protocols; before_aggregation is evaluated only on request."""
Average = Literal["clients", "examples"]
FIELD: dict[Average, str] = {"clients": "mean", "examples": "pooled"}
"""Average of the clients' accuracies, over clients or test examples -> its field in records and `metrics.Summary`."""
ReportedRound = Literal["last", "best"]
"""Round of a run that is reported: the last one, or the one with the highest mean."""
