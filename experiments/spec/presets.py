"""Presets from the papers as plain data: values of their main experiments, with exceptions for single datasets.

Sizes are examples per client. Hyper-parameters apply to all methods that have an argument of that name.
"""

from typing import Any, NamedTuple, TypeAlias

from experiments import DATASETS

Values: TypeAlias = dict[str, Any]

DEFAULT_PRESET = dict.fromkeys(DATASETS, "fedpac") | {"cifar100": "fedas"}
"""Default preset of each dataset: the first paper that reports results on it, FedPAC for those in neither paper."""

COLOR = ("cifar10", "cinic10", "cifar100")
"""Data sets of color images."""
IMAGES = ("emnist", "fashion_mnist", *COLOR)
"""Data sets of the papers."""

OWN_PRESET = {"fedpac": "fedpac", "fedpac_proto": "fedpac", "fedas": "fedas", "fedas_cd2": "fedas"}
"""Method -> preset of its own paper."""

PRESETS: dict[str, Values] = {
    # Xu, Tong, Huang. ICLR 2023. Appendix B.2 (data), B.3 (training); B.1 and the released code (network). 600 test
    # examples are the released code's. 100 clients: --num-clients 100 --participation 0.3 --full-last-round.
    "fedpac": {
        "method": "fedpac",
        "model": "fedpac_cnn",
        "rounds": 200,
        "num_clients": 20,
        "participation": 1.0,
        "partition": "grouped",
        "s": 20.0,
        "dirichlet_protocol": "fedpac",
        "train_size": 600,
        "test_size": 600,
        "pixel_normalization": "fedpac",
        # Some methods fine-tune or align every client for an evaluation, which would double the time of each round.
        "eval_every": 5,
    },
    # Yang, Huang, Ye. CVPR 2024. Section 4.1; participation is the lowest of Tables 2 and 3, for which the paper claims
    # the largest advantage. Sizes: the whole dataset, divided 75/25. The "learning rate decay value" 1e-3 of Section
    # 4.1 is left out because the paper does not say how it is applied.
    "fedas": {
        "method": "fedas",
        "model": "fedavg_cnn",
        "rounds": 40,
        "num_clients": 20,
        "participation": 0.2,
        "partition": "dirichlet",
        "dirichlet_protocol": "fedas",
        "beta": 0.1,
        "train_size": None,
        "test_size": None,
        "pixel_normalization": "fedas",
        # The paper's own algorithm; its tables and figures are run as in the released code, by `--procedure release`.
        "procedure": "print",
        # 4.1 reports the "highest top-1 accuracy", of all rounds.
        "eval_every": 1,
    },
}

HYPER_PARAMETERS: dict[str, Values] = {
    # B.3, "for all approaches": also for pFedMe, although the steps of its released code have no momentum.
    "fedpac": {"lr": 0.01, "momentum": 0.5, "weight_decay": 5e-4, "batch_size": 50, "epochs": 5},
    # Section 4.1, which mentions neither momentum nor weight decay.
    "fedas": {"lr": 5e-3, "momentum": 0.0, "weight_decay": 0.0, "batch_size": 16, "epochs": 5},
}


class Procedure(NamedTuple):
    """Training as in FedAS's paper or its released code: options of all methods, and options of single methods."""

    title: str
    every: Values
    of_method: dict[str, Values]


ALIGNING: Values = {"eval_every": 5}
"""Values for methods whose evaluation by `received` aligns all clients, which would take half of a run's time. Their
measure in the paper is `trained`, which training itself gives in every round."""

