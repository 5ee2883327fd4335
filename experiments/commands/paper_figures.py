"""The papers' figures: their runs, and the panels made of them.

FedPAC (Xu, Tong, Huang. ICLR 2023), its replication (Ding 2025), and FedAS (Yang, Huang, Ye. CVPR 2024).
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax.flatten_util import ravel_pytree

from experiments.commands.figure import Figure, Key, Part, Runs, Values
from experiments.papers import settings
from experiments.papers.settings import Measure
from experiments.run.loaded_run import load_run
from experiments.show.draw import ACCURACY, bars, grays, lines, matrix, over_runs, rows_of
from experiments.show.pictures import Panel
from pfl_jax import simulate
from pfl_jax.base import Model, Params, PRNGKey, PyTree
from pfl_jax.data.federated import FederatedData, client_data
from pfl_jax.data.partition import dominant_classes
from pfl_jax.primitives.fisher import diagonal_fisher
from pfl_jax.primitives.losses import deployed_loss
from pfl_jax.primitives.metrics import pooled, score
from pfl_jax.primitives.tree import gather, merge

# Curves over rounds.


def _method_runs(runs: Runs) -> dict[Key, Values]:
    """Runs of all methods, as in the paper."""
    own = functools.partial(settings.method_options, runs.figure.paper, procedure=runs.procedure)
    return {(method,): own(method) for method in runs.methods}


def _method_curves(runs: Runs) -> list[Panel]:
    """A line for each method, the paper's own method on top."""
    return [runs.curves(runs.data, {(method,): method for method in runs.methods}, (runs.figure.methods[-1],))]


def _curves(title: str, kind: str, main: str, lines: Mapping[str, tuple[str, Values]]) -> Part:
    """Lines for runs of FedAS: `lines` maps the name of a run to its label and options. The title "" is the data's."""
    labels = {(kind, name): label for name, (label, _) in lines.items()}
    return Part(
        lambda runs: {(kind, name): {"method": "fedas", **options} for name, (_, options) in lines.items()},
        lambda runs: [runs.curves(title or runs.data, labels, (kind, main))],
    )


EPOCHS = {str(e): (f"E = {e}", {"method": "fedpac", "epochs": e}) for e in (1, 5, 10, 20)}

ALIGNMENTS = {
    "fedas": ("FedAS: own features, before training", {}),
    "own-class-means": ("own class means, before training", {"target": "class_mean"}),
    "global-class-means": ("global class means, before training", {"target": "global_class_mean"}),
    "parallel": ("own features, during training", {"manner": "parallel"}),
    "none": ("no alignment", {"alignment": False}),
}

NORMALIZATIONS = {
    "proportional": ("proportional (FedAS)", {"normalization": "proportional"}),
    "softmax": ("softmax", {"normalization": "softmax"}),
    "min_max": ("min-max", {"normalization": "min_max"}),
}

CHANNELS = {
    "cd2pfed": ("CD2-pFed", {"method": "cd2pfed"}),
    "fedas_cd2": ("CD2-pFed with parameter alignment", {"method": "fedas_cd2"}),
}

# Accuracy over the values of an option.


def _steps(name: str, label: str, steps: Sequence[int]) -> Part:
    """A line for each method over the values of an option."""

    def variants(runs: Runs) -> dict[Key, Values]:
        return {(f"{name}={step}", own): {"method": own, name: step} for step in steps for own in runs.methods}

    def panels(runs: Runs) -> list[Panel]:
        keys = {method: [(f"{name}={step}", method) for step in steps] for method in runs.methods}
        frame = over_runs(runs.over_values(label, steps, keys))
        draw = functools.partial(lines, main="fedpac", is_spaced=True)
        return [Panel(f"{runs.data}{runs.coverage([key for some in keys.values() for key in some])}", draw, frame)]

    return Part(variants, panels)


OVER_S = _steps("s", "examples spread over all classes, s in %", (0, 20, 40, 60, 80))
"""Section 6.2 of FedPAC names only the smallest and the largest s."""
OVER_SIZE = _steps("train_size", "training examples of a client", (150, 300, 600, 1200))

USUAL = {"batch_size": 16, "epochs": 5}
"""FedAS's usual values."""


def equal_steps(rounds: int, factor: float) -> int:
    """Number of rounds with as many gradient steps in all as `rounds`, if each round has `factor` times the steps."""
    return max(1, round(rounds / factor))


