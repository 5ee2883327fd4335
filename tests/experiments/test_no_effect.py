"""Options that are given and not read are named; other tools' names of options get the right word."""

import io

import jax
import numpy as np
import pytest
from rich.console import Console

from experiments.cli.command import parse
from experiments.run import build, data
from experiments.run.rounds import visits
from experiments.spec.hyper_parameters import defaults, unread_by_method
from experiments.spec.identity import fixed_rounds, notes, relevant_options
from experiments.spec.option_notes import flag
from experiments.spec.options import Options
from experiments.spec.spec import SYNONYMS
from pfl_jax import InvalidInput, validation
from pfl_jax.methods import METHODS, annotations, make_method
from pfl_jax.validation import ReadWith, literals

CASES = [
    ("fedas", "--lam 3", "--manner serial"),
    ("fedas", "--lam 3 --manner parallel", None),
    ("fedas", "--align-lr 0.1 --manner parallel", "--manner parallel"),
    ("fedas", "--first-alignment --target global_class_mean", "--target global_class_mean"),
    ("fedpac", "--lam 0.5", None),
    ("knn_per", "--held-out 0.3", None),
    ("knn_per", "--held-out 0.3 --mixing 0.5", "--mixing 0.5"),
    ("fedtgp", "--server-lr 0.1 --server-epochs 0", "without --server-epochs"),
    ("fedavg", "--server-tau 0.1", "without --server-optimizer"),
    ("fedavg", "--server-tau 0.1 --server-optimizer sgd", "--server-optimizer sgd"),
    ("fedavg", "--train-size 30 --size-choices 30 60", "--size-choices"),
    ("fedavg", "--size-choices 30 60 --train-size 30 --partition dirichlet", "--partition dirichlet"),
    ("fedavg", "--pixel-normalization fedas", "on digits, which both papers' settings"),
    ("fedavg", "--straggler-rate 0.5 --participation 0.5", "without --straggler-fraction"),
    ("fedavg", "--straggler-rate 0.5 --straggler-fraction 0.2 --participation 0.5", None),
    ("lg_fedavg", "--hidden 8 --features 24 --model mlp,resnet8", None),
    ("lg_fedavg", "--hidden 8 --features 24 --model resnet8", "--model resnet8"),
    ("fedavg", "--attack signs --attackers 0", "without --attackers"),
    ("fedavg", "--eval-clients 9 --num-clients 9", "9 clients"),
]


@pytest.mark.parametrize(("method", "words", "reason"), CASES)
def test_what_is_not_read_is_named(method, words, reason):
    request = parse("digits", ["--method", method, *words.split()])
    said = notes(request, request.given, "gpu")
    if reason is None:
        assert said == []
    else:
        why = reason if reason.startswith(("on ", "without ")) else f"with {reason}"
        assert any(note.startswith(f"{words.split()[0]} has no effect {why}") for note in said)


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--method fedpac --no-alignment --schedule lam=cosine", "--lam has no effect with --no-alignment"),
        ("--method fedbn --model mlp", "--model mlp has no normalization layers, so fedbn is fedavg"),
        ("--method fedbn --model resnet8", ""),
        ("--method hetlora", "--model mlp has no low-rank adapters"),
        ("--method fedavg", ""),
    ],
)
def test_a_run_says_so(words, note):
    text = io.StringIO()
    data.load_data(parse("digits", words.split()), Console(file=text, width=200))
    assert f"Note: {note}" in text.getvalue() if note else "Note" not in text.getvalue()


def relevant(words):
    return relevant_options(parse("digits", words.split()))


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("--participation 1", "--straggler-fraction 0.5 --straggler-rate 0.1 --full-last-round"),
        ("--participation 0.5", "--straggler-rate 0.1"),
        ("--participation 0.5", "--select-clients uniform"),
        ("--participation 1", "--select-clients by_loss"),
        ("--participation 0.5", "--patience 3"),
        ("--method fedavg_ft --epochs 3", "--finetune-epochs 3"),
        ("--method fedper --server-optimizer sgd", "--server-tau 0.1"),
        ("--optimizer adam", "--momentum 0.9"),
        ("--optimizer adam", "--attack signs"),
        ("--model lenet5", "--hidden 8"),
    ],
)
def test_what_is_not_read_makes_no_other_run(words, more):
    assert relevant(words) == relevant(f"{words} {more}")


# Not sgd: then --momentum would tell --optimizer adam apart.
USUAL = "--participation 0.5 --optimizer adamw"


