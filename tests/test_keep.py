"""Results to keep: frames, files of states and models, and docs/keep.md in flax, PyTorch and another process."""

import json
import os
import subprocess
import sys

import cloudpickle
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import ROOT, block, blocks, executed
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model
from run_folders import SMALL, write_run
from trees import assert_same

import pfl_jax
from pfl_jax import InvalidInput, Scores, Settings, data, files, methods, networks
from pfl_jax.methods import METHODS, make_method

PAGE = "docs/keep.md"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.without_f1_auc
def test_the_page_in_flax_pytorch_and_another_process(here, capsys, monkeypatch):
    pandas, torch = pytest.importorskip("pandas"), pytest.importorskip("torch")
    pytest.importorskip("tensorboardX")
    logged = []
    monkeypatch.setattr("tensorboardX.SummaryWriter.add_scalar", lambda self, *words: logged.append(words))
    apart = [block(PAGE, marker) for marker in ("import torch", "HTTPServer(", "def mlflow(", "HfApi(")]
    of_torch, server, *_ = apart
    names = executed(*(text for text in blocks(PAGE) if text not in apart))
    scores = {name: value for name, value, number in logged if number == 3}
    assert scores["received/accuracy"] == pytest.approx(names["results"][2].received["accuracy"].mean())
    assert {number for *_, number in logged} == {1, 2, 3}
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("north", "east", "south", "west"))
    assert list(names["table"].columns) == [*("seed", "lr", "round", "client", "protocol", "split", "score", "value")]
    assert isinstance(names["table"], pandas.DataFrame)
    rows = names["accuracies"].query("client == 'south' and round == 3")
    assert rows.value.item() == pytest.approx(names["results"][2].received["accuracy"][2])
    # A state from a file goes on as that in memory does.
    run = pfl_jax.run(names["method"], names["federation"], Settings(rounds=4), jax.random.key(0))
    *_, uninterrupted = run
    assert_same(names["fourth"].state._replace(key=()), uninterrupted.state._replace(key=()), rtol=0, atol=0)
    # The model of the file is the one that the client would deploy.
    predict = names["method"].predict(names["params"], names["saved"].inputs(names["x"]))
    np.testing.assert_array_equal(names["logits"], predict)
    np.testing.assert_allclose(names["exported_logits"], predict, atol=1e-5)
    names = executed(of_torch, **names)
    np.testing.assert_allclose(names["torch_logits"].detach().numpy(), predict, rtol=1e-4, atol=1e-4)
    assert isinstance(names["torch_logits"], torch.Tensor)
    # A process without the federation.
    (net,) = [text for text in blocks(PAGE) if "class Net" in text]
    lines = net[net.index("class Net") :].partition("\n\n\n")[0]
    (here / "my_net.py").write_text(f"import flax.linen as nn\n\n\n{lines}\n")
    (here / "serve.py").write_text(server)
    words = [sys.executable, "serve.py", "south.safetensors"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            answer = names["ask"](int(process.stdout.readline()), names["x"])
        finally:
            process.kill()
    assert answer == np.argmax(predict, 1).tolist()


def test_a_frame_has_a_row_for_each_score_of_each_client():
    pytest.importorskip("pandas")

    def result(number, received, trained, validation=None):
        received = received and Scores({"accuracy": np.array(received)}, validation)
        blank = pfl_jax.RoundResult(*[None] * 11)  # pyright: ignore
        return blank._replace(round=number, received=received, trained=Scores({"accuracy": np.array(trained)}))

    apart = Scores({"accuracy": np.array([0.25, np.nan])})
    second = result(2, [0.1, 0.2], [0.3, 0.4], apart)
    means = {"received/accuracy": 0.15, "validation/received/accuracy": 0.25, "trained/accuracy": 0.35}
    assert pfl_jax.mean_scores(second) == pytest.approx(means)
    table = pfl_jax.frame([result(1, None, [np.nan, 0.5]), second], lr=0.1)
    assert table.drop(columns=["lr", "score"]).values.tolist() == [
        [1, 1, "trained", "test", 0.5],
        [2, 0, "received", "test", 0.1],
        [2, 1, "received", "test", 0.2],
        [2, 0, "received", "validation", 0.25],
        [2, 0, "trained", "test", 0.3],
        [2, 1, "trained", "test", 0.4],
    ]
    assert set(table.lr) == {0.1}
    sweep = [result(1, [[0.1, 0.2], [0.3, 0.4]], [[0.5, 0.6], [0.7, 0.8]])]
    table = pfl_jax.frame(sweep, clients=["a", "b"], lr=[1.0, 2.0], method="fedavg")
    (value,) = table.query("run == 1 and client == 'b' and protocol == 'received'").value
    assert value == 0.4
    assert table.groupby("run").lr.unique().tolist() == [[1.0], [2.0]]
    # Newcomers have numbers of their own, and an infinite error is a score.
    new = Scores({"accuracy": np.array([0.7, np.inf])})
    with_new = second._replace(newcomers=(new, new))
    table = pfl_jax.frame([with_new], clients=["a", "b"]).query("protocol == 'newcomers_trained'")
    assert (table.client.tolist(), table.value.tolist()) == ([0, 1], [0.7, np.inf])
    table = pfl_jax.frame([with_new], clients=["a", "b"], newcomers=["c", "d"])
    assert table.query("client == 'c'").value.tolist() == [0.7, 0.7]
    assert table.query("client == 'a' and protocol == 'trained'").value.tolist() == [0.3]
    assert pfl_jax.mean_scores(with_new)["newcomers_received/accuracy"] == np.inf
    with pytest.raises(InvalidInput, match="lr has 3 values, and the results are of 2 runs"):
        pfl_jax.frame(sweep, lr=[1, 2, 3])


def test_a_frame_of_folders_has_shares_and_what_differs(tmp_path):
    pytest.importorskip("pandas")
    accuracies = {lr: write_run(tmp_path / lr, (*SMALL, "--lr", lr)) for lr in ("0.1", "0.2")}
    table = pfl_jax.frame(tmp_path)
    rows = table.query("lr == 0.2 and protocol == 'received' and score == 'accuracy' and round == 4")
    assert rows.value.tolist() == pytest.approx((accuracies["0.2"][1] / 100).tolist())
    assert (set(table.seed), set(table.method)) == ({0}, {"fedpac"})
    loss = table.query("score == 'loss'").value
    assert set(loss.round(3)) == {0.432}
    # Of another task the first score has its name, and what is no share stays as it is.
    path = tmp_path / "0.1" / "config.json"
    task = {"name": "regression", "in_percent": [], "scores": ["mse", "mae", "r2"], "higher_is_better": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task": task}))
    rows = pfl_jax.frame(tmp_path / "0.1").query("protocol == 'received' and score == 'mse' and round == 4")
    assert rows.value.tolist() == pytest.approx(accuracies["0.1"][1].tolist())
    with pytest.raises(InvalidInput, match="is not a folder"):
        pfl_jax.frame(str(tmp_path / "nothing"))


class Out(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="last")(nn.relu(nn.Dense(4, name="before")(x)))


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(nn.Dense(4)(x))
        return Out(name="out")(nn.relu(x))


def test_flax_gets_its_variables_with_the_statistics_apart():
    model = networks.from_flax(Normalized(), (5,), 3, head="out/last")
    params, x = model.init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (6, 5))
    variables = networks.to_flax(params, "out/last")
    assert variables.keys() == {"params", "batch_stats"}
    assert "batch_stats" in params["backbone"]
    np.testing.assert_array_equal(Normalized().apply(variables, x), model.apply(params, x))


def test_a_model_keeps_normalization_and_names(tmp_path):
    dataset = data.load("cifar10", "embedded")._replace(class_names=("b", "a c"))
    params = {"backbone": {"w": jnp.ones((2, 3), jnp.bfloat16)}, "head": {"b": jnp.arange(3)}}
    files.save_model(tmp_path / "model.safetensors", params, dataset, method="fedper")
    saved = files.load_model(tmp_path / "model.safetensors")
    assert_same(saved.params, params, rtol=0, atol=0)
    assert saved.params["backbone"]["w"].dtype == jnp.bfloat16
    assert (saved.class_names, saved.about) == (("b", "a c"), {"method": "fedper"})
    x = dataset.test_x[:2]
    assert dataset.mean is not None
    np.testing.assert_allclose(saved.inputs(x), (x / 255 - np.array(dataset.mean)) / np.array(dataset.std), rtol=1e-4)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InvalidInput, match="cannot be read as safetensors"):
        files.load_model(tmp_path / "model.safetensors")