def _at_equal_steps(title: str, label: str, name: str, steps: Sequence[int]) -> Part:
    """FedAS's accuracy minus its mean over the values of an option, at equal numbers of gradient steps."""

    def variants(runs: Runs) -> dict[Key, Values]:
        found: dict[Key, Values] = {}
        for step in steps:
            factor = USUAL[name] / step if name == "batch_size" else step / USUAL[name]
            more = {"rounds": equal_steps(runs.rounds, factor), "eval_every": 1, name: step}
            found[f"{name}={step}",] = {"method": "fedas", **USUAL, **more}
        return found

    def panels(runs: Runs) -> list[Panel]:
        keys: list[Key] = [(f"{name}={step}",) for step in steps]
        rows = runs.over_values(label, steps, {"fedas": keys})
        mean = rows[ACCURACY].mean()
        rows[ACCURACY] -= rows.groupby("run")[ACCURACY].transform("mean")
        frame = over_runs(rows.rename(columns={ACCURACY: "accuracy minus the mean, in points"}))
        draw = functools.partial(lines, main="fedas", is_spaced=True, has_zero=True)
        return [Panel(f"{title}; mean {mean:.1f} %{runs.coverage(keys)}", draw, frame)]

    return Part(variants, panels)


# FedPAC's head weights.


def heat_rounds(evaluated: Collection[int]) -> list[int]:
    """Rounds whose head weights are shown: 1, 20 and 50 of 50 rounds, and in proportion for other numbers."""
    middle = 0.4 * max(evaluated)
    return sorted({min(evaluated), min(evaluated, key=lambda number: abs(number - middle)), max(evaluated)})


def by_group(weights: np.ndarray, num_groups: int) -> tuple[pd.DataFrame, list[int]]:
    """Weights [N, N] with rows and columns sorted by group of clients, i mod G, and the groups' sizes."""
    groups = np.arange(len(weights)) % num_groups
    order = np.argsort(groups, kind="stable")
    names = pd.Index(order, name="client"), pd.Index(order, name="head of client")
    return pd.DataFrame(weights[np.ix_(order, order)], *names), np.bincount(groups).tolist()


def _heat_panels(runs: Runs) -> list[Panel]:
    maps: dict[str, pd.DataFrame] = {}
    blocks: list[int] = []
    for key, values in runs.variants.items():
        num_groups = len(dominant_classes(runs.config(key)["data"]["num_classes"]))
        seeds = runs.info(key, "head_weights")
        for number in heat_rounds(seeds[0].keys()):
            mean = np.mean([weights[number] for weights in seeds], axis=0)
            maps[f"s = {values['s']} %, round {number}"], blocks = by_group(mean, num_groups)
    draw = functools.partial(matrix, unit="weight", limits=grays([*maps.values()]), blocks=blocks, is_square=True)
    return [Panel(title, draw, frame, (3.2, 2.5)) for title, frame in maps.items()]


# FedAS's Fisher information.

SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Fig. 3a: shares of the parameters that are replaced; the paper has 5 %."""


def replace_first(params: PyTree, fresh: PyTree, scores: PyTree, share: jax.Array | float) -> PyTree:
    """Replace the round(share P) of P entries of `params` with the highest scores by the entries of `fresh`; all three
    trees have one structure."""
    values, rebuild = ravel_pytree(params)
    order = jnp.argsort(-ravel_pytree(scores)[0], stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    return rebuild(jnp.where(rank < jnp.round(share * order.size), ravel_pytree(fresh)[0], values))


def accuracies_after_replacement(
    key: PRNGKey, model: Model, params: Params, data: FederatedData, clients: np.ndarray, shares: Sequence[float]
) -> dict[str, np.ndarray]:
    """Test accuracies [S, C] of clients' models (leaves [N, ...]) after shares of their parameters are reset (Fig. 3a).

    Reset are the parameters with the highest Fisher information on the client's training examples ("highest"), or as
    many at random ("at_random"). Both get the same untrained values, drawn from the model's initialization.
    """
    loss = deployed_loss(model)

    @jax.jit
    def accuracies(data, client, params):
        fresh_key, random_key = jax.random.split(jax.random.fold_in(key, client))
        fresh = model.init(fresh_key)
        flat, rebuild = ravel_pytree(params)
        fisher = diagonal_fisher(loss, params, client_data(data, client, "train"))
        scores = {"highest": fisher, "at_random": rebuild(jax.random.uniform(random_key, flat.shape))}
        test = client_data(data, client, "test")

        def accuracy(share, by):
            return score(model.apply, replace_first(params, fresh, by, share), test)["accuracy"]

        points = jnp.asarray(shares, jnp.float32)
        return {name: jax.lax.map(functools.partial(accuracy, by=by), points) for name, by in scores.items()}

    # One client after another, to need the memory of only one.
    rows = [accuracies(data, jnp.int32(client), gather(params, client)) for client in clients]
    return jax.tree.map(lambda *columns: np.stack(columns, axis=1), *rows)


def replaced(runs: Runs) -> list[dict[str, np.ndarray]]:
    """Accuracies with a share of the parameters replaced [S, C], and counts of test examples [C], for each seed."""
    found = []
    for job in runs.jobs["fedas",]:
        run = load_run(job.folder)
        clients, key = run.state.clients, jax.random.key(job.spec.seed)
        trained = np.flatnonzero(np.asarray(clients.trained))
        models = merge(clients.backbone, clients.head)
        accuracies = accuracies_after_replacement(key, run.model, models, run.data, trained, SHARES)
        found.append(accuracies | {"test_count": np.asarray(run.data.test_count)[trained]})
    return found


def _fisher(runs: Runs) -> list[Panel]:
    seeds, is_pooled = replaced(runs), runs.measure_of(("fedas",)).average == "examples"

    def means(one: dict[str, np.ndarray], name: str) -> list[float]:
        counts = one["test_count"] if is_pooled else np.ones_like(one["test_count"])
        return [100 * pooled(row, counts) for row in one[name]]

    labels = {"at_random": "random parameters", "highest": "highest Fisher information"}
    percent, x_label = [100 * share for share in SHARES], "replaced parameters in %"
    rows = [rows_of(labels[name], percent, [means(one, name) for one in seeds], x_label=x_label) for name in labels]
    traces, over = runs.info(("fedas",), "trace"), "mean over the cohort"
    growth = [[trace.mean() for trace in one.values()] for one in traces]
    growing = over_runs(rows_of(over, [*traces[0]], growth, y_label=f"t-FIM, {over}"))
    draw = functools.partial(lines, main=labels["highest"], is_spaced=True)
    return [
        Panel("(a) parameters replaced by untrained ones", draw, over_runs(pd.concat(rows))),
        Panel("(b) trace of the Fisher information", functools.partial(lines, main=over), growing),
    ]


def _stragglers(runs: Runs) -> list[Panel]:
    """Aggregation weights in the last round of the first seed, in which all clients take part."""
    options = runs.config(("stragglers",))["options"]
    weights, rounds = runs.info(("stragglers",), "weights")[0][options["rounds"]], options["rounds"]
    slow = np.asarray(simulate.stragglers(jax.random.key(0), len(weights), options["straggler_fraction"]))
    kinds = {"online clients": ~slow, "stragglers": slow}
    frame = pd.DataFrame({name: np.where(kind, weights, np.nan) for name, kind in kinds.items()})
    frame = frame.rename_axis("client").rename_axis(columns="aggregation weight")
    draw = functools.partial(bars, level=1 / len(weights), level_label="equal weights")
    return [Panel(f"(a) round {rounds}, everyone takes part", draw, frame, (4.8, 2.9))]


FISHER = Part(lambda _: {("fedas",): {"method": "fedas"}}, _fisher)
SLOW = {"straggler_fraction": 0.5, "straggler_rate": 0.1, "participation": 0.4, "full_last_round": True}
STRAGGLERS = Part(lambda _: {("stragglers",): {"method": "fedas", **SLOW}}, _stragglers)

# All figures.

COMPARED = ("local", "fedavg", "fedavg_ft", "fedrep", "fedbabu", "ditto", "fedpac")
_UNNAMED = "The paper's text does not name"
_NO_S, _NO_SIZES = f"{_UNNAMED} the methods compared nor all values of s.", f"{_UNNAMED} the sizes."
_NO_SETTING = "The text states no setting for this figure, so Figure 5's is used."
SETTING: dict[str, Any] = {"partition": "dirichlet", "beta": 0.1, "participation": 0.6, "eval_every": 2}
"""Setting of FedAS's Figure 5; the text states none for the other figures."""
_fedas_figure = functools.partial(Figure, "fedas", values=SETTING, procedures=("release", "print"))
_heat = functools.partial(
    *(Figure, "fedpac"),
    subject="weights of the classifier combination",
    parts=(Part(lambda _: {(f"s={s}",): {"method": "fedpac", "s": s} for s in (0, 20, 40, 80)}, _heat_panels),),
    values={"rounds": 50, "eval_every": 1},
    note="Clients are ordered by group (lines divide the groups). The paper's text does not name the values of s. By "
    "default the weights are those of Eq. 46, from class means and variances, as in the released code and the tables; "
    "C.1 refers to A.2 and A.3 (Eq. 33 to 39), with the features' covariance: --covariance empirical.",
    columns=3,
    # Row i is client i, whose group is i mod G.
    fixed=("participation", "held_out_clients", "partition"),
    measured=(),
)
_replication = functools.partial(Figure, "fedpac_replication", measured=Measure._fields)
_heterogeneity = functools.partial(_replication, subject="effect of data heterogeneity", parts=(OVER_S,), note=_NO_S)
_size = functools.partial(_replication, subject="effect of local data size", parts=(OVER_SIZE,), note=_NO_SIZES)

