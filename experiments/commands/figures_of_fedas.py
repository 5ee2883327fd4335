"""Figures of FedAS (Yang, Huang, Ye. CVPR 2024)."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax.flatten_util import ravel_pytree

from experiments.commands.figure import Figure, Key, Runs, Values
from experiments.commands.figures_of_fedpac import curves, of_methods
from experiments.papers.settings import Measure
from experiments.run.loaded_run import load_run
from experiments.show.draw import ACCURACY, bars, lines, over_runs, rows_of
from experiments.show.pictures import Panel
from pfl_jax import simulate
from pfl_jax.base import Model, Params, PRNGKey, PyTree
from pfl_jax.data.federated import FederatedData, client_data
from pfl_jax.primitives.fisher import diagonal_fisher
from pfl_jax.primitives.losses import deployed_loss
from pfl_jax.primitives.metrics import pooled, score
from pfl_jax.primitives.tree import gather, merge

SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Shares of the parameters that are replaced; the paper has 5 %."""

ALIGNMENTS: dict[str, tuple[str, Values]] = {
    "fedas": ("FedAS: own features, before training", {}),
    "own-class-means": ("own class means, before training", {"target": "class_mean"}),
    "global-class-means": ("global class means, before training", {"target": "global_class_mean"}),
    "parallel": ("own features, during training", {"manner": "parallel"}),
    "none": ("no alignment", {"alignment": False}),
}
"""Fig. 4b: name -> label and options of a way to align the received backbone."""

NORMALIZATIONS: dict[Key, str] = {
    ("normalization", "proportional"): "proportional (FedAS)",
    ("normalization", "softmax"): "softmax",
    ("normalization", "min_max"): "min-max",
}

CHANNEL_METHODS: dict[Key, str] = {
    ("channels", "cd2pfed"): "CD2-pFed",
    ("channels", "fedas_cd2"): "CD2-pFed with parameter alignment",
}

BATCH_SIZES, EPOCHS = (8, 16, 32, 64), (1, 2, 5, 10)

COMPARED = (
    *("fedavg_ft", "fedprox_ft", "fedper", "ditto", "lg_fedavg", "fedbabu", "fedproto_g", "fedala", "fedpac", "fedas"),
)

SETTING = {"partition": "dirichlet", "beta": 0.1, "participation": 0.6, "eval_every": 2}
"""Setting of Figure 5; the text states none for the other figures."""


def replaced(runs: Runs) -> list[dict[str, np.ndarray]]:
    """Accuracies with a share of the parameters replaced [S, C], and counts of test examples [C], for each seed."""
    found = []
    for job in runs.jobs["fedas",]:
        run = load_run(job.folder)
        clients, key = run.state.clients, jax.random.key(job.spec.seed)
        trained = np.flatnonzero(np.asarray(clients.trained))
        models = merge(clients.backbone, clients.head)
        highest, at_random = accuracies_after_replacement(key, run.model, models, run.data, trained, SHARES)
        counts = np.asarray(run.data.test_count)[trained]
        found.append({"highest": highest, "at_random": at_random, "test_count": counts})
    return found


def replace_first(params: PyTree, fresh: PyTree, scores: PyTree, share: jax.Array | float) -> PyTree:
    """Replace the round(share P) of P entries of params with the highest scores by entries of `fresh`, all of one
    structure."""
    values, rebuild = ravel_pytree(params)
    order = jnp.argsort(-ravel_pytree(scores)[0], stable=True)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size))
    return rebuild(jnp.where(rank < jnp.round(share * order.size), ravel_pytree(fresh)[0], values))


