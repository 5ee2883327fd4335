"""Runs under attack, with other statistics than the mean, with differential privacy."""

import json

import numpy as np
import pytest
from rich.console import Console
from scores import line_of, scores_of

from experiments.cli.command import main, parse
from experiments.folder.load import read_metrics
from experiments.folder.run_folder import ExampleCounts
from experiments.run import run
from experiments.spec.identity import difference
from pfl_jax.privacy import gaussian_epsilon

pytestmark = pytest.mark.without_f1_auc

SMALL = "--num-clients 5 --train-size 30 --test-size 10 --batch-size 10 --rounds 3 --no-compilation-cache"
ROBUST = "--attack signs --attackers 0.4 --server-mean median --compress quantize:4 --drop-rate 0.2"


def evaluation(attackers):
    scores = scores_of(np.array([0.1, 0.9, 0.5, np.nan]))
    return line_of(1, scores, scores, counts=ExampleCounts(np.array([10, 20, 30, 40]), attackers=attackers))


def test_honest_clients_and_attackers_by_themselves():
    line = evaluation(np.array([True, False, False, True]))
    assert line["honest"]["received"]["mean"] == 70
    assert line["honest"]["trained"]["pooled"] == 66
    assert line["attackers"]["received"]["mean"] == 10
    assert line["received"]["mean"] == 50
    assert not {"honest", "attackers"} & evaluation(None).keys()


@pytest.mark.slow
def test_a_run_under_attack_says_so_everywhere(tmp_path, capsys):
    words = ["--method", "fedper", *SMALL.split(), *ROBUST.split(), "--held-out-clients", "1", "--eval-every", "1"]
    whole = tmp_path / "whole"
    assert main("digits", [*words, "--out", str(whole)]) == 0
    printed = capsys.readouterr().out
    assert "--attack signs, --attackers 0.4" in printed
    assert "compress=quantize:4, server_mean=median" in printed
    config, summary = (json.loads((whole / name).read_text()) for name in ("config.json", "summary.json"))
    assert len(config["attackers"]) == 2
    lines = read_metrics(whole)
    for line in lines:
        apart = {side: line[side]["received"]["mean"] for side in ("honest", "attackers")}
        assert (2 * apart["honest"] + 2 * apart["attackers"]) / 4 == pytest.approx(line["received"]["mean"], abs=1e-3)
    assert summary["honest"] == lines[-1]["honest"]
    assert any("missing" in line for line in lines)
    sent = config["bytes_per_client_and_round"]["up"]
    arrived = sum(4 - len(line.get("missing", [])) for line in lines)
    assert lines[-1]["bytes_up"] == sent * arrived


def test_a_run_under_attack_is_not_taken_for_a_plain_one():
    attacked = parse("digits", ["--attack", "signs", "--attackers", "0.2"])
    config = {
        "data": {"is_real": True, "description": ""},
        "dataset": "digits",
        "options": json.loads(json.dumps(attacked.options)),
        "hyper_parameters": attacked.hyper_parameters,
    }
    assert difference(attacked, config) == ""
    assert difference(parse("digits", []), config) == "--attack signs, not None"
    # Nobody attacks.
    config["options"] = json.loads(json.dumps(parse("digits", ["--attack", "signs"]).options))
    assert difference(parse("digits", []), config) == ""


pytest.importorskip("dp_accounting")

WORDS = "--method fedper --rounds 3 --eval-every 2 --num-clients 4 --train-size 20 --test-size 10"
PRIVATE = "--epochs 2 --dp-clip 1 --dp-noise 2 --dp-delta 0.01 --client-clip 1 --client-noise 3 --no-compilation-cache"


@pytest.mark.without_f1_auc
@pytest.mark.slow
def test_every_output_of_a_run_has_its_budget(tmp_path, capsys):
    request = parse("digits", [*f"{WORDS} {PRIVATE}".split(), "--out", str(tmp_path / "run")])
    run.run(request, Console(width=1000))
    config, summary = (json.loads((tmp_path / "run" / name).read_text()) for name in ("config.json", "summary.json"))
    assert config["privacy"] == summary["privacy"]
    example, client = summary["privacy"]
    assert (example["unit"], example["clip"], example["noise"], example["delta"]) == ("example", 1.0, 2.0, 0.01)
    assert (client["unit"], client["clip"], client["noise"]) == ("client", 1.0, 3.0)
    assert example["uncovered"] == ["number of examples: weight of the client in the mean"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]

    def spent(rounds):
        # All take part: a round of two epochs uses an example twice, and a client once.
        return pytest.approx(
            {"example": gaussian_epsilon(2.0, 2 * rounds, 0.01), "client": gaussian_epsilon(3.0, rounds, 0.01)},
            rel=1e-5,
        )

    assert [line["round"] for line in lines] == [2, 3]
    assert [line["epsilon"] for line in lines] == [spent(2), spent(3)]
    assert {one["unit"]: one["epsilon"] for one in summary["privacy"]} == spent(3)
    printed = capsys.readouterr().out
    assert f"differential privacy of every example: epsilon {example['epsilon']:.4g} at delta 0.01" in printed
    assert "not covered: number of examples" in printed
    assert f"spent for every client: epsilon {client['epsilon']:.4g}" in printed
