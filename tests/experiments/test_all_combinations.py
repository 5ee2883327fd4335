"""Every method on every kind of data, few and all clients, equal and unequal ones: `pytest -m "slow or real_data"`."""

import functools
import io

import jax
import numpy as np
import pytest
from rich.console import Console

from experiments.cli.request import parse
from experiments.run import build
from pfl_jax import simulate
from pfl_jax.data import sources
from pfl_jax.methods import METHODS

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
