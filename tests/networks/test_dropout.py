"""Dropout in models of Flax: in training by the key of the step, none where a model is deployed."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from problems import CLASSES, SHAPE

from pfl_jax import ClientData, InvalidInput
from pfl_jax.networks import from_flax
from pfl_jax.networks.layers import Dense
from pfl_jax.networks.passes import apply_backbone, init_backbone
from pfl_jax.primitives import LocalTraining, clipped_gradient_sum
from pfl_jax.streams import DROPOUT

WIDTH, RATE = 40, 0.25


class Linen(nn.Module):
    """Two layers of dropout, each of which says by itself when it drops out."""

    deterministic: bool | None = None
    call: bool | None = None

    def setup(self):
        self.first, self.norm = nn.Dense(WIDTH), nn.BatchNorm(use_running_average=True)
        self.one = nn.Dropout(RATE, deterministic=self.deterministic)
        self.two = nn.Dropout(RATE, deterministic=self.deterministic)
        self.head = nn.Dense(CLASSES)

    def __call__(self, x):
        x = self.norm(self.first(x.reshape(x.shape[0], -1)))
        given = {} if self.call is None else {"deterministic": self.call}
        return self.head(self.two(self.one(x, **given)))


class Nnx(nnx.Module):
    def __init__(self, rngs, deterministic=False, norm_in_head=False, dropout_in_head=False):
        self.first, self.norm = nnx.Linear(6, WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
        self.one, self.two = (nnx.Dropout(RATE, deterministic=deterministic, rngs=rngs) for _ in range(2))
        head = [nnx.Linear(WIDTH, CLASSES, rngs=rngs)]
        if norm_in_head:
            head.insert(0, nnx.BatchNorm(WIDTH, rngs=rngs))
        if dropout_in_head:
            head.insert(0, nnx.Dropout(RATE, rngs=rngs))
        self.head = nnx.Sequential(*head)

    def __call__(self, x):
        return self.head(self.two(self.one(self.norm(self.first(x.reshape(x.shape[0], -1))))))


MODULES = {
    "linen": Linen(),
    "linen attribute": Linen(deterministic=False),
    "linen argument": Linen(call=True),
    "nnx": lambda rngs: Nnx(rngs),
    "nnx attribute": lambda rngs: Nnx(rngs, deterministic=True),
}
X = jax.random.normal(jax.random.key(0), (30, *SHAPE))
REAL = jnp.arange(30) < 25


def model_of(name):
    model = from_flax(MODULES[name], SHAPE, CLASSES)
    return model, model.init(jax.random.key(1))


@pytest.mark.parametrize("name", MODULES)
def test_a_pass_in_training_drops_out_and_another_one_does_not(name):
    model, params = model_of(name)
    backbone = params["backbone"]
    np.testing.assert_array_equal(model.features(backbone, X), model.features(backbone, X))
    batch = ClientData(X, jnp.zeros(30, jnp.int32), REAL)
    passes = [model.training_features(backbone, batch, jax.random.key(seed)) for seed in (2, 2, 3)]
    features = [np.asarray(one) for one, _ in passes]
    np.testing.assert_array_equal(features[0], features[1])
    kept = [one != 0 for one in features]
    # Independent masks of the two layers leave 9/16; one mask for both would leave 3/4.
    assert all(abs(one.mean() - (1 - RATE) ** 2) < 0.04 for one in kept)
    assert abs((kept[0] & kept[2]).mean() - (1 - RATE) ** 4) < 0.04
    # Whatever is left out: the others are those of the norm by the mini-batch, scaled.
    hidden = np.asarray(X.reshape(30, -1) @ backbone["first"]["kernel"] + backbone["first"]["bias"])
    mean, variance = hidden[:25].mean(0), hidden[:25].var(0)
    want = (hidden - mean) / np.sqrt(variance + 1e-5) / (1 - RATE) ** 2
    np.testing.assert_allclose(features[0][kept[0]], want[kept[0]], rtol=1e-3, atol=1e-4)
    # Padded rows are in no statistic, and dropout has no effect on them.
    for _, statistics in passes:
        np.testing.assert_allclose(statistics["norm"]["mean"], 0.01 * mean, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(statistics["norm"]["var"], 0.99 + 0.01 * variance * 25 / 24, rtol=1e-4)
    deployed = model.features(backbone, X)
    np.testing.assert_allclose(deployed, hidden / np.sqrt(1 + 1e-5), rtol=1e-4, atol=1e-5)
    assert model.features(backbone, X[:1]).shape == (1, WIDTH)


def test_the_module_of_the_user_stays_as_it_was():
    module = nn.Sequential([nn.Dense(4), nn.Dropout(0.5, deterministic=True), nn.Dense(3)])
    model = from_flax(module, (8,), 3, head="layers_2")
    params = model.init(jax.random.key(0))
    batch = ClientData(jnp.ones((9, 8)), jnp.zeros(9, jnp.int32), jnp.ones(9, bool))
    features, _ = model.training_features(params["backbone"], batch, jax.random.key(1))
    assert 0 < (features == 0).mean() < 1
    assert module.layers[1].deterministic is True


def test_steps_have_the_keys_that_streams_says():
    data = ClientData(jnp.arange(10.0), jnp.zeros(10), jnp.arange(10) < 7)

    def step(carry, batch, key):
        words, index = carry
        return words.at[index].set(jax.random.key_data(key)), index + 1

    recipe = LocalTraining(batch_size=4, epochs=2)
    words, _ = recipe.fold(jax.random.key(5), (jnp.zeros((4, 2), jnp.uint32), 0), data, step)
    stream = jax.random.fold_in(jax.random.key(5), DROPOUT)
    want = [jax.random.fold_in(jax.random.fold_in(stream, epoch), index) for epoch in range(2) for index in range(2)]
    np.testing.assert_array_equal(words, [jax.random.key_data(key) for key in want])
    assert len({tuple(row) for row in words.tolist()}) == 4


def test_private_gradients_drop_out_for_each_example():
    """Each example's gradient is its own mask; 150 rows come in several microbatches."""
    rows = 150

    def loss(w, batch, key):
        mask = jax.random.bernoulli(key, 0.5, (*batch.mask.shape, 400))
        return jnp.sum(mask * w * batch.mask[:, None]) / jnp.maximum(jnp.sum(batch.mask), 1)

    batch = ClientData(jnp.ones(rows), jnp.zeros(rows), jnp.ones(rows, bool))
    total, _ = clipped_gradient_sum(jax.random.key(0), loss, jnp.zeros(400), batch, 1e3)
    # Binomial: one mask for all rows, or for each microbatch of 64, would spread much more.
    assert abs(total.mean() / rows - 0.5) < 0.05
    assert 0.7 < total.std() / np.sqrt(rows / 4) < 1.3


