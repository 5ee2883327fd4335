"""Figures of FedPAC (Xu, Tong, Huang. ICLR 2023) and of its replication (Ding 2025)."""

import numpy as np

from experiments.execution.experiment import Experiment
from experiments.figures.plan import Key, Panel, Plan, Results, Scope, Values
from experiments.plots.pictures import ACCURACY, ROUND, Heat, Lines, Series, over_seeds
from pfl_jax.data.partition import dominant_classes
from pfl_jax.engine.simulate import RoundResult

HETEROGENEITY = (0, 20, 40, 60, 80)
"""s in percent (Section 6.2 names its ends)."""

SIZES, SHORT_SIZES = (150, 300, 600, 1200), (25, 50, 100, 200)
"""Training examples of a client."""

HEAT_HETEROGENEITY = (0, 20, 40, 80)

EPOCHS = (1, 5, 10, 20)

COMPARED = ("local", "fedavg", "fedavg_ft", "fedrep", "fedbabu", "ditto", "fedpac")
FEW = ("local", "fedavg_ft", "fedrep", "fedpac")

SHORT = {
    "num_clients": 10,
    "rounds": 12,
    "train_size": 100,
    "test_size": 100,
    "batch_size": 10,
    "lr": 0.05,
    "eval_every": 2,
}
"""So that a figure ends within minutes on embedded data: few examples, and steps that make up for it."""


def line(results: Results, label: str, key: Key, *, is_main: bool = False) -> Series:
    """Accuracy over rounds of one run."""
    rounds, rows = results.curve(key)
    return over_seeds(label, rounds, rows, is_main=is_main)


def sweep(name: str, steps: tuple[float, ...], scope: Scope) -> dict[Key, Values]:
    """Runs of every method at every step of an option."""
    return {(f"{name}={step:g}", method): {"method": method, name: step} for step in steps for method in scope.methods}


def sweep_panel(results: Results, name: str, steps: tuple[float, ...], title: str, x_label: str, main: str) -> Lines:
    """Accuracy after the last round over the steps of an option, a line for each method."""
    series = []
    for method in results.scope.methods:
        seeds = zip(*[results.final((f"{name}={step:g}", method)) for step in steps], strict=True)
        series.append(over_seeds(method, steps, [list(row) for row in seeds], is_main=method == main))
    return Lines(title, x_label, ACCURACY, series, x_ticks=steps)


def _sizes(scope: Scope) -> tuple[int, ...]:
    return SHORT_SIZES if scope.short else SIZES


def heterogeneity(paper: str, number: int, methods: tuple[str, ...], few: tuple[str, ...]) -> Plan:
    """Accuracy over s."""

    def panels(results: Results) -> list[Panel]:
        return [_heterogeneity_panel(results)]

    return Plan(
        paper,
        number,
        "effect of data heterogeneity",
        "fedpac",
        ("cifar10",),
        lambda scope: sweep("s", HETEROGENEITY, scope),
        panels,
        methods=methods,
        short_methods=few,
        short=SHORT,
        note="The paper's text does not name the methods compared nor all values of s.",
    )


def data_size(paper: str, number: int, methods: tuple[str, ...]) -> Plan:
    """Accuracy over the training examples of a client."""

    def panels(results: Results) -> list[Panel]:
        return [_size_panel(results)]

    return Plan(
        paper,
        number,
        "effect of local data size",
        "fedpac",
        ("cifar10",),
        lambda scope: sweep("train_size", _sizes(scope), scope),
        panels,
        methods=methods,
        short=SHORT,
        note="The paper's text does not name the sizes.",
    )


def _heterogeneity_panel(results: Results) -> Lines:
    label = "examples spread over all classes, s in %"
    return sweep_panel(results, "s", HETEROGENEITY, results.data, label, "fedpac")


def _size_panel(results: Results) -> Lines:
    label = "training examples of a client"
    return sweep_panel(results, "train_size", _sizes(results.scope), results.data, label, "fedpac")


def _both_sweeps(scope: Scope) -> dict[Key, Values]:
    return sweep("s", HETEROGENEITY, scope) | sweep("train_size", _sizes(scope), scope)


def heat_rounds(rounds: int) -> tuple[int, ...]:
    """Rounds whose head weights are shown: 1, 20 and 50 of 50, and in these proportions of fewer."""
    return tuple(sorted({1, max(1, round(0.4 * rounds)), rounds}))


