"""The final state of a run: kept, loaded, exported; and a table of many runs."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import serialization
from run_folders import summary
from safetensors import safe_open
from trees import assert_flat

from experiments import export
from experiments.cli.command import main
from experiments.commands import report_charts as charts
from experiments.export import load_run, load_runs
from experiments.folder import stored_runs
from experiments.report import main as main_of_report
from experiments.run import driver
from pfl_jax import InvalidInput

SMALL = ["--rounds", "2", "--num-clients", "4", "--train-size", "20", "--test-size", "10", "--epochs", "1"]
SMALL = [*SMALL, "--no-compilation-cache"]


def made(folder, *words):
    assert main("digits", [*SMALL, *words, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def fedrep(tmp_path_factory):
    return made(tmp_path_factory.mktemp("fedrep") / "run", "--method", "fedrep")


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Folder of a finished run of a method that communicates nothing."""
    return made(tmp_path_factory.mktemp("local") / "run", "--method", "local")


def losses(loaded):
    """Of what each client deploys, on its test examples; accuracies of ten examples hardly tell two models apart."""
    tests = [loaded.client_data(client) for client in range(loaded.data.num_clients)]
    logs = [jax.nn.log_softmax(loaded.predict(client, test.x)) for client, test in enumerate(tests)]
    return [-float(log[np.arange(len(test.y)), test.y].mean()) for log, test in zip(logs, tests, strict=True)]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--method", "fedrep"], marks=pytest.mark.slow),
        # Fine-tuning draws numbers, the learning rate is a schedule's, states are on the host.
        ["--method", "fedavg_ft", "--schedule", "lr=cosine", "--state-on", "host"],
        # What the attackers fine-tune on is flipped too.
        pytest.param(["--method", "fedavg_ft", "--attack", "labels", "--attackers", "0.5"], marks=pytest.mark.slow),
        pytest.param(["--method", "ditto", "--state-on", "disk", "--checkpoint-every", "1"], marks=pytest.mark.slow),
        pytest.param(
            ["--method", "knn_per", "--held-out-clients", "1", "--participation", "0.5"], marks=pytest.mark.slow
        ),
    ],
    ids=lambda words: "-".join(words[1:3]),
)
def test_a_loaded_run_predicts_as_its_last_evaluation(tmp_path, words):
    folder = made(tmp_path / "run", *words)
    loaded = load_run(folder)
    assert int(loaded.state.round) == 2
    assert losses(loaded) == pytest.approx(summary(folder)["received_loss_per_client"], abs=2e-4)


@pytest.mark.slow
def test_keeping_is_optional_and_bounded(tmp_path, monkeypatch, capsys):
    assert not (made(tmp_path / "never", "--method", "local", "--keep-state", "never") / "checkpoints").exists()
    with pytest.raises(InvalidInput, match=r"kept no state: make it again in a new folder, with --keep-state always"):
        load_run(tmp_path / "never")
    # The four clients' models take 4 * 4 * 6,570 bytes, their scores and the round a little more.
    monkeypatch.setattr(driver, "MOST_BYTES", 4 * 4 * 6570)
    capsys.readouterr()
    assert not (made(tmp_path / "auto", "--method", "local") / "checkpoints").exists()
    assert "is not kept: --keep-state always would keep it" in capsys.readouterr().out
    assert load_run(made(tmp_path / "always", "--method", "local", "--keep-state", "always")).state.round == 2