PROCEDURES = {
    "release": Procedure(
        "as in the released code: all methods take batches in a fixed order without the last incomplete one; the "
        "clients of FedAS align one backbone in turn, with class means, summed over classes, and have traces of batch "
        "means",
        {"drop_last": True, "shuffle": False},
        {
            "fedas": ALIGNING
            | {
                "manner": "in_turn",
                "target": "class_mean",
                "align_loss": "class_sum",
                "first_alignment": True,
                "reduction": "batch_means",
            },
            "fedas_cd2": ALIGNING,
            "fedprox": {"mu": 0.1},
            "fedprox_ft": {"mu": 0.1},
        },
    ),
    "print": Procedure(
        "as printed: all methods take all examples in a new order in every epoch; FedAS aligns each client's own copy "
        "of the backbone with its own embeddings, and has traces of examples",
        {"drop_last": False, "shuffle": True},
        {
            "fedas": ALIGNING
            | {
                "manner": "serial",
                "target": "example",
                "align_loss": "mean",
                "first_alignment": False,
                "reduction": "mean",
            },
            "fedas_cd2": ALIGNING,
        },
    ),
}
"""Value of --procedure -> its options; the paper does not mention the differences of the released code."""

FORTUNES: Values = {
    "model": "bert",
    "adapter": "lora:8",
    "targets": "layer_[45]/(query|value)",
    "rounds": 20,
    "num_clients": 20,
    "participation": 1.0,
    "partition": "dirichlet",
    "dirichlet_protocol": "fedas",
    "beta": 0.3,
    "min_size": 16,
    "train_size": 100,
    "test_size": 40,
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "batch_size": 16,
    "epochs": 1,
    "eval_every": 5,
    "procedure": None,
}
"""Short texts on all-MiniLM-L6-v2 with low-rank adapters in its last two layers, which neither paper has."""

NATURAL: Values = {
    "num_clients": 100,
    "participation": 0.1,
    "partition": "natural",
    "train_size": None,
    "test_size": None,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "eval_every": 5,
    "procedure": None,
}
"""Federations with their own clients, of which ten train at a time, as in LEAF and in Reddi et al. (ICLR 2021)."""

# Batches and epochs are from Reddi et al. The learning rates are not tuned; TAGS has small inputs, word frequencies.
FEMNIST = NATURAL | {"model": "leaf_cnn", "rounds": 200, "lr": 0.03, "batch_size": 20, "epochs": 1}
SHAKESPEARE = NATURAL | {
    "method": "fedper",
    "model": "char_lstm",
    "task": "next_symbol",
    "rounds": 100,
    "lr": 1.0,
    "batch_size": 4,
    "epochs": 1,
}
TAGS = NATURAL | {
    "method": "fedavg",
    "model": "bag_of_words",
    "task": "multi_label",
    "vocabulary": 10_002,
    "rounds": 100,
    "train_size": 500,
    "test_size": 100,
    "lr": 100.0,
    "batch_size": 100,
    "epochs": 1,
}

# All clients, which are few, in every round. The learning rates are not tuned.
SITES: Values = NATURAL | {"participation": 1.0, "momentum": 0.0, "batch_size": 10, "epochs": 1, "eval_every": 1}
HEART = SITES | {"num_clients": 4, "model": "mlp", "hidden": (16,), "rounds": 20, "lr": 0.05}
WATCH = SITES | {"num_clients": 10, "model": "series_cnn", "rounds": 20, "lr": 0.05}
HAR = SITES | {"num_clients": 30, "model": "series_cnn", "rounds": 40, "lr": 0.05}
DOMAINS = SITES | {"num_clients": 5, "model": "fedavg_cnn", "rounds": 100, "lr": 0.01}

CUSTOM: Values = {
    "model": "mlp",
    "rounds": 30,
    "num_clients": 10,
    "partition": "dirichlet",
    "beta": 0.5,
    "train_size": None,
    "test_size": None,
    "lr": 0.05,
    "batch_size": 10,
    "eval_every": 1,
    "procedure": None,
}
"""A user's own data, of any size: with the papers' hyper-parameters, but without their sizes."""

