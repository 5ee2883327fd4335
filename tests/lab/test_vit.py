"""The small vision transformer of `experiments.lab.vit`: its weights come back from their file."""

import jax
import numpy as np

from experiments.lab.vit import CONFIG, WEIGHTS, timm
from pfl_jax.networks.vit import vit

SHAPE = (28, 28, 1)


def test_weights_under_timms_names_are_read_back(tmp_path):
    model = vit(SHAPE, 10, config=CONFIG)
    params = model.init(jax.random.key(0))
    # Biases and scales are no longer zeros and ones.
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(1), leaf.shape), params)
    np.savez(tmp_path / "vit.npz", **timm(params["backbone"]["encoder"]))
    read = vit(SHAPE, 10, path=tmp_path / "vit.npz")
    x = jax.random.normal(jax.random.key(2), (3, *SHAPE))
    backbone = read.init(jax.random.key(0))["backbone"]
    np.testing.assert_allclose(read.features(backbone, x), model.features(params["backbone"], x), atol=0.02)


def test_the_committed_weights_fit():
    assert vit(SHAPE, 10, path=WEIGHTS).init(jax.random.key(0))["head"]