def keep_head_weights(experiment: Experiment, result: RoundResult) -> dict[str, np.ndarray]:
    """Head weights alpha [N, N] in the clients' order, for the rounds that are shown."""
    if result.round not in heat_rounds(experiment.settings.rounds):
        return {}
    order = np.argsort(result.cohort)
    return {f"weights_{result.round}": np.asarray(result.info["head_weights"])[np.ix_(order, order)]}


def by_group(matrix: np.ndarray, num_groups: int) -> tuple[np.ndarray, list[int]]:
    """Rows and columns sorted by group of clients, and the groups' sizes.

    Args:
      matrix: [N, N]; client i belongs to group i mod num_groups.
      num_groups: G.
    """
    groups = np.arange(len(matrix)) % num_groups
    order = np.argsort(groups, kind="stable")
    return matrix[np.ix_(order, order)], np.bincount(groups).tolist()


def _heat_panels(results: Results) -> list[Panel]:
    panels: list[Panel] = []
    for s in HEAT_HETEROGENEITY:
        key = (f"s={s}", "fedpac")
        num_groups = len(dominant_classes(results.config(key)["data"]["num_classes"]))
        arrays = results.arrays(key)
        for number in heat_rounds(results.config(key)["options"]["rounds"]):
            mean = np.mean([one[f"weights_{number}"] for one in arrays], axis=0)
            matrix, blocks = by_group(mean, num_groups)
            panels.append(Heat(f"s = {s} %, round {number}", "head of client", "client", matrix.tolist(), blocks))
    return panels


def _heat(number: int, dataset: str) -> Plan:
    def variants(scope: Scope) -> dict[Key, Values]:
        return {(f"s={s}", "fedpac"): {"method": "fedpac", "s": s} for s in HEAT_HETEROGENEITY}

    return Plan(
        "fedpac",
        number,
        "weights of the classifier combination",
        "fedpac",
        (dataset,),
        variants,
        _heat_panels,
        values={"rounds": 50, "eval_every": 50},
        # Twenty clients, so that a group of EMNIST's has as many as in the paper.
        short=SHORT | {"num_clients": 20, "rounds": 20, "eval_every": 20},
        note="Clients are ordered by group (lines divide the groups). The paper's text does not name the values of s.",
        columns=3,
        observe=keep_head_weights,
    )


def _curves(results: Results) -> list[Panel]:
    series = [line(results, method, (method,), is_main=method == "fedpac") for method in results.scope.methods]
    return [Lines(results.data, ROUND, ACCURACY, series)]


def _epoch_curves(results: Results) -> list[Panel]:
    series = [line(results, f"E = {e}", (f"epochs={e}", "fedpac"), is_main=e == 5) for e in EPOCHS]
    return [Lines(results.data, ROUND, ACCURACY, series)]


FIGURES = (
    Plan(
        "fedpac",
        1,
        "effect of data heterogeneity and of local data size",
        "fedpac",
        ("cifar10",),
        _both_sweeps,
        lambda results: [_heterogeneity_panel(results), _size_panel(results)],
        methods=COMPARED,
        short_methods=FEW,
        short=SHORT,
        note="The paper's text names neither all methods and values of s nor the sizes.",
    ),
    _heat(2, "emnist"),
    _heat(3, "cifar10"),
    Plan(
        "fedpac",
        4,
        "accuracy over rounds",
        "fedpac",
        ("emnist", "fashion_mnist", "cifar10"),
        lambda scope: {(method,): {"method": method} for method in scope.methods},
        _curves,
        methods=COMPARED,
        short_methods=FEW,
        short=SHORT,
        note="The paper's text does not name the methods.",
        columns=3,
    ),
    Plan(
        "fedpac",
        5,
        "effect of the number E of local epochs",
        "fedpac",
        ("cifar10",),
        lambda scope: {(f"epochs={e}", "fedpac"): {"method": "fedpac", "epochs": e} for e in EPOCHS},
        _epoch_curves,
        short=SHORT,
        note="The paper's text does not name the values of E.",
    ),
    heterogeneity("fedpac_replication", 1, COMPARED, FEW),
    heterogeneity("fedpac_replication", 2, ("local", "fedavg_ft", "fedpac_proto", "fedpac"), ()),
    data_size("fedpac_replication", 3, ("local", "fedavg", "fedpac")),
    data_size("fedpac_replication", 4, ("local", "fedavg", "fedpac_proto", "fedpac")),
)
