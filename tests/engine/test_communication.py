"""Bytes up and down of every method, from the sizes that its paper sends."""

import jax
import numpy as np
import pytest
from problems import CLASSES, FEATURES, HYPER_PARAMETERS, tiny_federation, tiny_method, tiny_model

from pfl_jax import simulate
from pfl_jax.engine.communication import Traffic, bytes_of_round, traffic
from pfl_jax.methods import METHODS, make_method

THETA, PHI = 6 * FEATURES + FEATURES, FEATURES * CLASSES + CLASSES
MODEL, CENTROIDS = THETA + PHI, CLASSES * FEATURES + CLASSES
STATISTICS = 1 + CLASSES * FEATURES
"""Numbers of 4 bytes: the tiny model's backbone and head, both, class means with their counts, FedPAC's (V, mu)."""

EMBEDDING = THETA + (FEATURES + CLASSES + 1) * 32
"""PeFLL's embedding network: a backbone, and a layer on features and label."""

POLICY, VALVE = 2 * FEATURES * (FEATURES + 3), 2 * FEATURES * (FEATURES + 3)
"""FedCP's layer to twice as many units with its normalization, GPFL's two layers with theirs."""

GENERATOR = (32 + CLASSES) * 256 + 2 * 256 + (256 + 1) * FEATURES
"""FedGen's layer of noise and classes, its normalization, and the layer of features."""

ITS_MODEL = [
    *("fedavg", "fedavg_ft", "fedprox", "fedprox_ft", "moon", "feddyn", "per_fedavg", "fedbn", "fedrod"),
    *("fedlwf", "fedreplay", "fedsam", "cfl"),
    *("feddbe", "knn_per", "apfl", "pfedme", "ditto", "fedamp", "fedala", "pfedhn", "cd2pfed", "fedas_cd2"),
    *("feddpa", "fedex_lora", "hetlora", "flora", "flexlora", "fml", "fedphp"),
]
"""Methods that send the model both ways; not counted is what goes up before the first round, and the tiny model has
neither normalization nor adapters."""

NUMBERS = dict.fromkeys(ITS_MODEL, (MODEL, MODEL)) | dict.fromkeys(
    ("fedper", "fedrep", "fedbabu", "fedsa_lora"), (THETA, THETA)
)
NUMBERS |= {
    "local": (0, 0),
    # To the server and to the next client.
    "cyclic_weight_transfer": (2 * MODEL, MODEL),
    # Model and control variate both ways.
    "scaffold": (2 * MODEL, 2 * MODEL),
    "lg_fedavg": (PHI, PHI),
    "fedcp": (MODEL + POLICY, MODEL + POLICY),
    "gpfl": (THETA + CLASSES * FEATURES + VALVE, THETA + CLASSES * FEATURES + VALVE),
    # The choice of a cluster goes up, all k = 3 models go down.
    "hypcluster": (MODEL + 1, 3 * MODEL),
    # Directions of class means and counts go up, those of all classes down; the factor of the logits both ways.
    "fednh": (THETA + 1 + CENTROIDS, THETA + 1 + CLASSES * FEATURES),
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
    # A fingerprint and a number of examples go up, 11 core models down.
    "apple": (MODEL + 3, 11 * MODEL),
    # A fingerprint goes up too; prototypes of all classes go down, without counts.
    "fedtgp": (CENTROIDS + 2, CLASSES * FEATURES),
    # The combined model and the sum of normalized models go down.
    "pfedgraph": (MODEL, 2 * MODEL),
    # A byte for each parameter goes up besides: whether it is critical.
    "fedcac": (MODEL + MODEL / 4, MODEL),
    # A head goes both ways, and up whether a client holds each class.
    "flute": (MODEL + CLASSES, MODEL),
    # A descriptor of e = 32 numbers goes up with the gradient of the network of which it is; its gradient goes down.
    "pefll": (MODEL + 32 + EMBEDDING, MODEL + 32 + EMBEDDING),
    # The weight of each parameter goes up besides: zero for personal ones.
    "fedselect": (2 * MODEL, MODEL),
    "fedpac": (MODEL + CENTROIDS + STATISTICS, MODEL + CENTROIDS),
    "fedpac_proto": (MODEL + CENTROIDS, MODEL + CENTROIDS),
    # Class means and a covariance go both ways.
    "pfedfda": (THETA + CLASSES * FEATURES + FEATURES**2, THETA + CLASSES * FEATURES + FEATURES**2),
    # Mean outputs for each class, and whether a client holds it, or how many do.
    "fd": (CLASSES**2 + CLASSES, CLASSES**2 + CLASSES),
    # The number of its factors' numbers goes up besides.
    "fedkd": (MODEL + 1, MODEL),
    # Shares of classes and the generator go down, and a seed; shares go up.
    "fedgen": (MODEL + CLASSES, MODEL + GENERATOR + CLASSES + 1),
    # A quarter of the features, at least one: a layer to it and its head.
    "fedmrl": (THETA + FEATURES + 1 + 2 * CLASSES,) * 2,
    # Over each link; of push-sum with a weight, of Dis-PFL with a byte for each entry of the mask.
    "dsgd": (MODEL, 0),
    "dfedavgm": (MODEL, 0),
    "osgp": (MODEL + 1, 0),
    "dispfl": (MODEL + MODEL / 4, 0),
    "dfedpgp": (THETA + 1, 0),
    # A number goes up besides: the loss's curvature, or the loss; a weight goes down.
    "qffl": (MODEL + 1, MODEL),
    "afl": (MODEL + 1, MODEL + 1),
    # A trace goes up besides.
    "fedas": (THETA + 1, THETA),
}


@pytest.mark.parametrize("name", METHODS)
def test_traffic_is_what_the_paper_sends(name):
    method = tiny_method(name)
    found = traffic(method, tiny_federation())
    assert (found.up / 4, found.down / 4) == NUMBERS[name]


def test_without_a_server_a_message_goes_over_each_link():
    # Four arrays, each with its largest magnitude, in a byte for each entry.
    method, data = make_method("dfedavgm", tiny_model(), bits=8, **HYPER_PARAMETERS), tiny_federation()
    one = traffic(method, data)
    assert one == (MODEL + 4 * 4, 0)
    *_, last = simulate.run(method, data, simulate.Settings(rounds=1), jax.random.key(0))
    assert last.info["links"].tolist() == [2, 2, 2, 2]
    assert bytes_of_round(one, last.arrived, last.info) == (8 * one.up, 0)
    assert bytes_of_round(Traffic(3, 5), np.array([True, False, True]), {}) == (6, 15)


def test_without_alignment_no_centroids_are_sent_down():
    method = make_method("fedpac", tiny_model(), alignment=False, **HYPER_PARAMETERS)
    assert traffic(method, tiny_federation()).down == 4 * MODEL
