"""Wasted steps counted one by one, the chunk that a run chooses, and how clients are dealt to devices."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import tiny_federation, tiny_model

from pfl_jax import Settings, backends, methods, models, simulate
from pfl_jax.data.federated import spread
from pfl_jax.engine import rounds
from pfl_jax.engine.chunking import most_clients, resolved, typical_cohort, wasted_share
from pfl_jax.primitives import LocalTraining


def counted(counts, batch_size, chunk, devices, drop_last):
    """Goes through the schedule of `map_places` step by step: device by device, chunk by chunk, client by client."""
    of_client = (max(count // batch_size, 1) if drop_last else int(np.ceil(count / batch_size)) for count in counts)
    steps = sorted(of_client, reverse=True)
    wasted = executed = 0
    size = int(np.ceil(len(steps) / devices)) if chunk is None else chunk
    own = {device: [] for device in range(devices)}
    for rank, length in enumerate(steps):
        turn, position = divmod(rank, devices)
        own[devices - 1 - position if turn % 2 else position].append(length)
    for lengths in own.values():
        for start in range(0, len(lengths), size):
            together = lengths[start : start + size]
            executed += max(together) * len(together)
            wasted += sum(max(together) - length for length in together)
    return wasted / executed


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(1, 300), min_size=1, max_size=12),
    batch_size=st.integers(1, 60),
    chunk=st.none() | st.integers(1, 14),
    devices=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_wasted_steps_are_those_counted_one_by_one(counts, batch_size, chunk, devices, drop_last):
    schedule = {"batch_size": batch_size, "chunk": chunk, "devices": devices, "drop_last": drop_last}
    share = wasted_share(np.array(counts), **schedule)
    assert share == pytest.approx(counted(counts, **schedule), abs=1e-12)
    assert chunk != 1 or share == 0


@settings(deadline=None, max_examples=25)
@given(loads=st.lists(st.integers(1, 300), min_size=1, max_size=14), devices=st.integers(1, 4))
def test_devices_get_equal_numbers_and_similar_loads(loads, devices):
    size, loads = len(loads), np.sort(loads)[::-1]
    places = spread(size, devices)
    assert sorted(places[places < size]) == list(range(size))
    # Free places are the last ones, and a device's clients are sorted.
    assert (np.diff(places, axis=1) > 0).all() or size <= devices
    numbers, totals = np.sum(places < size, axis=1), np.append(loads, 0)[places].sum(axis=1)
    assert np.ptp(numbers) <= 1
    # In any two turns that follow each other the devices' loads differ by less than the first turn's.
    assert np.ptp(totals) <= loads[0]


CNN, MLP = models.fedpac_cnn((28, 28, 1), 10), models.mlp((8, 8, 1), 10)


@pytest.mark.parametrize(
    ("model", "counts", "backend", "devices", "chunk"),
    [
        (CNN, np.full(20, 600), "cpu", 1, 1),
        (CNN, np.full(20, 600), "gpu", 1, 20),
        # Each of several devices has its share of them.
        (CNN, np.full(20, 600), "gpu", 4, 5),
        (MLP, np.full(20, 600), "cpu", 1, 20),
        (MLP, np.full(20, 600), "cpu", 2, 10),
        # Sorted pairs waste nothing, and larger chunks more than a tenth; on two devices a pair is apart.
        (CNN, np.repeat([10, 100, 1000], 2), "gpu", 1, 2),
        (CNN, np.repeat([10, 100, 1000], 2), "gpu", 2, 1),
        # Of several runs the one that wastes most decides.
        (CNN, np.array([[100] * 6, [10, 10, 100, 100, 1000, 1000]]), "tpu", 1, 2),
    ],
)
def test_auto_is_all_clients_at_once_where_that_is_fast(model, counts, backend, devices, chunk):
    def schedule(index):
        return methods.fedprox(model, LocalTraining(batch_size=10), mu=0.1 / (1 + index))

    for method in (schedule, schedule(0)._replace(survey=None)):
        settings = Settings(rounds=3, attack="signs")
        found = resolved(settings, method, counts, devices=devices, backend=backend)
        assert found == replace(settings, chunk=chunk)
        assert most_clients(method, backend) == (1 if backend == "cpu" and model is CNN else None)
    assert resolved(Settings(3, chunk=None), schedule, counts, backend=backend).chunk is None


def test_a_backend_may_limit_the_chunks_of_convolutions(monkeypatch):
    monkeypatch.setitem(backends.BACKENDS, "default", backends.Choices("matmul", 6))
    chunks = [
        resolved(Settings(3), methods.fedavg(model), np.full(20, 600), backend="gpu").chunk for model in (CNN, MLP)
    ]
    # Chunks of equal size: four of 5.
    assert chunks == [5, 20]


def test_a_run_makes_the_choice(monkeypatch):
    """On a CPU a multilayer perceptron's clients are trained together; conformance says that it changes nothing."""
    method, seen, mapped = methods.fedavg(tiny_model(), LocalTraining(batch_size=8)), [], rounds.map_places

    def spied(*arguments, chunk, **options):
        seen.append(chunk)
        return mapped(*arguments, chunk=chunk, **options)

    monkeypatch.setattr(rounds, "map_places", spied)
    next(simulate.run(method, tiny_federation((9, 9, 9, 9)), Settings(rounds=1), jax.random.key(0)))
    assert set(seen) == {4}


def test_a_typical_cohort_has_the_sizes_between_the_quantiles():
    counts = np.array([[8, 1, 7, 2, 6, 3, 5, 4], [10, 10, 10, 10, 90, 90, 90, 90]])
    np.testing.assert_array_equal(typical_cohort(counts, 2), [[3, 7], [10, 90]])
