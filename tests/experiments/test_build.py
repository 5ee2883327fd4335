"""What is built from a command line: its options and its seed reach the simulation and the data."""

import dataclasses

import jax
import numpy as np
from rich.console import Console

from experiments.cli.request import parse
from experiments.run import build
from pfl_jax.data import partition
from pfl_jax.data.allocation import draw_sizes
from pfl_jax.data.federated import federate
from pfl_jax.engine.simulate import Settings

QUIET = Console(quiet=True)


def test_options_reach_the_simulation():
    words = "--participation 0.5 --straggler-fraction 0.5 --straggler-rate 0.25 --drop-rate 0.4 --rounds 7"
    words += " --attack signs --attackers 0.25 --attack-scale 3 --full-last-round --eval-clients 3 --eval-every 3"
    words += " --num-clients 8 --train-size 20 --test-size 10"
    experiment = build.build_experiment(parse("digits", words.split()), QUIET)
    options = vars(experiment.request.options)
    names = [field.name for field in dataclasses.fields(Settings) if field.name in options and field.name != "chunk"]
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


def test_the_cosine_ends_with_the_run(monkeypatch):
    words = "--schedule lr=cosine --rounds 7 --lr 0.1 --num-clients 6 --train-size 20 --test-size 10"
    experiment = build.build_experiment(parse("digits", words.split()), QUIET)
    found = []
    monkeypatch.setattr(build, "method_of", lambda *_, lr, **__: found.append(float(lr)))
    for number in (0, 7):
        experiment.method(number)
    np.testing.assert_allclose(found, [0.1, 0.0], atol=1e-8)
