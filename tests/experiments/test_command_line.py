"""The command line: driven as a process where the process matters, called as a function where words do."""

import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from experiments.cli.command import main, parse
from experiments.host import jax_config
from experiments.host.console import RoundProgress
from experiments.run import build
from experiments.spec.spec import Spec
from pfl_jax.data import client_data
from pfl_jax.tasks import REGRESSION

ROOT = Path(__file__).parents[2]
SMALL = ["--num-clients", "4", "--train-size", "20", "--test-size", "10", "--epochs", "1"]


def test_xla_flags_of_the_user_stand(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1 --xla_cpu_enable_fast_math=false")
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    # A version of XLA that ends the process for a flag which it does not know.
    monkeypatch.setattr(jax_config.metadata, "version", lambda _: "0.12.0")
    jax_config.prepare(Spec.of("digits", devices=8))
    assert os.environ["XLA_FLAGS"].split() == [
        "--xla_force_host_platform_device_count=1",
        "--xla_cpu_enable_fast_math=false",
        "--xla_cpu_collective_call_terminate_timeout_seconds=604800",
    ]


def process(module, *words, cwd, optimized=True, **options):
    """Starts `python -m experiments...` with pipes for its output; `optimized`: compiled as for users."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "PFL_JAX_CACHE": str(Path(cwd) / "cache"), "COLUMNS": "200"}
    # As in every_test.py: compiling is most of the work of a short run.
    environment |= {} if optimized else {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-m", module, *words]
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: its folder, what it printed, and where."""
    cwd = tmp_path_factory.mktemp("cli")
    words = ["--method", "fedavg", "--rounds", "3", *SMALL, "--eval-every", "2"]
    child = process("experiments.digits", *words, cwd=cwd, optimized=False)
    out, err = child.communicate(timeout=240)
    assert child.returncode == 0, err
    return cwd / "runs" / "digits-fedavg-seed0-001", out, err


def test_a_run_leaves_its_files(finished):
    folder, _, _ = finished
    assert sorted(entry.name for entry in folder.iterdir()) == [
        *("checkpoints", "config.json", "metrics.jsonl", "summary.json")
    ]
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # Every second round, and the last one in any case.
    assert [line["round"] for line in lines] == [2, 3]
    assert summary["dataset"] == "digits"
    assert summary["data_source"] == "digits (scikit-learn digits)"
    assert (summary["method"], summary["seed"], summary["rounds"], summary["num_clients"]) == ("fedavg", 0, 3, 4)
    assert summary["received_accuracy"] == lines[-1]["received"]["mean"]
    assert summary["trained_accuracy"] == lines[-1]["trained"]["mean"]
    assert "before_aggregation" not in summary
    assert sum(summary["received_per_client"]) / 4 == pytest.approx(summary["received_accuracy"], abs=1e-3)
    assert min(summary["seconds"], summary["examples_per_second"]) > 0
    assert summary["jax_version"] == jax.__version__
    assert summary["device"].startswith("cpu")
    config = json.loads((folder / "config.json").read_text())
    assert config["hyper_parameters"]["epochs"] == 1
    assert config["options"]["num_clients"] == 4
    assert config["train_examples"] == [20] * 4
    # Everyone sends and is sent the model in both rounds.
    sizes = config["bytes_per_client_and_round"]
    assert sizes["up"] == sizes["down"] > 1000
    assert (lines[0]["bytes_up"], lines[0]["bytes_down"]) == (2 * 4 * sizes["up"], 2 * 4 * sizes["down"])
    assert sorted(lines[0]["cohort"]) == [0, 1, 2, 3]
    assert summary["bytes_up"] == lines[1]["bytes_up"]
    assert {len(lines[0][f"trained_{name}per_client"]) for name in ("", "loss_", "macro_f1_", "auc_")} == {4}
    assert config["given"] == ["epochs", "eval_every", "method", "num_clients", "rounds", "test_size", "train_size"]


def test_a_run_ends_at_its_target(tmp_path, capsys):
    out = tmp_path / "run"
    words = ["--method", "fedproto_g", "--rounds", "30", *SMALL, "--eval-every", "1", "--target-accuracy", "1"]
    words += ["--eval-protocol", "before_aggregation"]
    assert main("digits", [*words, "--out", str(out)]) == 0
    assert "reached --target-accuracy 1 in round 1" in capsys.readouterr().out
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["rounds"], summary["rounds_done"]) == (30, 1)
    (line,) = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    assert np.array(line["info"]["counts"]).shape == (10,)
    # All take part.
    assert (
        line["before_aggregation_per_client"] == line["trained_per_client"] == summary["before_aggregation_per_client"]
    )
    assert summary["best"]["before_aggregation_accuracy"] == line["before_aggregation"]["mean"]


