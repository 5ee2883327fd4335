"""The protocol before_aggregation, against bookkeeping that is slow and obvious."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import diverging, received, tiny_federation, tiny_method
from trees import row

from pfl_jax import Settings, simulate, sweep
from pfl_jax.data import client_data
from pfl_jax.primitives import score
from pfl_jax.streams import INITIALIZATION

# One program for each kind of call; operation by operation, each shape would compile a dozen.
score = jax.jit(score, static_argnums=0)


DATA = tiny_federation((9, 20, 14, 5, 12, 11, 8))
CLIENTS = range(DATA.num_clients)
KEY = jax.random.key(3)
SOME = Settings(rounds=4, participation=0.3, eval_every=2, before_aggregation=True)


def play(method, settings=SOME, data=DATA, **options):
    return list(simulate.run(method, data, settings, KEY, **options))


@functools.cache
def usual(name):
    """The run of a method under `SOME`."""
    return play(tiny_method(name))


def assert_scores(got, want, exact=False):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, **({"rtol": 0, "atol": 0} if exact else {"rtol": 2e-4, "atol": 2e-5}))


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def test_before_aggregation_of_fedper_against_a_loop_over_clients():
    """Two rounds from the method's own functions: the cohort with its trained models, the others with the old base."""
    method, settings = tiny_method("fedper"), Settings(rounds=2, participation=0.3, before_aggregation=True)
    results = play(method, settings)
    start = jax.random.fold_in(KEY, INITIALIZATION)
    server = method.init_server(jax.random.fold_in(start, len(CLIENTS)))
    data = {split: [client_data(DATA, client, split) for client in CLIENTS] for split in ("train", "test")}
    clients = [method.init_client(jax.random.fold_in(start, i), server, data["train"][i]) for i in CLIENTS]
    local, personalize = jax.jit(method.local), jax.jit(method.personalize)
    for index, result in enumerate(results):
        cohort = simulate.sample_cohort(KEY, jnp.int32(index), DATA.train_count, 2, settings)
        members = np.asarray(cohort.clients).tolist()
        round_key = jax.random.fold_in(KEY, index)
        done = {i: local(jax.random.fold_in(round_key, i), server, clients[i], data["train"][i]) for i in members}
        for i in CLIENTS:
            # FedPer deploys without drawing anything.
            model = done[i].personal if i in done else personalize(KEY, server, clients[i], data["train"][i])
            assert_scores(row(result.before_aggregation, i), score(method.predict, model, data["test"][i]))
        kept, messages = (stack([done[i][part] for i in members]) for part in (0, 1))
        server, kept, _ = method.aggregate(KEY, server, kept, received(messages), cohort)
        for place, i in enumerate(members):
            clients[i] = row(kept, place)
    # The protocols differ: neither the new base for everyone, nor old scores of clients that are not drawn again.
    last = results[-1]
    outside = np.setdiff1d(np.arange(len(CLIENTS)), last.cohort)
    assert (last.before_aggregation["loss"][outside] != last.received["loss"][outside]).all()
    assert (last.before_aggregation["loss"][last.cohort] != last.received["loss"][last.cohort]).all()


def test_before_aggregation_of_a_diverged_client_is_received():
    method, settings = tiny_method("fedper"), Settings(rounds=1, before_aggregation=True)
    (result,) = play(diverging(method, 20, part="message"), settings, on_nan="skip-client")
    assert result.diverged.tolist() == [1]
    engine = simulate.build(method, settings).jit()
    want = engine.evaluate(DATA, engine.init(DATA, KEY))
    assert_scores(row(result.before_aggregation, 1), row(want, 1))
    others = np.array([0, 2, 3, 4, 5, 6])
    assert_scores(row(result.before_aggregation, others), row(result.trained, others))


@pytest.mark.slow
def test_a_sweep_has_the_before_aggregation_of_each_run():
    keys = jax.vmap(jax.random.key)(jnp.array([5, 3]))
    together = list(sweep.run(lambda: tiny_method("fedper"), DATA, SOME, keys))
    assert [one.before_aggregation is None for one in usual("fedper")] == [True, False, True, False]
    for one, every in zip(usual("fedper"), together, strict=True):
        assert (every.before_aggregation is None) == (one.before_aggregation is None)
        if one.before_aggregation is not None:
            assert_scores(row(every.before_aggregation, 1), one.before_aggregation)
            assert not np.array_equal(every.before_aggregation["loss"][0], every.before_aggregation["loss"][1])
