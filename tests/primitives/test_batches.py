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

from experiments.commands.main import main
from experiments.config.request import assignments, parse
from pfl_jax import data, simulate
from pfl_jax.base import Batches, ClientData
from pfl_jax.data.federated import client_data
from pfl_jax.engine.chunking import choose_chunk, wasted_step_share
from pfl_jax.methods import METHODS
from pfl_jax.primitives import local_sgd

RELEASED = Batches(drop_last=True, shuffle=False)


def taken(batches, n, batch_size, epochs, key=0, padding=0):
    """The examples of each step, epoch by epoch: lists of row numbers."""
    rows = jnp.arange(n + padding)
    examples = ClientData(rows, rows, rows < n, batches=batches)
    most = epochs * -(-n // batch_size)

    def step(carry, batch):
        seen, index = carry
        return seen.at[index].set(jnp.where(batch.mask, batch.x, -1)), index + 1

    start = (jnp.full((most, batch_size), -2), jnp.zeros((), jnp.int32))
    seen, steps = local_sgd.fold_batches(
        jax.random.key(key), start, examples, step, epochs=epochs, batch_size=batch_size
    )
    assert steps == local_sgd.num_steps(n, batch_size, epochs, drop_last=batches.drop_last)
    return [[int(row) for row in batch if row >= 0] for batch in seen[: int(steps)]]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("n", "sizes"), [(11, [4, 4]), (12, [4, 4, 4]), (5, [4]), (3, [3])])
def test_an_incomplete_batch_is_dropped_unless_it_is_the_only_one(n, sizes, shuffle):
    batches = taken(Batches(drop_last=True, shuffle=shuffle), n, 4, 2)
    assert [len(batch) for batch in batches] == sizes * 2
    kept = taken(Batches(shuffle=shuffle), n, 4, 2)
    assert sum(map(len, kept)) == 2 * n


def test_the_fixed_order_is_the_same_in_all_epochs_runs_and_paddings():
    batches = taken(Batches(shuffle=False), 11, 4, 2)
    assert batches[:3] == batches[3:] == taken(Batches(shuffle=False), 11, 4, 1, key=7, padding=9)
    order = [row for batch in batches[:3] for row in batch]
    assert sorted(order) == list(range(11))
    # The rows of a client may be sorted by class: their own order will not do.
    assert order != sorted(order)
    assert taken(Batches(), 11, 4, 2)[:3] != taken(Batches(), 11, 4, 2)[3:]


