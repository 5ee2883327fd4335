"""FedFomo: who downloads from whom, its limits, and its equations against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from full_batches import SIZES, assert_model, losses, run, start_of, train, training_examples
from problems import tiny_federation, tiny_model
from trees import assert_same, row

from pfl_jax import Cohort, Settings, simulate
from pfl_jax.data import client_data
from pfl_jax.methods import fedfomo, make_method
from pfl_jax.primitives import fingerprint, fixed_subset, init_models
from pfl_jax.primitives.affinity import Affinity, add_affinity, choose_peers, empty_affinity, look_up

# One program for each kind of call; operation by operation, each shape would compile a dozen.
add_affinity, look_up = jax.jit(add_affinity), jax.jit(look_up)
fingerprint = jax.jit(fingerprint)


ASCENT = -1.0
"""A learning rate that makes every model worse."""


def split_examples(held_out=0.2):
    """Every client's examples to train on and its held-out ones."""
    parts = []
    for client, (x, y) in enumerate(training_examples()):
        mask = client_data(tiny_federation(SIZES), client, "train").mask
        judged = np.asarray(fixed_subset(mask, held_out))[np.asarray(mask)]
        parts.append(((x[~judged], y[~judged]), (x[judged], y[judged])))
    return parts


# Affinities


def identity(numbers):
    """Fingerprints that differ in their second word alone."""
    return jnp.stack([jnp.full(len(numbers), 5, jnp.uint32), jnp.asarray(numbers, jnp.uint32)], axis=1)


def test_affinities_are_sums_kept_by_fingerprint():
    generator, table, want = np.random.default_rng(0), empty_affinity(8), np.zeros(6)
    for _ in range(5):
        peers = generator.choice(6, 3, replace=False)
        weights = generator.random(3) * (generator.random(3) < 0.6)
        want[peers] += weights
        table = add_affinity(table, identity(peers + 100), jnp.float32(weights))
        np.testing.assert_allclose(look_up(table, identity(np.arange(100, 107))), [*want, 0], rtol=1e-5)
    # Too small a table forgets the smallest.
    small = add_affinity(empty_affinity(2), identity([1, 2, 3]), jnp.float32([0.2, 0.5, 0.3]))
    np.testing.assert_allclose(look_up(small, identity([1, 2, 3])), [0.0, 0.5, 0.3], rtol=1e-6)
    # An unused entry matches no client, whatever fingerprint it has.
    like_unused = jnp.zeros((1, 2), jnp.uint32)
    table = add_affinity(empty_affinity(4), like_unused, jnp.ones(1))
    np.testing.assert_array_equal(look_up(table, like_unused), 1.0)


@pytest.mark.parametrize("epsilon", [0.0, 0.4, 1.0])
def test_epsilon_greedy_choice(epsilon):
    affinity, own = jnp.float32([0.9, 0.5, 0.0, 0.7, 0.0, 0.0]), jnp.arange(6) == 1
    keys = jax.random.split(jax.random.key(1), 4000)
    chosen, found = jax.vmap(lambda key: choose_peers(key, affinity, own, jnp.float32(epsilon), 3))(keys)
    chosen = np.asarray(chosen)
    assert np.all(found)
    assert all(len(set(choices)) == 3 and 1 not in choices for choices in chosen[:50].tolist())
    # The first choice is the best one or, with probability epsilon, any of five; the third is a tie where it is greedy.
    shares = np.bincount(chosen[:, 0], minlength=6) / len(keys)
    want = epsilon / 5 * np.array([1, 0, 1, 1, 1, 1]) + (1 - epsilon) * np.eye(6)[0]
    np.testing.assert_allclose(shares, want, atol=0.03)
    # Whether the first choice explored says nothing about the second one.
    second = chosen[chosen[:, 0] != 0, 1]
    assert epsilon in (0, 1) or np.mean(second == 0) == pytest.approx(1 - epsilon + epsilon / 4, abs=0.05)
    if epsilon == 0:
        np.testing.assert_array_equal(chosen[:, 1], 3)
        np.testing.assert_allclose(np.bincount(chosen[:, 2], minlength=6)[[2, 4, 5]] / len(keys), 1 / 3, atol=0.03)


# Limits


@pytest.mark.slow
def test_a_client_whose_message_is_lost_keeps_what_it_trained():
    # With its own model alone, a client deploys what it trained, whether or not the server got it.
    method = make_method(fedfomo, tiny_model(), lr=0.2, epochs=3, batch_size=32, download=1, fallback="trained")
    settings = Settings(rounds=2, drop_rate=0.5)
    for result in simulate.run(method, tiny_federation(), settings, jax.random.key(4)):
        assert 0 < result.arrived.sum() < 4
        np.testing.assert_allclose(result.received["loss"], result.trained["loss"], rtol=1e-5)
        assert result.state.clients.received.all()


def test_fedfomo_stays_where_no_model_is_better():
    # Ascent: what a client trains is worse than the initial model, which so remains everyone's.
    last = run("fedfomo", rounds=3, lr=ASCENT, download=1)
    np.testing.assert_array_equal(last.info["weights"], [[1, 0]] * 3)
    initial = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), last.state.server.initial)
    jax.tree.map(np.testing.assert_array_equal, last.state.clients.previous, initial)
    np.testing.assert_array_equal(last.state.clients.affinity.values, 0.0)


# Equations


