"""Comparisons of all methods, each with the learning rate that a search on validation examples chooses.

What a search chooses, and which methods are the best ten, follows from committed results: the list of runs grows as
they come.
"""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments.commands.comparison import BASELINE
from experiments.folder.run_folder import slug
from experiments.spec.choices import CUSTOM, Protocol
from experiments.spec.presets import DEFAULT_PRESET, preset_of
from lab.committed import CommittedRun, ResultStore
from lab.queue.planned import DATASET, SEEDS, PlannedRun
from pfl_jax.methods import METHODS
from pfl_jax.methods.factories import is_for_adapters

PROTOCOL: Protocol = "received"
"""Protocol by which learning rates and methods are compared."""


class Field(NamedTuple):
    """Comparison of all methods.

    Attributes:
      title: its heading in the results.
      dataset: name of the experiment.
      options: of all runs.
      rounds: number of rounds.
      search_rounds: number of rounds in which the learning rates are compared.
      rates: learning rates that are tried for every method.
      methods: those that are compared, keys of METHODS or VARIANTS; none for all but those for models with adapters,
        which the usual networks do not have.
      best: number of methods that are run with all seeds, beside the baseline.
      together: whether every rate is run with all seeds, those of a method together as in a sweep, because that takes
        little more than one run. The rate is then chosen by the mean over the seeds.
      tested: number of test examples of all clients together; None if the options say it.
    """

    title: str
    dataset: str
    options: dict[str, Any]
    rounds: int
    search_rounds: int
    rates: tuple[str, ...]
    methods: tuple[str, ...] = ()
    best: int = 10
    together: bool = False
    tested: int | None = None

    @property
    def setting(self) -> tuple[Any, ...]:
        """All that decides the run of a method with a rate and a seed."""
        return self.dataset, self.options, self.rounds, self.search_rounds

    @property
    def search_seeds(self) -> tuple[int, ...]:
        """Seeds with which the learning rates are compared."""
        return SEEDS if self.together else SEEDS[:1]


_SIX_RATES = ("0.01", "0.02", "0.05", "0.1", "0.2", "0.5")

# A client may diverge at the largest rate: by default that would end the run, and the search would never end.
_EVERY_RATE_ENDS = {"on_nan": "skip-client"}

# docs/results.md says how to make the file. With its digest, the results are found without it.
_LETTERS = {"data": "letters.csv", "label": "lettr", "data_digest": "35716c518063909d", "normalize": True}
_LIKE_FASHION_MNIST = {
    "partition": "grouped",
    "s": 20,
    "num_clients": 20,
    "train_size": 600,
    "test_size": 200,
    "val_fraction": 0.2,
    **_EVERY_RATE_ENDS,
}

_IMAGES = {
    "data": "vit-train.npz",
    "test_data": "vit-test.npz",
    "data_digest": "09a114a7a74d1cee",
    "model": "vit",
    "weights": "results/vit.npz",
    "adapter": "lora:8",
    "targets": "layer_[23]/(query|value)",
    "partition": "grouped",
    "s": 20,
    "shift": "rotation",
    "num_clients": 20,
    "train_size": 100,
    "test_size": 100,
    "momentum": 0.9,
    "weight_decay": 0,
    "batch_size": 16,
    "epochs": 1,
    "val_fraction": 0.2,
    **_EVERY_RATE_ENDS,
}
"""Of the small vision transformer on images that it was not pretrained on; docs/results.md says how to make them."""

_SITES = {"val_fraction": 0.2, "eval_every": 20, **_EVERY_RATE_ENDS}

ADAPTER_METHODS = (
    *("local", "fedavg", "fedavg_ft", "fedper", "fedrep", "ditto", "pfedme", "apfl", "fedala", "fedpac", "fedas"),
    *("ffa_lora", "fedsa_lora", "feddpa", "fedex_lora", "hetlora", "linear_local", "linear_fedavg"),
)
"""Methods on a pretrained model."""

# Training as in HtFLlib.
_NETWORKS = {
    "model": "lenet5,fedpac_cnn,fedavg_cnn",
    "features": 64,
    "num_clients": 12,
    "s": 20,
    "train_size": 200,
    "test_size": 100,
    "val_fraction": 0.2,
    "batch_size": 10,
    "epochs": 1,
    "momentum": 0,
    "weight_decay": 0,
    "eval_every": 20,
    **_EVERY_RATE_ENDS,
}

MIXED_METHODS = ("local", "lg_fedavg", "fedgen_head", "fedgh", "fml", "fedkd", "fedmrl", "fd", "fedproto_g", "fedtgp")
"""Methods of clients with different networks: HtFLlib's."""

