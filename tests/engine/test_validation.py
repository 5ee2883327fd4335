"""Scores on validation examples: those of a federation whose test examples they are, wherever states and data are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import tiny_federation, tiny_method
from trees import row

from pfl_jax import InvalidInput, simulate
from pfl_jax import data as pfl_data
from pfl_jax.data import client_data

PLAIN = tiny_federation((9, 20, 14, 5, 12))
# Client 3 has no validation examples, and client 1 only one.
VALIDATION = {
    "validation_index": jnp.stack([jnp.roll(PLAIN.test_index[:, 4:9], 1, axis=0)[client] for client in range(5)]),
    "validation_count": jnp.asarray([5, 1, 3, 0, 5], jnp.int32),
}
DATA = PLAIN._replace(**VALIDATION)
VALIDATED = [0, 1, 2, 4]
# The same federation with the validation examples in the place of the test examples, of which every client has some.
SWAPPED = PLAIN._replace(
    test_index=VALIDATION["validation_index"], test_count=jnp.maximum(VALIDATION["validation_count"], 1)
)
SETTINGS = simulate.Settings(rounds=2, participation=0.6, before_aggregation=True)
KEY = jax.random.key(5)


def play(data, **options):
    return list(simulate.run(tiny_method(), data, SETTINGS, KEY, **options))


def assert_scores(got, want):
    for one, other in zip((got["accuracy"], got["loss"]), (want["accuracy"], want["loss"]), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def test_validation_scores_are_test_scores_of_the_swapped_federation():
    results, swapped, plain = play(DATA), play(SWAPPED), play(PLAIN)
    for result, other, without in zip(results, swapped, plain, strict=True):
        for protocol in ("received", "trained", "before_aggregation"):
            scores = getattr(result, protocol)
            assert_scores(*(row(some, np.array(VALIDATED)) for some in (scores.validation, getattr(other, protocol))))
            assert_scores(scores, getattr(without, protocol))
            assert np.isnan(scores.validation["loss"][3])
        assert without.received.validation is None


def test_a_federation_from_a_partition_has_validation_examples():
    dataset = pfl_data.load("digits")
    parts = pfl_data.partition.grouped(dataset, 3, train_size=[20, 30, 40], test_size=10)
    parts = pfl_data.partition.with_validation(parts, 0.2, seed=1)
    federation = pfl_data.federate(dataset, parts, shift="labels", num_groups=3)
    assert federation.validation_count.tolist() == [4, 6, 8]
    assert federation.train_count.tolist() == [16, 24, 32]
    for client in range(3):
        found, row = client_data(federation, client, "validation"), parts.validation[client]
        mask = np.asarray(found.mask)
        np.testing.assert_array_equal(np.asarray(found.y)[mask], federation.label_map[client][dataset.train_y[row]])
        pixels = np.asarray(federation.x)[np.asarray(federation.validation_index)[client][: len(row)]]
        np.testing.assert_array_equal(pixels, dataset.train_x[row])
    table = pfl_data.class_table(federation, "validation")
    assert table.sum(axis=1).tolist() == [4, 6, 8]
    remaining, others = pfl_data.hold_out(federation, 1)
    assert (remaining.validation_count.tolist(), others.validation_count.tolist()) == ([4, 6], [8])


def test_runs_with_different_validation_tables_are_padded():
    dataset = pfl_data.load("digits")
    parts = [pfl_data.partition.iid(dataset, 2, train_size=size) for size in (10, 30)]
    several = [pfl_data.partition.with_validation(one, 0.2) for one in parts]
    runs = pfl_data.federate_runs(dataset, several)
    assert runs.validation_index.shape == (2, 2, 6)
    assert runs.validation_count.tolist() == [[2, 2], [6, 6]]
    with pytest.raises(InvalidInput, match="all with validation or none"):
        pfl_data.federate_runs(dataset, [several[0], parts[1]])
    with pytest.raises(InvalidInput, match="has no validation examples"):
        client_data(pfl_data.federate(dataset, parts[0]), 0, "validation")
