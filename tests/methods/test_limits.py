"""Where a method's claim has a limit that is another method, both must give the same numbers."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deployed import log_probabilities
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model
from rounds import last_round
from trees import assert_same

from pfl_jax.data.federated import client_data
from pfl_jax.methods import METHODS, make_method
from pfl_jax.primitives.local_training import LocalTraining

pytestmark = pytest.mark.without_f1_auc

SAME = [
    ("fedavg_ft", {"finetune_epochs": 0}, "fedavg", {}),
    ("fedprox_ft", {"mu": 0.0, "finetune_epochs": 0}, "fedavg", {}),
    ("hypcluster", {"clusters": 1}, "fedavg", {}),
    ("fedbn", {}, "fedavg", {}),
    ("moon", {"mu": 0.0}, "fedavg", {}),
    ("fedamp", {"lam": 0.0, "alpha_k": 1e-30}, "local", {}),
]
"""(method, its hyper-parameters, another method, its): both deploy the same. A new method adds a row."""


def run(name, rounds=3, sizes=(9, 20, 14, 5), data=None, **hyper_parameters):
    """The last round; every method trains with the same optimizer unless told otherwise."""
    data = tiny_federation(sizes) if data is None else data
    sgd = {"momentum": 0.5, "weight_decay": 5e-4, **HYPER_PARAMETERS}
    return last_round(METHODS[name], data, 5, rounds, **{**sgd, **hyper_parameters})


@functools.cache
def deployed(name, **hyper_parameters):
    """Log-probabilities [4, 12, K] of every client's test examples, under both protocols, after two rounds."""
    data, arguments = tiny_federation(), {**HYPER_PARAMETERS, **hyper_parameters}
    last = last_round(METHODS[name], data, 5, 2, **arguments)
    return log_probabilities(make_method(name, tiny_model(), **arguments))(data, last.state)


@pytest.mark.parametrize(
    ("name", "limit", "other", "settings"), SAME, ids=[f"{name}-{other}" for name, _, other, _ in SAME]
)
def test_limit_is_the_other_method(name, limit, other, settings):
    assert_same(deployed(name, **limit), deployed(other, **settings))


# Its program takes long to compile.
@pytest.mark.slow
def test_floco_with_one_endpoint_is_fedavg():
    assert_same(deployed("floco", endpoints=1), deployed("fedavg"))


# test_equations.py compares both with float64.
@pytest.mark.slow
def test_fedavg_of_one_client_is_local():
    fedavg, local = run("fedavg", sizes=(20,)), run("local", sizes=(20,))
    assert_same(fedavg.state.server, jax.tree.map(lambda leaf: leaf[0], local.state.clients))
    assert_same(fedavg.trained["loss"], local.trained["loss"])


# test_equations.py compares both with float64.
@pytest.mark.slow
def test_fedper_of_one_client_is_local():
    fedper, local = run("fedper", sizes=(20,)), run("local", sizes=(20,))
    own = jax.tree.map(lambda leaf: leaf[0], local.state.clients)
    assert_same(fedper.state.server["backbone"], own["backbone"])
    assert_same(jax.tree.map(lambda leaf: leaf[0], fedper.state.clients), own["head"])


# test_equations.py compares both with float64.
@pytest.mark.slow
def test_fedavg_ft_trains_like_fedavg_and_without_tuning_is_fedavg():
    # One round only: later everything is right with and without tuning.
    fedavg = run("fedavg", rounds=1)
    tuned, untuned = (run("fedavg_ft", rounds=1, finetune_epochs=epochs) for epochs in (5, 0))
    chex.assert_trees_all_equal(tuned.state.server, fedavg.state.server)
    assert_same(untuned.received["loss"], fedavg.received["loss"])
    assert (np.abs(tuned.received["loss"] - fedavg.received["loss"]) > 1e-2).all()


def test_fedas_without_both_parts_is_fedper():
    # FedAS splits its key between alignment and training: with full batches, order is all that keys decide.
    fedas = run("fedas", alignment=False, synchronization=False, batch_size=32)
    fedper = run("fedper", batch_size=32)
    assert_same(fedas.state.server._asdict(), {**fedper.state.server, "centroids": (), "centroid_counts": ()})
    assert_same(fedas.state.clients.head, fedper.state.clients)
    assert_same(fedas.received["loss"], fedper.received["loss"])


