"""Methods where clients are absent, messages do not arrive, or numbers are extreme."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deployed import log_probabilities
from problems import CLASSES, FEATURES, HYPER_PARAMETERS, tiny_federation, tiny_model
from rounds import last_round
from trees import assert_same, distance

from pfl_jax import Cohort, simulate
from pfl_jax.data import client_data
from pfl_jax.methods import METHODS, make_method
from pfl_jax.methods.apple import AppleMessage
from pfl_jax.methods.fedcac import collaborators
from pfl_jax.methods.fedfomo import FedFomoMessage
from pfl_jax.methods.fedproto import Prototypes
from pfl_jax.methods.fedtgp import FedTGPMessage
from pfl_jax.methods.pfedfda import at_least, shrunk

KEY = jax.random.key(0)


def last_state(name, data, rounds, settings=None, **options):
    method = make_method(name, tiny_model(), lr=0.1, batch_size=8, epochs=1, **options)
    settings = simulate.Settings(rounds=rounds, **(settings or {}))
    engine, size = simulate.build(method, settings).jit(), settings.cohort_size(data.num_clients, 0)
    state = engine.init(data, KEY)
    for _ in range(rounds):
        state, _ = engine.round(data, state, size)
    return state


@pytest.mark.parametrize(
    ("name", "part"), [pytest.param("scaffold", "control", marks=pytest.mark.slow), ("feddyn", "drift")]
)
def test_the_server_has_the_mean_of_what_arrived(name, part):
    settings = {"participation": 0.7, "drop_rate": 0.5}
    state = last_state(name, tiny_federation((9, 20, 14, 5, 8)), 5, settings)
    theirs = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), getattr(state.clients, part))
    ours = getattr(state.server, part)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(ours)) > 1e-2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), ours, theirs)


def test_a_covariance_stays_one():
    axes, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(5, 5)))
    values = np.array([-0.3, 0.001, 0.2, 1.0, 4.0])
    broken = axes * values @ axes.T
    expected = axes * np.maximum(values, 0.1) @ axes.T
    lopsided = broken + 1e-1 * (np.triu(np.ones((5, 5)), 1) - np.tril(np.ones((5, 5)), -1))
    for given in (broken, lopsided):
        np.testing.assert_allclose(at_least(jnp.array(given, jnp.float32), jnp.float32(0.1)), expected, atol=1e-5)
    sound = jnp.array(expected, jnp.float32)
    np.testing.assert_array_equal(at_least(sound, jnp.float32(0.1)), sound)
    # Also that of features that lie on a line.
    np.testing.assert_allclose(shrunk(jnp.diag(jnp.array([1.0, 0.0]))), np.diag([1 - 5e-5, 5e-5]), rtol=1e-6)


@pytest.mark.parametrize(
    "option", [{"compress": "topk:0.1"}, pytest.param({"server_mean": "median"}, marks=pytest.mark.slow)]
)
def test_pfedfda_has_a_covariance_whatever_arrives(option):
    state = last_state("pfedfda", tiny_federation(), 3, ridge=1e-3, **option)
    covariance = np.asarray(state.server.features.covariance, np.float64)
    np.testing.assert_allclose(covariance, covariance.T, atol=1e-6)
    assert np.linalg.eigvalsh(covariance).min() > 4e-4


@pytest.mark.slow
def test_fedtgps_clients_keep_their_prototypes_through_a_round_in_which_nobody_sends_any():
    method = make_method("fedtgp", tiny_model(), server_epochs=1)
    server = method.init_server(KEY)._replace(ready=jnp.ones((), bool))
    prototypes = Prototypes(jnp.zeros((2, CLASSES, FEATURES)), jnp.zeros((2, CLASSES)))
    nobody = FedTGPMessage(prototypes, jnp.zeros((2, 2), jnp.uint32))
    cohort = Cohort(jnp.arange(2), jnp.zeros(2, jnp.int32), jnp.zeros(2, bool), 9)
    after, *_ = method.aggregate(KEY, server, None, nobody, cohort)
    assert after.ready
    np.testing.assert_allclose(after.prototypes, server.prototypes, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"), [("apple", {"peers": 1}), ("fedfomo", {"download": 2, "epsilon": 1.0, "epsilon_decay": 0.0})]
)
def test_each_client_draws_for_itself_and_from_the_others_that_arrived(name, options):
    # Five clients choose one other model each; the last of them is absent.
    method, words = make_method(name, tiny_model(), **options), np.array([11, 22, 33, 44, 0])
    identities = jnp.array(np.stack([7 * (words > 0), words], axis=1), jnp.uint32)
    server = method.init_server(KEY)
    client = method.init_client(KEY, server, client_data(tiny_federation(), 1, "train"))
    models, clients = jax.tree.map(lambda leaf: jnp.stack([leaf] * 5), (server.initial, client))
    counts = jnp.array([9, 20, 14, 5, 0])
    cohort = Cohort(jnp.arange(5), counts, counts > 0, 9)
    if name == "apple":
        messages = AppleMessage(models, identities, counts.astype(jnp.float32))
    else:
        messages = FedFomoMessage(models, identities, jnp.zeros((5, 3)))

    def choose(key):
        after = method.aggregate(key, server, clients, messages, cohort)[1]
        return (after.peers.identities if name == "apple" else after.senders)[:, 0, 1]

    chosen = np.asarray(jax.jit(jax.vmap(choose))(jax.random.split(KEY, 200)))
    for own in range(4):
        assert set(chosen[:, own].tolist()) == {11, 22, 33, 44} - {words[own]}
    # With one draw for all, the first two would choose alike half of the time.
    assert np.mean(chosen[:, 0] == chosen[:, 1]) == pytest.approx(2 / 9, abs=0.1)


def test_clients_with_equal_overlaps_all_collaborate():
    for size in (3, 6):
        for value in np.linspace(0.05, 1, 8, dtype=np.float32):
            assert collaborators(jnp.full((size, size), value), jnp.ones(size, bool), 0.3).all(), (size, value)


SAME = [
    ("fedavg_ft", {"finetune_epochs": 0}, "fedavg", {}),
    ("fedprox_ft", {"mu": 0.0, "finetune_epochs": 0}, "fedavg", {}),
    ("hypcluster", {"clusters": 1}, "fedavg", {}),
    ("fedbn", {}, "fedavg", {}),
    ("moon", {"mu": 0.0}, "fedavg", {}),
    ("fedlwf", {"alpha": 1.0}, "fedavg", {}),
    ("fedreplay", {"buffer_size": 0}, "fedavg", {}),
    ("fd", {"lam": 0.0}, "local", {}),
    ("fml", {"alpha": 1.0}, "local", {}),
    ("fedgen", {"alpha": 0.0}, "fedavg", {}),
    ("fedgen", {"alpha": 0.0, "shared": "head"}, "lg_fedavg", {}),
    ("fedamp", {"lam": 0.0, "alpha_k": 1e-30}, "local", {}),
    ("knn_per", {"mixing": 0.0}, "fedavg", {}),
    ("fedcac", {"share": 0.0}, "fedavg", {}),
    ("qffl", {"q": 0.0}, "fedavg", {}),
    ("fedsam", {"rho": 0.0}, "fedavg", {}),
    ("cfl", {"clusters": 1}, "fedavg", {}),
]
"""(method, its hyper-parameters, another method, its): both deploy the same. A new method adds a row."""


@functools.cache
def deployed(name, **hyper_parameters):
    """Log-probabilities [4, 12, K] of every client's test examples, under both protocols, after two rounds."""
    data, arguments = tiny_federation(), {**HYPER_PARAMETERS, **hyper_parameters}
    last = last_round(METHODS[name], data, 5, 2, **arguments)
    return log_probabilities(make_method(name, tiny_model(), **arguments))(data, last.state)