GRAPH_METHODS = (
    *("local", "fedavg", "fedrep", "dsgd", "dsgd_torus", "dsgd_exponential", "dsgd_random", "dsgd_full"),
    *("dfedavgm_8bit", "dfedavgm_24bit", "osgp", "dispfl", "dfedpgp"),
)
"""Methods without a server, on the graph of their name or their default one, and three methods to compare them with."""

VARIANTS: dict[str, dict[str, Any]] = {
    "ffa_lora": {"method": "fedavg", "adapter": "ffa_lora:8"},
    "fedsa_lora": {"method": "fedper", "personal": "lora_b|^head"},
    "linear_local": {"method": "local", "adapter": "linear_probe"},
    "linear_fedavg": {"method": "fedavg", "adapter": "linear_probe"},
    "fedgen_head": {"method": "fedgen", "shared": "head"},
    "dsgd_torus": {"method": "dsgd", "topology": "torus"},
    "dsgd_exponential": {"method": "dsgd", "topology": "exponential"},
    "dsgd_random": {"method": "dsgd", "topology": "erdos_renyi:0.3"},
    "dsgd_full": {"method": "dsgd", "topology": "full"},
    "dfedavgm_8bit": {"method": "dfedavgm", "bits": 8},
    "dfedavgm_24bit": {"method": "dfedavgm", "bits": 24},
}
"""Name in a comparison -> the method, and its further options."""

FIELDS = {
    "field-digits": Field("digits", "digits", {"val_fraction": 0.2}, 40, 40, _SIX_RATES),
    "field-letters": Field("letters, a table", CUSTOM, _LETTERS | _LIKE_FASHION_MNIST, 40, 40, _SIX_RATES),
    "field": Field(
        DATASET,
        DATASET,
        {"num_clients": 20, "s": 20, "val_fraction": 0.1, **_EVERY_RATE_ENDS},
        *(50, 20, ("0.01", "0.03", "0.1")),
    ),
    "field-texts": Field(
        "short texts on all-MiniLM-L6-v2 with low-rank adapters",
        "fortunes",
        {"targets": "layer_5/(query|value)", "val_fraction": 0.2, **_EVERY_RATE_ENDS},
        *(10, 10, ("0.1", "0.3", "1"), ADAPTER_METHODS, len(ADAPTER_METHODS)),
    ),
    "field-images": Field(
        "rotated images on a small vision transformer with low-rank adapters",
        *(CUSTOM, _IMAGES, 10, 10, ("0.01", "0.03", "0.1"), ADAPTER_METHODS, len(ADAPTER_METHODS)),
    ),
    "field-heart": Field(
        *("heart, four hospitals", "heart", _SITES, 20, 20, ("0.02", "0.1", "0.5")), together=True, tested=254
    ),
    "field-watch": Field(
        "watch, ten people",
        *("watch", _SITES | {"model": "mlp", "hidden": (64,)}, 20, 20, ("0.01", "0.03", "0.1")),
        together=True,
        tested=1010,
    ),
    "field-graphs-digits": Field(
        *("digits, without a server", "digits", {"val_fraction": 0.2}, 40, 40, ("0.02", "0.05", "0.1", "0.2")),
        *(GRAPH_METHODS, len(GRAPH_METHODS)),
        together=True,
    ),
    "field-graphs-watch": Field(
        *("watch, ten people, without a server", "watch", _SITES | {"model": "mlp", "hidden": (64,)}, 20, 20),
        *(("0.01", "0.03", "0.1"), GRAPH_METHODS, len(GRAPH_METHODS)),
        together=True,
        tested=1010,
    ),
    "field-networks": Field(
        "three networks, four clients each",
        *(DATASET, _NETWORKS, 20, 20, ("0.03", "0.1", "0.3"), MIXED_METHODS),
        together=True,
    ),
}
"""Block -> its comparison."""

_OWN_STEPS = {"pfedme": {"momentum": 0}}
"""method -> options of its released code: here no paper gives all methods the same momentum."""


class Tuned(NamedTuple):
    """A method with its learning rate: that of the highest accuracy on validation examples.

    Rates at which all clients diverge are left out, be it in the search or only in the longer run.

    Attributes:
      method: its name.
      rate: the learning rate.
      validation: accuracy in the search in percent.
      results: finished runs with this rate and all rounds, that of seed 0 first.
    """

    method: str
    rate: str
    validation: float
    results: list[CommittedRun]