@pytest.mark.parametrize(
    ("words", "more"),
    [
        *((USUAL, more) for more in ("--no-shuffle", "--drop-last", "--precision bf16", "--optimizer adam")),
        *((USUAL, more) for more in ("--clip-norm 1", "--drop-rate 0.5", "--val-fraction 0.2", "--dp-clip 1")),
        *((USUAL, more) for more in ("--held-out-clients 1", "--eval-clients 3", "--eval-every 7")),
        *((USUAL, more) for more in ("--full-last-round", "--on-nan skip-client", "--target-accuracy 50")),
        *((USUAL, f"--select-clients {name}") for name in ("by_size", "power_of_choice:5")),
        *((USUAL, more) for more in ("--schedule lr=cosine", "--straggler-fraction 0.5", "--hidden 8")),
        ("--participation 0.5 --straggler-fraction 0.5", "--straggler-rate 0.3"),
        ("--method fedavg_ft --epochs 3", "--finetune-epochs 4"),
        ("--method fedper", "--server-optimizer sgd"),
        ("--method fedper --server-optimizer sgd", "--server-lr 0.5"),
        # An option of one network of several counts.
        ("--method lg_fedavg --model mlp,resnet8 --features 24", "--hidden 8"),
    ],
)
def test_another_setting_is_another_run(words, more):
    assert relevant(words) != relevant(f"{words} {more}")


def test_rounds_can_be_added_where_the_last_is_full_anyway():
    full, half = (parse("digits", ["--participation", share, "--full-last-round"]) for share in ("1", "0.5"))
    assert (fixed_rounds(full), fixed_rounds(half)) == ("", "--full-last-round")


def program(method, values):
    """Lowered local training, personalization and aggregation of a method, as text."""
    from problems import received, tiny_federation, tiny_model

    from pfl_jax.base import Cohort
    from pfl_jax.data.federated import client_data

    made, key = make_method(method, tiny_model(), **values), jax.random.key(0)

    def everything(data):
        server, train = made.init_server(key), client_data(data, 1, "train")
        client = made.init_client(key, server, train)
        result = made.local(key, server, client, train)
        one = jax.tree.map(lambda leaf: leaf[None], (result.client, result.message))
        cohort = Cohort(jax.numpy.zeros(1, int), jax.numpy.ones(1, int), jax.numpy.ones(1, bool), 4)
        return made.aggregate(key, server, one[0], received(one[1]), cohort), made.personalize(
            key, server, client, train
        )

    return jax.jit(everything).lower(tiny_federation()).as_text()


@pytest.mark.parametrize(
    ("method", "name", "values", "other"),
    [
        ("fedas", "lam", {}, 3.0),
        ("fedas", "align_lr", {"manner": "parallel"}, 0.5),
        pytest.param("fedas", "reduction", {"synchronization": False}, "sum", marks=pytest.mark.slow),
        pytest.param("fedpac", "lam", {"alignment": False}, 3.0, marks=pytest.mark.slow),
        ("knn_per", "held_out", {"mixing": 0.5}, 0.4),
    ],
)
def test_the_program_does_not_depend_on_it(method, name, values, other):
    """What is said to have no effect is in no instruction; what has one is."""
    every = defaults(method) | values
    assert name in unread_by_method(method, every)
    assert program(method, values) == program(method, {**values, name: other})
    read = {"fedas": {"manner": "parallel"}, "fedpac": {}, "knn_per": {}}[method]
    if name not in unread_by_method(method, defaults(method) | read):
        assert program(method, read) != program(method, {**read, name: other})


@pytest.mark.parametrize("method", METHODS)
def test_conditions_are_of_hyper_parameters_that_exist(method):
    kinds = annotations(METHODS[method])
    for name, kind in kinds.items():
        for note in validation.notes_of(kind):
            if isinstance(note, ReadWith):
                assert note.name in kinds.keys() - {name}
                assert set(note.values) <= {*literals(kinds[note.name])}


def test_other_tools_names_lead_to_options_that_exist():
    options = set(Options.__dataclass_fields__) | defaults("fedavg").keys()
    everything = options.union(*map(defaults, METHODS))
    for here, names in SYNONYMS.items():
        assert here in options
        for name in names:
            assert name == "alpha" or name not in everything
            with pytest.raises(InvalidInput) as caught:
                parse("digits", ["--method", "fedavg", flag(name), "3"])
            assert flag(here) in str(caught.value)


@pytest.mark.parametrize(
    ("words", "visited"),
    [
        ("--epochs 2", [60, 14, 50]),
        ("--epochs 2 --drop-last", [60, 14, 40]),
        # Three, one and three mini-batches are an epoch.
        ("--local-steps 4", [40, 28, 35]),
    ],
)
def test_a_client_visits_its_examples_in_every_epoch(words, visited):
    spec = parse("digits", ["--batch-size", "10", *words.split()])
    assert visits(spec, np.array([30, 7, 25])).tolist() == visited


def test_a_batch_of_more_examples_than_any_client_has_is_noted():
    def told(*words):
        text = io.StringIO()
        request = parse("digits", ["--method", "local", "--rounds", "1", *words])
        build.build_experiment(request, Console(file=text, width=500))
        return text.getvalue()

    assert "5000 is more than the 60 training examples of any client" in told("--batch-size", "5000")
    assert "more than" not in told("--batch-size", "60")