def accuracies_after_replacement(
    key: PRNGKey, model: Model, params: Params, data: FederatedData, clients: np.ndarray, shares: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Test accuracies of clients' models (leaves [N, ...]) after shares of their parameters are reset.

    Those with the highest Fisher information on the client's training examples [S, C], or as many at random [S, C]. The
    untrained values are a fresh draw of the model's initialization, the same for both (FedAS, Fig. 3a).
    """

    loss = deployed_loss(model)

    @jax.jit
    def one(data, client, params):
        fresh_key, random_key = jax.random.split(jax.random.fold_in(key, client))
        fresh = model.init(fresh_key)
        fisher = diagonal_fisher(loss, params, client_data(data, client, "train"))
        flat, rebuild = ravel_pytree(params)
        random = rebuild(jax.random.uniform(random_key, flat.shape))
        test = client_data(data, client, "test")

        def accuracy(scores, share):
            return score(model.apply, replace_first(params, fresh, scores, share), test)["accuracy"]

        points = jnp.asarray(shares, jnp.float32)
        return tuple(jax.lax.map(lambda share, s=scores: accuracy(s, share), points) for scores in (fisher, random))

    # One client after another: the memory of one suffices.
    rows = [one(data, jnp.int32(client), gather(params, client)) for client in clients]
    highest, at_random = (np.stack([np.asarray(row[which]) for row in rows], axis=1) for which in (0, 1))
    return highest, at_random


def _fisher(runs: Runs) -> list[Panel]:
    percent, seeds = [100 * share for share in SHARES], replaced(runs)

    def means(one: dict[str, np.ndarray], name: str) -> list[float]:
        is_pooled = runs.measure.average == "examples"
        counts = one["test_count"] if is_pooled else np.ones_like(one["test_count"])
        return [100 * pooled(row, counts) for row in one[name]]

    main = "highest Fisher information"
    rows = [
        rows_of(label, percent, [means(one, name) for one in seeds], x_label="replaced parameters in %")
        for name, label in (("at_random", "random parameters"), ("highest", main))
    ]
    traces, over = runs.info(("fedas",), "trace"), "mean over the cohort"
    growth = [[trace.mean() for trace in one.values()] for one in traces]
    growing = over_runs(rows_of(over, [*traces[0]], growth, y_label=f"t-FIM, {over}"))
    draw = functools.partial(lines, main=main, is_spaced=True)
    return [
        Panel("(a) parameters replaced by untrained ones", draw, over_runs(pd.concat(rows))),
        Panel("(b) trace of the Fisher information", functools.partial(lines, main=over), growing),
    ]


def _straggler_bars(runs: Runs) -> Panel:
    """Aggregation weights in the last round of the first seed, in which all clients take part."""
    options = runs.config(("stragglers",))["options"]
    weights = runs.info(("stragglers",), "weights")[0][options["rounds"]]
    slow = np.asarray(simulate.stragglers(jax.random.key(0), len(weights), options["straggler_fraction"]))
    frame = pd.DataFrame(
        {"online clients": np.where(slow, np.nan, weights), "stragglers": np.where(slow, weights, np.nan)}
    )
    frame = frame.rename_axis("client").rename_axis(columns="aggregation weight")
    draw = functools.partial(bars, level=1 / len(weights), level_label="equal weights")
    return Panel(f"(a) round {options['rounds']}, everyone takes part", draw, frame, (4.8, 2.9))


def _discussion(runs: Runs) -> list[Panel]:
    labels: dict[Key, str] = {("align", name): label for name, (label, _) in ALIGNMENTS.items()}
    return [_straggler_bars(runs), runs.curves("(b) ways to align", labels, ("align", "fedas"))]


def _discussion_variants(runs: Runs) -> dict[Key, Values]:
    aligned: dict[Key, Values] = {("align", name): {"method": "fedas", **own} for name, (_, own) in ALIGNMENTS.items()}
    stragglers = {"straggler_fraction": 0.5, "straggler_rate": 0.1, "participation": 0.4, "full_last_round": True}
    return aligned | {("stragglers",): {"method": "fedas", **stragglers}}


def _compatibility(runs: Runs) -> list[Panel]:
    return [
        runs.curves("(a) normalization of the Fisher traces", NORMALIZATIONS, ("normalization", "proportional")),
        runs.curves("(b) channel-wise split", CHANNEL_METHODS, ("channels", "fedas_cd2")),
    ]


def _compatibility_variants(runs: Runs) -> dict[Key, Values]:
    normalizations: dict[Key, Values] = {key: {"method": "fedas", "normalization": key[1]} for key in NORMALIZATIONS}
    return normalizations | {key: {"method": key[1]} for key in CHANNEL_METHODS}


def equal_steps(rounds: int, factor: float) -> int:
    """Number of rounds with as many gradient steps as `rounds` with a `factor`-th of the steps in each."""
    return max(1, round(rounds / factor))


def _hyper_parameter_variants(runs: Runs) -> dict[Key, Values]:
    usual, found = {"batch_size": 16, "epochs": 5}, {}
    for name, steps in (("batch_size", BATCH_SIZES), ("epochs", EPOCHS)):
        for step in steps:
            factor = usual["batch_size"] / step if name == "batch_size" else step / usual["epochs"]
            rounds = equal_steps(runs.rounds, factor)
            found[f"{name}={step}",] = {"method": "fedas", "rounds": rounds, "eval_every": 1, **usual, name: step}
    return found


def _hyper_parameters(runs: Runs) -> list[Panel]:
    def panel(title: str, x_label: str, name: str, steps: tuple[int, ...]) -> Panel:
        keys: list[Key] = [(f"{name}={step}",) for step in steps]
        rows = runs.over_values(x_label, steps, {"fedas": keys})
        mean = rows[ACCURACY].mean()
        rows[ACCURACY] -= rows.groupby("run")[ACCURACY].transform("mean")
        frame = over_runs(rows.rename(columns={ACCURACY: "accuracy minus the mean, in points"}))
        draw = functools.partial(lines, main="fedas", is_spaced=True, has_zero=True)
        return Panel(f"{title}; mean {mean:.1f} %{runs.coverage(keys)}", draw, frame)

    return [
        panel("(a) batch size BS", "batch size", "batch_size", BATCH_SIZES),
        panel("(b) local epochs E", "local epochs", "epochs", EPOCHS),
    ]


_NO_SETTING = "The text gives this figure no setting: Figure 5's is taken."
_figure = functools.partial(Figure, "fedas", values=SETTING, procedures=("release", "print"))

FIGURES = (
    _figure(
        *(3, "Fisher information as a measure of what parameters hold"),
        *(lambda runs: {("fedas",): {"method": "fedas"}}, _fisher),
        note=f"(a) {_NO_SETTING} Models are the clients' own after their last training; the paper replaces 5 %.",
        values=SETTING | {"eval_every": 1, "keep_state": "always"},
        fixed=("keep_state",),
        measured=("average",),
    ),
    _figure(
        *(4, "aggregation weights with half the clients stragglers, and other ways to align"),
        *(_discussion_variants, _discussion),
        note=f"{_NO_SETTING} (a) participation 0.4, a straggler is drawn a tenth as often as an online client. "
        "(b) the text names a parallel manner and global features, without equations.",
        # The released code aligns in turn, with a client's own features, before training.
        procedures=("print",),
    ),
    _figure(
        *(5, "accuracy over rounds", of_methods, functools.partial(curves, main="fedas")),
        datasets=("cifar10", "cifar100"),
        methods=COMPARED,
    ),
    _figure(
        *(6, "other normalizations of the weights, and another split of the parameters"),
        *(_compatibility_variants, _compatibility),
        note=_NO_SETTING,
    ),
    _figure(
        *(7, "batch size and local epochs at equal numbers of gradient steps"),
        *(_hyper_parameter_variants, _hyper_parameters),
        note=f"{_NO_SETTING} Rounds are such that all runs take equally many steps.",
        measured=Measure._fields,
    ),
)
