"""The hour with a GPU: what is measured first, what stays after a stop, and what is carried to another machine."""

import dataclasses
import io
import json
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lab import committed
from lab.benchmark import records, workload
from lab.gpu import __main__ as gpu
from lab.gpu import carried, parts, queued
from lab.gpu.log import Log, OutOfTime
from lab.pages import performance
from lab.queue.planned import planned_runs
from pfl_jax import InvalidInput
from pfl_jax.data import idx_and_cifar
from pfl_jax.data.specs import SPECS

SOON = 1e12


# What is measured, and when.


def test_what_is_measured_is_not_measured_again_and_an_error_costs_only_itself(tmp_path, capsys):
    file, calls = tmp_path / "measurements.jsonl", []

    def work(number):
        calls.append(number)
        return {"s": 1 / number}

    for _ in range(2):
        log = Log(file, "training", SOON)
        for number in (1, 0, 2):
            log.add(str(number), work, number)
    assert calls == [1, 0, 2]
    there = committed.read(file)
    assert list(there) == ["training/0", "training/1", "training/2"]
    assert there["training/0"]["error"] == "ZeroDivisionError: division by zero"
    assert "training/2: s 0.5" in capsys.readouterr().out
    with pytest.raises(OutOfTime):
        Log(file, "training", time.time()).add("3", work, 3)
    Log(file, "training", time.time()).add("2", work, 2)


def test_numbers_of_every_kind_are_kept(tmp_path):
    file = tmp_path / "measurements.jsonl"
    Log(file, "rounds", SOON).add("a", lambda: {"s": np.float32(0.5), "apart": float("nan"), "by": "x", "clients": 3})
    found = committed.read(file)["rounds/a"]
    assert found | {"took, s": 0.0} == {"s": 0.5, "apart": "nan", "by": "x", "clients": 3, "took, s": 0.0}


def test_every_part_ends_in_its_share_of_the_time(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu.Hour, "_process", lambda self, words, until: asked.append((words[1], until)))
    monkeypatch.setattr(gpu.Hour, "_runs", lambda self, until, unpacking: asked.append(("runs", until)))
    began = time.time()
    assert gpu.main(["--minutes", "10", "--out", str(tmp_path / "out")]) == 0
    assert [part for part, _ in asked] == [*parts.PARTS, "runs"]
    ends = [until - began for _, until in asked]
    assert ends == sorted(ends)
    assert 500 < ends[-1] + gpu.GRACE < 600
    asked.clear()
    assert gpu.main(["--parts", "rounds", "--out", str(tmp_path / "out")]) == 0
    assert [part for part, _ in asked] == ["rounds"]
    assert gpu.main(["--parts", "round", "--out", str(tmp_path / "out")]) == 2


def test_a_process_that_hangs_is_stopped(tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu, "GRACE", 0.0)
    began = time.time()
    gpu.Hour(gpu.Options(out=tmp_path))._process(["hangs"], began, tmp_path / "output")
    assert time.time() - began < 30
    assert (tmp_path / "output").read_text() == "here\n"


# The runs of the queue.


def test_runs_are_those_of_the_queue_that_have_no_result(tmp_path):
    missing = queued.missing(tmp_path, tmp_path / "runs")
    order = [run.name for run in planned_runs()]
    there = committed.ResultStore().named
    assert [name for _, name in missing] == [name for name in order if name in {one for _, one in missing}]
    assert not there.keys() & {name for _, name in missing}
    block, name = missing[0]
    committed.write(tmp_path / "queue" / f"{block}.jsonl", name, {})
    assert queued.missing(tmp_path, tmp_path / "runs") == missing[1:]


