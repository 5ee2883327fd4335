"""q-FedAvg and AFL: equations in float64 NumPy."""

import full_batches as full
import numpy as np
import pytest
import reference
from problems import HYPER_PARAMETERS, tiny_federation
from rounds import last_round
from trees import distance

from pfl_jax.methods import METHODS


@pytest.mark.parametrize("q", [0.5, 2.0])
def test_qffl(q):
    w, lipschitz = reference.to_numpy(full.start_of("qffl")), 1 / full.SGD["lr"]
    for _ in range(2):
        change, total = dict.fromkeys(w, 0.0), 0.0
        for beta, (x, y) in zip(full.BETA, full.training_examples(), strict=True):
            trained, loss = full.train(w, x, y), reference.risk(w, x, y)
            step = {name: lipschitz * (trained[name] - w[name]) for name in w}
            change = {name: change[name] + beta * loss**q * step[name] for name in w}
            norm = sum((value**2).sum() for value in step.values())
            total += beta * (q * loss ** (q - 1) * norm + lipschitz * loss**q)
        w = {name: w[name] + change[name] / total for name in w}
    last = full.run("qffl", q=q)
    np.testing.assert_allclose(last.info["step"], 1 / total, rtol=1e-3)
    full.assert_model(last.state.server, w)
    full.assert_received(last, [w] * 3)


@pytest.mark.parametrize("size", [2, 3])
def test_afl(size):
    rate, w, weights = 0.3, reference.to_numpy(full.start_of("afl")), np.ones(3)
    for t, cohort in enumerate(full.cohorts(3, size)):
        trained, losses = [], []
        for i in cohort:
            x, y = full.training_examples()[i]
            losses.append(reference.risk(w, x, y))
            trained.append(full.train(w, x, y))
        total = weights[cohort].sum()
        w = reference.mean(weights[cohort] / total, trained)
        moved = (weights[cohort] + 3 * rate * np.array(losses)) / total
        weights[cohort] = total * reference.nearest_on_simplex(moved)
        last = full.run("afl", rounds=t + 1, weight_lr=rate, participation=size / 3)
        np.testing.assert_allclose(last.info["weights"], weights[cohort], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(last.state.clients, weights, rtol=1e-3, atol=1e-4)
    full.assert_model(last.state.server, w)
    assert np.ptp(weights) > 0.01
    full.assert_received(last, [w] * 3)


def test_without_a_step_of_its_weights_afl_is_fedavg():
    data = tiny_federation((9, 9, 9))
    afl = last_round(METHODS["afl"], data, 5, 2, **HYPER_PARAMETERS, weight_lr=0.0)
    fedavg = last_round(METHODS["fedavg"], data, 5, 2, **HYPER_PARAMETERS)
    assert distance(afl.state.server, fedavg.state.server) < 1e-10


def test_a_cohort_whose_weights_are_all_zero_leaves_the_model():
    data = tiny_federation((9, 9, 9))

    def nobody(state):
        return state._replace(clients=0 * state.clients)

    after = last_round(METHODS["afl"], data, 5, 1, change=nobody, **HYPER_PARAMETERS)
    start = full.first_state(METHODS["afl"], data, 5, **HYPER_PARAMETERS).server
    assert distance(after.state.server, start) == 0
    assert np.asarray(after.state.clients).tolist() == [0, 0, 0]
