"""--phases: what is recorded of data that change, resumption, and what cannot be given with it."""

import json

import numpy as np
import pytest
from interrupts import ask_to_stop
from run_folders import log, summary, untimed
from test_sweep_command import SMALL

from experiments.cli.command import main
from experiments.folder import stored_runs
from experiments.run import rounds
from experiments.run.loaded_run import load_run
from experiments.spec.identity import fixed_rounds, relevant_options
from experiments.spec.spec import Spec
from experiments.sweep import main as sweep

pytestmark = pytest.mark.without_f1_auc

WORDS = ["--method", "fedreplay", *SMALL, "--eval-every", "3", "--lr", "0.1", "--no-compilation-cache"]
WORDS[WORDS.index("--rounds") + 1] = "6"
WORDS += ["--phases", "3", "--partition", "iid", "--keep-state", "always"]


def test_a_run_records_all_phases_and_a_resumed_one_the_same(tmp_path, capsys, monkeypatch):
    assert main("digits", [*WORDS, "--out", str(tmp_path / "whole")]) == 0
    said = capsys.readouterr().out
    assert "forgetting" in said
    lines, found = log(tmp_path / "whole"), summary(tmp_path / "whole")
    # At the end of each phase, and in every third round.
    assert [(line["round"], line["phase"]) for line in lines] == [(2, 0), (3, 1), (4, 1), (6, 2)]
    for line in lines:
        assert line["phases"][line["phase"]] == line["received"]["mean"]
        assert line["phases_untrained"] == lines[0]["phases_untrained"]
    a, b = (np.array([lines[place]["phases"] for place in (0, 2, 3)]), np.array(lines[0]["phases_untrained"]))
    assert found["average"] == pytest.approx(a[2].mean())
    assert found["forgetting"] == pytest.approx((max(a[0, 0], a[1, 0]) - a[2, 0] + a[1, 1] - a[2, 1]) / 2)
    assert found["forward"] == pytest.approx((a[0, 1] - b[1] + a[1, 2] - b[2]) / 2)
    (row,) = stored_runs.load_runs(tmp_path / "whole").to_dict("records")
    assert row["forgetting"] == found["forgetting"]
    loaded = load_run(tmp_path / "whole")
    right = [
        np.mean(np.asarray(loaded.predict(i, loaded.client_data(i).x)).argmax(1) == loaded.client_data(i).y)
        for i in range(4)
    ]
    np.testing.assert_allclose(100 * np.array(right), lines[-1]["received_per_client"], atol=1e-3)

    add = rounds.ActiveRun.add

    def stopping(self, result, *times):
        add(self, result, *times)
        if result.round == 3:
            ask_to_stop()

    with monkeypatch.context() as patch:
        patch.setattr(rounds.ActiveRun, "add", stopping)
        assert main("digits", [*WORDS, "--out", str(tmp_path / "cut")]) == 130
    assert main("digits", ["--resume", str(tmp_path / "cut")]) == 0
    assert untimed(tmp_path / "cut") == untimed(tmp_path / "whole")


def test_a_sweep_has_the_columns(tmp_path):
    words = ["--dataset", "digits", *WORDS, "--rounds", "3", "--grid", "method=fedavg,local", "--out", str(tmp_path)]
    words[words.index("--method") : words.index("--method") + 2] = []
    assert sweep(words) == 0
    record = json.loads((tmp_path / "sweep.json").read_text())
    for row, name in zip(record["settings"], ("fedavg", "local"), strict=True):
        assert row["forgetting"]["mean"] == pytest.approx(summary(tmp_path / f"method={name}" / "seed-0")["forgetting"])
    assert "forgetting" in (tmp_path / "sweep.md").read_text()


def test_the_data_of_the_phases_are_in_the_identity():
    def spec(**more):
        return Spec.of("digits", method="fedavg", rounds=8, **more)

    plain, two, turned = spec(), spec(phases=2), spec(phases=2, change="rotation")
    assert relevant_options(plain) == relevant_options(spec(change="rotation"))
    assert len({str(relevant_options(one)) for one in (plain, two, turned)}) == 3
    assert (fixed_rounds(plain), fixed_rounds(two)) == ("", "--phases")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--val-fraction", "0.2", "--patience", "2"], "--patience cannot be given with --phases"),
        (["--rounds", "2"], "--phases 3 needs as many --rounds at least, not 2"),
        (["--phases", "11"], "classes arrive in 2 to 10 phases, not 11"),
    ],
)
def test_what_cannot_change_is_refused_in_one_line(tmp_path, capsys, words, message):
    assert main("digits", [*WORDS, "--rounds", "20", *words, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
