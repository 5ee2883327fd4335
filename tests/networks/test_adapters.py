"""`pfl_jax.networks.adapters`: the frozen network at first, then the network with merged kernels."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pfl_jax import InvalidInput, models, networks
from pfl_jax.networks.adapters import bottleneck, linear_probe, lora, prompts
from pfl_jax.networks.layers import assemble


class Layers(nn.Module):
    """A layer of each kind that can have an adapter."""

    @nn.compact
    def __call__(self, x):
        states = nn.Embed(20, 8, name="words")(x)
        states = nn.MultiHeadDotProductAttention(2, name="attention")(states, states)
        states = nn.Conv(6, (3,), strides=2, name="convolution")(states)
        return nn.Dense(3, name="head")(nn.Dense(5, name="dense")(states.mean(1)))


class NnxLayers(nnx.Module):
    def __init__(self, rngs):
        self.words = nnx.Embed(20, 8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.convolution = nnx.Conv(8, 6, (3,), strides=2, rngs=rngs)
        self.dense, self.head = nnx.Linear(6, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x):
        states = self.words(x)
        return self.head(self.dense(self.convolution(self.attention(states)).mean(1)))


NETWORKS = {
    "mlp": (models.mlp((5,), 3), (5,), jnp.float32),
    "cnn": (models.fedpac_cnn((12, 12, 1), 3), (12, 12, 1), jnp.float32),
    "nnx": (networks.from_flax(lambda rngs: NnxLayers(rngs), (7,), 3, input_dtype=jnp.int32), (7,), jnp.int32),
    "layers": (networks.from_flax(Layers(), (7,), 3, input_dtype=jnp.int32), (7,), jnp.int32),
}


def inputs(name):
    _, shape, dtype = NETWORKS[name]
    key = jax.random.key(1)
    if dtype == jnp.int32:
        return jax.random.randint(key, (4, *shape), 0, 20)
    return jax.random.normal(key, (4, *shape))


def moved(params):
    return jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(2), leaf.shape), params)


def merged(base, adapters, scale, more=0.0):
    """Backbone in which W + scale A B, and something more, is the kernel of each layer with an adapter."""
    if "lora_a" in adapters:
        name = "embedding" if "embedding" in base else "kernel"
        update = scale * (adapters["lora_a"] @ adapters["lora_b"]) + more
        return dict(base) | {name: base[name] + update.reshape(base[name].shape)}
    return {name: merged(one, adapters[name], scale, more) if name in adapters else one for name, one in base.items()}


def with_residual(adapters, value):
    """The same with residuals of this value beside the factors."""
    if "lora_a" in adapters:
        wide = adapters["lora_a"].shape[0], adapters["lora_b"].shape[1]
        return adapters | {"residual": jnp.full(wide, value)}
    return {name: with_residual(one, value) for name, one in adapters.items()}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_with_adapters_is_the_network_at_first_and_then_the_merged_one(name):
    model, shape, dtype = NETWORKS[name]
    adapted = lora(model, shape, rank=2, alpha=6.0, targets=".", input_dtype=dtype)
    backbone, x = adapted.init(jax.random.key(0))["backbone"], inputs(name)
    base = adapted.frozen.read()["base"]
    np.testing.assert_array_equal(adapted.features(backbone, x), model.features(base, x))
    backbone = moved(backbone)
    wanted = model.features(merged(base, backbone, 3.0), x)
    assert not np.allclose(wanted, model.features(base, x), atol=1e-2)
    np.testing.assert_allclose(adapted.features(backbone, x), wanted, rtol=1e-4, atol=1e-4)
    trained, _ = adapted.batch_features(backbone, x, jnp.ones(4, bool), jax.random.key(3))
    np.testing.assert_allclose(trained, wanted, rtol=1e-4, atol=1e-4)
    # A residual is added to the frozen kernel.
    got, wanted = with_residual(backbone, 0.01), merged(base, backbone, 3.0, more=0.03)
    np.testing.assert_allclose(adapted.features(got, x), model.features(wanted, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_linear_probe_trains_the_head_alone(name):
    model, shape, dtype = NETWORKS[name]
    probe = linear_probe(model, shape, input_dtype=dtype)
    params, x = probe.init(jax.random.key(0)), inputs(name)
    assert not params["backbone"]
    assert jax.tree.map(jnp.shape, params["head"]) == jax.tree.map(jnp.shape, model.init(jax.random.key(0))["head"])
    base = probe.frozen.read()["base"]
    np.testing.assert_array_equal(probe.features(params["backbone"], x), model.features(base, x))


def test_targets_name_layers_by_their_paths():
    model, shape, dtype = NETWORKS["layers"]
    adapted = lora(model, shape, targets="attention/(query|out)|dense", input_dtype=dtype)
    shapes = jax.tree.map(jnp.shape, adapted.init(jax.random.key(0))["backbone"])
    assert set(shapes) == {"attention", "dense"}
    assert set(shapes["attention"]) == {"query", "out"}
    assert shapes["attention"]["out"] == {"lora_a": (8, 8), "lora_b": (8, 8)}
    with pytest.raises(InvalidInput, match="there are words, attention/query"):
        lora(model, shape, targets="fc9", input_dtype=dtype)


def test_blocks_of_a_convolution_have_adapters_too():
    model, shape, dtype = NETWORKS["cnn"]
    shapes = jax.eval_shape(lora(model, shape, rank=2, targets=".", input_dtype=dtype).init, jax.random.key(0))
    assert set(shapes["backbone"]) == {"conv1", "conv2", "fc1"}


def test_frozen_parameters_are_kept_in_the_type_that_was_asked_for():
    model, shape, _ = NETWORKS["mlp"]
    adapted = lora(model, shape, targets="fc2", frozen_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(adapted.frozen.values)} == {jnp.dtype(jnp.bfloat16)}
    backbone, x = adapted.init(jax.random.key(0))["backbone"], inputs("mlp")
    exact = lora(model, shape, targets="fc2").features(backbone, x)
    np.testing.assert_allclose(adapted.features(backbone, x), exact, atol=0.02)


def test_bound_values_are_read_in_place_of_the_model_s_own():
    model, shape, _ = NETWORKS["mlp"]
    adapted = lora(model, shape, targets="fc2")
    backbone, x = adapted.init(jax.random.key(0))["backbone"], inputs("mlp")

    @jax.jit
    def features(frozen, x):
        with frozen.use():
            return adapted.features(backbone, x)

    zeros = jax.tree.map(jnp.zeros_like, adapted.frozen)
    np.testing.assert_array_equal(features(zeros, x), jnp.zeros((4, 32)))
    np.testing.assert_allclose(features(adapted.frozen, x), adapted.features(backbone, x), atol=1e-6)


def test_a_frozen_a_is_drawn_once_and_only_b_is_trained():
    """FFA-LoRA: the mean of clients' adapters is the adapter of the mean of their merged kernels."""
    model, shape, _ = NETWORKS["mlp"]
    adapted = lora(model, shape, rank=2, alpha=6.0, targets="fc1|fc2", frozen_a=jax.random.key(5))
    first = adapted.init(jax.random.key(0))["backbone"]
    assert set(first["fc1"]) == {"lora_b"}
    fixed = adapted.frozen.read()
    a = fixed["adapters"]["fc2"]["lora_a"]
    clients = [jax.tree.map(lambda leaf, seed=seed: leaf + seed, first) for seed in (0.1, -0.3)]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 2, *clients)
    kernels = [fixed["base"]["fc2"]["kernel"] + 3.0 * a @ one["fc2"]["lora_b"] for one in clients]
    np.testing.assert_allclose(
        fixed["base"]["fc2"]["kernel"] + 3.0 * a @ mean["fc2"]["lora_b"], sum(kernels) / 2, rtol=1e-6, atol=1e-6
    )
    # The same A for the same key, whichever other layers have adapters, and another one for another key.
    alone = lora(model, shape, rank=2, targets="fc2", frozen_a=jax.random.key(5)).frozen.read()["adapters"]
    np.testing.assert_array_equal(alone["fc2"]["lora_a"], a)
    other = lora(model, shape, rank=2, targets="fc2", frozen_a=jax.random.key(6)).frozen.read()["adapters"]
    assert not np.allclose(other["fc2"]["lora_a"], a)
    x = inputs("mlp")
    both = lora(model, shape, rank=2, alpha=6.0, targets="fc1|fc2")
    whole = {name: fixed["adapters"][name] | clients[0][name] for name in ("fc1", "fc2")}
    np.testing.assert_allclose(adapted.features(clients[0], x), both.features(whole, x), rtol=1e-6)


