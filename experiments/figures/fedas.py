"""Figures of FedAS (Yang, Huang, Ye. CVPR 2024)."""

import functools

import jax
import numpy as np

from experiments.cli.presets import EVERY_BATCH
from experiments.figures.fedpac import curves, line, of_methods
from experiments.figures.figure import Figure, Key, Results, Runs, Values
from experiments.figures.substitution import accuracies_after_replacement
from experiments.papers.settings import Measure
from experiments.run.build import Experiment, model_of
from experiments.show.pictures import ACCURACY, ROUND, Bars, Lines, Panel, Series, over_seeds
from pfl_jax import simulate
from pfl_jax.data.federated import FederatedData
from pfl_jax.engine.simulate import RoundResult
from pfl_jax.primitives.metrics import pooled
from pfl_jax.primitives.tree import merge

SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
"""Shares of the parameters that are replaced; the paper has 5 %."""

ALIGNMENTS: dict[str, Values] = {
    "fedas": {},
    "own-class-means": {"target": "class_mean"},
    "global-class-means": {"target": "global_class_mean"},
    "parallel": {"manner": "parallel"},
    "none": {"alignment": False},
}
"""Fig. 4b: name -> options of a way to align the received backbone."""

ALIGNMENT_LABELS = {
    "fedas": "FedAS: own features, before training",
    "own-class-means": "own class means, before training",
    "global-class-means": "global class means, before training",
    "parallel": "own features, during training",
    "none": "no alignment",
}

NORMALIZATIONS = {"proportional": "proportional (FedAS)", "softmax": "softmax", "min_max": "min-max"}

CHANNEL_METHODS = {"cd2pfed": "CD2-pFed", "fedas_cd2": "CD2-pFed with parameter alignment"}

BATCH_SIZES, EPOCHS = (8, 16, 32, 64), (1, 2, 5, 10)

COMPARED = (
    *("fedavg_ft", "fedprox_ft", "fedper", "ditto", "lg_fedavg", "fedbabu", "fedproto_g", "fedala", "fedpac", "fedas"),
)
FEW = ("fedavg_ft", "fedper", "fedbabu", "fedala", "fedpac", "fedas")

SETTING = {"partition": "dirichlet", "beta": 0.1, "participation": 0.6, "eval_every": 2, **EVERY_BATCH}
"""Setting of Figure 5; the text states none for the other figures. Batches are as printed, not as released: so are the
ways to align and to normalize that the figures compare."""

SHORT = {"rounds": 12, "train_size": 100, "test_size": 75, "lr": 0.05}


def keep_traces(experiment: Experiment, result: RoundResult) -> dict[str, np.ndarray]:
    """Fisher traces and aggregation weights [M] of a round, its cohort [M], and flags of the stragglers [N]."""
    names = ("trace", "weights")
    kept = {f"{name}_{result.round}": np.asarray(result.info[name]) for name in names}
    kept[f"cohort_{result.round}"] = result.cohort
    settings, key = experiment.settings, jax.random.key(experiment.request.options.seed)
    slow = simulate.stragglers(key, experiment.data.num_clients, settings.straggler_fraction)
    return {**kept, "stragglers": np.asarray(slow)}


def keep_traces_and_replacements(experiment: Experiment, result: RoundResult) -> dict[str, np.ndarray]:
    """Traces, and after the last round the accuracies with a share of the parameters replaced [S, C].

    With them, how many test examples [C] those clients have.
    """
    kept = keep_traces(experiment, result)
    if result.round < experiment.settings.rounds:
        return kept
    dataset, data, clients = experiment.dataset, experiment.data, result.state.clients
    # A figure's runs have one process.
    assert isinstance(data, FederatedData)
    model, trained = model_of(experiment.request.options, dataset), np.flatnonzero(np.asarray(clients.trained))
    highest, at_random = accuracies_after_replacement(
        jax.random.key(experiment.request.options.seed),
        model,
        merge(clients.backbone, clients.head),
        data,
        trained,
        SHARES,
    )
    return {**kept, "highest": highest, "at_random": at_random, "test_count": np.asarray(data.test_count)[trained]}


def _fisher(results: Results) -> list[Panel]:
    arrays = results.arrays(("fedas",))
    percent = [100 * share for share in SHARES]

    def means(one: dict[str, np.ndarray], name: str) -> list[float]:
        is_pooled = results.measure.average == "examples"
        counts = one["test_count"] if is_pooled else np.ones_like(one["test_count"])
        return [100 * pooled(row, counts) for row in one[name]]

    replaced = [
        over_seeds(label, percent, [means(one, name) for one in arrays], is_main=is_main)
        for name, label, is_main in (
            ("at_random", "random parameters", False),
            ("highest", "highest Fisher information", True),
        )
    ]
    rounds = range(1, results.config(("fedas",))["options"]["rounds"] + 1)
    traces = [[one[f"trace_{number}"].mean() for number in rounds] for one in arrays]
    growth = over_seeds("mean over the cohort", list(rounds), traces, is_main=True)
    return [
        Lines("(a) parameters replaced by untrained ones", "replaced parameters in %", ACCURACY, replaced, percent),
        Lines("(b) trace of the Fisher information", ROUND, "t-FIM, mean over the cohort", [growth]),
    ]


