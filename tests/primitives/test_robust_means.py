"""Robust means and compressed messages against float64 NumPy."""

import functools
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfl_jax.primitives import byte_count, compressors, robust_means

CLIENTS, ENTRIES = 7, 4
EQUAL = np.ones(CLIENTS)
ABSENT = np.array([1.0, 0, 1, 1, 0, 1, 1])
UNEQUAL = np.array([3.0, 5, 1, 0, 2, 2, 4])


def vectors(seed=0):
    return np.random.default_rng(seed).normal(size=(CLIENTS, ENTRIES)).astype(np.float32)


def numpy_median(x, w):
    out = []
    for column in np.float64(x).T:
        repeated = sorted(itertools.chain.from_iterable([value] * int(n) for value, n in zip(column, w, strict=True)))
        out.append(np.median(repeated))
    return np.array(out)


def numpy_trimmed(x, w, share, parts=1000):
    """Each client as many copies of itself as its weight has thousandths; a share of all copies is cut at each end."""
    out = []
    for column in np.float64(x).T:
        copies = np.sort(np.repeat(column, np.round(w * parts).astype(int)))
        cut = round(share * len(copies))
        out.append(copies[cut : len(copies) - cut].mean())
    return np.array(out)


def numpy_krum(x, w, share, several):
    here = [i for i in range(len(x)) if w[i] > 0]
    attackers = int(share * len(here))
    near = max(1, len(here) - attackers - 2)
    score = {i: sum(sorted(sum((x[i] - x[j]) ** 2) for j in here if j != i)[:near]) for i in here}
    order = sorted(here, key=lambda i: score[i])
    if not several:
        return x[order[0]]
    kept = order[: len(here) - attackers]
    return np.average(x[kept], axis=0, weights=w[kept])


def numpy_geometric(x, w):
    z = np.average(x, axis=0, weights=w)
    for _ in range(robust_means.ITERATIONS):
        b = [w[i] / max(robust_means.SMOOTHING, np.linalg.norm(z - x[i])) for i in range(len(x))]
        z = sum(b[i] * x[i] for i in range(len(x))) / sum(b)
    return z


STATISTICS = {
    "median": (jax.jit(robust_means.coordinate_median), numpy_median),
    "trimmed": (jax.jit(partial(robust_means.trimmed_mean, share=0.2)), partial(numpy_trimmed, share=0.2)),
    "krum": (jax.jit(partial(robust_means.krum, share=0.3)), partial(numpy_krum, share=0.3, several=False)),
    "multi_krum": (
        jax.jit(partial(robust_means.krum, share=0.3, several=True)),
        partial(numpy_krum, share=0.3, several=True),
    ),
    "geometric": (jax.jit(robust_means.geometric_median), numpy_geometric),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics(name):
    ours, slow = STATISTICS[name]
    for seed, w in enumerate((EQUAL, ABSENT, UNEQUAL)):
        x = vectors(seed)
        np.testing.assert_allclose(ours(x, jnp.float32(w)), slow(np.float64(x), w), rtol=1e-5, atol=1e-6)
        # The vectors of absent clients are not read.
        moved = np.where(w[:, None] > 0, x, 1e6)
        np.testing.assert_allclose(ours(moved, jnp.float32(w)), ours(x, jnp.float32(w)), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(ours(vectors(), jnp.zeros(CLIENTS)), np.zeros(ENTRIES))
    # One client is alone.
    np.testing.assert_allclose(ours(vectors(), jnp.eye(CLIENTS)[2]), vectors()[2], rtol=1e-6)


def test_median_of_ties():
    x, median = np.float32([[1], [2], [4], [9]]), jax.jit(robust_means.coordinate_median)
    # The last are weights that are no integers, whose sums are rounded.
    for w, want in (([1, 1, 1, 1], 3), ([1, 2, 1, 2], 3), ([1, 2, 1, 1], 2), ([0.1, 0.2, 0.1, 0.2], 3)):
        assert median(x, np.float32(w)).tolist() == [want]
    # In float32 the sum of the lower half is a little less than half of the total.
    assert median(jnp.arange(10.0)[:, None], jnp.full(10, 0.1)).tolist() == [4.5]


def test_krum_counts_the_nearest_alone():
    # 1 has the two nearest, 1.9 the three nearest.
    x = jnp.array([[0.0], [1.0], [1.9], [10.0]])
    assert jax.jit(partial(robust_means.krum, share=0.0))(x, jnp.ones(4)).tolist() == [1.0]
    # One at least: of three with an attacker, the first is the farthest from its neighbor.
    x = jnp.array([[0.0], [10.0], [11.0]])
    assert jax.jit(robust_means.krum)(x, jnp.ones(3), 0.34).tolist() == [10.0]


@pytest.mark.parametrize(("clients", "attackers"), [(10, 4), (5, 2), (12, 5)])
@pytest.mark.parametrize("weight", [1.0, 37.0, 600.0])
def test_nothing_of_a_trimmed_client_is_left(clients, attackers, weight):
    x = jnp.array([[1.0]] * (clients - attackers) + [[3e30]] * attackers)
    trimmed = jax.jit(robust_means.trimmed_mean)(x, jnp.full(clients, weight), attackers / clients)
    np.testing.assert_allclose(trimmed, [1.0], rtol=1e-5)


def test_a_value_of_several_arrays_is_one_vector():
    x = vectors()
    split = {"w": x[:, :3].reshape(CLIENTS, 3, 1), "b": x[:, 3]}
    for name in ("median", "krum"):
        ours, _ = STATISTICS[name]
        got = jax.jit(partial(robust_means.robust_mean, ours))(split, jnp.float32(UNEQUAL))
        whole = np.concatenate([np.asarray(got.value["w"]).reshape(-1), np.asarray(got.value["b"]).reshape(-1)])
        np.testing.assert_allclose(whole, ours(jnp.asarray(x), jnp.float32(UNEQUAL)), rtol=1e-5, atol=1e-6)
        assert got.weight == UNEQUAL.sum()
    assert robust_means.robust_mean(robust_means.coordinate_median, {}, jnp.ones(3)).value == {}


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
    @functools.cache
    def decoded(bits):
        return jax.jit(compressors.quantizing_compressor(bits).decoded)

    assert not decoded(4)(KEY, jnp.zeros(3)).any()
    # The largest entry is a level itself.
    assert float(decoded(2)(KEY, jnp.array([0.0, -7.0]))[1]) == -7
    assert decoded(8)(KEY, {}) == {}
    assert not np.array_equal(decoded(2)(jax.random.key(4), TREE)["w"], decoded(2)(KEY, TREE)["w"])
    # Nor are equal arrays rounded alike.
    alike = decoded(2)(KEY, {name: jnp.linspace(-1, 1, 20) for name in "ab"})
    assert not np.array_equal(alike["a"], alike["b"])


def test_sign_has_the_mean_magnitude_of_each_array():
    got = compressors.sign_compressor().decoded(KEY, TREE)
    for name, value in TREE.items():
        want = np.where(value < 0, -1, 1) * np.abs(np.float64(value)).mean()
        np.testing.assert_allclose(got[name], want, rtol=1e-6)
    assert byte_count(compressors.sign_compressor().encoded(TREE)) == 1 + 1 + 2 * 4
