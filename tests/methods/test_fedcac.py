"""FedCAC: its limit, the selections, and its rounds against float64 NumPy."""

import full_batches as full
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from trees import row

from pfl_jax.methods.fedcac import collaborators, critical_entries, fedcac, overlaps

# One program for each kind of call; operation by operation, each shape would compile a dozen.
overlaps = jax.jit(overlaps)
collaborators = jax.jit(collaborators)
critical_entries = jax.jit(critical_entries)


def critical(before, after, share):
    """The most sensitive entries of each array, by sorting."""
    chosen = {}
    for name, new in after.items():
        sensitivity = np.abs((new - before[name]) * new)
        count = int(share * sensitivity.size)
        chosen[name] = sensitivity >= np.sort(sensitivity, axis=None)[::-1][count - 1]
    return chosen


@pytest.mark.parametrize(("rounds", "size"), [(1, 3), (2, 3), (4, 3), (1, 2), (4, 2)])
def test_fedcac(rounds, size):
    share, most, clients, numbers = 0.5, 3, full.training_examples(), range(3)
    settings = {"share": share, "collaboration_rounds": most, "participation": size / 3}
    mean = reference.to_numpy(full.start_of(fedcac).params)
    nothing = {name: np.zeros(value.shape, bool) for name, value in mean.items()}
    vs, masks = [mean] * 3, [nothing] * 3

    def model(i):
        return {name: np.where(masks[i][name], vs[i][name], mean[name]) for name in mean}

    for t in range(1, rounds + 1):
        last = full.run(fedcac, rounds=t, **settings)
        cohort = last.cohort.tolist()
        new = {i: full.train(model(i), *clients[i]) for i in cohort}
        chosen = {i: critical(model(i), new[i], share) for i in cohort}
        flat = {i: np.concatenate([np.ravel(chosen[i][name]) for name in sorted(mean)]) for i in cohort}
        overlap = {(i, j): 1 - np.sum(flat[i] != flat[j]) / (2 * flat[i].sum()) for i in cohort for j in cohort}
        others = [o for (i, j), o in overlap.items() if i != j]
        threshold = np.mean(others) + t / most * (max(others) - np.mean(others))
        sizes = full.BETA[cohort]
        mean = reference.mean(sizes / sizes.sum(), [new[i] for i in cohort])
        for i in cohort:
            near = [j for j in cohort if j == i or overlap[i, j] >= threshold - 1e-9]
            vs[i], masks[i] = reference.mean([1 / len(near)] * len(near), [new[j] for j in near]), chosen[i]
    want = [[overlap[i, j] for j in cohort] for i in cohort]
    np.testing.assert_allclose(last.info["overlap"], want, rtol=1e-5)
    full.assert_model(last.state.server.params, mean, rtol=5e-4, atol=5e-5)
    for i in numbers:
        state = row(last.state.clients, i)
        full.assert_model(state.params, vs[i], rtol=5e-4, atol=5e-5)
        full.assert_model(state.critical, masks[i])
    full.assert_received(last, [model(i) for i in numbers])
    # Later than `most` rounds nobody collaborates; both of two clients have the largest overlap.
    assert (np.asarray(last.info["collaborators"]).sum() == 3) == (rounds > most and size == 3)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_fedcac_without_critical_parameters_is_fedavg(size):
    # With any participation: also for clients that never took part.
    last = full.run(fedcac, share=0.0, participation=size / 3)
    full.assert_like_fedavg(last, last.state.server.params, participation=size / 3)


def test_critical_entries_are_those_that_moved():
    before, after = {"w": jnp.arange(8.0)}, {"w": jnp.arange(8.0) + jnp.array([9, 0, 0, 0.5, 0, 0, 0, 0.25])}
    np.testing.assert_array_equal(critical_entries(before, after, 0.25)["w"], [1, 0, 0, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(critical_entries(before, after, 0.5)["w"], [1, 0, 0, 1, 0, 0, 0, 1])
    np.testing.assert_array_equal(critical_entries(before, after, 0.0)["w"], np.zeros(8))
    np.testing.assert_array_equal(critical_entries(before, before, 0.25)["w"], np.ones(8))
    statistics = [{"batch_stats": {"norm": tree}, **tree} for tree in (before, after)]
    assert jax.tree.map(jnp.sum, critical_entries(*statistics, 0.25)) == {"batch_stats": {"norm": {"w": 0}}, "w": 2}


def test_overlaps_and_collaborators_leave_out_absent_clients():
    masks = {"a": jnp.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]], bool)}
    overlap = overlaps(masks)
    np.testing.assert_allclose(overlap[0, [0, 1, 3]], [1.0, 1.0, 0.5])
    assert (overlap[2] == -1).all()
    chosen = np.asarray(collaborators(overlap, jnp.array([True, True, False, True]), 0.5))
    np.testing.assert_array_equal(chosen, [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    # The mean is over pairs of different clients.
    three = jnp.array([[1.0, 0.5, 0.45], [0.5, 1.0, 0.3], [0.45, 0.3, 1.0]])
    chosen = np.asarray(collaborators(three, jnp.ones(3, bool), 0.0))
    np.testing.assert_array_equal(chosen, [[1, 1, 1], [1, 1, 0], [1, 0, 1]])
    everyone = np.asarray(collaborators(jnp.ones((2, 2)), jnp.ones(2, bool), 9.0))
    assert everyone.all()
