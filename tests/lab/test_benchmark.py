"""The benchmark: both sides of its comparison do the same work, it counts right, and its command line behaves."""

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from experiments.lab.benchmark import (
    measure,
    processes,
    records,
    sections,
    workload,
)
from experiments.lab.benchmark.__main__ import SECTIONS, main
from experiments.lab.benchmark.jax_rounds import Rounds, convolutions, local_training
from experiments.lab.pages import performance
from pfl_jax import simulate
from pfl_jax.errors import InvalidInput
from pfl_jax.primitives.head_combination import head_weights

ROOT = Path(__file__).parents[2]

# One batch holds a whole client, so that both sides see the same batches whatever their shuffles.
SCALE = dataclasses.replace(workload.QUICK, clients=3, examples=40, batch_size=64, epochs=2)


@pytest.fixture
def torch_rounds():
    """The PyTorch side, on one thread: pytest's workers fill the machine already."""
    module = pytest.importorskip("experiments.lab.benchmark.torch_rounds", exc_type=ImportError)
    threads = module.torch.get_num_threads()
    module.torch.set_num_threads(1)
    yield module
    module.torch.set_num_threads(threads)


@pytest.mark.slow
def test_the_pytorch_round_is_our_round(torch_rounds):
    data = workload.federation(SCALE.clients, SCALE.examples)
    ours = Rounds(workload.method("fedpac", SCALE), data, participation=1.0, chunk=1, mesh=None)
    params = {"backbone": ours.state.server.backbone, "head": ours.state.server.head}
    theirs = torch_rounds.FedPAC(params, torch_rounds.clients(data), workload.dataset().num_classes, SCALE)
    # The second round has centroids to align to and heads that differ.
    for _ in range(2):
        received, trained = theirs.round()
        ours.round()
        assert received == pytest.approx(float(ours.evaluate()["accuracy"].mean()), abs=1e-6)
        assert trained == pytest.approx(float(ours.state.trained["accuracy"].mean()), abs=1e-6)
    np.testing.assert_allclose(theirs.server.centroids.cpu(), ours.state.server.centroids, atol=1e-5)
    kernel = np.asarray(ours.state.clients["kernel"])
    heads = theirs.server.heads.cpu().numpy()[:, : kernel[0].size].reshape(len(kernel), -1, kernel.shape[1])
    np.testing.assert_allclose(heads.swapaxes(1, 2), kernel, atol=1e-5)


def test_the_pytorch_training_is_our_training(torch_rounds):
    data = workload.federation(1, SCALE.examples)
    network = torch_rounds.Network(workload.network().init(jax.random.key(0)))
    examples = [train for train, _ in torch_rounds.clients(data)]
    torch_rounds.train_clients(network, torch_rounds.weights(network), examples, 2, SCALE)
    ours = local_training(data, SCALE, clients=1, epochs=2, chunk=1, mesh=None)()
    kernel = network.backbone[0].weight.detach().cpu().numpy().transpose(2, 3, 1, 0)
    np.testing.assert_allclose(kernel, ours["backbone"]["conv1"]["kernel"][0], atol=1e-6)


def test_the_pytorch_head_weights_are_ours(torch_rounds):
    generator = np.random.default_rng(0)
    mu = generator.normal(size=(6, 3, 4)).astype(np.float32) * 0.2
    variance, counts = generator.uniform(1, 50, 6).astype(np.float32), np.full(6, 30)
    want = head_weights(mu, variance, counts, solver="interior_point")
    np.testing.assert_allclose(torch_rounds.head_weights(mu, variance, counts), want, atol=2e-3)


