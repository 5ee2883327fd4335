"""Choice of the clients of a round: who is drawn, whether with usual draws, and how the drawn ones count."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import HYPER_PARAMETERS, tiny_federation, tiny_method, tiny_model
from rounds import local_results
from trees import assert_same, average, row

from pfl_jax import InvalidInput, Settings, simulate, sweep
from pfl_jax.data import client_data
from pfl_jax.engine import selection
from pfl_jax.engine.cohort import sample_cohort
from pfl_jax.methods import make_method
from pfl_jax.privacy import participations

COUNTS = jnp.array([5, 9, 7, 9, 1, 3, 8, 2, 6, 4], jnp.int32)
LOSSES = jnp.array([0.5, 0.1, np.nan, 0.9, 2.0, np.nan, 0.3, 0.3, 1.0, 0.2], jnp.float32)
HALF = Settings(rounds=4, participation=0.5)


def drawn(select, size=3, rounds=400, losses=LOSSES):
    """Cohorts [R, M] of some rounds."""
    settings = Settings(rounds=1, select=select)
    draw = jax.jit(
        jax.vmap(lambda index: sample_cohort(jax.random.key(0), index, COUNTS, size, settings, losses).clients)
    )
    return np.asarray(draw(jnp.arange(rounds)))


def test_equal_weights_draw_whom_no_selection_draws():
    usual = drawn(None)
    for select in (selection.uniform, lambda key, number, counts, losses, size: jnp.full(len(counts), 1.0)):
        np.testing.assert_array_equal(drawn(select), usual)
    # The first of a draw is the largest of noise + log weight, with the noise of the usual draw.
    noise = jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 2**32 - 2), 5), (10,))
    wanted = np.argsort(-(np.asarray(noise, np.float64) + np.log(np.asarray(COUNTS, np.float64))))[:3]
    np.testing.assert_array_equal(drawn(selection.by_size)[5], np.sort(wanted))


def test_probabilities_are_the_weights():
    share = np.bincount(drawn(selection.by_size, 1, 6000)[:, 0], minlength=10) / 6000
    np.testing.assert_allclose(share, np.asarray(COUNTS) / np.sum(COUNTS), atol=0.02)
    # Clients without a loss come first, then others in proportion to it.
    three = drawn(selection.by_loss, 3, 6000)
    assert np.isin(three, [2, 5]).sum(axis=1).tolist() == [2] * 6000
    rest = three[~np.isin(three, [2, 5])]
    wanted = np.nan_to_num(np.asarray(LOSSES, np.float64))
    np.testing.assert_allclose(np.bincount(rest, minlength=10) / 6000, wanted / wanted.sum(), atol=0.02)
    # Clients whose weight is zero or NaN are drawn if others do not suffice, at random, and before inactive ones.
    some = drawn(lambda *_: jnp.array([0.0, 1, 0, 1, np.nan, 0, 0, 0, 0, 0]), 3, 50)
    assert {1, 3} <= set.intersection(*map(set, some.tolist()))
    assert set.union(*map(set, some.tolist())) == set(range(10))
    settings = Settings(rounds=1, select=lambda *_: jnp.array([1e-30, *[0.0] * 9]))
    active = jnp.arange(10) % 3 == 0
    for index in range(20):
        cohort = sample_cohort(jax.random.key(0), index, COUNTS, 4, settings, LOSSES, active)
        assert cohort.clients.tolist() == [0, 3, 6, 9]
        assert bool(cohort.present.all())


def test_power_of_choice_is_the_slow_way():
    found = drawn(selection.power_of_choice(5), 3, 50)
    for index in range(50):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 2**32 - 27), index)
        noise = np.asarray(jax.random.gumbel(key, (10,), jnp.float32), np.float64)
        candidates = np.argsort(-(noise + np.log(np.asarray(COUNTS, np.float64))))[:5].tolist()
        known = np.where(np.isnan(LOSSES), np.inf, LOSSES)
        chosen = sorted(sorted(candidates, key=lambda client: -known[client])[:3])
        assert found[index].tolist() == chosen
    # Equal losses leave nobody out.
    first = drawn(selection.power_of_choice(10), 2, 300, jnp.full(10, jnp.nan))
    assert set(first.reshape(-1).tolist()) == set(range(10))
    with pytest.raises(InvalidInput, match="power_of_choice:2 has fewer candidates than the 3 clients"):
        drawn(selection.power_of_choice(2), 3, 1)
    assert selection.power_of_choice(5) is selection.named("power_of_choice:5")


def test_round_robin_serves_all_in_turn():
    found = drawn(selection.round_robin, 3, 10)
    assert found[:4].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 9]]
    assert np.bincount(found.reshape(-1)).tolist() == [3] * 10
    settings = Settings(rounds=10, participation=0.3, select=selection.round_robin)
    assert participations(settings, COUNTS, jax.random.key(0)).tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    with pytest.raises(InvalidInput, match="not accounted where clients are drawn by their losses"):
        participations(replace(settings, select=selection.by_loss), COUNTS, jax.random.key(0))


def test_clients_drawn_by_size_count_alike_and_the_mean_over_draws_is_that_by_size():
    data, method = tiny_federation(), tiny_method("fedavg")
    counts = np.asarray(data.train_count, np.float64)
    for select, equal in ((selection.by_size, True), (selection.power_of_choice(2), True), (selection.by_loss, False)):
        settings = Settings(rounds=1, participation=2 / data.num_clients, select=select)
        (result,) = simulate.run(method, data, settings, jax.random.key(0))
        results = local_results(method, data, simulate.build(method, settings).init(data, jax.random.key(0)))
        weights = np.ones(2) if equal else counts[result.cohort]
        wanted = average([results[i].personal for i in result.cohort], weights)
        assert_same(result.state.server, wanted, rtol=2e-5, atol=1e-6)
    # Where all take part, they count by size.
    last = Settings(rounds=1, participation=0.5, full_last_round=True)
    one, other = (
        next(simulate.run(method, data, replace(last, select=one), jax.random.key(0))).state.server
        for one in (selection.by_size, None)
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(("name", "part"), [("scaffold", "control"), ("feddyn", "drift")])
def test_means_that_count_all_equally_still_do_so_with_draws_by_size(name, part):
    settings = Settings(rounds=3, participation=0.5, select=selection.by_size)
    *_, last = simulate.run(tiny_method(name), tiny_federation(), settings, jax.random.key(0))
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), getattr(last.state.clients, part))
    assert_same(getattr(last.state.server, part), mean, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("wrapper", [{"compress": "topk:0.3"}, {"server_mean": "median"}, {"server_optimizer": "adam"}])
def test_wrappers_leave_constant_weights_constant(wrapper):
    data, method = tiny_federation(), tiny_method("per_fedavg", **wrapper)
    begun = simulate.build(method, Settings(rounds=1)).init(data, jax.random.key(0))
    result = method.local(jax.random.key(0), begun.server, row(begun.clients, 0), client_data(data, 0, "train"))
    assert isinstance(result.message.weight, np.float32)


def test_a_weight_that_is_one_by_chance_is_divided_like_others():
    # In AFL a client that was never drawn has the number 1.
    data, method = tiny_federation(), tiny_method("afl")
    settings = Settings(rounds=3, participation=2 / data.num_clients, select=selection.by_size)
    state, counts = simulate.build(method, settings).init(data, jax.random.key(0)), np.asarray(data.train_count)
    mixed = []
    for result in simulate.run(method, data, settings, jax.random.key(0)):
        weights = np.asarray(state.clients)[result.cohort]
        mixed.append(len({*(weights == 1).tolist()}))
        every = local_results(method, data, state, result.round - 1)
        wanted = average([every[i].personal for i in result.cohort], weights / counts[result.cohort])
        assert_same(result.state.server, wanted, rtol=2e-5, atol=1e-6)
        state = result.state
    assert max(mixed) == 2


@pytest.mark.parametrize(("name", "more"), [("hypcluster", {"clusters": 1}), ("fedex_lora", {}), ("flora", {})])
def test_servers_that_weigh_rows_count_clients_alike_too(name, more):
    # Without adapters and with one cluster these are FedAvg.
    data = tiny_federation()
    settings = Settings(rounds=2, participation=2 / data.num_clients, select=selection.by_size)
    *_, one = simulate.run(tiny_method(name, **more), data, settings, jax.random.key(0))
    *_, other = simulate.run(tiny_method("fedavg"), data, settings, jax.random.key(0))
    sizes = [sum(map(np.sum, map(np.abs, jax.tree.leaves(run.received.by_name["loss"])))) for run in (one, other)]
    np.testing.assert_allclose(*sizes, rtol=1e-5)


def test_absent_clients_are_no_candidates_and_where_all_others_take_part_nothing_is_divided():
    active = jnp.arange(10) < 5
    losses = jnp.array([5, 4, 1, 0.5, 0.1, *[jnp.inf] * 5])
    settings = Settings(rounds=1, select=selection.power_of_choice(8))
    for index in range(20):
        cohort = sample_cohort(jax.random.key(0), index, COUNTS, 2, settings, losses, active)
        assert cohort.clients.tolist() == [0, 1]
        assert cohort.weights.tolist() == [1, 1]
    everyone = sample_cohort(jax.random.key(0), 0, COUNTS, 5, settings, losses, active)
    assert everyone.weights.tolist() == everyone.counts.tolist() == COUNTS[:5].tolist()


def test_both_means_of_qffl_have_the_same_weights():
    data, method = tiny_federation(), tiny_method("qffl")
    settings = Settings(rounds=1, participation=2 / data.num_clients, select=selection.by_size)
    begun = simulate.build(method, settings).init(data, jax.random.key(0))
    (result,) = simulate.run(method, data, settings, jax.random.key(0))
    sent = [local_results(method, data, begun)[i].message for i in result.cohort]
    step = 1 / np.mean([one.curvature.value for one in sent])
    change = average([one.change.value for one in sent], np.ones(2))
    wanted = jax.tree.map(lambda w, direction: w + step * direction, begun.server, change)
    assert_same(result.state.server, wanted, rtol=1e-4, atol=1e-6)


def test_losses_are_those_of_the_last_training_and_go_on_in_states_and_sweeps():
    data, settings = tiny_federation(), replace(HALF, select=selection.by_loss)

    def make(lr):
        return make_method("fedper", tiny_model(), **HYPER_PARAMETERS | {"lr": lr})

    method = make(0.1)
    whole = list(simulate.run(method, data, settings, jax.random.key(3)))
    # Everybody is drawn before anybody is drawn twice.
    first, second = (set(one.cohort.tolist()) for one in whole[:2])
    assert len(first | second) == min(data.num_clients, 2 * len(first))
    losses = whole[0].trained.train["loss"]
    assert np.isfinite(losses).nonzero()[0].tolist() == sorted(first)
    client = int(whole[0].cohort[0])
    begun = simulate.build(method, settings).init(data, jax.random.key(3))
    examples = client_data(data, client, "train")
    personal = local_results(method, data, begun)[client].personal
    logits = np.asarray(method.predict(personal, examples.x), np.float64)[np.asarray(examples.mask)]
    labels = np.asarray(examples.y)[np.asarray(examples.mask)]
    wanted = np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels])
    np.testing.assert_allclose(losses[client], wanted, rtol=1e-4)

    *_, half = simulate.run(method, data, replace(settings, rounds=2), jax.random.key(3))
    again = list(simulate.run(method, data, settings, jax.random.key(3), state=half.state))
    jax.tree.map(np.testing.assert_array_equal, again[-1].state.server, whole[-1].state.server)
    assert [one.cohort.tolist() for one in again] == [one.cohort.tolist() for one in whole[2:]]
    *_, on_host = simulate.run(method, data, settings, jax.random.key(3), state_on="host")
    assert on_host.cohort.tolist() == whole[-1].cohort.tolist()
    keys = jnp.stack([jax.random.key(3), jax.random.key(4)])
    for one, both in zip(whole, sweep.run(make, data, settings, keys, {"lr": jnp.array([0.1, 0.1])}), strict=True):
        assert both.cohort[0].tolist() == one.cohort.tolist()
    before = replace(settings, before_aggregation=True)
    assert all(one.before_aggregation for one in simulate.run(method, data, before, jax.random.key(3)))


def test_what_is_no_selection_is_refused():
    with pytest.raises(InvalidInput, match="select must be a selection, a function"):
        Settings(rounds=1, select="by_size")
    with pytest.raises(InvalidInput, match="shapes weights"):
        drawn(lambda *_: jnp.ones(3))
