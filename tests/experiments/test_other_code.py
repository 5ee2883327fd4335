"""Results know the code that made them: after an edit of the sources no finished or interrupted run counts silently."""

import json
import shutil

import pytest
from rich.console import Console
from run_folders import FakeRuns, write_run

from experiments import report, sweep, tables
from experiments.cli.command import main as run_alone
from experiments.folder import stored_runs, version
from experiments.folder.load import read_config
from experiments.folder.run_folder import CONFIG
from experiments.run import run
from experiments.spec.spec import Spec
from pfl_jax import InvalidInput
from pfl_jax.frames import find_runs

pytestmark = pytest.mark.without_f1_auc

SMALL = ["--num-clients", "4", "--train-size", "20", "--test-size", "10", "--rounds", "2", "--no-compilation-cache"]
DIGEST = version.own_version()
SWEEP = ["--dataset", "digits", "--method", "local", *SMALL]
TABLE = ["--paper", "fedpac", "--table", "5", "--dataset", "fashion_mnist", "--method"]


@pytest.fixture
def edit(monkeypatch):
    """Edits the sources, as far as their digests say so."""
    return lambda text="edited", of="own_version": monkeypatch.setattr(version, of, lambda: text)


@pytest.fixture
def runs(monkeypatch):
    stand_in = FakeRuns()
    stand_in.accuracies = lambda options: [0.5 + 0.1 * (len(stand_in.done) - 1)]
    monkeypatch.setattr(run, "run", stand_in)
    return stand_in


# The digests.


def test_what_builds_a_run_counts_and_what_reads_it_does_not(tmp_path, monkeypatch):
    copy = tmp_path / "experiments"
    shutil.copytree(version.EXPERIMENTS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(version, "EXPERIMENTS", copy)
    digests = [version.building_version.__wrapped__()]
    for name in ("report.py", "run/build.py", "spec/presets.py", "run/driver.py"):
        (copy / name).write_text((copy / name).read_text() + "# edited\n")
        digests.append(version.building_version.__wrapped__())
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_each_part_of_the_code_is_compared(tmp_path, edit):
    write_run(tmp_path / "run")
    config = read_config(tmp_path / "run")
    assert not any(version.by_other_code(config, compared) for compared in ("sources", "version"))
    for changed, others in (
        (config | {"versions": {}}, (True, False)),
        (config | {"versions": config["versions"] | {"experiments": "edited"}}, (True, False)),
        (config | {"versions": config["versions"] | {"pfl_jax": "edited"}}, (True, False)),
        (config | {"method_version": 9}, (False, True)),
        (config | {version.RESUMED_BY: [version.code_version("fedpac") | {"pfl_jax": "edited"}]}, (True, False)),
        (config | {version.RESUMED_BY: [version.code_version("fedpac") | {"method_version": 9}]}, (False, True)),
        # The number of a user's own method does not exist.
        (config | {"options": {"method": "mine.py:mine"}, "versions": {}}, (True, True)),
    ):
        assert tuple(version.by_other_code(changed, compared) for compared in ("sources", "version")) == others


def test_a_sweep_never_averages_old_and_new_code(tmp_path, edit, capsys, monkeypatch):
    out = tmp_path / "sweep"
    assert sweep.main([*SWEEP, "--out", str(out)]) == 0
    before = (out / "runs" / "seed-0" / CONFIG).read_bytes()
    edit()
    monkeypatch.setattr(version, "commit_of", lambda digest, newest: {DIGEST: "1a2b3c4d"}.get(digest))
    capsys.readouterr()
    assert sweep.main([*SWEEP, "--seeds", "2", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert f"1 of 2 runs in {out} are of other code than today's, of commit 1a2b3c4: give another --out" in said
    assert said.count("\n") == 1
    assert (out / "runs" / "seed-0" / CONFIG).read_bytes() == before
    assert find_runs(out) == [out / "runs" / "seed-0"]


# Tables and figures.


def test_a_part_of_a_table_does_not_show_what_other_code_made(runs, tmp_path, edit):
    words = ["--out", str(tmp_path / "table")]
    assert tables.main([*TABLE, "local", *words]) == 0
    edit()
    assert tables.main([*TABLE, "fedavg_ft", *words]) == 0
    places = json.loads((tmp_path / "table" / "table.json").read_text())["places"]
    assert [place["method"] for place in places if place["seeds"]] == ["fedavg_ft"]


def test_a_cell_by_itself_is_refused(tmp_path, edit):
    write_run(tmp_path / "run", ("--method", "local"))
    edit()
    with pytest.raises(InvalidInput, match="made by other code"):
        run.run_cell(Spec.of("digits", method="local"), tmp_path / "run", Console())


# Single runs.


def test_a_run_that_is_resumed_by_other_code_says_so(tmp_path, edit, capsys):
    words = ["--method", "local", *SMALL, "--rounds", "3", "--checkpoint-every", "1", "--out", str(tmp_path / "run")]
    assert run_alone("digits", words) == 0
    edit()
    capsys.readouterr()
    assert version.note_on_code(read_config(tmp_path / "run")) == ""
    assert run_alone("digits", ["--resume", str(tmp_path / "run"), "--rounds", "4"]) == 0
    group = stored_runs.Group("local", (stored_runs.read(tmp_path / "run"),))
    assert report.versions({"": [group]})[1]["pfl_jax"] == f"{DIGEST}, then edited"
    note = "Note: its last rounds are of other code than its first rounds, see resumed_by in"
    assert " ".join(capsys.readouterr().out.split()).count(note) == 2
    config = read_config(tmp_path / "run")
    assert config["options"]["rounds"] == 4
    assert [one["pfl_jax"] for one in config["resumed_by"]] == ["edited"]