OF_NEITHER_PAPER = {"fortunes": FORTUNES, "femnist": FEMNIST, "shakespeare": SHAKESPEARE, "stackoverflow_tags": TAGS}
OF_NEITHER_PAPER |= {"heart": HEART, "watch": WATCH, "har": HAR, "domains": DOMAINS}
"""Data set -> its values with either preset."""

# FedPAC B.3: "fix both the server and client learning rate to 0.01", for pFedHN alone on all data sets.
BY_DATASET_AND_METHOD: dict[tuple[str, str, str], Values] = {
    ("fedpac", dataset, "pfedhn"): {"lr": 0.01} for dataset in COLOR
}
"""(preset, dataset, method) -> values that differ for this method on this dataset."""

BY_DATASET: dict[tuple[str, str], Values] = {
    # FedPAC B.3: larger clients and batches on EMNIST, a larger learning rate on CIFAR-10 and CINIC-10. For these two,
    # the released code has 300 test examples per client and always augments training images. CIFAR-100 is not in that
    # paper and has the values of CIFAR-10.
    ("fedpac", "emnist"): {"train_size": 1000, "batch_size": 100},
    **{("fedpac", dataset): {"test_size": 300, "lr": 0.02, "augment": True} for dataset in COLOR},
    # Neither paper uses the digits, which are 1,287 training and 510 test examples of 8x8 pixels for 20 clients.
    ("fedpac", "digits"): {
        "model": "mlp",
        "rounds": 40,
        "train_size": 60,
        "test_size": 25,
        "lr": 0.05,
        "batch_size": 10,
    },
    ("fedpac", "custom"): CUSTOM | {"min_size": 2},
    ("fedas", "custom"): CUSTOM | {"min_size": 4},
    **{(preset, dataset): values for dataset, values in OF_NEITHER_PAPER.items() for preset in PRESETS},
    ("fedas", "digits"): {
        "model": "mlp",
        "num_clients": 10,
        "participation": 0.4,
        "lr": 0.05,
        "batch_size": 10,
        "procedure": None,
    },
}
"""(preset, dataset) -> values that differ for this dataset."""

EMBEDDED: dict[tuple[str, str], Values] = {
    # Not from a paper: short enough for a complete experiment within minutes on two cores, without a download. There is
    # no augmentation, because a mirrored digit is not a digit.
    ("fedpac", "emnist"): {"rounds": 20, "train_size": 600, "test_size": 300},
    ("fedpac", "fashion_mnist"): {"rounds": 30, "train_size": 300, "test_size": 300},
    **{("fedpac", dataset): {"rounds": 25, "train_size": 300, "test_size": 200, "augment": False} for dataset in COLOR},
    **{("fedas", dataset): {"rounds": 20, "train_size": 300, "test_size": 150, "lr": 0.05} for dataset in IMAGES},
}
"""(preset, dataset) -> smaller values for embedded data, whose default run must end in five minutes on two cores."""


def preset_of(dataset: str, method: str | None = None) -> str:
    """Default preset: on the papers' data sets the preset of the method's own paper."""
    usual = DEFAULT_PRESET[dataset]
    return OWN_PRESET.get(str(method), usual) if dataset in IMAGES else usual


def values(
    preset: str, dataset: str, method: str | None = None, *, procedure: str | None = "", embedded: bool = False
) -> Values:
    """Values of a preset for a dataset and a method, by default the preset's own; smaller ones for embedded data.

    The procedure is one of PROCEDURES, None for neither, or "" for the preset's.
    """
    merged = PRESETS[preset] | HYPER_PARAMETERS[preset] | BY_DATASET.get((preset, dataset), {})
    if embedded:
        merged |= EMBEDDED.get((preset, dataset), {})
    method = str(method or merged["method"])
    chosen = merged["procedure"] = merged.get("procedure") if procedure == "" else procedure
    if chosen is not None:
        merged |= PROCEDURES[chosen].every | PROCEDURES[chosen].of_method.get(method, {})
    return merged | BY_DATASET_AND_METHOD.get((preset, dataset, method), {})
