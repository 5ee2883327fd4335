"""`pfl_jax.networks.split`: another split is the same model, and methods share and keep what it says."""

import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfl_jax import LocalTraining, Settings, methods, models, networks, run
from pfl_jax.base import NO_FEATURES, ClientData
from pfl_jax.errors import InvalidInput
from pfl_jax.methods import METHODS
from pfl_jax.networks import adapters
from pfl_jax.testing.problems import tiny_federation

TAKE_A_SPLIT_MODEL = {
    *("local", "fedavg", "fedavg_ft", "fedprox", "fedprox_ft", "scaffold", "feddyn", "per_fedavg", "fedper", "fedbn"),
    *("lg_fedavg", "fedbabu", "fedrod", "apfl", "pfedme", "ditto", "fedfomo", "fedamp", "apple", "hypcluster"),
    *("fedem", "fedem_ft", "fedala", "pfedhn", "pfedgraph", "fedcac", "cd2pfed", "fedex_lora", "hetlora"),
}
"""Methods that share and keep parameters; the others use features as vectors."""

TRAINING = LocalTraining(lr=0.1, batch_size=5, epochs=2)


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
        return nn.Dense(3, name="head")(x)


def perceptron():
    federation = tiny_federation()
    return models.mlp(federation.x.shape[1:], federation.num_classes, hidden=(6,))


def rounds(method, count=2):
    return list(run(method, tiny_federation(), Settings(rounds=count), jax.random.key(0)))


def test_a_split_model_computes_and_trains_as_the_model():
    model = perceptron()
    divided = networks.split(model, personal="bias")
    whole, parts = (rounds(methods.fedavg(one, TRAINING))[-1] for one in (model, divided))
    chex.assert_trees_all_close(parts.received, whole.received, rtol=1e-5)
    server = parts.state.server
    assert sorted(server["head"]) == ["backbone/fc1/bias", "head/bias"]
    np.testing.assert_allclose(server["head"]["head/bias"], whole.state.server["head"]["bias"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        server["backbone"]["backbone/fc1/kernel"], whole.state.server["backbone"]["fc1"]["kernel"], rtol=1e-5, atol=1e-6
    )


def test_the_head_alone_as_personal_is_the_model_s_own_split():
    model = perceptron()
    first, second = (
        rounds(methods.fedper(one, TRAINING))[-1] for one in (model, networks.split(model, personal="^head"))
    )
    chex.assert_trees_all_close(first.received, second.received, rtol=1e-5)


def test_fedper_keeps_what_is_personal_and_averages_the_rest():
    """FedSA-LoRA: the A of the adapters are shared, the B and the classifier stay with the clients."""
    federation = tiny_federation()
    model = adapters.lora(perceptron(), federation.x.shape[1:], rank=2, targets="fc1")
    method = methods.fedper(networks.split(model, personal="lora_b|^head"), TRAINING)
    state = rounds(method)[-1].state
    assert set(state.server["backbone"]) == {"backbone/fc1/lora_a"}
    assert set(state.clients) == {"backbone/fc1/lora_b", "head/bias", "head/kernel"}
    own = np.asarray(state.clients["backbone/fc1/lora_b"])
    assert len(np.unique(own.reshape(len(own), -1), axis=0)) == len(own)


def test_dropout_of_training_reaches_a_split_model():
    class Dropping(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dropout(0.5)(nn.relu(nn.Dense(8, name="dense")(x)))
            return nn.Dense(3, name="head")(x)

    model = networks.split(networks.from_flax(Dropping(), (4,), 3), personal="bias")
    params, x, mask = model.init(jax.random.key(0)), jnp.ones((2, 4)), jnp.ones(2, bool)
    batch = ClientData(x, jnp.zeros(2, jnp.int32), mask)
    first, second = (
        model.classify(params["head"], model.training_features(params["backbone"], batch, jax.random.key(seed))[0])
        for seed in (1, 2)
    )
    assert not np.allclose(first, second)
    assert model.apply(params, x).shape == (2, 3)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("fedpac", "fedrep") else pytest.mark.slow) for name in METHODS]
)
def test_every_method_runs_on_a_split_model_or_says_that_it_needs_features(name):
    model = networks.split(perceptron(), personal="bias")
    if name in TAKE_A_SPLIT_MODEL:
        (result,) = rounds(METHODS[name](model, TRAINING), 1)
        assert np.isfinite(result.received["accuracy"]).all()
    else:
        with pytest.raises(InvalidInput, match=re.escape(NO_FEATURES)):
            rounds(METHODS[name](model, TRAINING), 1)


def test_running_statistics_are_refused():
    model = networks.from_flax(Normalized(), (4,), 3)
    with pytest.raises(InvalidInput, match="running statistics"):
        networks.split(model, personal="bias")


@pytest.mark.parametrize(
    ("personal", "words"), [("(", "no regular expression"), ("fc9", "finds none of"), (".", "finds all of")]
)
def test_what_finds_nothing_or_everything_is_one_line(personal, words):
    with pytest.raises(InvalidInput, match=words) as error:
        networks.split(perceptron(), personal=personal)
    assert "\n" not in str(error.value)
