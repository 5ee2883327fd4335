"""Uses of a client's data by each method: what differential privacy of single examples covers, and what it does not.

With `dp_clip`, every step of `LocalSGD.fit` is private, see `pfl_jax.primitives.private_gradients`. What a method
computes from a client's examples besides these steps is not; DATA_USE names it. The neighboring relation keeps the
number of examples, which therefore counts as public.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

Values: TypeAlias = Mapping[str, Any]


def _epochs(*names: str) -> Callable[[Values], int]:
    return lambda values: sum(int(values[name]) for name in names)


def _finetune(values: Values) -> int:
    given = values["finetune_epochs"]
    return int(values["epochs"] if given is None else given)


class DataUse(NamedTuple):
    """Uses of a client's data by a method that trains with `dp_clip`.

    Attributes:
      uncovered: what is computed from the examples without clipping and noise, and where it goes.
      passes: (hyper-parameters) -> private passes over a client's examples in a round in which it takes part.
      deployment: (hyper-parameters) -> private passes of fine-tuning, before a client uses its model.
      refused: (hyper-parameters) -> reason why the method cannot train with `dp_clip`; "" if it can.
    """

    uncovered: tuple[str, ...] = ()
    passes: Callable[[Values], int] = _epochs("epochs")
    deployment: Callable[[Values], int] = _epochs()
    refused: Callable[[Values], str] = lambda values: ""


def _never(reason: str) -> DataUse:
    return DataUse(refused=lambda values: reason)


SIZE = "number of examples: weight of the client in the mean"
IDENTITY = "fingerprint of the examples: identifies the client, only in a simulation"
OWN_GRADIENTS = "its steps compute gradients of their own"
WHOLE_BATCH = "its loss compares the examples of a mini-batch with each other"
CLASS_SIZES = "numbers of examples of each class: sent"


def _fedas_refused(values: Values) -> str:
    if values["alignment"] and values["align_loss"] == "class_sum":
        return "align_loss class_sum weights an example by the others of its class: use mean"
    if values["alignment"] and values["manner"] == "parallel" and values["target"] == "global_class_mean":
        return "with manner parallel, target global_class_mean averages over the examples that have a target"
    return ""


def _scaffold_refused(values: Values) -> str:
    plain = values["optimizer"] == "sgd" and values["clip_norm"] is None
    return "" if plain else "its control variates need the gradient itself, except with sgd without clip_norm"


def _fedas_passes(values: Values) -> int:
    serial = values["alignment"] and values["manner"] == "serial"
    return int(values["epochs"]) + (int(values["align_epochs"]) if serial else 0)


DATA_USE: dict[str, DataUse] = {
    "local": DataUse(),
    "fedavg": DataUse((SIZE,)),
    "fedavg_ft": DataUse((SIZE,), deployment=_finetune),
    "fedprox": DataUse((SIZE,)),
    "fedprox_ft": DataUse((SIZE,), deployment=_finetune),
    "scaffold": DataUse(("number of examples: the number of steps",), refused=_scaffold_refused),
    "moon": DataUse((SIZE,)),
    "feddyn": DataUse(),
    "per_fedavg": _never(OWN_GRADIENTS),
    "fedper": DataUse((SIZE,)),
    "fedbn": DataUse((SIZE,)),
    "lg_fedavg": DataUse((SIZE,)),
    "fedrep": DataUse((SIZE,), passes=_epochs("head_epochs", "epochs")),
    "fedbabu": DataUse((SIZE,), deployment=_finetune),
    "fedrod": DataUse((SIZE, "numbers of examples of each class: the loss of the shared head")),
    "feddbe": _never(OWN_GRADIENTS),
    "fedcp": _never(WHOLE_BATCH),
    "gpfl": _never(WHOLE_BATCH),
    "knn_per": DataUse((SIZE, "features and labels of the examples: kept by the client, for its own predictions")),
    "apfl": _never(OWN_GRADIENTS),
    "pfedme": _never(OWN_GRADIENTS),
    "ditto": DataUse((SIZE,), passes=_epochs("personal_epochs", "epochs")),
    "fedfomo": DataUse(
        (
            IDENTITY,
            "number of examples: the order in which models are drawn",
            "losses on held-out examples: the weights of the downloaded models, which are sent",
        )
    ),
    "fedamp": DataUse(),
    "apple": DataUse((IDENTITY, "number of examples: sent, and the initial relations")),
    "hypcluster": DataUse((SIZE, "losses on the examples: the choice of the shared model, which is sent")),
    "fedem": DataUse((SIZE, "losses on the examples: the mixture's weights and those of the examples in the loss")),
    "fedem_ft": DataUse(
        (SIZE, "losses on the examples: the mixture's weights and those of the examples in the loss"),
        deployment=_finetune,
    ),
    "floco": _never(OWN_GRADIENTS),
    "fedproto_g": DataUse((CLASS_SIZES, "mean feature of each class: sent")),
    "fedproto_l": DataUse(("mean feature of each class: kept by the client, targets of its training",)),
    "fedgh": DataUse((IDENTITY, CLASS_SIZES, "mean feature of each class: sent")),
    "fedtgp": DataUse((IDENTITY, CLASS_SIZES, "mean feature of each class: sent")),
    "fedala": DataUse((SIZE, "gradients of the weights that interpolate the models, and when they have converged")),
    "pfedhn": DataUse((IDENTITY,)),
    "pfedgraph": DataUse((SIZE,)),
    "fedcac": DataUse((SIZE,)),
    "cd2pfed": DataUse((SIZE,)),
    "fedpac": DataUse(
        (
            SIZE,
            CLASS_SIZES,
            "mean feature of each class: sent, and targets of the training for classes without a shared one",
            "mean and variance of the features (mu, V or Lambda): sent, for the weights of the heads",
        ),
        passes=_epochs("head_epochs", "epochs"),
    ),
    "fedpac_proto": DataUse(
        (
            SIZE,
            CLASS_SIZES,
            "mean feature of each class: sent, and targets of the training for classes without a shared one",
        ),
        passes=_epochs("head_epochs", "epochs"),
    ),
    "pfedfda": DataUse(
        (
            SIZE,
            "class means and covariance of the features: sent, and the classifier of the training",
            "numbers of examples of each class: the classifier of the training",
        )
    ),
    "fedas": DataUse(
        (
            "trace of the Fisher information: sent, weight of the client in the mean; without synchronization the "
            "number of examples",
            "mean feature of each class: with target class_mean target of the training, with global_class_mean sent",
        ),
        passes=_fedas_passes,
        refused=_fedas_refused,
    ),
    "fedas_cd2": DataUse((SIZE,), passes=_epochs("align_epochs", "epochs")),
}
"""Method -> its uses of a client's data besides private steps."""

CLIENT_UNCOVERED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("fedavg", "fedavg_ft", "fedprox", "fedprox_ft", "moon", "per_fedavg", "feddyn", "pfedme"), ()),
    **dict.fromkeys(("fedper", "fedbn", "lg_fedavg", "fedrep", "fedbabu", "fedrod", "fedcp", "gpfl"), ()),
    **dict.fromkeys(("knn_per", "apfl", "ditto", "fedala", "fedem", "fedem_ft"), ()),
    "feddbe": ("mean feature before the first round: sent",),
    "fedpac": (
        "head: sent",
        "mean feature and number of examples of each class: sent",
        "mean and variance of the features (mu, V or Lambda): sent, for the weights of the heads",
    ),
    "fedpac_proto": ("head: sent", "mean feature and number of examples of each class: sent"),
}
"""Method that `ClientPrivacy` applies to -> what a client sends besides its clipped update."""
