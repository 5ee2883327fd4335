"""Partitions: exact sizes, promised disjointness, proportions of the papers, and refusals in one line."""

import contextlib
import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_jax import InvalidInput
from pfl_jax.data import Dataset, Partition
from pfl_jax.data import dirichlet as dirichlet_module
from pfl_jax.data.allocation import draw_sizes
from pfl_jax.data.partition import (
    PATHOLOGICAL_CLASSES,
    dirichlet,
    dominant_classes,
    grouped,
    iid,
    make,
    pathological,
    with_validation,
)

TRAIN_Y = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 120)).astype(np.int32)
TEST_Y = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 40)).astype(np.int32)
POOL_Y = np.concatenate([TRAIN_Y, TEST_Y])


def labeled(train_y, test_y):
    x = np.zeros((0, 1), np.float32)
    return Dataset("labels", "arrays", "", True, x, train_y, x, test_y, 1 + int(np.max(train_y)), None, None, False)


DATASET = labeled(TRAIN_Y, TEST_Y)

fast = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 2**31)


def sizes(hands):
    return [len(hand) for hand in hands]


def table(hands, y=POOL_Y, num_classes=10):
    return np.stack([np.bincount(y[hand], minlength=num_classes) for hand in hands])


def assert_distinct(hands):
    for hand in hands:
        assert len(np.unique(hand)) == len(hand)


def assert_same(first, second):
    for hands, others in zip(first[:2], second[:2], strict=True):
        for hand, other in zip(hands, others, strict=True):
            np.testing.assert_array_equal(hand, other)


@pytest.mark.parametrize(
    ("draw", "digest"),
    [
        (lambda: grouped(DATASET, 6, train_size=61, test_size=23, seed=7), "a0bc3ba1318f"),
        # The first draw leaves a client four training examples.
        (lambda: dirichlet(DATASET, 25, beta=0.2, seed=7), "a25c4c950acd"),
        (lambda: dirichlet(DATASET, 12, beta=0.3, protocol="fedas", train_size=80, seed=7), "e7a462b97373"),
        (lambda: dirichlet(DATASET._replace(keep_split=True), 6, beta=0.3, protocol="fedas", seed=7), "74dd0a31b782"),
        (lambda: iid(DATASET, 7, seed=7), "5c49f493d9a7"),
        (lambda: iid(DATASET, 7, train_size=61, test_size=23, seed=7), "2f946752c3f7"),
        (lambda: pathological(DATASET, 6, train_size=61, test_size=23, seed=7), "db7e6f53c6ae"),
        (lambda: pathological(DATASET, 6, protocol="clustered", train_size=61, test_size=23, seed=7), "98ff717a4dda"),
        (lambda: with_validation(iid(DATASET, 7, train_size=61, test_size=23), 0.3, seed=7), "85523709c129"),
    ],
)
def test_draws_are_those_of_stored_results(draw, digest):
    """Results of earlier versions can be had again: their seeds give the clients the same examples."""
    train, test, validation = draw()[:3]
    drawn = np.concatenate([*train, *test, *(validation or [])])
    assert hashlib.sha256(drawn.astype(np.int64).tobytes()).hexdigest()[:12] == digest


# Grouped


