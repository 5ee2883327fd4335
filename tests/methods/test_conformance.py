"""What every method must satisfy, run over METHODS. A new method gets these tests by its line there.

Compiling is nearly all the work here, so tests share compiled engines wherever shapes and settings allow.
"""

import collections
import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import FILE, fingerprint
from problems import CLASSES, HYPER_PARAMETERS, permute_clients, tiny_federation, tiny_model

from pfl_jax import simulate
from pfl_jax.data.federated import client_data
from pfl_jax.engine import sharding
from pfl_jax.engine.simulate import Settings
from pfl_jax.methods import METHODS, hyper_parameters, make_method

pytestmark = pytest.mark.without_f1_auc

TRACES = collections.Counter()
"""How often each method's round was traced."""


@pytest.fixture(autouse=True, scope="module")
def _write_no_programs():
    """No other test has these programs: writing them to the disk would be a tenth of the time."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 3600)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


@pytest.fixture(params=METHODS, scope="module")
def name(request):
    """Each method in turn. All tests of one run together, so that its programs are compiled once and then dropped."""
    yield request.param
    for cache in (compiled, start, reference):
        cache.cache_clear()


REPRESENTATIVES = {"fedavg", "scaffold", "fedala", "fedfomo", "pfedhn", "fedpac", "fedas"}
"""Methods of different kinds of state, of loops over examples, and of aggregation."""

representatives = pytest.mark.parametrize(
    "name",
    [name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.slow) for name in METHODS],
    indirect=True,
)
"""For a test that compiles each method for itself: by default it runs for `REPRESENTATIVES` alone."""


def build(name, **changes):
    return make_method(name, tiny_model(), **{**HYPER_PARAMETERS, **changes})


@functools.cache
def compiled(name, chunk=1, shared=False):
    mesh = simulate.client_mesh() if shared else None
    method = build(name)

    def counted(*arguments):
        TRACES[name] += 1
        return method.aggregate(*arguments)

    return simulate.build(method._replace(aggregate=counted), Settings(rounds=1, chunk=chunk), mesh).jit(mesh)


copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def rows(tree, indices):
    """`tree.gather` in NumPy, which compiles nothing."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[indices], tree)


def play(engine, data=None, seed=0, rounds=3, size=3, state=None):
    """The state after some rounds of three of the four clients; continues `state` where one is given."""
    data = tiny_federation() if data is None else data
    state = engine.init(data, jax.random.key(seed)) if state is None else copy(state)
    for _ in range(rounds):
        state, _ = engine.round(data, state, size)
    return state


@functools.cache
def start(name):
    """The first state."""
    return compiled(name).init(tiny_federation(), jax.random.key(0))


def assert_close(left, right):
    chex.assert_trees_all_close(left._replace(key=()), right._replace(key=()), rtol=2e-4, atol=2e-5)


@functools.cache
def reference(name):
    """Three rounds, one client after another."""
    return play(compiled(name), state=start(name))


def test_structure_shapes_and_types_stay_the_same(name):
    data, engine = tiny_federation(), compiled(name)
    state = engine.init(data, jax.random.key(0))
    before = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), state._replace(key=()))
    for _ in range(2):
        state, outcome = engine.round(data, state, 3)
        after = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), state._replace(key=()))
        assert before == after
        chex.assert_tree_all_finite((state.server, state.clients, outcome.info))
        assert outcome.finite.all()
        assert outcome.server_finite
    assert int(state.round) == 2


def test_a_round_is_traced_once(name):
    engine = compiled(name)
    state = play(engine, rounds=1)
    before = TRACES[name]
    assert before >= 1
    play(engine, rounds=2, state=state)
    play(engine, rounds=1, seed=1)
    assert TRACES[name] == before


@representatives
def test_chunks_and_padding_change_nothing(name):
    # All three of the cohort under one vmap.
    engine, data, want = compiled(name, chunk=3), tiny_federation(pad=11), reference(name)
    got = play(engine, data, state=start(name))
    assert_close(got, want)
    losses = engine.evaluate(data, got).loss, compiled(name).evaluate(tiny_federation(), want).loss
    np.testing.assert_allclose(*losses, rtol=2e-4, atol=2e-5)


