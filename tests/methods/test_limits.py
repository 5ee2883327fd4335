"""Where a method's claim has a limit that is another method, both must give the same numbers."""

import functools

import jax
import pytest
from deployed import log_probabilities
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model
from rounds import last_round
from trees import assert_same

from pfl_jax.data.federated import client_data
from pfl_jax.methods import METHODS, make_method

SAME = [
    ("fedavg_ft", {"finetune_epochs": 0}, "fedavg", {}),
    ("fedprox_ft", {"mu": 0.0, "finetune_epochs": 0}, "fedavg", {}),
    ("hypcluster", {"clusters": 1}, "fedavg", {}),
    ("fedbn", {}, "fedavg", {}),
    ("moon", {"mu": 0.0}, "fedavg", {}),
    ("fedamp", {"lam": 0.0, "alpha_k": 1e-30}, "local", {}),
]
"""(method, its hyper-parameters, another method, its): both deploy the same. A new method adds a row."""


@functools.cache
def deployed(name, **hyper_parameters):
    """Log-probabilities [4, 12, K] of every client's test examples, under both protocols, after two rounds."""
    data, arguments = tiny_federation(), {**HYPER_PARAMETERS, **hyper_parameters}
    last = last_round(METHODS[name], data, 5, 2, **arguments)
    return log_probabilities(make_method(name, tiny_model(), **arguments))(data, last.state)


@pytest.mark.parametrize(
    ("name", "limit", "other", "settings"), SAME, ids=[f"{name}-{other}" for name, _, other, _ in SAME]
)
def test_limit_is_the_other_method(name, limit, other, settings):
    assert_same(deployed(name, **limit), deployed(other, **settings))


FINE_TUNED = [
    "fedavg_ft",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedprox_ft", "fedem_ft", "fedbabu")),
]


@pytest.mark.parametrize("name", FINE_TUNED)
def test_fine_tuning_has_as_many_epochs_as_training_unless_told(name):
    def program(**epochs):
        """What a client deploys, as text: nothing need be compiled to see that two programs are the same."""

        def deployed(examples):
            method = make_method(name, tiny_model(), lr=0.1, batch_size=8, **epochs)
            server = method.init_server(jax.random.key(0))
            client = method.init_client(jax.random.key(1), server, examples)
            return method.personalize(jax.random.key(2), server, client, examples)

        return jax.jit(deployed).lower(client_data(tiny_federation(), 1, "train")).as_text()

    assert program(epochs=3) == program(epochs=3, finetune_epochs=3) == program(epochs=1, finetune_epochs=3)
    assert program(epochs=1) != program(epochs=3)