def _straggler_bars(results: Results) -> Bars:
    """Aggregation weights in the last round of the first seed, in which all clients take part."""
    (arrays, *_), config = results.arrays(("stragglers",)), results.config(("stragglers",))
    last = config["options"]["rounds"]
    weights = np.zeros(len(arrays["stragglers"]))
    weights[arrays[f"cohort_{last}"]] = arrays[f"weights_{last}"]
    groups = [np.flatnonzero(~arrays["stragglers"]), np.flatnonzero(arrays["stragglers"])]
    return Bars(
        f"(a) round {last}, everyone takes part",
        "client",
        "aggregation weight",
        ["online clients", "stragglers"],
        [[str(client) for client in group] for group in groups],
        [weights[group].tolist() for group in groups],
        1 / len(weights),
        "equal weights",
    )


def _discussion(results: Results) -> list[Panel]:
    series = [
        line(results, ALIGNMENT_LABELS[name], ("align", name), is_main=name == "fedas") for name in reversed(ALIGNMENTS)
    ]
    return [_straggler_bars(results), Lines("(b) ways to align", ROUND, ACCURACY, series)]


def _discussion_variants(runs: Runs) -> dict[Key, Values]:
    aligned: dict[Key, Values] = {("align", name): {"method": "fedas", **own} for name, own in ALIGNMENTS.items()}
    stragglers = {"straggler_fraction": 0.5, "straggler_rate": 0.1, "participation": 0.4, "full_last_round": True}
    return aligned | {("stragglers",): {"method": "fedas", **stragglers}}


def _compatibility(results: Results) -> list[Panel]:
    normalizations = [
        line(results, label, ("normalization", name), is_main=name == "proportional")
        for name, label in reversed(NORMALIZATIONS.items())
    ]
    channels = [
        line(results, label, ("channels", name), is_main=name == "fedas_cd2") for name, label in CHANNEL_METHODS.items()
    ]
    return [
        Lines("(a) normalization of the Fisher traces", ROUND, ACCURACY, normalizations),
        Lines("(b) channel-wise split", ROUND, ACCURACY, channels),
    ]


def _compatibility_variants(runs: Runs) -> dict[Key, Values]:
    normalizations: dict[Key, Values] = {
        ("normalization", name): {"method": "fedas", "normalization": name} for name in NORMALIZATIONS
    }
    return normalizations | {("channels", name): {"method": name} for name in CHANNEL_METHODS}


def equal_steps(rounds: int, factor: float) -> int:
    """Number of rounds with as many gradient steps as `rounds` rounds of the usual setting.

    Args:
      rounds: at the usual setting.
      factor: gradient steps of a round, as a share of the usual number.
    """
    return max(1, round(rounds / factor))


def _hyper_parameter_variants(runs: Runs) -> dict[Key, Values]:
    def own(rounds: int, **changed: int) -> Values:
        return {"method": "fedas", "rounds": rounds, "eval_every": 1, **changed}

    batches = {
        (f"batch_size={size}",): own(equal_steps(runs.rounds, 16 / size), batch_size=size, epochs=5)
        for size in BATCH_SIZES
    }
    epochs = {
        (f"epochs={count}",): own(equal_steps(runs.rounds, count / 5), batch_size=16, epochs=count) for count in EPOCHS
    }
    return batches | epochs


def _hyper_parameters(results: Results) -> list[Panel]:
    def panel(title: str, x_label: str, name: str, steps: tuple[int, ...]) -> Lines:
        rows = np.array([results.reported((f"{name}={step}",)) for step in steps]).T
        series: list[Series] = [
            over_seeds("fedas", steps, (rows - rows.mean(axis=1, keepdims=True)).tolist(), is_main=True)
        ]
        title = f"{title}; mean {rows.mean():.1f} %"
        return Lines(title, x_label, "accuracy minus the mean, in points", series, steps, zero_line=True)

    return [
        panel("(a) batch size BS", "batch size", "batch_size", BATCH_SIZES),
        panel("(b) local epochs E", "local epochs", "epochs", EPOCHS),
    ]


_NO_SETTING = "The text gives this figure no setting: Figure 5's is taken."
_figure = functools.partial(Figure, "fedas", preset="fedas", values=SETTING, short=SHORT)

FIGURES = (
    _figure(
        *(3, "Fisher information as a measure of what parameters hold"),
        *(lambda runs: {("fedas",): {"method": "fedas"}}, _fisher),
        note=f"(a) {_NO_SETTING} Models are the clients' own after their last training; the paper replaces 5 %.",
        observe=keep_traces_and_replacements,
        measured=("average",),
    ),
    _figure(
        *(4, "aggregation weights with half the clients stragglers, and other ways to align"),
        *(_discussion_variants, _discussion),
        note=f"{_NO_SETTING} (a) participation 0.4, a straggler is drawn a tenth as often as an online client. "
        "(b) the text names a parallel manner and global features, without equations.",
        observe=keep_traces,
    ),
    _figure(
        *(5, "accuracy over rounds", of_methods, functools.partial(curves, main="fedas")),
        datasets=("cifar10", "cifar100"),
        methods=COMPARED,
        short_methods=FEW,
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
