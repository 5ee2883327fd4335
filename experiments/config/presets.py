"""Presets from the papers as plain data: default values of the options.

A preset is what a paper used for all its main experiments, then what it used for single datasets. Sizes are examples
per client, s and momentum are as in the papers, learning rates per step. Hyper-parameters reach the methods that
have an argument of that name; what a method needs beyond them stands in its own signature.
"""

from typing import Any, TypeAlias

Values: TypeAlias = dict[str, Any]

DEFAULT_PRESET = {
    "cifar100": "fedas",
    "cifar10": "fedpac",
    "cinic10": "fedpac",
    "fashion_mnist": "fedpac",
    "emnist": "fedpac",
    "digits": "fedpac",
    "custom": "fedpac",
}
"""The preset of a dataset when --preset is not given: that of the paper which reports it (first)."""

PRESETS: dict[str, Values] = {
    # Xu, Tong, Huang. ICLR 2023. Appendix B.2 (data), B.3 (training); C.1 and the released code (network). 600 test
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
        # Evaluation fine-tunes or aligns every client where the method does: each round would double the work.
        "eval_every": 5,
    },
    # Yang, Huang, Ye. CVPR 2024. Section 4.1; participation is the lowest of Tables 2 and 3, where its claim is
    # strongest. Sizes: the whole dataset, divided 75/25. The "learning rate decay value" 1e-3 of Section 4.1 is left
    # out: the text does not say how it is applied.
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
        # The released code's loader of training examples, for every method: batches in a fixed order, the incomplete
        # last one left out. The text does not mention it.
        "drop_last": True,
        "shuffle": False,
        "eval_every": 5,
    },
}

HYPER_PARAMETERS: dict[str, Values] = {
    # B.3.
    "fedpac": {"lr": 0.01, "momentum": 0.5, "weight_decay": 5e-4, "batch_size": 50, "epochs": 5},
    # Section 4.1, which names neither momentum nor weight decay.
    "fedas": {"lr": 5e-3, "momentum": 0.0, "weight_decay": 0.0, "batch_size": 16, "epochs": 5},
}

EVERY_BATCH: Values = {"drop_last": False, "shuffle": True}
"""Every example of every epoch, in a new order: where clients are small, and no paper's figures are compared."""

BY_METHOD: dict[str, Values] = {
    # The steps of its released code have no momentum; the papers give one for all methods.
    "pfedme": {"momentum": 0.0},
}
"""method -> what differs for it, with every preset."""

BY_DATASET: dict[tuple[str, str], Values] = {
    # FedPAC B.3: larger clients and batches on EMNIST, a larger learning rate on CIFAR-10 and CINIC-10. The released
    # code tests on 300 examples of these two, and always augments their training images. CIFAR-100 is not in that
    # paper: as CIFAR-10.
    ("fedpac", "emnist"): {"train_size": 1000, "batch_size": 100},
    ("fedpac", "cifar10"): {"test_size": 300, "lr": 0.02, "augment": True},
    ("fedpac", "cinic10"): {"test_size": 300, "lr": 0.02, "augment": True},
    ("fedpac", "cifar100"): {"test_size": 300, "lr": 0.02, "augment": True},
    # Neither paper has the digits: 1,287 training and 510 test examples of 8x8 pixels, shared by 20 clients.
    ("fedpac", "digits"): {
        "model": "mlp",
        "rounds": 40,
        "train_size": 60,
        "test_size": 25,
        "lr": 0.05,
        "batch_size": 10,
    },
    # A user's own data, of any size: the papers' hyper-parameters and no sizes of theirs.
    ("fedpac", "custom"): {
        "model": "mlp",
        "rounds": 30,
        "num_clients": 10,
        "partition": "dirichlet",
        "beta": 0.5,
        "min_size": 2,
        "train_size": None,
        "test_size": None,
        "lr": 0.05,
        "batch_size": 10,
        "eval_every": 1,
    },
    ("fedas", "custom"): {
        "model": "mlp",
        "rounds": 30,
        "num_clients": 10,
        "beta": 0.5,
        "min_size": 4,
        "lr": 0.05,
        "batch_size": 10,
        "eval_every": 1,
        **EVERY_BATCH,
    },
    ("fedas", "digits"): {
        "model": "mlp",
        "num_clients": 10,
        "participation": 0.4,
        "lr": 0.05,
        "batch_size": 10,
        **EVERY_BATCH,
    },
}
"""(preset, dataset) -> what differs for this dataset."""

EMBEDDED: dict[tuple[str, str], Values] = {
    # Not from a paper: so that a newcomer without a network sees a whole experiment within minutes on two cores. A
    # mirrored digit is no digit: nothing is augmented.
    ("fedpac", "emnist"): {"rounds": 20, "train_size": 600, "test_size": 300},
    ("fedpac", "fashion_mnist"): {"rounds": 30, "train_size": 300, "test_size": 300},
    ("fedpac", "cifar10"): {"rounds": 25, "train_size": 300, "test_size": 200, "augment": False},
    ("fedpac", "cinic10"): {"rounds": 25, "train_size": 300, "test_size": 200, "augment": False},
    ("fedpac", "cifar100"): {"rounds": 25, "train_size": 300, "test_size": 200, "augment": False},
    ("fedas", "emnist"): {"rounds": 20, "train_size": 300, "test_size": 150, "lr": 0.05} | EVERY_BATCH,
    ("fedas", "fashion_mnist"): {"rounds": 20, "train_size": 300, "test_size": 150, "lr": 0.05} | EVERY_BATCH,
    ("fedas", "cifar10"): {"rounds": 20, "train_size": 300, "test_size": 150, "lr": 0.05} | EVERY_BATCH,
    ("fedas", "cinic10"): {"rounds": 20, "train_size": 300, "test_size": 150, "lr": 0.05} | EVERY_BATCH,
    ("fedas", "cifar100"): {"rounds": 20, "train_size": 300, "test_size": 150, "lr": 0.05} | EVERY_BATCH,
}
"""(preset, dataset) -> what is smaller on embedded data, whose default must end within five minutes on two cores."""


def values(preset: str, dataset: str, method: str | None = None, *, embedded: bool = False) -> Values:
    """All values of a preset for a dataset, options and hyper-parameters together.

    Args:
      preset: a key of PRESETS.
      dataset: a key of DEFAULT_PRESET.
      method: whose values; None for the preset's own.
      embedded: with the reductions for embedded data.
    """
    merged = PRESETS[preset] | HYPER_PARAMETERS[preset] | BY_DATASET.get((preset, dataset), {})
    if embedded:
        merged |= EMBEDDED.get((preset, dataset), {})
    return merged | BY_METHOD.get(method or merged["method"], {})
