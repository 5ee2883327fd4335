"""Encodings against float64 NumPy, without bias where they promise it, and the bytes that they send."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfl_jax.primitives import compressors
from pfl_jax.primitives.tree import byte_count

TREE = {
    "w": np.array([[0.5, -3.0, 0.0], [0.1, 2.0, -0.2]], np.float32),
    "b": np.array([-2.5, 0.4, 0.0, 1.0], np.float32),
}
KEY = jax.random.key(3)


def test_topk_keeps_the_largest_of_all_arrays_together():
    got = compressors.top_k_compressor(0.3).decoded(KEY, TREE)
    np.testing.assert_array_equal(got["w"], [[0, -3, 0], [0, 2, 0]])
    np.testing.assert_array_equal(got["b"], [-2.5, 0, 0, 0])
    # Three of ten values with their positions.
    assert byte_count(compressors.top_k_compressor(0.3).encoded(TREE)) == 3 * (4 + 4)
    # At least one, and of equal ones no more than asked for.
    assert np.count_nonzero(compressors.top_k_compressor(1e-6).decoded(KEY, jnp.ones(5))) == 1
    np.testing.assert_array_equal(compressors.top_k_compressor(1.0).decoded(KEY, TREE)["w"], TREE["w"])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantize_rounds_to_neighboring_levels_without_bias(bits):
    levels, encoding = 2 ** (bits - 1) - 1, compressors.quantizing_compressor(bits)
    draws = jax.vmap(lambda key: encoding.decoded(key, TREE))(jax.random.split(KEY, 4000))
    for name, value in TREE.items():
        scale = np.abs(np.float64(value)).max()
        steps = np.asarray(draws[name], np.float64) / scale * levels
        np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)
        exact = np.float64(value) / scale * levels
        # Within float32's rounding of a level, no draw is further than one level.
        assert np.abs(steps - exact).max() < 1 + 1e-4
        # The mean of 4,000 draws, whose deviation is at most half a level.
        assert np.abs(steps.mean(0) - exact).max() < 5 * 0.5 / np.sqrt(4000)
    # Ten entries: six in one array and four in the other, each in whole bytes and with its scale.
    assert byte_count(encoding.encoded(TREE)) == -(-6 * bits // 8) + -(-4 * bits // 8) + 2 * 4


def test_quantized_extremes():
    assert not compressors.quantizing_compressor(4).decoded(KEY, jnp.zeros(3)).any()
    # The largest entry is a level itself.
    assert float(compressors.quantizing_compressor(2).decoded(KEY, jnp.array([0.0, -7.0]))[1]) == -7
    assert compressors.quantizing_compressor(8).decoded(KEY, {}) == {}
    other = compressors.quantizing_compressor(2).decoded(jax.random.key(4), TREE)["w"]
    assert not np.array_equal(other, compressors.quantizing_compressor(2).decoded(KEY, TREE)["w"])
    # Nor are equal arrays rounded alike.
    alike = compressors.quantizing_compressor(2).decoded(KEY, {name: jnp.linspace(-1, 1, 20) for name in "ab"})
    assert not np.array_equal(alike["a"], alike["b"])


def test_sign_has_the_mean_magnitude_of_each_array():
    got = compressors.sign_compressor().decoded(KEY, TREE)
    for name, value in TREE.items():
        want = np.where(value < 0, -1, 1) * np.abs(np.float64(value)).mean()
        np.testing.assert_allclose(got[name], want, rtol=1e-6)
    assert byte_count(compressors.sign_compressor().encoded(TREE)) == 1 + 1 + 2 * 4
