"""Keys of random numbers: one for each phase of a client's training, and others for another client or round."""

import collections
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model

from pfl_jax.data import client_data
from pfl_jax.methods import METHODS
from pfl_jax.primitives import LocalTraining

NOTED = []


@dataclass(frozen=True)
class Keyed(LocalTraining):
    """Recipe that trains nothing and notes its keys."""

    def fit(self, key, params, data, loss, *, transformation=None):
        return self.fold(key, params, data, None)

    def fold(self, key, carry, data, step):
        jax.debug.callback(lambda words: NOTED.append(tuple(np.asarray(words).tolist())), jax.random.key_data(key))
        return carry


def keys_of(name, stage, trained=False, **options):
    """Keys of all trainings in a stage of the method, for three keys of a client."""
    method, data = (
        METHODS[name](tiny_model(), Keyed(**HYPER_PARAMETERS), **options),
        client_data(tiny_federation(), 1, "train"),
    )

    @jax.jit
    def run(key):
        server = method.init_server(jax.random.key(0))
        client = method.init_client(jax.random.key(1), server, data)
        if stage == "survey":
            method.survey.local(key, server, data)
        else:
            client = client._replace(trained=jnp.ones((), bool)) if trained else client
            getattr(method, stage)(key, server, client, data)
        # Nothing but the keys is compiled.

    NOTED.clear()
    for key in jax.random.split(jax.random.key(2), 3):
        run(key)
    jax.effects_barrier()
    return list(NOTED)


TWO_PHASES = ("fedrep", "ditto", "flute", "fedselect", "fedpac", "fedpac_proto", "fedas", "fedas_cd2")
"""Methods whose clients train twice in a round; of the others, the steps' keys tell the trainings' keys, see below."""

STAGES = [("feddbe", "survey"), *((name, "local") for name in TWO_PHASES)]
STAGES += [(name, "personalize") for name in ("fedas", "fedas_cd2", "fedavg_ft", "fedbabu", "fedem_ft", "fedprox_ft")]


@pytest.mark.parametrize(("name", "stage"), STAGES)
def test_each_training_has_a_key_of_its_own(name, stage):
    keys = keys_of(name, stage)
    assert len(set(keys)) == len(keys) == 3 * (2 if stage == "local" else 1)


def test_batches_of_fedas_traces_have_a_key_of_their_own():
    keys = keys_of("fedas", "local", reduction="batch_means")
    assert len(set(keys)) == len(keys) == 3 * 3


def test_each_pass_over_fedalas_weights_has_a_key_of_its_own(monkeypatch):
    monkeypatch.setattr(sys.modules["pfl_jax.methods.fedala"], "WINDOW", 2)
    # Weights that do not move have converged after the window and one pass more; then the model is trained.
    keys = keys_of("fedala", "local", trained=True)
    assert len(set(keys)) == len(keys) == 3 * (2 + 1 + 1)


def keyed_model():
    """The tiny model, whose passes in training note their keys."""
    model = tiny_model()

    def batch_features(backbone, x, mask, key):
        jax.debug.callback(lambda words: NOTED.append(tuple(np.asarray(words).tolist())), jax.random.key_data(key))
        return model.features(backbone, x), ()

    return model._replace(batch_features=batch_features)


PASSES = {"cd2pfed": 3, "fedas_cd2": 3, "per_fedavg": 2}
"""Passes of a step that are compared, and so need the same dropout: CD2-pFed's two paths and the model, the two
gradients of a finite difference. Others have a key each."""


KINDS = {"fedper", "pfedme", "fedem"}
"""One training, steps on one mini-batch, and several models: these run by default."""


@pytest.mark.parametrize(
    "name", [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]
)
def test_each_step_has_a_key_of_its_own_for_its_loss(name):
    """Whatever a step is: pFedMe's on one mini-batch, APFL's two models, FedEM's three, a round and a client more."""
    method = METHODS[name](keyed_model(), LocalTraining(**HYPER_PARAMETERS))
    data = client_data(tiny_federation(), 1, "train")

    @jax.jit
    def run(key):
        server = method.init_server(jax.random.key(0))
        method.local(key, server, method.init_client(jax.random.key(1), server, data), data)

    NOTED.clear()
    for key in jax.random.split(jax.random.key(2), 2):
        run(key)
    jax.effects_barrier()
    counts = collections.Counter(NOTED)
    # FedFomo holds out a part of the examples.
    steps = LocalTraining(**HYPER_PARAMETERS).num_steps(16 if name == "fedfomo" else 20)
    assert len(counts) >= 2 * steps
    assert max(counts.values()) == PASSES.get(name, 1)