QUICK_LIMITS = {"fedbn"}
"""Limits that run by default: the other methods have equations with their own program, and compiling is the work."""


@pytest.mark.parametrize(
    ("name", "limit", "other", "settings"),
    [
        pytest.param(*row, id=f"{row[0]}-{row[2]}", marks=() if row[0] in QUICK_LIMITS else pytest.mark.slow)
        for row in SAME
    ],
)
def test_limit_is_the_other_method(name, limit, other, settings):
    assert_same(deployed(name, **limit), deployed(other, **settings))


def test_apfl_s_global_model_is_fedavg_s_where_gradients_are_clipped():
    # By the norm of a model's own gradient, not by that of both models together.
    data = tiny_federation()
    apfl, fedavg = (last_state(name, data, 2, clip_norm=0.3) for name in ("apfl", "fedavg"))
    assert distance(apfl.server, fedavg.server) < 1e-6
    assert distance(fedavg.server, last_state("fedavg", data, 2).server) > 1e-2


def test_fedem_clips_each_model_by_the_norm_of_its_own_gradient():
    # Three equal models share the examples equally: each takes a third of FedAvg's gradient.
    data, plain = client_data(tiny_federation(), 1, "train"), HYPER_PARAMETERS | {"weight_decay": 0.0}
    fedem = make_method("fedem", tiny_model(), **plain, clip_norm=0.1)
    fedavg = make_method("fedavg", tiny_model(), **plain | {"lr": plain["lr"] / 3}, clip_norm=0.3)
    start = fedavg.init_server(KEY)
    models = jax.tree.map(lambda leaf: jnp.stack(3 * [leaf]), start)
    got = jax.jit(fedem.local)(KEY, models, jnp.zeros(3), data)
    want = jax.jit(fedavg.local)(KEY, start, (), data)
    assert distance(jax.tree.map(lambda leaf: leaf[2], got.message.value), want.message.value) < 1e-12


def test_fedrod_clips_the_shared_model_whatever_the_personal_head():
    method, data = make_method("fedrod", tiny_model(), **HYPER_PARAMETERS, clip_norm=1.0), tiny_federation()
    server, rows = method.init_server(KEY), client_data(data, 1, "train")
    other = jax.tree.map(lambda leaf: 5 * leaf + jnp.arange(CLASSES), server["head"])
    local = jax.jit(method.local)
    got, want = (local(KEY, server, head, rows).message.value for head in (server["head"], other))
    assert distance(got, want) < 1e-12
