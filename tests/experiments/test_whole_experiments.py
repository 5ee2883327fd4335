"""Whole experiments: minutes long, or on real data. `pytest -m slow`, `pytest -m real_data`."""

import functools
import io
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from rich.console import Console

from experiments.cli.command import parse
from experiments.run import build
from pfl_jax import simulate
from pfl_jax.data import sources
from pfl_jax.methods import METHODS


def experiment(tmp_path, dataset, method, *options):
    """Runs an experiment as a user does; returns its summary and its evaluations."""
    out = tmp_path / method
    command = [sys.executable, "-m", f"experiments.{dataset}", "--method", method, "--out", str(out), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return json.loads((out / "summary.json").read_text()), [json.loads(line) for line in lines]


@pytest.mark.slow
def test_embedded_defaults_end_in_time_and_personalised_methods_win(tmp_path):
    summaries = {
        method: experiment(tmp_path, "cifar100", method, "--source", "embedded")[0]
        for method in ("local", "fedavg", "fedper", "fedpac", "fedas")
    }
    accuracy = {method: summary["received_accuracy"] for method, summary in summaries.items()}
    baseline = max(accuracy["local"], accuracy["fedavg"])
    for method in ("fedper", "fedpac", "fedas"):
        assert accuracy[method] > baseline + 2, accuracy
    for summary in summaries.values():
        assert summary["seconds"] < 300
        assert "embedded" in summary["data_source"]


@pytest.mark.real_data
def test_fedpac_learns_fashion_mnist_as_the_released_code_does(tmp_path):
    # One run of the released code: 81.1 % received and 82.8 % trained in its line for round 5. It measures `received`
    # before the round's training, so the first figure is that after round 4.
    options = ("--source", "files", "--rounds", "5", "--eval-every", "1")
    _, evaluations = experiment(tmp_path, "fashion_mnist", "fedpac", *options)
    fourth, fifth = evaluations[3:]
    assert abs(fourth["received"]["mean"] - 81.1) < 1.5
    assert abs(fifth["trained"]["mean"] - 82.8) < 1.5


DATA = {
    "digits": ["--source", "embedded"],
    "cifar100": ["--source", "embedded", "--partition", "grouped"],
    "fashion_mnist": ["--source", "files"],
}
SMALL = "--num-clients 10 --test-size 30 --rounds 2 --eval-every 1 --batch-size 15 --epochs 1"
SIZES = {"equal": ["--train-size", "30"], "unequal": ["--size-choices", "15", "30", "60"]}


@pytest.fixture(autouse=True, scope="module")
def _load_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "load", functools.cache(sources.load))
        yield


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("participation", [0.3, 1.0])
@pytest.mark.parametrize(
    ("dataset", "method"),
    [
        pytest.param(dataset, method, marks=pytest.mark.real_data if dataset == "fashion_mnist" else pytest.mark.slow)
        for dataset in DATA
        for method in METHODS
    ],
)
def test_finite_results(dataset, method, participation, sizes):
    words = [*DATA[dataset], "--method", method, "--participation", str(participation), *SIZES[sizes]]
    words += SMALL.split()
    experiment = build.build_experiment(parse(dataset, words), Console(file=io.StringIO()))
    mesh = simulate.client_mesh(jax.devices()[:2])
    results = simulate.run(experiment.method, experiment.data, experiment.settings, jax.random.key(0), mesh=mesh)
    for result in results:
        for accuracy in (result.received["accuracy"], result.trained["accuracy"][result.cohort]):
            assert np.all((accuracy >= 0) & (accuracy <= 1))
        assert len(result.cohort) == round(10 * participation)
        leaves = jax.tree.leaves((result.state.server, result.state.clients, result.info))
        assert all(np.all(np.isfinite(leaf)) for leaf in leaves if np.issubdtype(leaf.dtype, np.floating))