def test_a_run_that_diverges_is_told_with_its_likely_cause(tmp_path, capsys):
    words = ["--method", "fedavg", "--rounds", "3", *SMALL, "--lr", "1e30", "--out", str(tmp_path / "run")]
    assert main("digits", words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "fedavg: round 1: the model or message of client 0 (and 3 more) is NaN or infinite" in said
    assert "most likely --lr 1e+30 is too large: use a smaller one, or leave such clients out with --on-nan" in said
    assert not (tmp_path / "run").exists()
    assert main("digits", [*words, "--on-nan", "skip-client"]) == 2
    said = capsys.readouterr().err
    assert "(and 3 more)" in said
    assert "--on-nan" not in said


BLIND = """
from pfl_jax import LocalTraining
from pfl_jax.methods import fedavg

def blind(model, training=LocalTraining()):
    base = fedavg(model, training)
    return base._replace(predict=lambda personal, x: base.predict(personal, x) * float("nan"))
"""
"""A method that trains as FedAvg and predicts nothing."""


def test_a_test_loss_that_is_not_finite_is_named_once_and_stops_nothing(tmp_path, capsys):
    (tmp_path / "own.py").write_text(BLIND)
    words = ["--method", f"{tmp_path}/own.py:blind", *SMALL, "--rounds", "2", "--eval-every", "1"]
    words += ["--out", str(tmp_path / "run")]
    assert main("digits", words) == 0
    said = "".join(capsys.readouterr())
    assert "round 1: the test loss of client 0 (and 3 more) is NaN or infinite (received)" in said
    assert said.count("the test loss of client") == 1


def test_an_unknown_dataset_is_one_line(tmp_path):
    child = process("experiments.cifar11", cwd=tmp_path)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 2
    assert err.count("\n") == 1
    assert err.startswith("error: unknown dataset 'cifar11'")
    assert "did you mean cifar10" in err


def test_options_reach_where_they_belong():
    words = "--method fedpac --lam 0.25 --no-collaboration --train_size=None --chunk 3 --head-lr 0.2 --seed 4 --seed 5"
    request = parse("fashion_mnist", words.split())
    assert request.hyper_parameters["lam"] == 0.25
    assert request.hyper_parameters["head_lr"] == 0.2
    assert request.hyper_parameters["collaboration"] is False
    assert request.hyper_parameters["alignment"] is True
    assert (request.train_size, request.chunk, request.seed) == (None, 3, 5)
    assert request.given == {"method", "lam", "collaboration", "train_size", "chunk", "head_lr", "seed"}


def test_the_terminal_shows_a_bar():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=160)
    with RoundProgress(console, 4, "received") as progress:
        logging.getLogger("pfl_jax.primitives").info("a round solves 1,000 quadratic programs")
        progress.refresh()
        assert "1,000 quadratic programs" in text.getvalue()
        # The first round, with compilation, says nothing about the others.
        progress.completed(1, 90.0, None, 100.0)
        progress.refresh()
        assert "received not evaluated yet · 100 examples/s" in text.getvalue()
        progress.completed(2, 3.0, 81.25, 12345.0, "5 of 8 clients")
    assert "received 81.25 % accuracy over 5 of 8 clients · 12,345 examples/s · 0:06 left" in text.getvalue()
    with RoundProgress(console, 1, "received", REGRESSION.primary) as progress:
        progress.completed(1, 1.0, 0.0042, 1.0)
    assert "received 0.0042 mse ·" in text.getvalue()


def test_pixels_are_normalized_as_the_options_say():
    words = ["--source", "embedded", "--method", "fedavg", "--model", "mlp", "--rounds", "1", *SMALL]
    request = parse("cifar10", [*words, "--pixel-normalization", "fedas"])
    data = build.build_experiment(request, Console(quiet=True)).data
    pixels = np.asarray(data.x[data.train_index[0, 0]], np.float64)
    np.testing.assert_allclose(client_data(data, 0, "train").x[0], (pixels / 255 - 0.5) / 0.5, atol=1e-5)
