"""Random numbers of the engine: none is drawn twice in a run, and no draw leaves a client out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import CLASSES, tiny_federation, tiny_method

from pfl_jax import LocalResult, Method, Settings, simulate
from pfl_jax.base import Survey
from pfl_jax.data import hold_out
from pfl_jax.engine import cohort
from pfl_jax.engine.cohort import attackers
from pfl_jax.engine.store import OnHost
from pfl_jax.messages import Unsummed

ROUNDS = 3


def drawing():
    """A method that draws a number wherever it has a key, and whose models are these numbers."""

    def draw(key):
        return jax.random.normal(key)

    def asked(server, numbers):
        return {**server, "asked": numbers}

    def local(key, server, client, data):
        number = draw(key)
        return LocalResult({**client, "last": number}, number, number)

    def aggregate(key, server, clients, messages, cohort):
        return {**server, "last": draw(key)}, clients, {}

    return Method(
        init_server=lambda key: {"first": draw(key), "last": jnp.zeros(())},
        init_client=lambda key, server, data: {"first": draw(key), "last": jnp.zeros(())},
        local=local,
        aggregate=aggregate,
        personalize=lambda key, server, client, data: draw(key),
        predict=lambda number, x: jnp.zeros((len(x), CLASSES)).at[:, 0].set(number),
        survey=Survey(lambda key, server, data: draw(key), asked),
    )


def number_of(loss):
    """The model's number, from its loss on examples of class 0: log(1 + 2 exp(-number))."""
    return np.log(CLASSES - 1) - np.log(np.expm1(np.asarray(loss, np.float64)))


def numbers(engine, seed):
    """All numbers of a run of four clients, and of two that never take part."""
    everyone = tiny_federation((9, 20, 14, 5, 7, 12))
    data, newcomers = hold_out(everyone._replace(y=jnp.zeros_like(everyone.y)), 2)
    state = engine.init(data, jax.random.key(seed))
    found = [state.server["first"], state.server["asked"], state.clients["first"]]
    found.append(number_of(engine.evaluate(data, state)["loss"]))
    for _ in range(ROUNDS):
        state, _ = engine.round(data, state, 4)
        np.testing.assert_allclose(number_of(state.trained["loss"]), state.clients["last"], atol=1e-4)
        scores = [engine.evaluate(data, state), *engine.evaluate_new(newcomers, state)]
        found += [state.server["last"], state.clients["last"], *(number_of(one["loss"]) for one in scores)]
    return np.concatenate([np.ravel(part) for part in found])


@pytest.mark.parametrize("store", [None, pytest.param(OnHost(), marks=pytest.mark.slow)], ids=["device", "host"])
def test_every_key_of_a_run_is_another_one(store):
    """Over rounds, clients, newcomers, the survey, both initializations, training, aggregation and evaluation."""
    engine = simulate.build(drawing(), Settings(rounds=ROUNDS), store=store)
    engine = engine.jit() if store is None else engine
    found = np.concatenate([numbers(engine, seed) for seed in (0, 1)])
    assert len(found) == 2 * (1 + 4 + 4 + 4 + ROUNDS * (1 + 4 + 4 + 2 + 2))
    assert np.diff(np.sort(found)).min() > 1e-5


def test_attackers_send_noise_of_their_own():
    """Two of three clients attack; the message of each is its noise, as long as the number 1."""
    method = drawing()._replace(
        local=lambda key, server, client, data: LocalResult(client, Unsummed(jnp.ones(9), jnp.ones(())), jnp.zeros(())),
        aggregate=lambda key, server, clients, messages, cohort: (server, clients, {"sent": messages.value}),
        survey=None,
        trained_from=lambda server, client: jnp.zeros(9),
    )
    settings = Settings(rounds=2, attack="noise", attackers=0.6)
    sent = [
        result.info["sent"] for result in simulate.run(method, tiny_federation((9, 8, 7)), settings, jax.random.key(0))
    ]
    noise = np.concatenate([one[np.asarray(attackers(jax.random.key(0), 3, 0.6))] for one in sent])
    assert noise.shape == (4, 9)
    assert len(np.unique(noise)) == noise.size


def often(draw, keys=600):
    """How often each client is in a draw, over as many keys: [N]."""
    return np.asarray(jax.vmap(lambda seed: draw(jax.random.key(seed)))(jnp.arange(keys))).sum(axis=0)


def members(clients, size=8):
    return jnp.zeros(size, bool).at[clients].set(True)


COUNTS = jnp.array([5, 9, 7, 9, 1, 3, 8, 2])


@pytest.mark.parametrize(
    ("draw", "share"),
    [
        (lambda key: members(cohort.evaluated_clients(key, len(COUNTS), Settings(1, eval_clients=2))), 1 / 4),
        (lambda key: members(cohort.sample_cohort(key, 0, COUNTS, 2, Settings(1)).clients), 1 / 4),
        (lambda key: cohort.sample_cohort(key, 0, COUNTS, 8, Settings(1, drop_rate=0.25)).present, 3 / 4),
        (lambda key: cohort.stragglers(key, 8, 0.25), 1 / 4),
        (lambda key: attackers(key, 8, 0.25), 1 / 4),
    ],
    ids=["evaluated", "cohort", "arriving", "stragglers", "attackers"],
)
def test_a_draw_leaves_nobody_out(draw, share):
    # 150 or 450 expected, standard deviation below 11.
    assert np.abs(often(draw) - 600 * share).max() < 50


def test_each_round_draws_whom_it_needs_anew():
    """In some round each client takes part and arrives; who attacks has nothing to do with who is slow."""
    settings = Settings(rounds=1, drop_rate=0.5)
    drawn = [cohort.sample_cohort(jax.random.key(0), index, COUNTS, 4, settings) for index in range(24)]
    assert set(np.concatenate([one.clients[one.present] for one in drawn]).tolist()) == set(range(8))
    assert len({tuple(one.present.tolist()) for one in drawn}) > 3
    both = often(lambda key: cohort.stragglers(key, 8, 0.5) & attackers(key, 8, 0.5))
    assert np.abs(both - 600 / 4).max() < 50


def test_a_raw_key_is_the_typed_one():
    method, data, settings = tiny_method("fedavg"), tiny_federation(), Settings(rounds=1)
    raw, typed = (
        next(simulate.run(method, data, settings, key)).state for key in (jax.random.PRNGKey(3), jax.random.key(3))
    )
    assert raw.key == typed.key
    jax.tree.map(np.testing.assert_array_equal, raw.server, typed.server)
