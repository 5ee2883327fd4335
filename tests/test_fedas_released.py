"""FedAS with the alignment in place: the method where a cohort has one client, NumPy where it has more."""

import json

import chex
import jax
import numpy as np
import pytest
import reference
from problems import tiny_federation, tiny_model

from experiments import fedas_released
from pfl_jax import simulate
from pfl_jax.base import Batches
from pfl_jax.cohorts import Settings
from pfl_jax.methods import METHODS

KEY = jax.random.key(4)
OPTIONS = {
    "align_lr": 0.3,
    "lr": 0.2,
    "batch_size": 4,
    "align_batch_size": 4,
    "epochs": 2,
    "target": "class_mean",
    "align_loss": "class_sum",
    "first_alignment": True,
    "reduction": "batch_means",
}


def both(settings, **options):
    """The method, and the procedure with it."""
    aligned, plain = (METHODS["fedas"](tiny_model(), **OPTIONS | options, alignment=on) for on in (True, False))
    return aligned, fedas_released.procedure(aligned, plain, settings)


def test_cohorts_of_one_client_are_the_method():
    data = tiny_federation()._replace(batches=Batches(drop_last=True, shuffle=False))
    settings = Settings(rounds=5, participation=0.25)
    method, procedure = both(settings)
    *_, last = simulate.run(method, data, settings, KEY)
    state, round_ = procedure.init(data, KEY), jax.jit(procedure.round, static_argnums=2)
    for _ in range(5):
        state, cohort, info = round_(data, state, 1)
    chex.assert_trees_all_close((state.server, state.clients), (last.state.server, last.state.clients), rtol=1e-5)
    np.testing.assert_allclose(info["trace"], last.info["trace"], rtol=1e-5)
    np.testing.assert_allclose(state.trained.loss, last.trained.loss, rtol=1e-5)
    assert cohort.clients.tolist() == last.cohort.tolist()
    received = jax.jit(procedure.evaluate, static_argnums=2)(data, state, 1)
    np.testing.assert_allclose(received.loss, last.received.loss, rtol=1e-5)


def test_each_client_receives_what_the_one_before_has_aligned():
    sizes = (9, 20, 14)
    data = tiny_federation(sizes)
    one_batch = {"batch_size": 32, "align_batch_size": 32, "align_loss": "mean", "target": "example"}
    _, procedure = both(Settings(rounds=1), **one_batch)
    state = procedure.init(data, KEY)
    start = reference.to_numpy(state.server)
    # Another previous backbone for each client, so that there is something to align with.
    shifts = np.array([0.5, -0.4, 0.3])
    backbone = jax.tree.map(lambda leaf: leaf + shifts.reshape(-1, *[1] * (leaf.ndim - 1)), state.clients.backbone)
    state = state._replace(clients=state.clients._replace(backbone=backbone))
    next_state, cohort, info = procedure.round(data, state, 3)
    w, trained, traces = dict(start), {}, []
    for client in cohort.clients.tolist():
        x, y = reference.examples(data, client)
        own = {name: value + shifts[client] if name.startswith("backbone") else value for name, value in start.items()}
        targets = reference.features(own, x)
        w = reference.descend(w, lambda w: reference.alignment_gradient(w, x, targets), 1, 0.3)  # noqa: B023
        trained[client] = reference.descend(w, lambda w: reference.cross_entropy_gradient(w, x, y), 2, 0.2)  # noqa: B023
        gradient = reference.cross_entropy_gradient(trained[client], x, y)
        traces.append(sum((value**2).sum() for value in gradient.values()))
    assert sorted(trained) == [0, 1, 2]
    np.testing.assert_allclose(info["trace"], traces, rtol=1e-3)
    weights = np.array(traces) / sum(traces)
    want = reference.mean(weights, list(trained.values()))
    got = reference.to_numpy({name: next_state.server[name] for name in ("backbone", "head")})
    for name, value in got.items():
        expected = want[name] if name.startswith("backbone") else start[name]
        np.testing.assert_allclose(value, expected, rtol=2e-4, atol=2e-5)


def test_a_run_leaves_an_ordinary_folder(tmp_path, capsys):
    out = tmp_path / "run"
    words = ["digits", "--rounds", "2", "--num-clients", "4", "--train-size", "20", "--participation", "0.5"]
    assert fedas_released.main([*words, "--eval-every", "1", "--out", str(out)]) == 0
    config, summary = (json.loads((out / f"{name}.json").read_text()) for name in ("config", "summary"))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert config["procedure"] == summary["procedure"] == fedas_released.PROCEDURE
    assert config["options"]["drop_last"]
    assert not config["options"]["shuffle"]
    names = ("target", "align_loss", "first_alignment", "reduction")
    assert [config["hyper_parameters"][name] for name in names] == ["class_mean", "class_sum", True, "batch_means"]
    assert [line["round"] for line in lines] == [1, 2]
    assert summary["trained_accuracy"] == lines[-1]["trained"]["mean"]
    assert "alignment in place" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("digts", "did you mean digits?"),
        ("digits --method fedper", "experiments.fedas_released runs fedas, not fedper"),
        ("digits --no-alignment", "alignment in place needs --alignment"),
        ("digits --manner parallel", "--manner serial"),
        ("digits --target global_class_mean", "--target example or class_mean"),
        ("digits --drop-rate 0.5", "--drop-rate is not an option of experiments.fedas_released"),
        ("digits --resume run", "--resume is not an option of experiments.fedas_released"),
    ],
)
def test_what_cannot_be_asked_for(words, message, capsys):
    assert fedas_released.main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