def test_bottleneck_adapters_are_perceptrons_after_layers():
    model, shape, _ = NETWORKS["mlp"]
    adapted = bottleneck(model, shape, size=3, targets="fc1")
    backbone, x = adapted.init(jax.random.key(0))["backbone"], inputs("mlp")
    base = adapted.frozen.read()["base"]
    np.testing.assert_array_equal(adapted.features(backbone, x), model.features(base, x))
    own = moved(backbone)["fc1"]
    states = x @ base["fc1"]["kernel"] + base["fc1"]["bias"]
    states = jax.nn.relu(states + nn.gelu(states @ own["down"]) @ own["up"])
    wanted = jax.nn.relu(states @ base["fc2"]["kernel"] + base["fc2"]["bias"])
    np.testing.assert_allclose(adapted.features({"fc1": own}, x), wanted, rtol=1e-4, atol=1e-5)


def test_bottleneck_adapters_of_a_block_come_after_its_convolution():
    model = assemble(models.Backbone(((4, 3, 1),), (5,), jax.nn.relu), 5, (6, 6, 2), 3)
    adapted = bottleneck(model, (6, 6, 2), size=3, targets="conv1")
    own, x = moved(adapted.init(jax.random.key(0))["backbone"]), jax.random.normal(jax.random.key(1), (4, 6, 6, 2))
    conv1, fc1 = (adapted.frozen.read()["base"][name] for name in ("conv1", "fc1"))
    states = jax.lax.conv_general_dilated(
        x, conv1["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    states = states + nn.gelu(states @ own["conv1"]["down"]) @ own["conv1"]["up"]
    states = jax.nn.relu(states.reshape(4, 3, 2, 3, 2, 4).max((2, 4)) + conv1["bias"]).reshape(4, -1)
    wanted = jax.nn.relu(states @ fc1["kernel"] + fc1["bias"])
    np.testing.assert_allclose(adapted.features(own, x), wanted, rtol=1e-4, atol=1e-5)


class Means(nn.Module):
    """Mean of embedded tokens, for any number of them."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(nn.Embed(20, 8, name="embeddings")(x).mean(1))


def test_prompts_are_states_before_those_of_the_tokens():
    model = networks.from_flax(Means(), (7,), 3, input_dtype=jnp.int32)
    adapted = prompts(model, (7,), tokens=2)
    backbone, x = adapted.init(jax.random.key(0))["backbone"], inputs("layers")
    assert backbone["embeddings"]["tokens"].shape == (2, 8)
    states = adapted.frozen.read()["base"]["embeddings"]["embedding"][x]
    wanted = (backbone["embeddings"]["tokens"].sum(0) + states.sum(1)) / 9
    np.testing.assert_allclose(adapted.features(backbone, x), wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(InvalidInput, match="there are embeddings"):
        prompts(model, (7,), after="layers")
