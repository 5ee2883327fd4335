"""What is built from a command line: its options, schedules and seed reach the training and the data."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from rich.console import Console

from experiments.cli.command import parse
from experiments.run import build, data
from experiments.spec.hyper_parameters import defaults, parse_schedule, read_at_init, real_numbers
from pfl_jax import Settings
from pfl_jax.data import federate, partition
from pfl_jax.data.allocation import draw_sizes
from pfl_jax.methods import METHODS
from pfl_jax.schedules import at_round

ROUNDS = 40


@pytest.mark.parametrize(
    ("text", "factor"),
    [
        ("lr=cosine:0.2", lambda r: 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * r / ROUNDS))),
        ("lam=linear:2:0.5:10", lambda r: 2 - 1.5 * min(r / 10, 1)),
        ("head-lr=exponential:0.9", lambda r: 0.9**r),
        ("lr=step:0.1:15", lambda r: 0.1 ** (r // 15)),
    ],
)
def test_factors(text, factor):
    schedule = parse_schedule(text)
    assert schedule.name == text.partition("=")[0].replace("-", "_")
    for index in (0, 1, 14, 15, 16, 20, 39):
        np.testing.assert_allclose(schedule.factor(index, ROUNDS), factor(index), rtol=1e-5, atol=1e-7)


def test_every_method_takes_a_schedule_of_each_real_number():
    """Built with a traced round: no factory looks at a value while tracing."""
    request, dataset = data.load_data(parse("digits", ["--method", "fedavg"]), Console(quiet=True))
    for name in METHODS:
        values = defaults(name)
        scheduled = dataclasses.replace(
            request,
            method=name,
            hyper_parameters=values,
            schedule=tuple(f"{one}=cosine" for one in real_numbers(name, values) if one not in read_at_init(name)),
        )
        assert scheduled.schedule
        method = build.make_method(scheduled, dataset)
        jax.eval_shape(lambda index, method=method: at_round(method, index).init_server(jax.random.key(0)), 0)


QUIET = Console(quiet=True)


def test_options_reach_the_simulation():
    words = "--participation 0.5 --straggler-fraction 0.5 --straggler-rate 0.25 --drop-rate 0.4 --rounds 7"
    words += " --attack signs --attackers 0.25 --attack-scale 3 --full-last-round --eval-clients 3 --eval-every 3"
    words += " --num-clients 8 --train-size 20 --test-size 10"
    experiment = build.build_experiment(parse("digits", words.split()), QUIET)
    options = experiment.spec.options
    # Commands end runs themselves, by their logs.
    others = {"chunk", "patience"}
    names = [field.name for field in dataclasses.fields(Settings) if field.name in options.keys() - others]
    assert {name: getattr(experiment.settings, name) for name in names} == {name: options[name] for name in names}
    # A new option must be given above.
    assert all(options[name] != getattr(Settings(1), name) for name in names)


def test_the_seed_reaches_every_draw_of_the_data():
    words = "--size-choices 20 40 60 --test-size 10 --val-fraction 0.2 --shift labels --num-clients 6 --seed 1"
    experiment = build.build_experiment(parse("digits", words.split()), QUIET)
    sizes = draw_sizes((20, 40, 60), 6, 1)
    parts = partition.make("grouped", experiment.dataset, 6, seed=1, train_size=sizes, test_size=10)
    parts = partition.with_validation(parts, 0.2, seed=1)
    expected = federate(experiment.dataset, parts, shift="labels", num_groups=5, seed=1)
    jax.tree.map(np.testing.assert_array_equal, experiment.data, expected)


def test_the_cosine_ends_with_the_run_and_options_are_fields_of_the_recipe(monkeypatch):
    words = "--schedule lr=cosine --rounds 7 --lr 0.1 --num-clients 6 --train-size 20 --test-size 10"
    words += " --optimizer adamw --clip-norm 2 --drop-last --no-shuffle"
    experiment = build.build_experiment(parse("digits", words.split()), QUIET)
    found = []
    monkeypatch.setattr(build, "method_of", lambda *_, lr, **others: found.append((float(lr), others)))
    for number in (0, 7):
        experiment.method(number)
    np.testing.assert_allclose([lr for lr, _ in found], [0.1, 0.0], atol=1e-8)
    recipe = {"optimizer": "adamw", "clip_norm": 2.0, "drop_last": True, "shuffle": False, "augment": None}
    recipe |= {"dp_clip": None, "dp_noise": 0.0, "local_steps": None}
    assert found[0][1].items() >= recipe.items()
