"""The protocol before_aggregation, against bookkeeping that is slow and obvious, and scores on validation examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import diverging, received, tiny_federation, tiny_method
from trees import row

from pfl_jax import InvalidInput, Settings, simulate, sweep
from pfl_jax import data as pfl_data
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


def assert_scores(got, want):
    for name in ("accuracy", "loss"):
        np.testing.assert_allclose(got[name], want[name], rtol=2e-4, atol=2e-5)


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
    alone, together = play(tiny_method("fedper")), sweep.run(lambda: tiny_method("fedper"), DATA, SOME, keys)
    assert [one.before_aggregation is None for one in alone] == [True, False, True, False]
    for one, every in zip(alone, together, strict=True):
        assert (every.before_aggregation is None) == (one.before_aggregation is None)
        if one.before_aggregation is not None:
            assert_scores(row(every.before_aggregation, 1), one.before_aggregation)
            assert not np.array_equal(every.before_aggregation["loss"][0], every.before_aggregation["loss"][1])


# Validation examples; client 3 has none, and client 1 only one.
VALIDATION = {
    "validation_index": jnp.roll(DATA.test_index[:, 4:9], 1, axis=0),
    "validation_count": jnp.array([5, 1, 3, 0, 5, 2, 4], jnp.int32),
}
VALIDATED = DATA._replace(**VALIDATION)
# The same federation with them in the place of the test examples, of which every client has some.
SWAPPED = DATA._replace(
    test_index=VALIDATION["validation_index"], test_count=jnp.maximum(VALIDATION["validation_count"], 1)
)


def test_validation_scores_are_test_scores_of_the_swapped_federation():
    settings = Settings(rounds=2, participation=0.6, before_aggregation=True)
    results, swapped, plain = (play(tiny_method(), settings, data) for data in (VALIDATED, SWAPPED, DATA))
    some_clients = np.array([0, 1, 2, 4, 5, 6])
    for result, other, without in zip(results, swapped, plain, strict=True):
        for protocol in ("received", "trained", "before_aggregation"):
            scores = getattr(result, protocol)
            assert_scores(*(row(some, some_clients) for some in (scores.validation, getattr(other, protocol))))
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
