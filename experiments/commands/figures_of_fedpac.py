"""Figures of FedPAC (Xu, Tong, Huang. ICLR 2023) and of its replication (Ding 2025)."""

import functools
from collections.abc import Callable, Collection

import numpy as np
import pandas as pd

from experiments.commands.figure import Figure, Key, Runs, Values
from experiments.papers import settings
from experiments.papers.settings import Measure
from experiments.show.draw import grays, lines, matrix, over_runs
from experiments.show.pictures import Panel
from pfl_jax.data.partition import dominant_classes

STEPS = {"s": (0, 20, 40, 60, 80), "train_size": (150, 300, 600, 1200)}
"""Option that is varied -> its values; Section 6.2 names the ends of s."""

LABELS = {"s": "examples spread over all classes, s in %", "train_size": "training examples of a client"}
"""Option that is varied -> its axis."""

HEAT_HETEROGENEITY = (0, 20, 40, 80)

EPOCHS = (1, 5, 10, 20)

COMPARED = ("local", "fedavg", "fedavg_ft", "fedrep", "fedbabu", "ditto", "fedpac")


def curves(runs: Runs, main: str) -> list[Panel]:
    """Accuracy over rounds, a line for each method."""
    return [runs.curves(runs.data, {(method,): method for method in runs.methods}, (main,))]


def of_methods(runs: Runs) -> dict[Key, Values]:
    """A run of every method, as the paper has it."""
    paper, procedure = runs.figure.paper, runs.procedure_name
    return {(method,): settings.method_options(paper, method, procedure) for method in runs.methods}


def _sweep(paper: str, number: int, subject: str, *names: str) -> Callable[..., Figure]:
    """Accuracy of each method over some options; the caller adds methods and the note."""

    def variants(runs: Runs) -> dict[Key, Values]:
        steps = [(name, step) for name in names for step in STEPS[name]]
        return {(f"{name}={step}", own): {"method": own, name: step} for name, step in steps for own in runs.methods}

    def panel(runs: Runs, name: str) -> Panel:
        keys = {method: [(f"{name}={step}", method) for step in STEPS[name]] for method in runs.methods}
        frame = over_runs(runs.over_values(LABELS[name], STEPS[name], keys))
        over = runs.coverage([key for some in keys.values() for key in some])
        return Panel(f"{runs.data}{over}", functools.partial(lines, main="fedpac", is_spaced=True), frame)

    def panels(runs: Runs) -> list[Panel]:
        return [panel(runs, name) for name in names]

    return functools.partial(Figure, paper, number, f"effect of {subject}", variants, panels, measured=Measure._fields)


def heat_rounds(evaluated: Collection[int]) -> list[int]:
    """Rounds whose head weights are shown: 1, 20 and 50 of 50, and in these proportions of others."""
    middle = 0.4 * max(evaluated)
    return sorted({min(evaluated), min(evaluated, key=lambda number: abs(number - middle)), max(evaluated)})


def by_group(weights: np.ndarray, num_groups: int) -> tuple[pd.DataFrame, list[int]]:
    """Weights [N, N] with rows and columns sorted by group of clients, i mod G, and the groups' sizes."""
    groups = np.arange(len(weights)) % num_groups
    order = np.argsort(groups, kind="stable")
    names = pd.Index(order, name="client"), pd.Index(order, name="head of client")
    return pd.DataFrame(weights[np.ix_(order, order)], *names), np.bincount(groups).tolist()


def _heat_variants(runs: Runs) -> dict[Key, Values]:
    return {(f"s={s}", "fedpac"): {"method": "fedpac", "s": s} for s in HEAT_HETEROGENEITY}


def _heat_panels(runs: Runs) -> list[Panel]:
    maps: dict[str, pd.DataFrame] = {}
    blocks: list[int] = []
    for s in HEAT_HETEROGENEITY:
        key = (f"s={s}", "fedpac")
        num_groups = len(dominant_classes(runs.config(key)["data"]["num_classes"]))
        seeds = runs.info(key, "head_weights")
        for number in heat_rounds(seeds[0].keys()):
            mean = np.mean([weights[number] for weights in seeds], axis=0)
            maps[f"s = {s} %, round {number}"], blocks = by_group(mean, num_groups)
    draw = functools.partial(matrix, unit="weight", limits=grays([*maps.values()]), blocks=blocks, is_square=True)
    return [Panel(title, draw, frame, (3.2, 2.5)) for title, frame in maps.items()]


def _epochs(runs: Runs) -> dict[Key, Values]:
    return {(f"epochs={e}", "fedpac"): {"method": "fedpac", "epochs": e} for e in EPOCHS}


def _epoch_curves(runs: Runs) -> list[Panel]:
    return [runs.curves(runs.data, {(f"epochs={e}", "fedpac"): f"E = {e}" for e in EPOCHS}, ("epochs=5", "fedpac"))]


_heat = functools.partial(
    Figure,
    subject="weights of the classifier combination",
    variants=_heat_variants,
    panels=_heat_panels,
    values={"rounds": 50, "eval_every": 1},
    note="Clients are ordered by group (lines divide the groups). The paper's text does not name the values of s. By "
    "default the weights are those of Eq. 46, from class means and variances, as in the released code and the tables; "
    "C.1 says by A.2 and A.3 (Eq. 33 to 39), with the features' covariance: --covariance empirical.",
    columns=3,
    # Row i is client i, whose group is i mod G.
    fixed=("participation", "held_out_clients", "partition"),
    measured=(),
)
_UNSAID = "The paper's text does not name"
_S_UNSAID, _SIZES_UNSAID = f"{_UNSAID} the methods compared nor all values of s.", f"{_UNSAID} the sizes."
_OVER_S, _OVER_SIZE = ("data heterogeneity", "s"), ("local data size", "train_size")
_REPLICATION = "fedpac_replication"

FIGURES = (
    _sweep("fedpac", 1, "data heterogeneity and of local data size", "s", "train_size")(
        methods=COMPARED,
        note="The paper's text names FedPAC and FedAvg for (b), not all methods and values of s of (a), nor the sizes.",
    ),
    _heat("fedpac", 2, datasets=("emnist",)),
    _heat("fedpac", 3),
    Figure(
        *("fedpac", 4, "accuracy over rounds", of_methods, functools.partial(curves, main="fedpac")),
        datasets=("emnist", "fashion_mnist", "cifar10"),
        methods=("fedfomo", *COMPARED),
        note="The paper's text (C.2) names FedFomo, FedAvg-FT and Ditto, not the other methods.",
        columns=3,
    ),
    Figure(
        *("fedpac", 5, "effect of the number E of local epochs", _epochs, _epoch_curves),
        note=f"{_UNSAID} the values of E.",
    ),
    _sweep(_REPLICATION, 1, *_OVER_S)(methods=COMPARED, note=_S_UNSAID),
    _sweep(_REPLICATION, 2, *_OVER_S)(methods=("local", "fedavg_ft", "fedpac_proto", "fedpac"), note=_S_UNSAID),
    _sweep(_REPLICATION, 3, *_OVER_SIZE)(methods=("local", "fedavg", "fedpac"), note=_SIZES_UNSAID),
    _sweep(_REPLICATION, 4, *_OVER_SIZE)(methods=("local", "fedavg", "fedpac_proto", "fedpac"), note=_SIZES_UNSAID),
)