def test_operations_are_those_that_xla_counts():
    model = workload.network()
    params = jax.eval_shape(model.init, jax.random.key(0))
    pictures = jax.ShapeDtypeStruct((50, *workload.dataset().input_shape), np.float32)
    with convolutions("lax"):
        counted = jax.jit(model.apply).lower(params, pictures).cost_analysis()["flops"]
    # XLA leaves out the second layer's products with its padding: 2 of 10 * 5 places and taps in either direction. It
    # also counts pooling, biases and activations.
    padding = 2 * (50**2 - 48**2) * 16 * 32
    assert workload.operations()["forward"] - padding == pytest.approx(counted / 50, rel=0.02)
    assert workload.operations() == {"forward": 3_228_160, "training": 9_223_680}


def test_contestants_take_turns():
    calls = []
    times = measure.interleaved(3, {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")})
    assert calls == list("abbaab")
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}


def test_the_peak_is_measured_on_all_devices():
    peak = measure.matmul_peak(64, simulate.client_mesh(), repetitions=1)
    assert peak["peak"] == max(peak["one_device"], peak["every_device"]) > 0


def test_the_rate_of_copies_is_of_bytes_and_seconds(monkeypatch):
    monkeypatch.setattr(measure, "seconds", lambda work: (work(), 0.5)[1])
    assert measure.copy_rate(1000, repetitions=2) == 2000


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    first, second = (sections.start(str(tmp_path), name, "fedavg") for name in ("first", "second"))
    assert first["compiled"] == first["programs"] > 0
    assert second["programs"] == first["programs"]
    assert second["compiled"] == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--chunks 0", "--chunks must be at least 1"),
        ("--chunks many", "--chunks must be a whole number, not 'many'"),
        ("--only nothing", "unknown section 'nothing'"),
        ("--fast", "unrecognized arguments: --fast"),
        ("--out missing/figures.json", "missing/figures.json is not there"),
    ],
)
def test_bad_input_is_one_line(words, expected, capsys):
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert expected in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "words", "expected"),
    [
        (processes, "--out pyproject.toml", "pyproject.toml is there already"),
        (processes, "--clients 0", "--clients must be at least 1, not 0"),
        (processes, "--processes 2 0", "--processes must be at least 1, not 0"),
        (processes, "--checkout docs", "--checkout docs: no experiments/emnist.py there"),
    ],
)
def test_bad_input_of_the_smaller_commands_is_one_line(program, words, expected, capsys):
    assert program.main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {expected}")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_processes_are_compared(tmp_path):
    words = ["--clients", "50", "--processes", "1", "2", "--out", str(tmp_path / "figures.json")]
    assert processes.main(words) == 0
    one, two = json.loads((tmp_path / "figures.json").read_text())["processes"]["rows"]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert min(one["largest peak MiB"], two["largest peak MiB"]) > 100


def test_a_failed_process_is_told(tmp_path, capsys):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "emnist.py").touch()
    (tmp_path / "experiments" / "__main__.py").write_text("raise SystemExit('it has no data')")
    assert processes.main(["--clients", "2", "--processes", "1", "--checkout", str(tmp_path)]) == 2
    assert "one of 1 processes ended with exit code 1: it has no data" in capsys.readouterr().err


