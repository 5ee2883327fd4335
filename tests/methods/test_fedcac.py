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

pytestmark = pytest.mark.without_f1_auc


def critical(before, after, share):
    """The most sensitive entries of each array, by sorting."""
    chosen = {}
    for name, new in after.items():
        sensitivity = np.abs((new - before[name]) * new)
        count = int(share * sensitivity.size)
        chosen[name] = sensitivity >= np.sort(sensitivity, axis=None)[::-1][count - 1]
    return chosen


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_fedcac(rounds):
    share, most, clients = 0.5, 3, full.training_examples()
    w = reference.to_numpy(full.start_of(fedcac).params)
    ws, numbers = [w] * len(clients), range(len(clients))
    for t in range(1, rounds + 1):
        new = [full.train(w, x, y) for w, (x, y) in zip(ws, clients, strict=True)]
        masks = [critical(old, after, share) for old, after in zip(ws, new, strict=True)]
        flat = [np.concatenate([np.ravel(mask[name]) for name in sorted(mask)]) for mask in masks]
        overlap = {(i, j): 1 - np.sum(flat[i] != flat[j]) / (2 * flat[i].sum()) for i in numbers for j in numbers}
        others = [o for (i, j), o in overlap.items() if i != j]
        threshold = np.mean(others) + t / most * (max(others) - np.mean(others))
        mean, ws = reference.mean(full.BETA, new), []
        for i in numbers:
            near = [j for j in numbers if j == i or overlap[i, j] >= threshold - 1e-9]
            own = reference.mean([1 / len(near)] * len(near), [new[j] for j in near])
            ws.append({name: np.where(masks[i][name], own[name], mean[name]) for name in mean})
    last = full.run(fedcac, rounds=rounds, share=share, collaboration_rounds=most)
    order = np.ix_(np.argsort(last.cohort), np.argsort(last.cohort))
    want = [[overlap[i, j] for j in numbers] for i in numbers]
    np.testing.assert_allclose(np.asarray(last.info["overlap"])[order], want, rtol=1e-5)
    for client, w in enumerate(ws):
        full.assert_model(row(last.state.clients, client), w, rtol=5e-4, atol=5e-5)
    full.assert_model(last.state.server.params, mean, rtol=5e-4, atol=5e-5)
    full.assert_received(last, ws)
    # Later than `most` rounds nobody collaborates.
    assert (np.asarray(last.info["collaborators"]).sum() == 3) == (rounds > most)


def test_fedcac_without_critical_parameters_is_fedavg():
    last = full.run(fedcac, share=0.0)
    full.assert_like_fedavg(last, last.state.server.params)


def test_critical_entries_are_those_that_moved():
    before, after = {"w": jnp.arange(8.0)}, {"w": jnp.arange(8.0) + jnp.array([9, 0, 0, 0.5, 0, 0, 0, 0.25])}
    np.testing.assert_array_equal(critical_entries(before, after, 0.25)["w"], [1, 0, 0, 0, 0, 0, 0, 1])
    np.testing.assert_array_equal(critical_entries(before, after, 0.5)["w"], [1, 0, 0, 1, 0, 0, 0, 1])
    np.testing.assert_array_equal(critical_entries(before, after, 0.0)["w"], np.zeros(8))
    np.testing.assert_array_equal(critical_entries(before, before, 0.25)["w"], np.ones(8))


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
