"""Runs with attackers, robust means and compressed messages: what they leave, alone, resumed and in a sweep."""

import json

import numpy as np
import pytest
from scores import line_of, scores_of

from experiments.cli.effects import notes, relevant_options
from experiments.cli.request import parse
from experiments.folder.load import read_metrics
from experiments.folder.run_folder import Counts
from experiments.run.cached_runs import difference
from experiments.run.command import main
from experiments.sweep.__main__ import main as sweep

pytestmark = pytest.mark.without_f1_auc

SMALL = "--num-clients 5 --train-size 30 --test-size 10 --batch-size 10 --rounds 3 --no-compilation-cache"
ROBUST = "--attack signs --attackers 0.4 --server-mean median --compress quantize:4 --drop-rate 0.2"


def evaluation(attackers):
    scores = scores_of(np.array([0.1, 0.9, 0.5, np.nan]))
    return line_of(1, scores, scores, counts=Counts(np.array([10, 20, 30, 40]), attackers=attackers))


def test_honest_clients_and_attackers_by_themselves():
    line = evaluation(np.array([True, False, False, True]))
    assert line["honest"]["received"]["mean"] == 70
    assert line["honest"]["trained"]["pooled"] == 66
    assert line["attackers"]["received"]["mean"] == 10
    assert line["received"]["mean"] == 50
    assert not {"honest", "attackers"} & evaluation(None).keys()


@pytest.mark.slow
def test_a_run_and_its_resumption(tmp_path, capsys):
    words = [
        "--method",
        "fedper",
        *SMALL.split(),
        *ROBUST.split(),
        "--checkpoint-every",
        "1",
        "--held-out-clients",
        "1",
    ]
    words += ["--eval-every", "1"]
    whole = tmp_path / "whole"
    assert main("digits", [*words, "--out", str(whole)]) == 0
    printed = capsys.readouterr().out
    assert "2 clients attack (signs)" in printed
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

    # After the first round again.
    (whole / "summary.json").unlink()
    newest = max((whole / "checkpoints").iterdir(), key=lambda path: path.name)
    for path in sorted(newest.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    newest.rmdir()
    assert main("digits", ["--resume", str(whole)]) == 0
    again = read_metrics(whole)
    for one, other in zip(again, lines, strict=True):
        assert one["received_loss_per_client"] == other["received_loss_per_client"]
        assert one["attackers"] == other["attackers"]


@pytest.mark.slow
def test_a_sweep_of_means_and_compressions(tmp_path):
    out = tmp_path / "sweep"
    grid = ["--grid", "server_mean=mean,trimmed:0.3", "--grid", "compress=none,topk:0.1", "--grid", "attackers=0,0.4"]
    words = ["--dataset", "digits", "--method", "fedper", "--attack", "signs", "--seeds", "2"]
    assert sweep([*words, *SMALL.split(), *grid, "--out", str(out)]) == 0
    rows = json.loads((out / "sweep.json").read_text())["settings"]
    assert len(rows) == 8
    configs = [json.loads(path.read_text()) for path in sorted(out.glob("*/seed-1/config.json"))]
    assert len(configs) == 8
    assert sorted("attackers" in config for config in configs) == [False] * 4 + [True] * 4
    assert len({config["bytes_per_client_and_round"]["up"] for config in configs}) == 2


def test_a_run_under_attack_is_not_taken_for_a_plain_one():
    attacked = parse("digits", ["--attack", "signs", "--attackers", "0.2"])
    config = {
        "data": {"is_real": True, "description": ""},
        "dataset": "digits",
        "options": json.loads(json.dumps(vars(attacked.options))),
        "hyper_parameters": attacked.hyper_parameters,
    }
    assert difference(attacked, config) == ""
    assert difference(parse("digits", []), config) == "--attack signs, not None"
    # Nobody attacks.
    nobody, plain = (parse("digits", words) for words in (["--attack", "signs"], []))
    assert relevant_options(nobody) == relevant_options(plain)
    zero = parse("digits", ["--attack", "signs", "--attackers", "0"])
    assert notes(zero, zero.given, "cpu") == ["--attack has no effect without --attackers"]
    config["options"] = json.loads(json.dumps(vars(nobody.options)))
    assert difference(nobody, config) == difference(plain, config) == ""
