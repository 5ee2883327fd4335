"""Any Flax module as a `Model`: the split by path, what it computes, and what is refused."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pfl_jax import ClientData, InvalidInput, LocalTraining, Settings, methods, models, networks, run, tasks
from pfl_jax.errors import NO_FEATURES
from pfl_jax.methods import METHODS
from pfl_jax.networks import from_flax
from pfl_jax.testing.problems import tiny_federation

KEY, X = jax.random.key(0), jax.random.normal(jax.random.key(1), (4, 8))


class Named(nn.Module):
    twice: bool = False

    def setup(self):
        self.backbone = nn.Sequential([nn.Dense(5), nn.relu])
        self.head = nn.Dense(3)

    def __call__(self, x):
        y = self.head(self.backbone(x))
        if self.twice:
            self.head(2 * self.backbone(x))
        return y


class Deep(nn.Module):
    """The head is a part of a part, which has more parts."""

    @nn.compact
    def __call__(self, x):
        return Decoder(name="decoder")(nn.LayerNorm()(nn.tanh(nn.Dense(6)(x))))


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Out(name="out")(nn.Dense(7, name="first")(x))


class Out(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Dense(4)(x))


class Logits(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="out")(nn.relu(nn.Dense(4)(x)))


class Transformed(nn.Module):
    """Its head is the last step, inside a part that is computed again in the backward pass."""

    @nn.compact
    def __call__(self, x):
        return nn.remat(Logits)(name="decoder")(x)


class Remembering(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.variable("cache", "last", jnp.zeros, (8,))
        return nn.Dense(3, name="head")(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs, norm=nnx.LayerNorm, more=False):
        self.blocks = nnx.List([nnx.Linear(8, 5, rngs=rngs), nnx.Linear(5, 5, rngs=rngs)])
        self.norm = norm(5, rngs=rngs)
        self.head = nnx.Linear(5, 3, rngs=rngs)
        self.more = more

    def __call__(self, x):
        for block in self.blocks:
            x = nnx.tanh(block(x))
        y = self.head(self.norm(x))
        return nnx.log_softmax(y) if self.more else y


def test_a_head_within_a_part():
    model, module = from_flax(Deep(), (8,), 3, head="decoder/out"), Deep()
    params, whole = model.init(KEY), module.init(KEY, X)["params"]
    assert sorted(params["backbone"]) == ["Dense_0", "LayerNorm_0", "decoder"]
    assert list(params["backbone"]["decoder"]) == ["first"]
    assert sorted(params["head"]) == ["Dense_0", "Dense_1"]
    assert model.num_features == 7
    np.testing.assert_allclose(model.apply(params, X), module.apply({"params": whole}, X), rtol=1e-6)


def test_an_nnx_module():
    model = from_flax(lambda rngs: NnxNet(rngs), (8,), 3)
    params = model.init(KEY)
    assert params["head"]["kernel"].shape == (5, 3)
    np.testing.assert_allclose(model.apply(params, X), NnxNet(nnx.Rngs(KEY))(X), rtol=1e-6)
    other = model.init(jax.random.key(1))
    assert not np.allclose(params["backbone"]["blocks"][0]["kernel"], other["backbone"]["blocks"][0]["kernel"])
    # As the engine calls it.
    each = jax.jit(jax.vmap(lambda params, x: model.apply(params, x[None]), (None, 0)))(params, X)
    np.testing.assert_allclose(each[:, 0], model.apply(params, X), rtol=1e-5)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Transformed(), {"head": "decoder/out"}, "or decoder/out is inside nn.remat, nn.jit or another transform"),
        (Named(twice=True), {}, "head is called 2 times"),
        (Remembering(), {}, r"keeps variables besides its parameters \(cache\)"),
        (
            nn.Sequential([nn.Conv(4, (3,)), nn.Dense(3)]),
            {"head": "layers_1", "input_shape": (8, 1)},
            "flatten before the head",
        ),
        (lambda rngs: NnxNet(rngs, more=True), {}, "the module does more after head"),
    ],
)
def test_what_is_refused(module, options, message):
    with pytest.raises(InvalidInput, match=message):
        from_flax(module, **{"input_shape": (8,), "num_classes": 3} | options)


def test_a_model_of_sequences():
    """The head of linen and of nnx is applied at each place, and only a task of sequences may have places."""

    class Characters(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Embed(7, 4)(x)
            return nn.Dense(7, name="head")(nn.relu(nn.Dense(5)(x)))

    model = from_flax(Characters(), (3,), 7, input_dtype=jnp.int32, task=tasks.NEXT_SYMBOL)
    params, x = model.init(jax.random.key(0)), jnp.array([[1, 2, 3], [4, 5, 6]])
    assert model.num_features == 5
    features, _ = model.training_features(params["backbone"], ClientData(x, x, jnp.ones(2, bool)), jax.random.key(1))
    assert features.shape == (2, 3, 5)
    np.testing.assert_allclose(model.apply(params, x)[:, :1], model.apply(params, x[:, :1]), rtol=1e-6)
    with pytest.raises(InvalidInput, match=r"two inputs have features float32 \[2, 3, 5\], not \[2, 5\]: flatten"):
        from_flax(Characters(), (3,), 7, input_dtype=jnp.int32)
    with pytest.raises(InvalidInput, match=r"logits float32 \[2, 3, 7\], not \[2, 3, 8\] for the task next_symbol"):
        from_flax(Characters(), (3,), 8, input_dtype=jnp.int32, task=tasks.NEXT_SYMBOL)


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
    said = ""
    try:
        (result,) = rounds(METHODS[name](model, TRAINING), 1)
        assert np.isfinite(result.received["accuracy"]).all()
    except InvalidInput as error:
        said = str(error)
    assert not said or NO_FEATURES in said
    # What only shares and keeps parameters needs no features.
    assert {"fedavg": True, "fedper": True, "ditto": True, "fedpac": False, "fedrep": False}.get(name, not said) == (
        not said
    )


def test_running_statistics_are_refused():
    model = networks.from_flax(Normalized(), (4,), 3)
    with pytest.raises(InvalidInput, match="running statistics"):
        networks.split(model, personal="bias")


@pytest.mark.parametrize(
    ("personal", "words"), [("(", "not a regular expression"), ("fc9", "finds none of"), (".", "finds all of")]
)
def test_what_finds_nothing_or_everything_is_one_line(personal, words):
    with pytest.raises(InvalidInput, match=words) as error:
        networks.split(perceptron(), personal=personal)
    assert "\n" not in str(error.value)