def test_one_run_after_another_is_finished_and_told(tmp_path, monkeypatch, capsys):
    names = ["one", "two", "three"]
    monkeypatch.setattr(gpu, "missing", lambda *_: [("table-1", name) for name in names])

    def process(self, words, until, output):
        request = json.loads(words[1])
        if request["name"] == "two":
            output.write_text("left out: --lr 0.01 is too large\n")
        else:
            committed.write(Path(request["out"]) / "queue" / "table-1.jsonl", request["name"], {"version": 1})

    monkeypatch.setattr(gpu.Hour, "_process", process)
    assert gpu.main(["--parts", "runs", "--at-once", "1", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "two: not finished; left out: --lr 0.01 is too large" in out
    assert list(committed.read(tmp_path / "measurements.jsonl")) == ["runs/one", "runs/three"]


# What is kept.

MACHINE = {
    "cpu": "A Processor",
    "cores": 16,
    "devices": "NVIDIA H100 x 1",
    "backend": "gpu",
    "date": "2026-11-26T00:00:00",
}
MACHINE |= {"versions": {"jax": "0.11.2"}, "quick": False}


def test_figures_and_runs_are_kept_and_become_the_page(tmp_path):
    out, root = tmp_path / "out", tmp_path / "results"
    file = out / "measurements.jsonl"
    out.mkdir()
    for name, row in {
        "machine/machine": MACHINE,
        "machine/peak tf32": {"TFLOP/s": 300.0},
        "rounds/fedpac 20": {"s": 0.5},
    }.items():
        Log(file, *name.split("/")[:1], SOON).add(name.split("/")[1], lambda row=row: row)
    committed.write(out / "queue/table-1.jsonl", "a/run", {"version": 1, "config": {"versions": {"pfl_jax": "0"}}})
    gpu.keep(out, root)
    sections = records.stored(root / "benchmark.jsonl")
    assert sections["gpu-rounds"].rows == [{"s": 0.5}]
    assert sections["gpu-machine"].rows == [{"what": "peak tf32", "TFLOP/s": 300.0}]
    assert committed.read(root / "queue/table-1.jsonl")["a/run"]["version"] == 1
    text = performance.gpu(sections)
    assert "| peak tf32 | 300 |" in text
    assert "on NVIDIA H100 x 1, jax 0.11.2" in text
    assert performance.gpu({}) == performance.UNTESTED
    committed.write(file, "machine/machine", MACHINE | {"quick": True})
    with pytest.raises(InvalidInput, match="no measurements to keep"):
        gpu.keep(out, root)


# What is carried.


def test_cifar10_is_carried_compressed(tmp_path):
    draw, arrays = np.random.default_rng(0), {}
    for split, number in (("train", 20), ("test", 10)):
        images = []
        for _ in range(number):
            Image.fromarray(draw.integers(0, 256, (32, 32, 3), np.uint8)).save(opened := io.BytesIO(), "JPEG")
            images.append(opened.getvalue())
        arrays[f"{split}_bytes"] = np.frombuffer(b"".join(images), np.uint8)
        arrays[f"{split}_sizes"] = np.array([len(image) for image in images], np.uint16)
        arrays[f"{split}_labels"] = np.arange(number).astype(np.uint8) % 10
    source, folder, target = tmp_path / "source.npz", tmp_path / "build", tmp_path / "data"
    np.savez(source, **arrays)
    folder.mkdir()
    carried.pack_cifar10(source, folder / carried.CIFAR)
    packed, given = carried.records(folder / carried.CIFAR), carried.records(source)
    assert all((packed[split] == given[split]).all() for split in carried.SPLITS)
    # The tables of a JPEG file take some 600 bytes.
    assert source.stat().st_size - (folder / carried.CIFAR).stat().st_size > 29 * 500
    assert carried.unpack(folder, target) == f"CIFAR-10, JPEG copy unpacked in {target}"
    loaded, _ = idx_and_cifar.load(SPECS["cifar10"], idx_and_cifar.find(SPECS["cifar10"], target))
    assert (target / "cifar-10-batches-bin" / idx_and_cifar.NOTE).read_text() == "JPEG copy\n"
    assert sorted(loaded.train_y) == sorted(arrays["train_labels"])
    np.testing.assert_array_equal(loaded.test_x[0].transpose(2, 0, 1).ravel(), given["test"][0, 1:])
    assert carried.unpack(folder, target) == f"no dataset unpacked in {target}"


def test_fashion_mnist_gives_way_where_both_data_sets_do_not_fit(tmp_path, monkeypatch, capsys):
    def pack(folder, cifar10):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / carried.FASHION).write_bytes(bytes(3 * 2**20))
        (folder / carried.CIFAR).write_bytes(bytes(2**20))

    for name, value in {"pack": pack, "ROOT": tmp_path / "results", "_tree": list, "MOST": 2}.items():
        monkeypatch.setattr(carried, name, value)
    assert carried.main(["--cifar10", "copy.npz"]) == 0
    assert [one.name for one in (tmp_path / carried.FOLDER).iterdir()] == [carried.CIFAR]
    assert "Fashion-MNIST does not fit beside CIFAR-10" in capsys.readouterr().out
    assert carried.main([]) == 2


# PyTorch's other way.


def test_training_under_torchs_vmap_is_the_loop(monkeypatch):
    torch_rounds = pytest.importorskip("lab.benchmark.torch_rounds", exc_type=ImportError)
    scale = dataclasses.replace(workload.QUICK, batch_size=64)
    for name, like in (("fedpac_cnn", "fashion_mnist"), ("fedavg_cnn", "cifar10")):
        network = torch_rounds.Network(parts.network(name, like).init(parts.jax.random.key(0)), name)
        start = torch_rounds.weights(network)
        examples = torch_rounds.clients(parts.federation(2, 10, like))
        found = []
        for train in (torch_rounds.train_clients, torch_rounds.train_at_once):
            train(network, start, examples, 2, scale)
            # Those of the last client.
            found.append(torch_rounds.weights(network).numpy())
        np.testing.assert_allclose(*found, atol=1e-6)
        assert np.abs(found[0] - start.numpy()).max() > 1e-3


@pytest.mark.slow
def test_every_part_measures(tmp_path, monkeypatch):
    for name, value in {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PFL_JAX_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    assert gpu.main(["--quick", "--minutes", "20", "--parts", *parts.PARTS, "--out", str(tmp_path)]) == 0
    lines = committed.read(tmp_path / "measurements.jsonl")
    assert not [line for line in lines.values() if "error" in line]
    assert {name.split("/")[0] for name in lines} == set(parts.PARTS)
    trained = [line for name, line in lines.items() if name.startswith("training/")]
    assert {line["network"] for line in trained} == {name for name, _ in parts.NETWORKS}
    for column, number in {"form": 3, "precision": 3, "chunk": 3}.items():
        assert len({line[column] for line in trained}) == number
    assert all(line["of peak %"] > 0 for line in trained)
    assert [line["within 1e-4"] for name, line in lines.items() if name.endswith("beside the CPU")] == ["yes", "yes"]
    assert sum(name.startswith("machine/") for name in lines) == 7