def combine(previous, models, x, y):
    """The paper's weights, one model after another, and the model that they give."""
    weights = []
    for model in models:
        gain = losses(previous, x, y).mean() - losses(model, x, y).mean()
        distance = np.sqrt(reference.squared_distance(model, previous))
        weights.append(max(0.0, gain / distance))
    weights = np.array(weights) / sum(weights) if sum(weights) else np.zeros(len(models))
    moved = dict(previous)
    for weight, model in zip(weights, models, strict=True):
        moved = {name: value + weight * (model[name] - previous[name]) for name, value in moved.items()}
    return weights, moved


def test_fedfomo():
    clients = split_examples()
    data = tiny_federation(SIZES)
    identities = [fingerprint(client_data(data, client, "train")) for client in range(3)]
    start = reference.to_numpy(start_of("fedfomo").initial)
    previous, trained, affinity = [start] * 3, [train(start, x, y) for (x, y), _ in clients], np.zeros((3, 3))
    for _ in range(2):
        starts, shares = [], np.zeros((3, 3))
        for client, (_, (x, y)) in enumerate(clients):
            shares[client], combined = combine(previous[client], trained, x, y)
            starts.append(combined)
        affinity += shares
        previous, trained = starts, [train(w, x, y) for w, ((x, y), _) in zip(starts, clients, strict=True)]
    # Cohorts of three with five to download: everyone gets everyone.
    last, personalize = run("fedfomo", rounds=3), jax.jit(fedfomo(tiny_model()).personalize)
    for client in range(3):
        state = row(last.state.clients, client)
        assert_model(state.previous, previous[client], rtol=1e-3, atol=1e-4)
        assert_model(row(state.models, 0), trained[client], rtol=1e-3, atol=1e-4)
        np.testing.assert_array_equal(state.received, [True] * 3 + [False] * 2)
        others = [other for other in range(3) if other != client]
        got = look_up(state.affinity, jnp.stack([identities[other] for other in others]))
        np.testing.assert_allclose(got, affinity[client, others], rtol=2e-3, atol=1e-4)
        # What it deploys is the next combination.
        rows = client_data(data, client, "train")
        deployed = personalize(jax.random.key(0), last.state.server, state, rows)
        assert_model(deployed, combine(previous[client], trained, *clients[client][1])[1], rtol=1e-3, atol=1e-4)
    # In the order of the cohort; the own model before the others.
    want = [shares[client, client] for client in last.cohort]
    np.testing.assert_allclose(last.info["weights"][:, 1], want, rtol=2e-3, atol=1e-4)
    np.testing.assert_allclose(np.sum(last.info["weights"][:, 1:], axis=1), shares.sum(1), rtol=2e-3, atol=1e-4)
    off = ~np.eye(3, dtype=bool)
    np.testing.assert_allclose(np.asarray(last.info["affinity"])[off], affinity[off], rtol=2e-3, atol=1e-4)
    assert ((shares > 0.05) & (shares < 0.95)).sum() >= 2


def test_fedfomo_downloads_from_those_worth_most():
    # One other model for each of three; without exploration it is the one with the largest affinity. Exploration ends
    # after four rounds here.
    method, identities = fedfomo(tiny_model(), download=2, epsilon=1.0, epsilon_decay=0.25), identity([7, 8, 9])
    server = method.init_server(jax.random.key(0))._replace(rounds=jnp.int32(4))
    client = method.init_client(jax.random.key(0), server, client_data(tiny_federation(SIZES), 0, "train"))
    clients = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), client)
    table = Affinity(
        clients.affinity.peers.at[:, :2].set(identities[jnp.asarray([[1, 2], [0, 2], [0, 1]])]),
        clients.affinity.values.at[:, :2].set(jnp.float32([[1, 3], [2, 0], [1, 2]])),
    )
    models = init_models(tiny_model(), jax.random.key(1), 3)
    cohort = Cohort(clients=jnp.arange(3), counts=jnp.asarray(SIZES), present=jnp.ones(3, bool), num_clients=9)
    messages = (models, identities, jnp.zeros((3, 3)))
    favorites = np.array([2, 0, 1])

    @jax.jit
    def senders(rounds):
        """Whom each client downloads from after so many rounds, for twenty keys."""

        def draw(key):
            known = clients._replace(affinity=table)
            return method.aggregate(key, server._replace(rounds=rounds), known, messages, cohort)[1].senders

        return jax.vmap(draw)(jax.random.split(jax.random.key(3), 20))[:, :, 0, 1]

    greedy = np.tile(identities[favorites, 1], (20, 1))
    shares = [np.mean(np.asarray(senders(jnp.int32(rounds))) == greedy) for rounds in range(6)]
    assert shares[4:] == [1, 1]
    assert 0.3 < shares[0] < 0.7
    assert shares[0] < shares[2] < shares[3] < 1
    server, clients, info = jax.jit(method.aggregate)(
        jax.random.key(2), server, clients._replace(affinity=table), messages, cohort
    )
    np.testing.assert_array_equal(clients.senders[:, 0], identities[favorites])
    assert_same(row(clients.models, np.s_[:, 0]), models)
    assert_same(row(clients.models, np.s_[:, 1]), row(models, favorites))
    np.testing.assert_array_equal(info["affinity"], [[0, 1, 3], [2, 0, 0], [1, 2, 0]])
    assert int(server.rounds) == 5
