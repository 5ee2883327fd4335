"""The code in README.md and on the pages of BLOCKS runs as it stands."""

import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from pfl_jax import LocalTraining, simulate
from pfl_jax.base import Cohort
from pfl_jax.engine.simulate import Settings
from pfl_jax.methods import make_method

ROOT = Path(__file__).parents[1]
BLOCKS = [
    code
    for page in (
        "README.md",
        "docs/evaluation.md",
        "docs/privacy.md",
        "docs/sweeps.md",
        "docs/training.md",
        "docs/pretrained.md",
    )
    for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
]


def block(marker):
    (found,) = [code for code in BLOCKS if marker in code]
    return found


def test_the_library_example_runs_and_learns(capsys):
    exec(compile(block("simulate.run("), "README.md", "exec"), {"__name__": "readme"})
    rounds = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [int(number) for number, _ in rounds] == [1, 2, 3, 4, 5]
    assert float(rounds[-1][1]) > 0.7


def test_the_example_of_adapters_runs_and_learns(capsys):
    exec(compile(block('targets="fc1|fc2"'), "docs/pretrained.md", "exec"), {"__name__": "adapters"})
    first, *_, last = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert last > max(first, 0.5)


def test_the_examples_of_local_training_run(capsys):
    for marker in ('optimizer="adamw"', "optimizer=optax.adam", "cosine_decay_schedule(0.1, 3)"):
        exec(
            compile(block(marker), "docs/training.md", "exec"), {"__name__": "training", "LocalTraining": LocalTraining}
        )
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.slow
def test_the_example_of_validation_runs(capsys):
    exec(compile(block("with_validation("), "docs/evaluation.md", "exec"), {"__name__": "evaluation"})
    rounds = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [len(words) for words in rounds] == [3, 3]
    assert all(0 < float(word) <= 1 for words in rounds for word in words[1:])


@pytest.mark.slow
def test_the_sweep_example_runs_and_learns(capsys):
    namespace = {"__name__": "readme"}
    for marker in ("simulate.run(", "sweep.run("):
        capsys.readouterr()
        exec(compile(block(marker), "README.md", "exec"), namespace)
    *_, last = capsys.readouterr().out.splitlines()
    assert len(re.findall(r"0\.[4-9]\d*", last)) == 4


def test_the_method_example_is_a_method():
    namespace = {"__name__": "readme"}
    exec(compile(block("def fedavg_median("), "README.md", "exec"), namespace)
    median, data = make_method(namespace["fedavg_median"], tiny_model(), **HYPER_PARAMETERS), tiny_federation()
    *_, last = simulate.run(median, data, Settings(rounds=6), jax.random.key(0))
    assert last.received["accuracy"].mean() > 0.6
    # Its purpose: one client's nonsense does not reach the server.
    models = [median.init_server(jax.random.key(0))] * 4
    messages = jax.tree.map(lambda *leaves: jnp.stack(leaves).at[2].set(1e6), *models)
    cohort = Cohort(jnp.arange(4), jnp.full(4, 9), jnp.ones(4, bool), num_clients=4)
    server, _, _ = median.aggregate(jax.random.key(0), None, (), messages, cohort)
    chex.assert_trees_all_equal(server, models[0])