def test_figures_are_never_overwritten(tmp_path, capsys):
    file = tmp_path / "figures.json"
    file.write_text("mine")
    assert main(["--out", str(file)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert file.read_text() == "mine"


def command(*words, cwd):
    """Runs the benchmark as a user does; returns what it printed."""
    arguments = [sys.executable, "-m", "experiments.lab.benchmark", *words]
    environment = measure.os.environ | {"PFL_JAX_CACHE": str(cwd / "cache"), "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(arguments, cwd=cwd, env=environment, check=True, capture_output=True, text=True).stdout


def test_rows_become_tables():
    rows = [{"what": "a", "s": 0.012345, "runs": [1.0, 2.0]}, {"what": "b", "s": 12345.6, "cohort": 3, "ratio": None}]
    section = records.Section("Times", rows, "A note.")
    want = "## Times\n\n| what | s | cohort | ratio |\n| --- | --- | --- | --- |\n"
    want += "| a | 0.0123 |  |  |\n| b | 12,346 | 3 |  |\n\nA note.\n"
    assert records.markdown([section]) == want
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(section.terminal())
    shown = console.export_text()
    assert all(words in shown for words in ("Times", "ratio", "0.0123", "12,346", "A note."))
    whole = json.loads(records.as_json({"cpu": "x"}, {"times": section}))
    assert whole == {"machine": {"cpu": "x"}, "times": {"title": "Times", "rows": rows, "note": "A note."}}


@pytest.mark.slow
def test_a_part_of_it_in_one_command(tmp_path):
    out = command("--quick", "--only", "training", "waste", "--out", "figures.json", cwd=tmp_path)
    assert "FedPAC round" in out
    assert "no GPU: GPU rows need one, same command" in out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["machine"]["quick"]
    assert ("PyTorch" in {row["by"] for row in figures["training"]["rows"]}) == sections.has_torch()
    assert figures["training"]["rows"][0]["examples/s"] > 0
    waste = figures["waste"]["rows"]
    assert {row["clients"] for row in waste} == {20, 100}
    assert all(row["chunk 1, %"] == 0 < row["chunk all, %"] < 100 for row in waste)


@pytest.mark.slow
def test_all_of_it(tmp_path):
    out = command("--quick", "--only", *SECTIONS, "--out", "figures.json", cwd=tmp_path)
    figures = json.loads((tmp_path / "figures.json").read_text())
    rows = {name: figures[name]["rows"] for name in SECTIONS}
    assert all(figures[name]["title"].partition(",")[0] in out for name in SECTIONS)
    assert {row["method"] for row in rows["methods"]} == {"fedavg", "fedpac", "fedas"}
    assert all(row["peak MiB"] > 1 for row in rows["growth"])
    early, last, first, second, run, another = rows["memory_growth"]
    assert another["s"] < run["s"]
    assert last["MiB"] < early["MiB"] + 20
    assert first["compiled"] == second["programs"] > second["compiled"] == 0
    assert {row["form"] for row in rows["variants"]} == {"lax", "matmul", "direct"}
    assert all(rate > 0 for row in rows["chunks"] for heading, rate in row.items() if heading.startswith("chunk"))
    assert all(row["peak MiB"] > row["states MiB"] for row in rows["many_clients"])
    assert {(row["method"], row["states on"]) for row in rows["client_counts"]} == {
        *(("fedavg", ""), ("fedpac", "host"), ("fedpac", "disk"), ("fedas", "host"), ("fedas", "disk"))
    }
    assert all(row["peak MiB"] > row["states MiB"] for row in rows["client_counts"])
    assert rows["sweep"][1]["ratio, with compilation"] > 0


MACHINE = {
    "cpu": "A Processor",
    "cores": 2,
    "versions": {"jax": "0.10.1"},
    "date": "2026-11-23T05:00:00+00:00",
    "peak": {"peak": 155.4e9, "memory": 4.51e9},
}


def test_a_measured_part_is_a_table_with_its_machine(tmp_path):
    times = records.Section("Times", [{"what": "a", "s": 0.5}, {"what": "b", "s": 200.0}], "medians")
    (tmp_path / "some.json").write_text(records.as_json(MACHINE, {"times": times}))
    want = "| what | s |\n| --- | --- |\n| a | 0.5 |\n| b | 200 |\n\n"
    want += "Medians. From `results/benchmark/some.json`, 2026-11-23: "
    want += "2 cores of A Processor, 155 GFLOP/s in matrix products, 4.5 GB/s in copies by one core, jax 0.10.1.\n"
    assert performance.sections(tmp_path) == {"times": want}
    (tmp_path / "other.json").write_text(records.as_json(MACHINE, {"times": times}))
    with pytest.raises(InvalidInput, match=r"two files of .* have the section times: keep one"):
        performance.sections(tmp_path)