class Comparison:
    """Finished and missing runs of a comparison.

    Args:
      block: a key of FIELDS.
      library: the committed results.

    Attributes:
      block, field: its name, and its value in FIELDS.
      tuned: methods whose search has ended; those with a finished run first, the best on test examples with seed 0
        first.
      runs: all runs that are known now.
    """

    def __init__(self, block: str, library: ResultStore):
        self.block, self.field, self._library = block, FIELDS[block], library
        # The block itself first.
        self._alike = sorted(
            (name for name, one in FIELDS.items() if one.setting == self.field.setting), key=block.__ne__
        )
        compared = methods(block)
        found = [tuned for method in compared if (tuned := self._tuned(method))]
        self.tuned = sorted(found, key=lambda one: -_accuracy(one))
        search = [run for method in compared for run in search_runs(block, method)]
        long = [tuned_run(block, one.method, one.rate) for one in found]
        again = []
        if len(found) == len(compared) and all(map(self._is_done, long)):
            again = [
                tuned_run(block, one.method, one.rate, seed)
                for rank, one in enumerate(self.tuned)
                if rank < self.field.best or one.method == BASELINE
                for seed in SEEDS[1:]
            ]
        self.runs = list({run.name: run for run in [*search, *long, *again]}.values())

    def _tuned(self, method: str) -> Tuned | None:
        """The method with its learning rate; None until its search has ended."""
        if not all(map(self._is_done, search_runs(self.block, method))):
            return None
        validation = [self._validation(method, rate) for rate in self.field.rates]
        ranked = sorted(zip(self.field.rates, validation, strict=True), key=lambda one: -one[1])
        usable = [one for one in ranked if not self._has_diverged(tuned_run(self.block, method, one[0]))]
        rate, accuracy = (usable or ranked)[0]
        first, *others = [self._result(tuned_run(self.block, method, rate, seed)) for seed in SEEDS]
        results = [] if first is None else [one for one in (first, *others) if one is not None]
        return Tuned(method, rate, accuracy, results)

    def _validation(self, method: str, rate: str) -> float:
        """Mean accuracy of a rate over the seeds of the search, in percent; 0 where all clients diverge."""
        runs = [self._result(one) for one in search_runs(self.block, method, [rate])]
        return statistics.fmean((run and run.validation(PROTOCOL)) or 0.0 for run in runs)

    def _result(self, run: PlannedRun) -> CommittedRun | None:
        """Result of a run, which may have been made for another block of the same setting."""
        # By names: reading the command lines of hundreds of runs takes its time.
        own = run.name.removeprefix(self.block)
        return next((found for block in self._alike if (found := self._library.named.get(block + own))), None)

    def _is_done(self, run: PlannedRun) -> bool:
        return self._has_diverged(run) or self._result(run) is not None

    def _has_diverged(self, run: PlannedRun) -> bool:
        return run.name in self._library.diverged and self._library.has_diverged(run.name, run.spec)


def _accuracy(one: Tuned) -> float:
    return (one.results[0].accuracy(PROTOCOL) or 0.0) if one.results else -1.0


def tuned_run(block: str, method: str, rate: str, seed: int = SEEDS[0], *, search: bool = False) -> PlannedRun:
    """Run of a comparison, of METHODS or VARIANTS, with the rounds of the search or with all."""
    field, name = FIELDS[block], f"{method} lr={rate}"
    rounds = field.search_rounds if search else field.rounds
    if rounds < field.rounds:
        name += " search"
    own = VARIANTS.get(method, {"method": method} | _OWN_STEPS.get(method, {}))
    # All in the setting of the data set, also those whose own paper has another.
    usual = DEFAULT_PRESET[field.dataset]
    preset = {} if preset_of(field.dataset, own["method"]) == usual else {"preset": usual}
    # What a variant has of its own comes last, and counts.
    options = preset | {"lr": rate} | field.options | own | {"rounds": rounds}
    return PlannedRun(block, field.dataset, options, name, f"{block}/{slug(name)}/seed-{seed}", seed)


def methods(block: str) -> list[str]:
    """Methods that are compared in a block, keys of METHODS or VARIANTS."""
    return list(FIELDS[block].methods) or [name for name in METHODS if name not in left_out(block)]


def left_out(block: str) -> list[str]:
    """Methods that are left out of a block of all methods, because they are for models with adapters."""
    return [] if FIELDS[block].methods else [name for name, factory in METHODS.items() if is_for_adapters(factory)]


def search_runs(block: str, method: str, rates: Sequence[str] = ()) -> list[PlannedRun]:
    """Runs in which a method's learning rates, by default all, are compared."""
    field = FIELDS[block]
    cells = itertools.product(rates or field.rates, field.search_seeds)
    return [tuned_run(block, method, rate, seed, search=True) for rate, seed in cells]


def possible_runs() -> list[PlannedRun]:
    """All runs that the comparisons may come to need, whatever the searches choose."""
    found = []
    for block, method in [(one, method) for one in FIELDS for method in methods(one)]:
        found += search_runs(block, method)
        found += [tuned_run(block, method, rate, seed) for rate in FIELDS[block].rates for seed in SEEDS]
    return found
