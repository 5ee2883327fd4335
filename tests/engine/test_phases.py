"""Data that change: what each phase has, who takes part, and scores on all phases, against runs by hand."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import trees
from problems import tiny_federation, tiny_method
from rounds import local_results
from trees import assert_same

from pfl_jax import InvalidInput, Settings, data, models, run, simulate
from pfl_jax.data import client_data, phases
from pfl_jax.engine.cohort import Timetable
from pfl_jax.methods import METHODS, make_method
from pfl_jax.primitives import transfer

SETTINGS = Settings(rounds=5, eval_every=3)


@pytest.fixture(scope="module")
def digits():
    dataset = data.load("digits")
    return dataset, data.partition.iid(dataset, num_clients=4, train_size=30, test_size=12)


MODEL = models.mlp((8, 8, 1), 10, hidden=(8,))


def examples(federation, split="train"):
    """Sorted inputs and labels of each client."""
    found = []
    for client in range(federation.num_clients):
        one = client_data(federation, client, split)
        x = np.asarray(one.x).reshape(len(one.mask), 64)[np.asarray(one.mask)]
        rows = np.concatenate([x, np.asarray(one.y)[np.asarray(one.mask), None]], axis=1)
        found.append(rows[np.lexsort(rows.T)])
    return found


@pytest.mark.parametrize("kind", ["classes", "clients", "rotation"])
def test_each_phase_is_the_federation_of_its_partition(digits, kind):
    dataset, parts = digits
    datasets = [dataset] * 3
    if kind == "rotation":
        datasets, partitions = [phases.rotated(dataset, 90.0 * place) for place in range(3)], [parts] * 3
    else:
        partitions = phases.classes(dataset, parts, 3) if kind == "classes" else phases.clients(parts, 3)
    found = data.federate_phases(datasets if kind == "rotation" else dataset, partitions, [2, 1])
    assert found.starts == (0, 2, 3)
    assert [found.phase_of(completed) for completed in range(5)] == [0, 0, 1, 2, 2]
    shapes = {tuple(leaf.shape for leaf in jax.tree.leaves(part)) for part in (*found.parts, found.first)}
    assert len(shapes) == 1
    whole = examples(data.federate(dataset, parts))
    for number, (part, one) in enumerate(zip(found.parts, partitions, strict=True)):
        for client, rows in enumerate(examples(part)):
            x = np.concatenate([datasets[number].train_x, datasets[number].test_x])[one.train[client]]
            if dataset.mean is not None:
                x = (np.float64(x) / 255 - dataset.mean) / dataset.std
            assert len(rows) == len(x) == int(part.train_count[client])
            assert bool(part.active[client]) == (len(x) > 0)
            np.testing.assert_allclose(
                np.sort(rows[:, :-1].sum(1)), np.sort(x.reshape(len(x), 64).sum(1)), rtol=1e-4, atol=1e-3
            )
    if kind == "classes":
        # Together they are all examples, each once.
        for client, rows in enumerate(whole):
            joined = np.concatenate([examples(part)[client] for part in found.parts])
            np.testing.assert_array_equal(joined[np.lexsort(joined.T)], rows)
    if kind == "rotation":
        turned = np.rot90(dataset.train_x[0, ..., 0])
        np.testing.assert_allclose(datasets[1].train_x[0, ..., 0], turned, atol=1e-5)
    if kind == "clients":
        for client, rows in enumerate(whole):
            np.testing.assert_array_equal(examples(found.first)[client], rows)
            np.testing.assert_array_equal(examples(found.parts[2])[client], rows)


def test_a_run_over_phases_is_runs_one_after_another(digits):
    dataset, parts = digits
    partitions = phases.classes(dataset, parts, 2)
    found = data.federate_phases(dataset, partitions, [2])
    method = make_method("fedper", MODEL, lr=0.1, batch_size=10, epochs=1)
    results = list(run(method, found, SETTINGS, jax.random.key(0)))
    # At the end of a phase too, for forgetting.
    assert [one.received is not None for one in results] == [False, True, True, False, True]
    first = list(run(method, found.parts[0], replace(SETTINGS, rounds=2), jax.random.key(0)))
    second = list(run(method, found.parts[1], SETTINGS, jax.random.key(0), state=first[-1].state))
    for one, other in zip(results, [*first, *second], strict=True):
        np.testing.assert_array_equal(one.trained["loss"], other.trained["loss"])
    np.testing.assert_array_equal(results[1].received["loss"], results[1].phases[0]["loss"])
    # A model of the second phase on examples of the first one.
    state, client = results[-1].state, 2
    own = jax.tree.map(lambda leaf: leaf[client], state.clients)
    now = client_data(found.parts[1], client, "train")
    personal = method.personalize(jax.random.key(0), state.server, own, now)
    old = client_data(found.parts[0], client, "test")
    right = np.asarray(method.predict(personal, old.x)).argmax(1) == np.asarray(old.y)
    np.testing.assert_allclose(results[-1].phases[0]["accuracy"][client], right[np.asarray(old.mask)].mean(), rtol=1e-6)
    # A resumed run is the same, also before training.
    *_, half = run(method, found, replace(SETTINGS, rounds=3), jax.random.key(0))
    again = list(run(method, found, SETTINGS, jax.random.key(0), state=half.state))
    for one, other in zip(again, results[3:], strict=True):
        np.testing.assert_array_equal(one.trained["loss"], other.trained["loss"])
        for left, right in zip(one.untrained, other.untrained, strict=True):
            np.testing.assert_array_equal(left["loss"], right["loss"])


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_clients_that_have_not_joined_take_no_part(digits, participation):
    dataset, parts = digits
    partitions = phases.clients(parts, 2)
    late = [client for client in range(4) if not len(partitions[0].train[client])]
    found = data.federate_phases(dataset, partitions, [2])
    method = make_method("fedper", MODEL, lr=0.1, batch_size=10, epochs=1)
    settings = Settings(rounds=4, participation=participation)
    begun = simulate.build(method, settings).init(found.first, jax.random.key(0))
    one, two, _, last = run(method, found, settings, jax.random.key(0))
    for result in (one, two):
        assert not set(result.cohort[result.arrived]) & set(late)
        assert np.isnan(result.trained["loss"][late]).all()
    for client in late:
        for before, after in zip(*map(jax.tree.leaves, (begun.clients, two.state.clients)), strict=True):
            np.testing.assert_array_equal(before[client], after[client])
    assert np.isfinite(last.received["loss"]).all()
    if participation == 1:
        assert last.arrived.all()
        # The mean is that of those who are there.
        average = make_method("fedavg", MODEL, lr=0.1, batch_size=10, epochs=1)
        begun = simulate.build(average, settings).init(found.first, jax.random.key(0))
        result = next(run(average, found, settings, jax.random.key(0)))
        every = local_results(average, found.parts[0], begun)
        there = [every[client].personal for client in range(4) if client not in late]
        assert_same(result.state.server, trees.average(there, None), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_stands_clients_without_examples(digits, name):
    dataset, parts = digits
    method = make_method(name, MODEL, lr=0.05, batch_size=10, epochs=1)
    found = data.federate_phases(dataset, phases.clients(parts, 2), [1])
    *_, last = run(method, found, Settings(rounds=2), jax.random.key(0))
    assert np.isfinite(last.received["loss"]).all()


def test_messages_are_lost_among_those_who_are_there(digits):
    dataset, parts = digits
    found = data.federate_phases(dataset, phases.clients(parts, 4), [2, 2, 2])
    method = make_method("fedavg", MODEL, lr=0.1, batch_size=10, epochs=1)
    results = list(run(method, found, Settings(rounds=7, drop_rate=0.5), jax.random.key(0)))
    assert [int(one.arrived.sum()) for one in results] == [1] * 6 + [2]
    assert all(np.abs(jax.tree.leaves(one.state.server)[0]).max() > 0 for one in results)


def test_clients_that_pause_keep_their_scores_and_alone_change_nothing(digits):
    dataset, parts = digits
    nothing = np.zeros(0, int)
    paused = parts._replace(train=[nothing, nothing, *parts.train[2:]])
    found = data.federate_phases(dataset, [parts, paused], [1])
    method = make_method("fedavg", MODEL, lr=0.1, batch_size=10, epochs=1)
    one, two = run(method, found, Settings(rounds=2), jax.random.key(0))
    np.testing.assert_array_equal(one.trained["loss"][:2], two.trained["loss"][:2])
    assert (one.trained["loss"][2:] != two.trained["loss"][2:]).all()
    # A timetable of these two.
    timetable = Timetable(np.array([[0, 1]] * 2), np.zeros((2, 2), int), np.ones(2))
    one, two = run(method, found, Settings(rounds=2, timetable=timetable), jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, one.state.server, two.state.server)
    # Such a round is a step of the server: clients that began one step earlier began from the same state.
    late = Timetable(np.array([[0, 1], [0, 1], [2, 3]]), np.array([[0, 0], [0, 0], [0, 1]]), np.ones(3))
    _, two, _ = run(method, found, Settings(rounds=3, timetable=late), jax.random.key(0))
    jax.tree.map(lambda now, past: np.testing.assert_array_equal(now, past[0]), *two.state.server)


@pytest.mark.parametrize("on_nan", ["stop", "skip-client"])
def test_clients_that_pause_are_measured_before_aggregation_with_what_they_received(digits, on_nan):
    dataset, parts = digits
    nothing = np.zeros(0, int)
    paused = parts._replace(train=[nothing, nothing, *parts.train[2:]])
    found = data.federate_phases(dataset, [parts, paused], [1])
    method = make_method("fedavg", MODEL, lr=0.1, batch_size=10, epochs=1)
    one, two = run(method, found, Settings(rounds=2, before_aggregation=True), jax.random.key(0), on_nan=on_nan)
    np.testing.assert_allclose(two.before_aggregation["loss"][:2], one.received["loss"][:2], rtol=1e-6)
    np.testing.assert_array_equal(two.before_aggregation["loss"][2:], two.trained["loss"][2:])


def test_forgetting_and_transfer_by_hand():
    after, untrained = (
        np.array([[90.0, 20.0, 5.0], [95.0, 80.0, 30.0], [60.0, 70.0, 85.0]]),
        np.array([9.0, 10.0, 12.0]),
    )
    found = transfer(after, untrained)
    assert found.average == pytest.approx((60 + 70 + 85) / 3)
    assert found.forgetting == pytest.approx(((95 - 60) + (80 - 70)) / 2)
    assert found.forward == pytest.approx(((20 - 10) + (30 - 12)) / 2)
    errors = transfer(100 - after, 100 - untrained, higher_is_better=False)
    assert errors.forgetting == pytest.approx(found.forgetting)
    assert errors.forward == pytest.approx(found.forward)
    first = transfer(after[:1], untrained)
    assert first.average == 90
    assert np.isnan([first.forgetting, first.forward]).all()


def test_what_is_no_federation_over_phases_is_refused(digits):
    dataset, parts = digits
    partitions = phases.clients(parts, 2)
    with pytest.raises(InvalidInput, match="need at least 2 phases"):
        data.federate_phases(dataset, partitions[:1], [1])
    with pytest.raises(InvalidInput, match=r"client . has no training examples in any phase"):
        data.federate_phases(dataset, [partitions[0]] * 2, [1])
    for other in (dataset._replace(class_names=tuple("jihgfedcba")), dataset._replace(mean=(0.5,), std=(1.0,))):
        with pytest.raises(InvalidInput, match="data sets of the phases differ in"):
            data.federate_phases([dataset, other], partitions, [4])
    found = data.federate_phases(dataset, partitions, [4])
    for settings, message in ((Settings(rounds=4), "last phase begins after 4"), (Settings(9, patience=2), "patience")):
        with pytest.raises(InvalidInput, match=message):
            run(tiny_method(), found, settings, jax.random.key(0))
    with pytest.raises(InvalidInput, match="newcomers"):
        run(tiny_method(), found, Settings(rounds=9), jax.random.key(0), newcomers=tiny_federation())