@pytest.mark.parametrize(("n", "padding"), [(11, 0), (11, 6), (3, 2), (8, 0)])
def test_always_visited_examples(n, padding):
    rows = jnp.arange(n + padding)
    examples = ClientData(rows, rows, rows < n, batches=RELEASED)
    visited = np.flatnonzero(local_sgd.always_visited(examples, 4))
    rows_taken = [row for batch in taken(RELEASED, n, 4, 1, padding=padding) for row in batch]
    np.testing.assert_array_equal(visited, sorted(rows_taken))
    for batches in (Batches(), Batches(drop_last=True), Batches(shuffle=False)):
        kept = local_sgd.always_visited(examples._replace(batches=batches), 4)
        np.testing.assert_array_equal(kept, examples.mask)


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
    share = wasted_step_share(np.array(counts), batch_size=batch_size, chunk=chunk, drop_last=True)
    assert share == pytest.approx(1 - sum(steps) / executed, abs=1e-12)
    owners = np.arange(len(counts)) % 2
    own = [sorted((max(count // batch_size, 1) for count in counts[device::2]), reverse=True) for device in (0, 1)]
    executed = sum(
        part[0] * len(part) for row in own for part in (row[i : i + chunk] for i in range(0, len(row), chunk))
    )
    share = wasted_step_share(
        np.array(counts), batch_size=batch_size, chunk=chunk, devices=2, owners=owners, drop_last=True
    )
    assert share == pytest.approx(1 - sum(steps) / executed, abs=1e-12)


def test_choose_chunk_ignores_dropped_batches():
    counts = np.array([10, 19, 15, 11])
    options = {"batch_size": 10, "devices": 1, "backend": "gpu"}
    assert choose_chunk(counts, **options, drop_last=True) == 4
    assert choose_chunk(counts, **options) < 4


def test_scaffold_counts_the_steps_that_it_takes():
    """c_i+ = (w - w_i) / (S lr) in the first round: with 11 examples in batches of 4, S is 2 in an epoch, not 3."""
    method = METHODS["scaffold"](tiny_model(), lr=0.1, momentum=0.0, weight_decay=0.0, batch_size=4, epochs=3)
    examples = client_data(tiny_federation((11,))._replace(batches=Batches(drop_last=True)), 0, "train")
    key = jax.random.key(0)
    server = method.init_server(key)
    result = method.local(key, server, method.init_client(key, server, examples), examples)
    moved = jax.tree.map(lambda old, new: (old - new) / (6 * 0.1), server.params, result.message.value.params)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6), result.client, moved)


@pytest.mark.parametrize("name", ["fedavg", "apfl", "pfedme", "fedrod"])
def test_methods_train_on_the_batches_of_their_data(name):
    """What an epoch in a fixed order leaves out may be anything."""
    method = METHODS[name](tiny_model(), lr=0.1, batch_size=4, epochs=2)
    examples = client_data(tiny_federation((11,))._replace(batches=RELEASED), 0, "train")
    # Pixels far away in the examples that are never visited.
    visited = local_sgd.always_visited(examples, 4)
    strange = examples._replace(x=jnp.where(visited[:, None, None, None], examples.x, 50.0))
    key = jax.random.key(1)
    server = method.init_server(key)

    def trained(data):
        return method.local(key, server, method.init_client(key, server, examples), data).message

    same = jax.tree.leaves(trained(examples)), jax.tree.leaves(trained(strange))
    for one, other in zip(*same, strict=True):
        np.testing.assert_array_equal(one, other)
    shuffled = jax.tree.leaves(trained(strange._replace(batches=Batches())))
    assert any(np.abs(np.asarray(one) - other).max() > 1e-3 for one, other in zip(same[0], shuffled, strict=True))


def test_batches_belong_to_training_data_alone():
    dataset = data.load("digits")
    parts = data.partition.iid(dataset.train_y, dataset.test_y, num_clients=2, train_size=10, test_size=10)
    federation = data.federate(dataset, parts, batches=RELEASED)
    assert client_data(federation, 0, "train").batches == RELEASED
    assert client_data(federation, 0, "test").batches == Batches()
    assert client_data(data.federate(dataset, parts), 0, "train").batches == Batches()
    runs = data.federated.federate_runs(dataset, [parts, parts], batches=RELEASED)
    assert data.federated.select_run(runs, 1).batches == RELEASED


def test_batches_do_not_depend_on_chunks():
    method = METHODS["fedavg"](tiny_model(), lr=0.1, batch_size=4, epochs=2)
    federation = tiny_federation()._replace(batches=RELEASED)
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


def test_the_command_line_reaches_the_training(tmp_path, capsys):
    words = ["--method", "local", "--rounds", "1", "--num-clients", "2", "--train-size", "25", "--test-size", "10"]
    words += ["--batch-size", "10", "--epochs", "3", "--lr", "0.5", "--no-compilation-cache"]
    losses = []
    for number, own in enumerate(([], ["--no-shuffle"], ["--no-shuffle", "--drop-last"])):
        out = tmp_path / str(number)
        assert main("digits", [*words, *own, "--out", str(out)]) == 0
        losses.append(json.loads((out / "summary.json").read_text())["trained"]["loss"])
        printed = capsys.readouterr().out
        assert ("batches in a fixed order" in printed) == ("--no-shuffle" in own)
        assert ("incomplete batches dropped" in printed) == ("--drop-last" in own)
    assert len(set(losses)) == 3
