"""Incomplete batches dropped and a fixed order: which examples an epoch takes, and everything that counts its steps."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import tiny_federation, tiny_model

from experiments.cli.request import assignments, parse
from experiments.run.command import main
from pfl_jax import simulate
from pfl_jax.base import ClientData
from pfl_jax.data.federated import client_data
from pfl_jax.engine.chunking import choose_chunk, unused_shares
from pfl_jax.methods import make_method
from pfl_jax.primitives.local_training import LocalTraining

RELEASED = {"drop_last": True, "shuffle": False}


def taken(n, epochs, key=0, padding=0, batch_size=4, **options):
    """The examples of each step, epoch by epoch: lists of row numbers."""
    rows = np.arange(n + padding)
    most = epochs * -(-n // batch_size)
    training = LocalTraining(batch_size=batch_size, epochs=epochs, **options)

    def step(carry, batch, key):
        seen, index = carry
        return seen.at[index].set(jnp.where(batch.mask, batch.x, -1)), index + 1

    start = (np.full((most, batch_size), -2), np.int32(0))
    seen, steps = jax.jit(lambda key, data: training.fold(key, start, data, step))(
        jax.random.key(key), ClientData(rows, rows, rows < n)
    )
    assert steps == training.num_steps(n)
    return [[int(row) for row in batch if row >= 0] for batch in np.asarray(seen)[: int(steps)]]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("n", "sizes"), [(11, [4, 4]), (12, [4, 4, 4]), (5, [4]), (3, [3])])
def test_an_incomplete_batch_is_dropped_unless_it_is_the_only_one(n, sizes, shuffle):
    batches = taken(n, 2, drop_last=True, shuffle=shuffle)
    assert [len(batch) for batch in batches] == sizes * 2
    kept = taken(n, 2, shuffle=shuffle)
    assert sum(map(len, kept)) == 2 * n


def test_the_fixed_order_is_the_same_in_all_epochs_runs_and_paddings():
    batches = taken(11, 2, shuffle=False)
    assert batches[:3] == batches[3:] == taken(11, 1, key=7, padding=9, shuffle=False)
    order = [row for batch in batches[:3] for row in batch]
    assert sorted(order) == list(range(11))
    # The rows of a client may be sorted by class: their own order will not do.
    assert order != sorted(order)
    assert taken(11, 2)[:3] != taken(11, 2)[3:]


@pytest.mark.parametrize(("n", "padding"), [(11, 0), (11, 6), (3, 2), (8, 0)])
def test_always_visited_examples(n, padding):
    mask = jnp.arange(n + padding) < n
    visited = np.flatnonzero(LocalTraining(batch_size=4, **RELEASED).always_visited(mask))
    rows_taken = [row for batch in taken(n, 1, padding=padding, **RELEASED) for row in batch]
    np.testing.assert_array_equal(visited, sorted(rows_taken))
    for options in ({}, {"drop_last": True}, {"shuffle": False}):
        np.testing.assert_array_equal(LocalTraining(batch_size=4, **options).always_visited(mask), mask)


@settings(deadline=None, max_examples=40)
@given(
    counts=st.lists(st.integers(1, 90), min_size=1, max_size=9),
    batch_size=st.integers(1, 40),
    chunk=st.integers(1, 9),
)
def test_wasted_steps_leave_out_dropped_batches(counts, batch_size, chunk):
    steps = sorted((max(count // batch_size, 1) for count in counts), reverse=True)
    chunks = [steps[start : start + chunk] for start in range(0, len(steps), chunk)]
    executed = sum(part[0] * len(part) for part in chunks)
    share = unused_shares(np.array(counts), batch_size=batch_size, chunk=chunk, drop_last=True).steps
    assert share == pytest.approx(1 - sum(steps) / executed, abs=1e-12)
    # Clients that belong to two devices, the largest of each first.
    order = [sorted(range(device, len(counts), 2), key=lambda client: -counts[client]) for device in (0, 1)]
    own = [[max(counts[client] // batch_size, 1) for client in clients] for clients in order]
    places = np.full((2, max(map(len, order))), len(counts))
    for row, clients in zip(places, order, strict=True):
        row[: len(clients)] = clients
    executed = sum(
        part[0] * len(part) for row in own for part in (row[i : i + chunk] for i in range(0, len(row), chunk))
    )
    share = unused_shares(
        np.array(counts), batch_size=batch_size, chunk=chunk, devices=2, places=places, drop_last=True
    ).steps
    assert share == pytest.approx(1 - sum(steps) / executed, abs=1e-12)


def test_choose_chunk_ignores_dropped_batches():
    counts = np.array([10, 19, 15, 11])
    options = {"batch_size": 10, "devices": 1}
    assert choose_chunk(counts, **options, drop_last=True) == 4
    assert choose_chunk(counts, **options) < 4


def test_scaffold_counts_the_steps_that_it_takes():
    """c_i+ = (w - w_i) / (S lr) in the first round: with 11 examples in batches of 4, S is 2 in an epoch, not 3."""
    training = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "batch_size": 4, "epochs": 3, "drop_last": True}
    method = make_method("scaffold", tiny_model(), **training)
    examples = client_data(tiny_federation((11,)), 0, "train")
    key = jax.random.key(0)
    server = method.init_server(key)
    result = method.local(key, server, method.init_client(key, server, examples), examples)
    moved = jax.tree.map(lambda old, new: (old - new) / (6 * 0.1), server.params, result.message.value.params)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6), result.client.trained, moved
    )


@pytest.mark.parametrize("name", ["fedavg", "apfl", "pfedme", "fedrod"])
def test_every_method_has_the_recipes_batches(name):
    """What an epoch in a fixed order leaves out may be anything."""
    examples = client_data(tiny_federation((11,)), 0, "train")
    # Pixels far away in the examples that are never visited.
    visited = LocalTraining(batch_size=4, **RELEASED).always_visited(examples.mask)
    strange = examples._replace(x=jnp.where(visited[:, None, None, None], examples.x, 50.0))
    key = jax.random.key(1)

    def trained(data, **options):
        method = make_method(name, tiny_model(), lr=0.1, batch_size=4, epochs=2, **options)
        server = method.init_server(key)
        return jax.tree.leaves(method.local(key, server, method.init_client(key, server, examples), data).message)

    same = trained(examples, **RELEASED), trained(strange, **RELEASED)
    for one, other in zip(*same, strict=True):
        np.testing.assert_array_equal(one, other)
    shuffled = trained(strange)
    assert any(np.abs(np.asarray(one) - other).max() > 1e-3 for one, other in zip(same[0], shuffled, strict=True))


def test_batches_do_not_depend_on_chunks():
    method = make_method("fedavg", tiny_model(), lr=0.1, batch_size=4, epochs=2, **RELEASED)
    federation = tiny_federation()
    alone, together = (
        next(simulate.run(method, federation, simulate.Settings(rounds=1, chunk=chunk), jax.random.key(3)))
        for chunk in (1, None)
    )
    got, want = (reference.to_numpy(result.state.server) for result in (together, alone))
    for name, value in got.items():
        np.testing.assert_allclose(value, want[name], rtol=1e-4, atol=1e-5)


def test_batches_of_presets():
    for dataset in ("cifar100", "cifar10", "fashion_mnist"):
        for method in ("fedas", "fedper", "local"):
            request = parse(dataset, ["--preset", "fedas", "--method", method])
            assert (request.options.drop_last, request.options.shuffle) == (True, False)
            embedded, changes = request.on_embedded_data()
            assert (embedded.options.drop_last, embedded.options.shuffle) == (False, True)
            assert (
                assignments({name: changes[name] for name in ("drop_last", "shuffle")}) == "--no-drop-last, --shuffle"
            )
    for words in (["--preset", "fedpac"], ["--preset", "fedas", "--no-drop-last", "--shuffle"]):
        options = parse("cifar10", words).options
        assert (options.drop_last, options.shuffle) == (False, True)
    options = parse("digits", ["--preset", "fedas"]).options
    assert (options.drop_last, options.shuffle) == (False, True)


@pytest.mark.slow
def test_the_command_line_reaches_the_training(tmp_path, capsys):
    words = ["--method", "local", "--rounds", "1", "--num-clients", "2", "--train-size", "25", "--test-size", "10"]
    words += ["--batch-size", "10", "--epochs", "3", "--lr", "0.5", "--no-compilation-cache"]
    losses = []
    for number, own in enumerate(([], ["--no-shuffle", "--drop-last"])):
        out = tmp_path / str(number)
        assert main("digits", [*words, *own, "--out", str(out)]) == 0
        losses.append(json.loads((out / "summary.json").read_text())["trained"]["loss"])
        printed = capsys.readouterr().out
        assert ("batches in a fixed order" in printed) == ("--no-shuffle" in own)
        assert ("incomplete batches dropped" in printed) == ("--drop-last" in own)
    assert len(set(losses)) == 2