def test_states_and_models_of_others_are_refused(tmp_path):
    federation, model = tiny_federation(), tiny_model()
    states = {}
    for name in ("fedper", "fedem"):
        method = make_method(name, model, **HYPER_PARAMETERS)
        *_, last = pfl_jax.run(method, federation, Settings(rounds=1), jax.random.key(0))
        states[name] = last.state
    files.save_state(tmp_path / "state.safetensors", states["fedper"])
    with pytest.raises(InvalidInput, match="is of another run"):
        files.load_state(tmp_path / "state.safetensors", states["fedem"])
    with pytest.raises(InvalidInput, match="more than one set of the model's parameters"):
        files.client_params(method, federation, states["fedem"], 0)
    with pytest.raises(InvalidInput, match="there is no client 9"):
        files.client_params(method, federation, states["fedem"], 9)


def test_names_of_clients_stay():
    rows = np.arange(8.0).reshape(4, 2), [0, 1, 0, 1]
    federation = data.federate({"b": rows, "a": rows})
    assert federation.client_names == ("b", "a")
    stay, new = data.federated.hold_out(federation, 1)
    assert (stay.client_names, new.client_names) == (("b",), ("a",))
    # They are no leaves of compiled programs.
    assert all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(federation))
    dataset = data.load("digits")
    assert data.federate(dataset, data.partition.iid(dataset, num_clients=2)).client_names == ()


def test_a_method_survives_cloudpickle():
    model, federation = tiny_model(), tiny_federation()
    for name in METHODS:
        cloudpickle.loads(cloudpickle.dumps(make_method(name, model, **HYPER_PARAMETERS)))
    method = methods.fedpac(model, pfl_jax.LocalTraining(lr=0.1, batch_size=8))
    copy = cloudpickle.loads(cloudpickle.dumps(method))
    first, second = (
        list(pfl_jax.run(one, federation, Settings(rounds=1), jax.random.key(0))) for one in (method, copy)
    )
    assert_same(first[0].received, second[0].received, rtol=0, atol=0)
