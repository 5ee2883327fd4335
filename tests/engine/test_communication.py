"""Bytes up and down of every method, from the sizes that its paper sends."""

import pytest
from problems import CLASSES, FEATURES, HYPER_PARAMETERS, tiny_federation, tiny_method, tiny_model

from pfl_jax.engine.communication import traffic
from pfl_jax.methods import METHODS, make_method

THETA, PHI = 6 * FEATURES + FEATURES, FEATURES * CLASSES + CLASSES
MODEL, CENTROIDS = THETA + PHI, CLASSES * FEATURES + CLASSES
STATISTICS = 1 + CLASSES * FEATURES
"""Numbers of 4 bytes: the tiny model's backbone and head, both, class means with their counts, FedPAC's (V, mu)."""

POLICY, VALVE = 2 * FEATURES * (FEATURES + 3), 2 * FEATURES * (FEATURES + 3)
"""FedCP's layer to twice as many units with its normalization, GPFL's two layers with theirs."""

NUMBERS = {
    "local": (0, 0),
    "fedavg": (MODEL, MODEL),
    "fedavg_ft": (MODEL, MODEL),
    "fedprox": (MODEL, MODEL),
    "fedprox_ft": (MODEL, MODEL),
    # Model and control variate both ways.
    "scaffold": (2 * MODEL, 2 * MODEL),
    "moon": (MODEL, MODEL),
    "feddyn": (MODEL, MODEL),
    "per_fedavg": (MODEL, MODEL),
    "fedper": (THETA, THETA),
    # The tiny model has no normalization layer.
    "fedbn": (MODEL, MODEL),
    "lg_fedavg": (PHI, PHI),
    "fedrep": (THETA, THETA),
    "fedbabu": (THETA, THETA),
    "fedrod": (MODEL, MODEL),
    # Not counted: what goes up before the first round.
    "feddbe": (MODEL, MODEL),
    "fedcp": (MODEL + POLICY, MODEL + POLICY),
    "gpfl": (THETA + CLASSES * FEATURES + VALVE, THETA + CLASSES * FEATURES + VALVE),
    "knn_per": (MODEL, MODEL),
    "apfl": (MODEL, MODEL),
    "pfedme": (MODEL, MODEL),
    "ditto": (MODEL, MODEL),
    # The choice of a cluster goes up, all k = 3 models go down.
    "hypcluster": (MODEL + 1, 3 * MODEL),
    "fedem": (3 * MODEL, 3 * MODEL),
    "fedem_ft": (3 * MODEL, 3 * MODEL),
    # m = 5 endpoints of the head's kernel and one bias; the client's point goes down besides.
    "floco": (THETA + 5 * FEATURES * CLASSES + CLASSES, THETA + 5 * FEATURES * CLASSES + CLASSES + 5),
    "fedproto_g": (CENTROIDS, CENTROIDS),
    "fedproto_l": (0, 0),
    # A fingerprint of two words and 1 + M shares go up, M - 1 = 4 models of others down.
    "fedfomo": (MODEL + 2 + 6, 4 * MODEL),
    # Class means and counts with a fingerprint go up.
    "fedgh": (CENTROIDS + 2, PHI),
    "fedamp": (MODEL, MODEL),
    # A fingerprint and a number of examples go up, 11 core models down.
    "apple": (MODEL + 3, 11 * MODEL),
    # A fingerprint goes up too; prototypes of all classes go down, without counts.
    "fedtgp": (CENTROIDS + 2, CLASSES * FEATURES),
    "fedala": (MODEL, MODEL),
    "pfedhn": (MODEL, MODEL),
    # The combined model and the sum of normalized models go down.
    "pfedgraph": (MODEL, 2 * MODEL),
    # A byte for each parameter goes up besides: whether it is critical.
    "fedcac": (MODEL + MODEL / 4, MODEL),
    "cd2pfed": (MODEL, MODEL),
    "fedpac": (MODEL + CENTROIDS + STATISTICS, MODEL + CENTROIDS),
    "fedpac_proto": (MODEL + CENTROIDS, MODEL + CENTROIDS),
    # Class means and a covariance go both ways.
    "pfedfda": (THETA + CLASSES * FEATURES + FEATURES**2, THETA + CLASSES * FEATURES + FEATURES**2),
    # A trace goes up besides.
    "fedas": (THETA + 1, THETA),
    "fedas_cd2": (MODEL, MODEL),
    # The tiny model has no adapters.
    "feddpa": (MODEL, MODEL),
    "fedex_lora": (MODEL, MODEL),
    "hetlora": (MODEL, MODEL),
}


def test_every_method_is_counted():
    assert set(NUMBERS) == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_traffic_is_what_the_paper_sends(name):
    method = tiny_method(name)
    found = traffic(method, tiny_federation())
    assert (found.up / 4, found.down / 4) == NUMBERS[name]


def test_without_alignment_no_centroids_are_sent_down():
    method = make_method("fedpac", tiny_model(), alignment=False, **HYPER_PARAMETERS)
    assert traffic(method, tiny_federation()).down == 4 * MODEL