@pytest.mark.slow
def test_fedas_without_an_alignment_epoch_or_rate_does_not_align():
    plain = run("fedas", alignment=False)
    for off in ({"align_epochs": 0}, {"align_lr": 0.0}):
        assert_same(run("fedas", **off).state.server, plain.state.server)
    moved = run("fedas", align_lr=0.1).state.server.backbone["kernel"]
    assert float(jnp.abs(moved - plain.state.server.backbone["kernel"]).max()) > 1e-4


def test_fedas_skips_the_alignment_of_clients_never_trained():
    # A model that has moved since the client's first: aligning with that one would be seen.
    method, data = METHODS["fedas"](tiny_model(), align_lr=0.5), client_data(tiny_federation(), 1, "train")
    first, later = (method.init_server(jax.random.key(seed)) for seed in (0, 1))
    client = method.init_client(jax.random.key(2), first, data)
    personalize = jax.jit(method.personalize)
    chex.assert_trees_all_equal(
        personalize(jax.random.key(3), later, client, data), {"backbone": later.backbone, "head": first.head}
    )
    trained = personalize(jax.random.key(3), later, client._replace(trained=jnp.ones((), bool)), data)
    assert float(jnp.abs(trained["backbone"]["kernel"] - later.backbone["kernel"]).max()) > 1e-2


@pytest.mark.parametrize("name", ["fedas", "fedas_cd2"])
def test_the_alignment_compares_embeddings_of_the_original_examples(name):
    data = client_data(tiny_federation(), 1, "train")

    def aligned(augment):
        method = METHODS[name](tiny_model(), LocalTraining(augment=augment), align_lr=0.5)
        first, later = (method.init_server(jax.random.key(seed)) for seed in (0, 1))
        client = method.init_client(jax.random.key(2), first, data)._replace(trained=jnp.ones((), bool))
        return jax.jit(method.personalize)(jax.random.key(3), later, client, data)

    chex.assert_trees_all_equal(aligned(lambda key, x: 2 * x + 1), aligned(None))


def test_fedas_synchronization_weights_are_the_traces():
    last = run("fedas")
    traces = np.float64(last.info["trace"])
    np.testing.assert_allclose(last.info["weights"], traces / traces.sum(), rtol=1e-5)


@pytest.mark.slow
def test_fedpac_without_both_parts_trains_each_head_alone():
    fedpac = run("fedpac", alignment=False, collaboration=False)
    np.testing.assert_array_equal(fedpac.info["head_weights"], np.eye(4))
    # Under a backbone that stays as it is, other labels of the last client change nobody else's head.
    data = tiny_federation()
    rows = data.train_index[3, :5]
    others = data._replace(y=data.y.at[rows].set((data.y[rows] + 1) % 3))
    for collaboration in (False, True):
        settings = {"alignment": False, "collaboration": collaboration, "rounds": 2, "lr": 0.0}
        heads = [run("fedpac", data=each, **settings).state.clients["kernel"] for each in (data, others)]
        moved = np.abs(heads[0] - heads[1]).max(axis=(1, 2))
        assert moved[3] > 1e-3
        assert (moved[:3] > 1e-3).any() if collaboration else (moved[:3] < 1e-6).all()


@pytest.mark.slow
def test_fedpac_with_zero_lambda_does_not_align():
    assert_same(run("fedpac", lam=0.0).state.server.backbone, run("fedpac", alignment=False).state.server.backbone)
    moved = run("fedpac", lam=5.0).state.server.backbone["kernel"]
    plain = run("fedpac", lam=0.0).state.server.backbone["kernel"]
    assert float(jnp.abs(moved - plain).max()) > 1e-4


@pytest.mark.parametrize("name", [pytest.param("fedpac", marks=pytest.mark.slow), "fedpac_proto"])
def test_fedpac_does_not_align_in_the_first_round(name):
    first, plain = run(name, rounds=1, lam=10.0), run(name, rounds=1, lam=0.0)
    assert_same(first.state.server.backbone, plain.state.server.backbone)