_FIGURES = (
    Figure(
        *("fedpac", 1, "effect of data heterogeneity and of local data size", (OVER_S, OVER_SIZE)),
        methods=COMPARED,
        note="The paper's text names FedPAC and FedAvg for (b), not all methods and values of s of (a), nor the sizes.",
        measured=Measure._fields,
    ),
    _heat(2, datasets=("emnist",)),
    _heat(3),
    Figure(
        *("fedpac", 4, "accuracy over rounds", (Part(_method_runs, _method_curves),)),
        datasets=("emnist", "fashion_mnist", "cifar10"),
        methods=("fedfomo", *COMPARED),
        note="The paper's text (C.2) names FedFomo, FedAvg-FT and Ditto, not the other methods.",
        columns=3,
    ),
    Figure(
        *("fedpac", 5, "effect of the number E of local epochs", (_curves("", "epochs", "5", EPOCHS),)),
        note=f"{_UNNAMED} the values of E.",
    ),
    _fedas_figure(
        *(3, "Fisher information as a measure of what parameters hold", (FISHER,)),
        note=f"(a) {_NO_SETTING} Models are the clients' own after their last training; the paper replaces 5 %.",
        values=SETTING | {"eval_every": 1, "keep_state": "always"},
        fixed=("keep_state",),
        measured=("average",),
    ),
    _fedas_figure(
        *(4, "aggregation weights with half the clients stragglers, and other ways to align"),
        (STRAGGLERS, _curves("(b) ways to align", "align", "fedas", ALIGNMENTS)),
        note=f"{_NO_SETTING} (a) participation 0.4, a straggler is drawn a tenth as often as an online client. "
        "(b) the text names a parallel manner and global features, without equations.",
        # The released code aligns in turn, with a client's own features, before training.
        procedures=("print",),
    ),
    _fedas_figure(
        *(5, "accuracy over rounds", (Part(_method_runs, _method_curves),)),
        datasets=("cifar10", "cifar100"),
        methods=(
            *("fedavg_ft", "fedprox_ft", "fedper", "ditto", "lg_fedavg", "fedbabu", "fedproto_g", "fedala", "fedpac"),
            "fedas",
        ),
    ),
    _fedas_figure(
        *(6, "other normalizations of the weights, and another split of the parameters"),
        (
            _curves("(a) normalization of the Fisher traces", "normalization", "proportional", NORMALIZATIONS),
            _curves("(b) channel-wise split", "channels", "fedas_cd2", CHANNELS),
        ),
        note=_NO_SETTING,
    ),
    _fedas_figure(
        *(7, "batch size and local epochs at equal numbers of gradient steps"),
        (
            _at_equal_steps("(a) batch size BS", "batch size", "batch_size", (8, 16, 32, 64)),
            _at_equal_steps("(b) local epochs E", "local epochs", "epochs", (1, 2, 5, 10)),
        ),
        note=f"{_NO_SETTING} The numbers of rounds give all runs equally many steps.",
        measured=Measure._fields,
    ),
    _heterogeneity(1, methods=COMPARED),
    _heterogeneity(2, methods=("local", "fedavg_ft", "fedpac_proto", "fedpac")),
    _size(3, methods=("local", "fedavg", "fedpac")),
    _size(4, methods=("local", "fedavg", "fedpac_proto", "fedpac")),
)

FIGURES: dict[str, dict[str, Figure]] = {}
"""paper -> number, as users write it -> figure. FedAS's Figures 1 and 2 are drawings."""

for _figure in _FIGURES:
    FIGURES.setdefault(_figure.paper, {})[str(_figure.number)] = _figure