def test_private_gradients_in_closed_form_drop_out_for_each_example():
    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dropout(0.5)(Dense(400)(x))

    module, rows = Layers(), 100
    params = init_backbone(module, jax.random.key(0), jnp.ones((1, 1)))

    def loss(params, batch, key):
        features, _ = apply_backbone(module, params, batch.x, batch.mask, key)
        return jnp.sum(features * batch.mask[:, None]) / jnp.maximum(jnp.sum(batch.mask), 1)

    batch = ClientData(jnp.ones((rows, 1)), jnp.zeros(rows), jnp.ones(rows, bool))
    total, _ = clipped_gradient_sum(jax.random.key(0), loss, params, batch, 1e3)
    bias = total["Dense_0"]["bias"]
    # Twice a binomial number.
    assert abs(bias.mean() / rows - 1) < 0.05
    assert 0.7 < bias.std() / np.sqrt(rows) < 1.3


class DroppingHead(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Dropout(0.5)(x))


class WithDroppingHead(nn.Module):
    @nn.compact
    def __call__(self, x):
        return DroppingHead(name="head")(nn.Dense(4)(x))


class AlwaysRandom(Nnx):
    def __call__(self, x):
        return self.head(self.one(self.first(x.reshape(x.shape[0], -1)), deterministic=False))


class OwnStatistics(nnx.Module):
    def __init__(self, rngs):
        self.mean, self.head = nnx.BatchStat(jnp.zeros(6)), nnx.Linear(6, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(x.reshape(x.shape[0], -1) - self.mean[...])


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (WithDroppingHead(), "the head head has dropout, which only a backbone can have"),
        (lambda rngs: Nnx(rngs, dropout_in_head=True), "the head head has dropout, which only a backbone can have"),
        (lambda rngs: Nnx(rngs, norm_in_head=True), "the head head has BatchNorm, which only a backbone can have"),
        (lambda rngs: AlwaysRandom(rngs), "draws random numbers when deployed too"),
        (lambda rngs: OwnStatistics(rngs), "OwnStatistics keeps statistics of its own: only those of BatchNorm"),
    ],
)
def test_what_is_refused(module, message):
    with pytest.raises(InvalidInput, match=message):
        from_flax(module, SHAPE, CLASSES)
