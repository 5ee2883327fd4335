"""The benchmark: both sides of its comparison do the same work, it counts right, and its command line behaves."""

import dataclasses
import importlib.util

import jax
import numpy as np
import pytest

from lab.benchmark import head_weights, measure, records, workload
from lab.benchmark.__main__ import main
from lab.benchmark.jax_rounds import local_training, operations

# One batch holds a whole client, so that both sides see the same batches whatever their shuffles.
SCALE = dataclasses.replace(workload.QUICK, clients=3, examples=40, batch_size=64, epochs=2)


@pytest.fixture
def torch_rounds():
    """The PyTorch side, on one thread: pytest's workers fill the machine already."""
    module = pytest.importorskip("lab.benchmark.torch_rounds", exc_type=ImportError)
    threads = module.torch.get_num_threads()
    module.torch.set_num_threads(1)
    yield module
    module.torch.set_num_threads(threads)


def test_the_pytorch_training_is_our_training(torch_rounds):
    data = workload.federation(1, SCALE.examples)
    network = torch_rounds.Network(workload.network().init(jax.random.key(0)))
    examples = torch_rounds.clients(data)
    torch_rounds.train_clients(network, torch_rounds.weights(network), examples, 2, SCALE)
    ours = local_training(data, SCALE, clients=1, epochs=2, chunk=1, mesh=None)()
    kernel = network.backbone[0].weight.detach().cpu().numpy().transpose(2, 3, 1, 0)
    np.testing.assert_allclose(kernel, ours["backbone"]["conv1"]["kernel"][0, 0], atol=1e-6)


def test_operations_are_those_of_all_layers():
    first, *others = 2 * 24**2 * 16 * 25, 2 * 10**2 * 32 * 16 * 25, 2 * 800 * 128, 2 * 128 * 10
    # The first layer's input needs no gradient. XLA leaves out the products with padding, a twentieth.
    assert operations() == pytest.approx(2 * first + 3 * sum(others), rel=0.06)


def test_contestants_take_turns():
    calls = []
    times = measure.interleaved(3, {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")})
    assert calls == list("abbaab")
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}


MACHINE = {"cpu": "A Processor"}
ROWS = [{"what": "a", "s": 0.012345, "runs": [1.0, 2.0]}, {"what": "b", "s": 12345.6, "cohort": 3, "ratio": None}]


def test_sections_are_stored(tmp_path):
    file, section = tmp_path / "benchmark.jsonl", records.Section("Times", ROWS, "a note", MACHINE)
    records.store(file, "times", section)
    records.store(file, "other", section._replace(title="old"))
    records.store(file, "other", section._replace(title="new"))
    assert records.stored(file) == {"times": section, "other": section._replace(title="new")}


@pytest.mark.slow
def test_a_command_stores_what_it_measures(tmp_path, monkeypatch, capsys):
    """Another section of the file stays, and the machine is that of the measurement."""
    for name, value in {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "figures.jsonl"
    records.store(file, "other", records.Section("Other", ROWS, "", MACHINE))
    machine_here = measure.machine
    monkeypatch.setattr(measure, "machine", lambda: machine_here() | MACHINE)
    assert main(["--quick", "--out", str(file)]) == 0
    assert "no GPU: GPU rows need one, lab.gpu" in capsys.readouterr().out
    found = records.stored(file)
    with_torch = importlib.util.find_spec("torch") is not None
    assert {*found} == {"other", "training", *["networks"] * with_torch, "head-weights"}
    machine, rows = found["training"].machine or {}, found["training"].rows
    assert (machine["quick"], machine["cpu"]) == (True, "A Processor")
    assert ("PyTorch" in {row["by"] for row in rows}) == with_torch
    if with_torch:
        own = found["networks"].rows
        assert [row["network"] for row in own] == ["fedpac_cnn"] * 3 + ["fedavg_cnn"] * 3
        for row in own:
            torch_seconds = next(one["s"] for one in own if (one["network"], one["by"]) == (row["network"], "PyTorch"))
            assert row["speed-up"] == (None if row["by"] == "PyTorch" else torch_seconds / row["s"])
    assert rows[0]["examples/s"] > 0
    assert rows[-1]["work"] == "FedPAC round, E = 1, both evaluations"
    weights = found["head-weights"]
    assert [row["clients"] for row in weights.rows] == [2, 3]
    assert weights.headings == ["clients", "quadratic programs, ms", "prototypes, ms", "ratio"]
    for row in weights.rows:
        assert row["ratio"] == row["quadratic programs, ms"] / row["prototypes, ms"] > 0
    # One section alone leaves the others.
    assert main(["--quick", "--only", "head-weights", "--out", str(file)]) == 0
    again = records.stored(file)
    assert again["training"] == found["training"]
    assert again["head-weights"].rows != weights.rows


def test_both_ways_to_weigh_heads_get_a_cohort_in_groups():
    """Clients of a group, 5 apart, have the same classes, and heads of others get less weight."""
    found = head_weights.programs(10, 600)
    for compute in found.values():
        weights = np.asarray(compute())
        np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
        assert weights.min() >= 0
    quadratic = np.asarray(found["quadratic programs"]())
    for client in range(10):
        assert quadratic[client, client % 5] + quadratic[client, client % 5 + 5] > 0.5