@representatives
def test_devices_change_nothing(name):
    data, alone, shared = tiny_federation(), compiled(name), compiled(name, shared=True)
    # A cohort of three does not divide by two devices, nor by the eight that docs/distributed.md has a command for.
    got, want = play(shared), play(alone)
    assert_close(got, want)
    np.testing.assert_allclose(shared.evaluate(data, got).loss, alone.evaluate(data, want).loss, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_devices_that_own_their_clients_change_nothing(name):
    # On eight devices some own nobody.
    data = sharding.place(tiny_federation(), simulate.client_mesh())
    got = play(simulate.build(build(name), Settings(rounds=1)).jit(data.mesh), data)
    assert_close(got, reference(name))


def test_permuting_clients_permutes_results(name):
    # Clients of one batch each, in arrays of the usual shapes: no random number is left but the initial model.
    data = tiny_federation()
    data = data._replace(train_count=jnp.minimum(data.train_count, jnp.array([7, 8, 6, 5])))
    # This seed leaves out client 0 three times: the cohorts are the same clients in both orders.
    engine, order, seed = compiled(name), np.array([0, 2, 3, 1]), 4
    permuted = permute_clients(data, order)
    got, want = play(engine, permuted, seed), play(engine, data, seed)
    np.testing.assert_array_equal(np.isnan(want.trained.loss), [True, False, False, False])
    losses = engine.evaluate(permuted, got).loss, engine.evaluate(data, want).loss[order]
    np.testing.assert_allclose(*losses, rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(got.trained.loss, want.trained.loss[order], rtol=2e-3, atol=2e-4)
    chex.assert_trees_all_close(got.server, want.server, rtol=2e-3, atol=2e-4)
    chex.assert_trees_all_close(got.clients, rows(want.clients, order), rtol=2e-3, atol=2e-4)


def test_clients_outside_the_cohort_stay_as_they_were(name):
    data, engine = tiny_federation(), compiled(name)
    state = engine.init(data, jax.random.key(3))
    for _ in range(2):
        before = jax.tree.map(np.asarray, (state.clients, state.trained))
        state, outcome = engine.round(data, state, 3)
        outside = np.setdiff1d(np.arange(4), np.asarray(outcome.cohort.clients))
        assert outside.size == 1
        after = jax.tree.map(np.asarray, (state.clients, state.trained))
        chex.assert_trees_all_equal(rows(after, outside), rows(before, outside))


def test_a_continued_run_is_the_uninterrupted_one(name):
    engine = compiled(name)
    whole, half = play(engine, rounds=4), play(engine, rounds=2)
    # A state that was saved and restored is its arrays and its key's data.
    stored = jax.tree.map(np.asarray, half._replace(key=jax.random.key_data(half.key)))
    restored = jax.tree.map(jnp.asarray, stored)
    restored = restored._replace(key=jax.random.wrap_key_data(restored.key))
    continued = play(engine, rounds=2, state=restored)
    chex.assert_trees_all_equal(continued._replace(key=()), whole._replace(key=()))


def test_the_same_seed_gives_the_same_result_and_another_one_does_not(name):
    first, again, other = reference(name), play(compiled(name)), play(compiled(name), seed=1)
    chex.assert_trees_all_equal(first._replace(key=()), again._replace(key=()))
    differences = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), first.server, other.server)
    assert max(jax.tree.leaves(differences)) > 1e-3


@representatives
def test_vmap_over_seeds_and_learning_rates(name):
    data, settings = tiny_federation(), Settings(rounds=1)

    def whole_run(seed, lr, others):
        engine = simulate.build(build(name, **others, lr=lr), settings)
        state = engine.init(data, jax.random.key(seed))
        state = jax.lax.fori_loop(0, 2, lambda _, state: engine.round(data, state, 3)[0], state)
        return state.server, state.trained.loss

    usual = HYPER_PARAMETERS["lr"]
    # Every real number may be an input of the program, as sweeps have it.
    every = hyper_parameters(METHODS[name]).items()
    others = {other: default for other, default in every if isinstance(default, float) and other != "lr"}
    over = jax.jit(jax.vmap(whole_run, in_axes=(0, 0, None)))
    servers, losses = over(jnp.array([0, 1, 0]), jnp.array([usual, usual, usual / 5]), others)
    for index in range(2):
        alone = play(compiled(name), seed=index, rounds=2)
        chex.assert_trees_all_close(rows(servers, index), alone.server, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(losses[index], alone.trained.loss, rtol=2e-4, atol=2e-5)
    chex.assert_tree_all_finite(servers)


def test_predictions_and_learning(name):
    method, data, engine = build(name), tiny_federation(), compiled(name)
    last = play(engine, rounds=20)

    def predict(server, client):
        personal = method.personalize(jax.random.key(0), server, client, client_data(data, 1, "train"))
        return method.predict(personal, client_data(data, 1, "test").x)

    logits = jax.eval_shape(predict, last.server, rows(last.clients, 1))
    assert (logits.shape, logits.dtype) == ((12, CLASSES), jnp.float32)
    scores = engine.evaluate(data, last)
    assert np.isfinite(scores.loss).all()
    # Always naming a client's largest class would be right seven times in ten.
    assert scores.accuracy.mean() > 0.85
    assert last.trained.accuracy.mean() > 0.85


def test_golden_values(name):
    stored, got = json.loads(FILE.read_text())[name], fingerprint(build(name), compiled(name))
    assert got.keys() == stored.keys()
    for key, values in stored.items():
        np.testing.assert_allclose(got[key], values, rtol=1e-3, atol=1e-3, err_msg=f"{name}: {key}")
