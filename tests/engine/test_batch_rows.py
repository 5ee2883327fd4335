"""Models in which the examples of a batch influence each other are refused, see `pfl_jax.engine.independent_rows`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from pfl_jax import InvalidInput, mixed, simulate, sweep
from pfl_jax.methods import make_method
from pfl_jax.networks import from_flax, split, with_features

MODEL, DATA, KEY = tiny_model(), tiny_federation(), jax.random.key(0)


def normalized(features):
    return (features - features.mean(0)) / jnp.sqrt(features.var(0) + 1e-5)


def of_batch(backbone, x):
    return normalized(MODEL.features(backbone, x))


def in_training(backbone, x, mask, key):
    return of_batch(backbone, x), {}


def of_real_rows(backbone, x, mask, key):
    features = MODEL.features(backbone, x)
    return features - jnp.sum(features * mask[:, None], 0) / jnp.sum(mask), {}


def head(head, features):
    return MODEL.classify(head, normalized(features))


def cumulated(backbone, x):
    return jnp.cumsum(MODEL.features(backbone, x), 0)


class Centered(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x.reshape(len(x), -1))
        return nn.Dense(3, name="head")(x - x.mean(0))


WRONG = {
    "features": MODEL._replace(features=of_batch),
    "training": MODEL._replace(features=lambda *args: MODEL.features(*args), batch_features=in_training),
    "head": MODEL._replace(classify=head),
    "one direction": MODEL._replace(features=cumulated),
    "flax": from_flax(Centered(), DATA.x.shape[1:], 3),
}


@pytest.mark.parametrize("where", WRONG)
def test_a_layer_that_reads_the_whole_batch_is_refused(where):
    method = make_method("fedper", WRONG[where], **HYPER_PARAMETERS)
    with pytest.raises(InvalidInput, match="examples of a batch influence each other"):
        simulate.run(method, DATA, simulate.Settings(rounds=1), KEY)


def test_also_under_another_model_and_in_a_sweep():
    for model in (with_features(WRONG["features"], 4), split(WRONG["head"], personal="head")):
        with pytest.raises(InvalidInput, match="examples of a batch influence each other"):
            simulate.run(make_method("fedavg", model, **HYPER_PARAMETERS), DATA, simulate.Settings(rounds=1), KEY)

    def make(lr):
        return make_method("fedper", WRONG["features"], **HYPER_PARAMETERS | {"lr": lr})

    with pytest.raises(InvalidInput, match="examples of a batch influence each other"):
        sweep.run(make, DATA, simulate.Settings(rounds=1), jax.random.split(KEY, 1), {"lr": jnp.array([0.1])})


def test_also_in_the_second_of_several_networks_and_in_the_network_that_is_shared():
    make = functools.partial(make_method, "fedproto_g", **HYPER_PARAMETERS)
    for method in (
        mixed(make, [MODEL, WRONG["features"]]),
        make_method("fml", MODEL._replace(shared=WRONG["head"]), **HYPER_PARAMETERS),
    ):
        with pytest.raises(InvalidInput, match="examples of a batch influence each other"):
            simulate.run(method, DATA, simulate.Settings(rounds=1), KEY)


def test_in_training_the_real_examples_may():
    model = MODEL._replace(features=lambda *args: MODEL.features(*args), batch_features=of_real_rows)
    simulate.run(make_method("fedper", model, **HYPER_PARAMETERS), DATA, simulate.Settings(rounds=1), KEY)
