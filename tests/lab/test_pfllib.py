"""The comparison with PFLlib, with a small program in the place of PFLlib."""

import json

import numpy as np
import pytest

from experiments.lab.benchmark import pfllib

PROGRAM = """
import argparse, sys
import numpy as np
import torchvision
parser = argparse.ArgumentParser()
for name in ("data", "m", "algo", "gr", "nc", "lbs", "lr", "ls", "eg", "dev"):
    parser.add_argument("-" + name)
words = parser.parse_args()
if words.algo == "FedPer" and {fails}:
    sys.exit("Traceback\\nNo FedPer here")
for number in range(int(words.nc)):
    for half in ("train", "test"):
        client = np.load(f"../dataset/{{words.data}}/{{half}}/{{number}}.npz", allow_pickle=True)["data"].tolist()
        assert client["x"].shape == (20, 1, 28, 28) and client["x"].dtype == np.float32
        assert client["y"].shape == (20,) and abs(client["x"].mean()) < 1
for number in range(int(words.gr) + 1):
    print("-" * 25, "time cost", "-" * 25, 50.0 if number == 0 else 2.0 + number)
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Function that writes such a program and returns the command's words; the clients are small."""
    monkeypatch.setattr(pfllib, "CLIENTS", 2)
    monkeypatch.setattr(pfllib, "EXAMPLES", 20)
    monkeypatch.setattr(pfllib, "BATCH_SIZE", 10)

    def write(*, fails=False):
        (tmp_path / "PFLlib" / "system").mkdir(parents=True)
        (tmp_path / "PFLlib" / "system" / "main.py").write_text(PROGRAM.format(fails=fails))
        return ["--checkout", str(tmp_path / "PFLlib"), "--out", str(tmp_path / "found.json"), "--embedded"]

    return write


def test_rounds_are_compared_by_their_medians(checkout, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pfllib, "ours", lambda data, name, own: lambda: None)
    monkeypatch.setattr(pfllib.measure, "seconds", lambda work: 0.5)
    assert pfllib.main([*checkout(), "--repetitions", "2"]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["pfllib"]["rows"]
    assert [row["method"] for row in rows] == ["FedAvg", "FedPer", "FedAS"]
    # The first round, which evaluates, does not count.
    assert {(row["PFLlib, s"], row["pfl_jax, s"], row["ratio"]) for row in rows} == {(4.0, 0.5, 8.0)}
    assert (rows[0]["PFLlib"], rows[0]["pfl_jax"]) == ([4.0, 4.0], [0.5, 0.5])
    assert "FedAS, 2 of 2" in capsys.readouterr().out


def test_its_errors_are_one_line(checkout, monkeypatch, capsys):
    monkeypatch.setattr(pfllib, "ours", lambda data, name, own: lambda: None)
    words = checkout(fails=True)
    assert pfllib.main([*words, "--repetitions", "1"]) == 2
    assert "PFLlib's FedPer ended after 0 of 4 rounds: No FedPer here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--checkout", "."], "no system/main.py there"),
        (["--repetitions", "0"], "--repetitions must be at least 1, not 0"),
        (["--out", "pyproject.toml"], "pyproject.toml is there already"),
        (["--out", "missing/found.json"], "the folder of missing/found.json is not there"),
    ],
)
def test_bad_input_is_one_line(checkout, words, expected, capsys):
    assert pfllib.main([*checkout(), *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_our_rounds_run_with_all_three_methods(checkout, tmp_path):
    words = pfllib.Options(checkout=tmp_path, embedded=True)
    (tmp_path / "system").mkdir()
    data = pfllib.prepare(words, tmp_path / "here")
    for name, own in pfllib.METHODS.values():
        pfllib.ours(data, name, own)()
    assert np.asarray(data.train_count).tolist() == [20, 20]