@fast
@given(
    num_clients=st.integers(1, 12),
    s=st.floats(0, 100),
    train_size=st.integers(1, 120),
    test=st.integers(1, 40),
    seed=seeds,
)
def test_grouped_sizes_and_shares(num_clients, s, train_size, test, seed):
    partition = grouped(DATASET, num_clients, s=s, train_size=train_size, test_size=test, seed=seed)
    assert sizes(partition.train) == [train_size] * num_clients
    assert sizes(partition.test) == [test] * num_clients
    assert_distinct(partition.train + partition.test)
    assert all(hand.max() < len(TRAIN_Y) for hand in partition.train)
    assert all(hand.min() >= len(TRAIN_Y) for hand in partition.test)
    for part, size in ((partition.train, train_size), (partition.test, test)):
        uniform = round(size * s / 100)
        for client, counts in enumerate(table(part)):
            dominant = dominant_classes(10)[client % 5]
            others = np.setdiff1d(np.arange(10), dominant)
            assert np.isin(counts[others], [uniform // 10, -(-uniform // 10)]).all()
            assert np.ptp(counts[dominant]) <= 2


def test_grouped_reuses_a_class_only_when_it_is_exhausted():
    for partition in (grouped(DATASET, 20, s=20, train_size=60, test_size=20), iid(DATASET, 7, train_size=500)):
        uses = np.bincount(np.concatenate(partition.train), minlength=len(TRAIN_Y))
        for label in range(10):
            assert np.ptp(uses[label == TRAIN_Y]) <= 1


def test_groups_of_other_class_counts():
    np.testing.assert_array_equal(np.concatenate(dominant_classes(10)), [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9, 0])
    assert [(group[0], group[-1]) for group in dominant_classes(62)] == [(0, 9), (10, 35), (36, 61)]
    assert [len(group) for group in dominant_classes(100)] == [20] * 5
    assert [len(group) for group in dominant_classes(3)] == [1] * 3
    custom = grouped(DATASET, 2, s=0, train_size=10, test_size=10, groups=[[1], [2, 3]])
    assert set(TRAIN_Y[custom.train[0]]) == {1}
    assert set(TRAIN_Y[custom.train[1]]) == {2, 3}


def test_drawn_sizes_are_the_choices_equally_often():
    assert np.bincount(draw_sizes((300, 600, 1200), 3000, seed=5) // 300).max() < 1150
    # As in stored results.
    assert draw_sizes((300, 600, 1200), 8, seed=7).tolist() == [300, 300, 300, 600, 600, 1200, 600, 1200]


# Pathological


@fast
@given(
    num_clients=st.integers(1, 12),
    protocol=st.sampled_from(["random", "clustered"]),
    train_size=st.integers(8, 120),
    test=st.integers(8, 40),
    seed=seeds,
)
def test_pathological_clients_hold_few_classes_evenly(num_clients, protocol, train_size, test, seed):
    partition = pathological(DATASET, num_clients, protocol=protocol, train_size=train_size, test_size=test, seed=seed)
    assert_distinct(partition.train + partition.test)
    train, held_out = table(partition.train), table(partition.test)
    for client in range(num_clients):
        for counts, size in ((train[client], train_size), (held_out[client], test)):
            held = counts[counts > 0]
            assert counts.sum() == size
            assert len(held) == PATHOLOGICAL_CLASSES[client % 5]
            assert np.ptp(held) <= 1
        np.testing.assert_array_equal(train[client] > 0, held_out[client] > 0)


# Dirichlet


@fast
@given(num_clients=st.integers(1, 10), beta=st.sampled_from([0.3, 1.0, 100.0]), seed=seeds)
def test_dirichlet_by_set_deals_everything_once(num_clients, beta, seed):
    partition = dirichlet(DATASET, num_clients, beta=beta, min_size=3, seed=seed)
    np.testing.assert_array_equal(np.sort(np.concatenate(partition.train)), np.arange(len(TRAIN_Y)))
    np.testing.assert_array_equal(np.sort(np.concatenate(partition.test)), len(TRAIN_Y) + np.arange(len(TEST_Y)))
    assert min(sizes(partition.train)) >= 3
    assert min(sizes(partition.test)) >= 1
    # The same proportions: three training examples for each test example, up to the rounding of both.
    assert np.abs(table(partition.train) - 3 * table(partition.test)).max() <= 4 + 3 * num_clients


@fast
@given(num_clients=st.integers(1, 10), beta=st.sampled_from([0.3, 1.0, 100.0]), seed=seeds, keep_split=st.booleans())
def test_dirichlet_merged_deals_everything_once(num_clients, beta, seed, keep_split):
    dataset = DATASET._replace(keep_split=keep_split)
    partition = dirichlet(dataset, num_clients, beta=beta, protocol="fedas", seed=seed)
    np.testing.assert_array_equal(np.sort(np.concatenate(partition.train + partition.test)), np.arange(len(POOL_Y)))
    held = np.add(sizes(partition.train), sizes(partition.test))
    assert held.min() >= 40
    if keep_split:
        assert all(hand.max() < len(TRAIN_Y) for hand in partition.train)
        assert all(hand.min() >= len(TRAIN_Y) for hand in partition.test)
        # The pool is divided 3 to 1, and each client's part of a class within one example of it.
        both = table(partition.train) + table(partition.test)
        assert np.abs(table(partition.train) - 0.75 * both).max() < 1.01
    else:
        np.testing.assert_array_equal(sizes(partition.train), np.round(0.75 * held))


@pytest.mark.parametrize("protocol", ["fedpac", "fedas"])
def test_dirichlet_bounds_sizes(protocol):
    partition = dirichlet(DATASET, 5, beta=1.0, protocol=protocol, train_size=30, test_size=[1, 2, 3, 4, 5])
    assert max(sizes(partition.train)) <= 30
    assert (np.array(sizes(partition.test)) <= [1, 2, 3, 4, 5]).all()


def turns(train, test, num_classes):
    """Dataset of so many rows whose classes take turns."""
    return labeled(np.arange(train) % num_classes, np.arange(train, train + test) % num_classes)


@pytest.mark.parametrize("beta", [0.3, 1e-5])
@pytest.mark.parametrize("protocol", ["fedpac", "fedas"])
def test_500_clients_and_100_classes_are_served(protocol, beta, monkeypatch):
    """As many rows as CIFAR-100 has. With a tiny beta each class has one client, and 400 clients begin with nothing."""
    monkeypatch.setattr(dirichlet_module, "MAX_TRIES", 3)
    dataset = turns(50_000, 10_000, 100)
    with contextlib.nullcontext() if beta == 0.3 else pytest.warns(UserWarning, match="were moved from the largest"):
        partition = dirichlet(dataset, 500, beta=beta, protocol=protocol)
    np.testing.assert_array_equal(np.sort(np.concatenate([*partition.train, *partition.test])), np.arange(60_000))
    train, test = np.array(sizes(partition.train)), np.array(sizes(partition.test))
    assert test.min() >= 1
    assert (train if protocol == "fedpac" else train + test).min() >= (10 if protocol == "fedpac" else 40)


def test_a_draw_that_is_rare_is_found():
    """In one of some hundred draws, of which the first leave five of the clients too small, none is."""
    partition = dirichlet(turns(50_000, 10_000, 10), 100, beta=0.1, protocol="fedas")
    assert np.add(sizes(partition.train), sizes(partition.test)).min() >= 40


def test_all_that_can_be_met_is_met():
    """To the last example: 1,200 for 40 clients of 30. One more cannot be met, which is said at once."""
    with pytest.warns(UserWarning, match="none of 20 "):
        partition = dirichlet(turns(1200, 400, 10), 40, beta=0.1, min_size=30)
    assert sizes(partition.train) == [30] * 40
    with pytest.raises(InvalidInput, match="40 clients cannot each have 31 of the 1200 training examples"):
        dirichlet(turns(1200, 400, 10), 40, beta=0.1, min_size=31)


# IID


@fast
@given(num_clients=st.integers(1, 40), seed=seeds)
def test_iid_shares_everything_evenly(num_clients, seed):
    partition = iid(DATASET, num_clients, seed=seed)
    np.testing.assert_array_equal(np.sort(np.concatenate(partition.train)), np.arange(len(TRAIN_Y)))
    np.testing.assert_array_equal(np.sort(np.concatenate(partition.test)), len(TRAIN_Y) + np.arange(len(TEST_Y)))
    assert np.ptp(sizes(partition.train)) <= 1
    assert np.ptp(sizes(partition.test)) <= 1


# Refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: grouped(DATASET, 2, train_size=600), "needs 172 training examples of class"),
        (lambda: grouped(DATASET, 2, train_size=[60, 60, 60]), "one for each of 2 clients"),
        (lambda: grouped(DATASET, 2, train_size=10, groups=[[10]]), "between 0 and 9"),
        (
            lambda: dirichlet(DATASET, 44, beta=0.5, protocol="fedas"),
            "1 of the 1200 training examples and 1 of the 400 test examples and 40 of the 1600 examples: use fewer",
        ),
        (lambda: with_validation(iid(DATASET, 4), 1.0), "above 0 and below 1"),
        (lambda: with_validation(with_validation(iid(DATASET, 4), 0.1), 0.1), "already"),
        (lambda: with_validation(Partition([[1], [2]], [[3], [4]]), 0.5), "two training examples"),
        (lambda: pathological(labeled(TRAIN_Y % 7, TEST_Y % 7), 5, train_size=9), "3/3/5/5/8 .* where there are 7"),
        (
            lambda: pathological(DATASET, 5, protocol="clustered", classes_per_group=[9] * 11),
            "not 11 different sets of 9 of 10",
        ),
        (lambda: draw_sizes([300, 0], 5), "sizes to choose from"),
    ],
)
def test_invalid_input_gives_a_one_line_error(call, message):
    with pytest.raises(InvalidInput, match=message) as error:
        call()
    assert "\n" not in str(error.value)


# By name


def test_make_passes_options_that_are_given():
    named = make("dirichlet", DATASET, 5, seed=3, beta=0.5, protocol="fedas", min_size=None, train_size=9)
    assert_same(named, dirichlet(DATASET, 5, seed=3, beta=0.5, protocol="fedas", train_size=9))


def test_validation_examples_are_training_examples_set_apart():
    parts = grouped(DATASET, 5, train_size=[2, 5, 20, 60, 61], test_size=9)
    found = with_validation(parts, 0.25, seed=3)
    assert sizes(found.validation) == [1, 1, 5, 15, 15]
    assert_same((found.test,), (parts.test,))
    for row, train, validation in zip(parts.train, found.train, found.validation, strict=True):
        np.testing.assert_array_equal(np.sort(row), np.sort(np.concatenate([train, validation])))
    assert_same(found, with_validation(parts, 0.25, seed=3))
    assert any((a != b).any() for a, b in zip(found.validation, with_validation(parts, 0.25).validation, strict=True))


def test_nobody_trains_on_the_validation_examples_of_another_client():
    # Forty clients of 70 hold each of 1,200 examples twice or three times, with other clients each time.
    parts = iid(DATASET, 40, train_size=70, test_size=10)
    found = with_validation(parts, 0.1)
    apart = np.unique(np.concatenate(found.validation))
    assert not np.isin(np.concatenate(found.train), apart).any()
    assert min(sizes(found.validation)) >= 7
    assert sum(sizes(found.validation)) < 2 * 40 * 7


def test_a_client_keeps_its_last_training_example():
    rows = [np.array([7]), np.array([3, 4]), np.array([3, 4])]
    found = with_validation(Partition(rows, rows), 0.9)
    assert sizes(found.train) == [1, 1, 1]
    assert sizes(found.validation) == [0, 1, 1]
    # Other clients set both examples of the first one apart.
    rows = [np.array([1, 2]), *(np.array([shared, other]) for shared in (1, 2) for other in range(3, 20))]
    found = with_validation(Partition(rows, rows), 0.5)
    assert np.isin([1, 2], np.concatenate(found.validation[1:])).all()
    assert sizes(found.train)[0] == sizes(found.validation)[0] == 1
    # It keeps the one that it would keep alone, in the same order of twenty examples.
    alone = with_validation(Partition([rows[0], np.array([18, 19])], rows[:2]), 0.5)
    np.testing.assert_array_equal(found.train[0], alone.train[0])


def test_dirichlet_loses_no_example_to_rounding():
    """In float64, 0.7 + 0.1 is just below 0.8."""
    counts = dirichlet_module._cut(np.array([[0.7, 0.1, 0.2]]), np.array([10]))
    np.testing.assert_array_equal(counts[:, 0], [7, 1, 2])


def test_a_client_with_its_share_exactly_gets_no_more_of_fedas():
    counts = dirichlet_module._fill(np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([10, 10]))
    np.testing.assert_array_equal(counts, [[10, 0], [0, 10]])


def test_what_a_client_sets_apart_does_not_depend_on_the_others():
    rows = [np.arange(20), np.arange(20, 50), np.arange(50, 57)]
    whole = with_validation(Partition(rows, rows), 0.3)
    alone = with_validation(Partition(rows[2:], rows[2:]), 0.3)
    np.testing.assert_array_equal(whole.validation[2], alone.validation[0])