def test_export_writes_what_the_client_deploys(tmp_path, fedrep, capsys):
    target = tmp_path / "model.safetensors"
    assert export.main([str(fedrep), "--client", "3", "--to", str(target)]) == 0
    assert f"saved 6,570 parameters as {target}" in capsys.readouterr().out.replace("\n", "")
    with safe_open(target, "numpy") as file:
        about, found = file.metadata(), {name.replace(".", "/"): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert (about["method"], about["client"], about["input_shape"]) == ("fedrep", "3", "8 8 1")
    assert len(about["mean"].split()) == len(about["std"].split()) == 1
    params = load_run(fedrep).params(3)
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    assert_flat(params, found, rtol=0, atol=0)
    packed = tmp_path / "model.msgpack"
    assert export.main([str(fedrep), "--client", "0", "--to", str(packed)]) == 0
    restored = serialization.msgpack_restore(packed.read_bytes())
    jax.tree.map(np.testing.assert_array_equal, restored, load_run(fedrep).params(0))
    # Each client has a head of its own.
    assert not np.array_equal(restored["head"]["kernel"], params["head"]["kernel"])


def test_results_of_one_round_are_not_taken_for_the_state_of_another(tmp_path, fedrep):
    other = shutil.copytree(fedrep, tmp_path / "older")
    (other / "checkpoints/0-of-1/2.npz").rename(other / "checkpoints/0-of-1/1.npz")
    with pytest.raises(InvalidInput, match="the run kept no state"):
        load_run(other)


def test_a_table_of_runs(tmp_path, fedrep, local):
    shutil.copytree(local, tmp_path / "runs/one")
    made(tmp_path / "runs/two", "--method", "fedprox", "--seed", "1")
    rows = load_runs(tmp_path / "runs", fedrep).to_dict("records")
    assert [(row["method"], row["seed"], row["state"]) for row in rows] == [
        ("local", 0, "finished"),
        ("fedprox", 1, "finished"),
        ("fedrep", 0, "finished"),
    ]
    assert rows[0]["received_accuracy"] == summary(tmp_path / "runs/one")["received_accuracy"]
    assert rows[1]["mu"] > 0
    assert {"trained_loss", "received_auc", "rounds", "round", "folder"} <= set(rows[0])


def test_features_of_the_clients_are_drawn_by_principal_components(local, tmp_path):
    (chart,) = charts.features(stored_runs.grouped(local)[0])
    frame, loaded = chart.panels[0].frame, load_run(local)
    classes = {client: rows["class"].tolist() for client, rows in frame.groupby("client")}
    assert classes == {client: loaded.client_data(client).y.tolist() for client in range(4)}
    features = [
        np.asarray(loaded.model.features(loaded.params(client)["backbone"], loaded.client_data(client).x))
        for client in range(4)
    ]
    centred = np.concatenate(features) - np.concatenate(features).mean(0)
    # As far apart as their two largest directions say; signs are free.
    sizes = np.linalg.svd(centred, compute_uv=False)[:2]
    np.testing.assert_allclose(np.linalg.norm(frame.iloc[:, :2], axis=0), sizes, rtol=1e-3)
    assert main_of_report([str(local), "--features", "--out", str(tmp_path / "r.html")]) == 0
    assert "colors are classes" in (tmp_path / "r.html").read_text()
    shutil.copytree(local, tmp_path / "stateless", ignore=shutil.ignore_patterns("checkpoints"))
    (note,) = charts.features(stored_runs.grouped(tmp_path / "stateless")[0])
    assert (note.panels, "kept no state" in note.caption) == ([], True)


@pytest.mark.without_f1_auc
def test_clients_of_several_networks_are_dealt_loaded_and_exported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--method", "lg_fedavg", "--model", "mlp,mlp", "--features", "24", "--networks", "deal.json"]
    for text, why in (
        ("[0, 1]", "has 2 entries, and there are 4 clients"),
        ("[0, 1, 2, 0]", "is not a list of numbers from 0 to 1"),
        ("{", "is not JSON"),
    ):
        (tmp_path / "deal.json").write_text(text)
        assert main("digits", [*SMALL, *words]) == 2
        assert why in capsys.readouterr().err
    (tmp_path / "deal.json").write_text("[0, 1, 1, 1]")
    folder = made(tmp_path / "run", *words)
    assert json.loads((folder / "config.json").read_text())["networks"] == ["mlp"] * 4
    loaded = load_run(folder)
    assert [jax.tree.leaves(part)[0].shape[0] for part in loaded.state.clients] == [1, 3]
    assert loaded.params(3)["head"]["kernel"].shape == (24, 10)
    x = loaded.client_data(3).x
    np.testing.assert_allclose(loaded.predict(3, x), loaded.model.apply(loaded.params(3), x), atol=1e-6)
    assert export.main([str(folder), "--client", "2", "--to", "model.safetensors"]) == 0
    with safe_open("model.safetensors", "np") as file:
        assert "backbone.to_features.kernel" in file.keys()  # noqa: SIM118, no mapping
