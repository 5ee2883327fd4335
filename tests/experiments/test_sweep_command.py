"""`python -m experiments.sweep`: called as a function, on the smallest runs there are."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from run_folders import FakeRuns, log, summary, untimed

from experiments.cli import command
from experiments.commands import batch, sweep_results
from experiments.folder import stored_runs
from experiments.folder.run_folder import lock_folder
from experiments.run import run
from experiments.run.run import run_cell
from experiments.sweep import Sweep, main
from pfl_jax import InvalidInput
from pfl_jax.engine.checkpoint import FOLDER

pytestmark = pytest.mark.without_f1_auc

SMALL = ["--num-clients", "4", "--train-size", "20", "--test-size", "10", "--batch-size", "10", "--rounds", "2"]
SWEEP = ["--dataset", "digits", "--method", "fedper", "--seeds", "2", "--grid", "lr=0.05,0.1", "--eval-every", "1"]
SWEEP = [*SWEEP, *SMALL, "--val-fraction", "0.2", "--no-shuffle", "--no-compilation-cache"]
HALF = ["--participation", "0.5", "--drop-rate", "0.5"]


def test_a_sweep_is_its_runs_and_makes_none_twice(tmp_path, monkeypatch):
    out = tmp_path / "sweep"
    words = [*SWEEP, *HALF, "--shift", "labels", "--out", str(out)]
    assert main(words) == 0
    record = json.loads((out / "sweep.json").read_text())
    assert [row["setting"] for row in record["settings"]] == ["lr=0.05", "lr=0.1"]
    assert record["best"] in ("lr=0.05", "lr=0.1")
    assert f"| {record['best']} (best) |" in (out / "sweep.md").read_text()
    assert {f"sweep.{kind}" for kind in ("png", "svg", "tex", "csv")} <= {path.name for path in out.iterdir()}

    # A run alone leaves the same results.
    order = batch.read(Sweep, words)
    job = order.jobs_of((("lr", "0.1"),))[1]
    folder, alone = job.folder, tmp_path / "alone"
    run_cell(job.spec, alone, Console())
    for one, other in zip(log(alone), log(folder), strict=True):
        for name in ("received_per_client", "trained_per_client", "trained_loss_per_client"):
            # As numbers: null is a client that has not trained yet.
            found = (np.array(line[name], float) for line in (one, other))
            np.testing.assert_allclose(*found, atol=1e-3 if "loss" in name else 0.02)
        assert one.keys() == other.keys()
        for name in ("cohort", "missing", "bytes_up", "bytes_down"):
            assert one.get(name) == other.get(name)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() == json.loads((alone / "summary.json").read_text()).keys()
    # Of the time of four runs together, each has its share.
    assert stored_runs.read(folder).seconds == pytest.approx(summary["seconds"] / 4)
    row = record["settings"][1]
    assert row["received"]["per_seed"][1] == summary["received_accuracy"]
    assert row["trained_pooled"]["per_seed"][1] == summary["trained"]["pooled"]
    assert row["validation"]["per_seed"][1] == summary["validation"]["received"]["mean"]
    assert json.loads((folder / "config.json").read_text())["validation_examples"] == [4, 4, 4, 4]

    # Nothing is made twice.
    monkeypatch.setattr(run, "run_together", None)
    assert main(words) == 0


SICK = """
import jax, jax.numpy as jnp
from pfl_jax import LocalTraining, Model
from pfl_jax.methods import fedavg

def sick(model: Model, training: LocalTraining = LocalTraining(), *, dose: float = 0.0):
    base = fedavg(model, training)

    def local(key, server, client, data):
        result = base.local(key, server, client, data)
        bad = jnp.where(jax.random.uniform(key) < dose, jnp.nan, 1.0)
        return result._replace(message=jax.tree.map(lambda leaf: leaf * bad, result.message))

    return base._replace(local=local)
"""


@pytest.mark.parametrize(
    ("more", "dose", "is_scored"),
    [((), 0.3, False), (("--on-nan", "skip-client"), 0.3, True), (("--on-nan", "skip-client"), 1.0, False)],
)
def test_a_run_that_diverges_has_no_scores_and_the_others_go_on(tmp_path, capsys, more, dose, is_scored):
    (tmp_path / "mine.py").write_text(SICK)
    words = ["--dataset", "digits", "--method", f"{tmp_path}/mine.py:sick", "--grid", f"dose=0.0,{dose}", *SMALL, *more]
    assert main([*words, "--no-compilation-cache", "--out", str(tmp_path / "sweep")]) == 0
    well, ill = (tmp_path / "sweep" / f"dose={number}" / "seed-0" for number in (0.0, dose))
    assert ("has diverged" in capsys.readouterr().out) == (not is_scored)
    assert all(line["received"]["mean"] is not None for line in log(well))
    last = log(ill)[-1]
    assert (last["received"]["mean"] is not None) == is_scored
    assert (last.get("diverged", 0) > 0) == is_scored
    assert (summary(ill)["received_accuracy"] is not None) == is_scored
    table = (tmp_path / "sweep" / "sweep.md").read_text()
    assert (f"| dose={dose} | — | — | — | — |" in table) == (not is_scored)


def test_runs_of_a_sweep_diverge_in_the_rounds_in_which_they_do_alone(tmp_path, capsys):
    # One message of four arrives: the others may be finite where it is not.
    (tmp_path / "mine.py").write_text(SICK)
    words = [*SMALL, "--method", f"{tmp_path}/mine.py:sick", "--rounds", "8", "--drop-rate", "0.75"]
    words = [*words, "--on-nan", "skip-client", "--no-compilation-cache", "--out"]
    sweep = ["--dataset", "digits", "--grid", "dose=0.0,0.4", "--seeds", "2"]
    assert main([*sweep, *words, str(tmp_path / "sweep")]) == 0
    together = re.findall(r"round (\d+): the run in \S*dose=0.4/seed-(\d) has diverged", capsys.readouterr().out)
    alone = []
    for seed in "01":
        assert command.main("digits", ["--dose", "0.4", "--seed", seed, *words, str(tmp_path / seed)]) == 2
        alone += [(number, seed) for number in re.findall(r"round (\d+): the model", capsys.readouterr().err)]
    assert len(alone) == 2
    assert sorted(together) == sorted(alone)


@pytest.mark.slow
@pytest.mark.parametrize("newer", [False, True])
def test_a_group_that_was_cut_off_goes_on_to_the_same_end(tmp_path, capsys, monkeypatch, newer):
    # Three runs: one device of two has one to fill up.
    words = ["--dataset", "digits", "--method", "fedper", "--seeds", "3", *SMALL, "--rounds", "4", "--eval-every", "2"]
    words = [*words, "--participation", "0.5", "--no-compilation-cache", "--checkpoint-every", "1", "--out"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main([*words, str(whole)]) == 0

    save, seen = run.JointRuns.save, []

    def and_stop(group, states):
        save(group, states)
        seen.append(group.runs[0].counts.round)
        if seen[-1] == 3:
            # The log goes on after the checkpoint, and then everything is cut off.
            path = group.runs[1].folder.path / "metrics.jsonl"
            path.write_text(path.read_text() + '{"round": 4, "rec')
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run.JointRuns, "save", and_stop)
        assert main([*words, str(cut)]) == 130
    (folder,) = {path.parent for path in cut.glob("*/seed-0")}
    capsys.readouterr()
    monkeypatch.setattr(run, "_runs_at_once", lambda *_: 1)
    if newer:
        # Killed while it wrote the checkpoints of round 3.
        (folder / "seed-2" / FOLDER / "0-of-1" / "3.npz").unlink()
    assert main([*words, str(cut)]) == 0
    assert f"continuing 3 runs after round {2 if newer else 3}" in capsys.readouterr().out
    for seed in (0, 1, 2):
        one, other = (untimed(path / folder.name / f"seed-{seed}") for path in (whole, cut))
        assert one == other
        assert (cut / folder.name / f"seed-{seed}" / "summary.json").is_file()


PARTS = ["--dataset", "digits", "--method", "fedper", "--grid", "epochs=1,2,3,4", *SMALL]


def test_parts_claim_groups_and_the_last_one_collects(tmp_path, capsys, monkeypatch):
    fake, out = FakeRuns(), tmp_path / "sweep"
    monkeypatch.setattr(
        Sweep, "run", lambda self, jobs, console: [fake(job.spec.in_folder(job.folder)) for job in jobs]
    )
    words = [*PARTS, "--out", str(out)]
    order = batch.read(Sweep, [*words, "--part", "0/2"])
    groups = order.groups(order.jobs(Console(quiet=True)))
    with lock_folder(out, shared=True), order.claim(groups[3]) as is_mine:
        assert is_mine
        assert main([*words, "--part", "1/2"]) == 0
        assert "3 of 4 runs are finished; other processes have the rest" in capsys.readouterr().out
        # It began in the middle.
        assert [one.hyper_parameters["epochs"] for one in fake.done] == [3, 1, 2]
        assert not (out / "sweep.json").exists()
        # A process that shares nothing waits for the others.
        assert main(words) == 2
        assert "another process is at work" in capsys.readouterr().err
    assert main([*words, "--part", "0/2"]) == 0
    assert len(fake.done) == 4
    assert [row["setting"] for row in json.loads((out / "sweep.json").read_text())["settings"]] == [
        f"epochs={number}" for number in (1, 2, 3, 4)
    ]
    assert main(words) == 0
    assert len(fake.done) == 4


def test_values_with_other_signs_of_the_exponent_have_folders_of_their_own():
    order = batch.read(Sweep, ["--dataset", "digits", "--method", "fedpac", "--grid", "lam=1e-1,1e+1,1e1"])
    folders = {job.folder for job in order.jobs(Console(quiet=True))}
    assert len(folders) == 3


def test_switches_can_be_in_the_grid():
    grid = ["--grid", "drop_last=True,False", "--grid", "alignment=True,False"]
    order = batch.read(Sweep, ["--dataset", "digits", "--method", "fedpac", *grid])
    found = [order.jobs_of(setting)[0].spec for setting in order.settings()]
    assert [one.drop_last for one in found] == [True, True, False, False]
    assert [one.hyper_parameters["alignment"] for one in found] == [True, False, True, False]
    assert order.title(order.settings()[1]) == "drop_last=True alignment=False"


def test_runs_of_one_shape_are_a_group():
    grid = ["--seeds", "2", "--grid", "lam=0.1,1", "--grid", "epochs=1,2", "--grid", "participation=0.5,1.0"]
    order = batch.read(Sweep, ["--dataset", "digits", "--method", "fedpac", *grid])
    jobs = order.jobs(Console(quiet=True))
    found = [[(job.spec.seed, job.folder.parent.name) for job in group] for group in order.groups(jobs)]
    assert [len(group) for group in found] == [4] * 4
    assert found[0] == [
        *((seed, "lam=0.1-epochs=1-participation=0.5") for seed in (0, 1)),
        *((seed, "lam=1-epochs=1-participation=0.5") for seed in (0, 1)),
    ]


WORDS = ["--dataset", "digits", "--num-clients", "2", "--rounds", "2"]
RATES = ["--method", "fedper", "--grid", "lr=0.05,0.1,0.2"]


@pytest.fixture
def pictures(monkeypatch):
    """What is drawn, in place of the drawings."""
    found = []
    monkeypatch.setattr(sweep_results, "save_picture", lambda picture, *paths: found.append(picture))
    return found


def results(folder, words, of_settings, change=None):
    """sweep.json and sweep.md of settings with these (accuracies, accuracies on validation)."""
    sweep = batch.read(Sweep, [*WORDS, *words, "--out", str(folder)])
    settings = {sweep.title(setting): sweep.jobs_of(setting) for setting in sweep.settings()}
    fake = FakeRuns()
    # What a setting gets by the other protocol is the opposite.
    fake.trained = lambda accuracy: 1 - accuracy
    for jobs, (accuracies, validation) in zip(settings.values(), of_settings, strict=True):
        fake.accuracies = lambda options, found=accuracies: found
        fake.validation = None if validation is None else lambda options, found=validation: found
        for job in jobs:
            fake(job.spec.in_folder(job.folder))
            if change is not None:
                change(job.folder / "config.json")
    sweep_results.save(settings, folder, Console(quiet=True))
    return json.loads((folder / "sweep.json").read_text()), (folder / "sweep.md").read_text()


def test_the_best_setting_is_chosen_on_validation_examples(tmp_path, pictures):
    # On test examples lr=0.1 is the best; what counts is the last round.
    validated = [((0.7, 0.8), (0.9, 0.6)), ((0.9, 0.9), (0.5, 0.5)), ((0.75, 0.7), (0.4, 0.65))]
    record, table = results(tmp_path, [*RATES, "--val-fraction", "0.2"], validated)
    assert (record["best"], record["best_chosen_on"]) == ("lr=0.2", "validation")
    (best,) = (row for row in record["settings"] if row["setting"] == record["best"])
    assert best["validation"]["mean"] == pytest.approx(65)
    assert best["received"]["mean"] == pytest.approx(70)
    assert "| lr=0.2 (best) | 65.00 | 70.00 | 72.50 | 30.00 | 32.50 |" in table
    assert pictures[0].panels[0].draw.keywords["main"] == "lr=0.2"


def test_the_best_setting_is_chosen_by_the_protocol_asked_for(tmp_path, pictures):
    words = [*RATES, "--val-fraction", "0.2", "--eval-protocol", "trained"]
    record, _ = results(tmp_path, words, [((0.7,), (0.9,)), ((0.7,), (0.6,)), ((0.7,), (0.7,))])
    assert record["best"] == "lr=0.1"
    assert record["settings"][1]["validation"]["mean"] == pytest.approx(40)


def test_without_validation_examples_the_best_setting_is_chosen_on_test_examples_and_says_so(tmp_path):
    words = ["--method", "fedper", "--seeds", "2", "--grid", "lr=0.05,0.1"]
    record, table = results(tmp_path, words, [((float("nan"),), None), ((0.9,), None)])
    # A setting that diverged is never the best one.
    assert (record["best"], record["best_chosen_on"]) == ("lr=0.1", "test")
    assert record["settings"][0]["received"] == {
        "mean": None,
        "std": None,
        "per_seed": [None, None],
        "over": "",
    }
    assert "validation" not in record["settings"][1]
    assert "| lr=0.05 | — | — |" in table
    assert "| lr=0.1 (best) | 90.00 ± 0.00 |" in table


def test_methods_in_files_of_the_same_name_are_settings_of_their_own(tmp_path, monkeypatch, pictures):
    monkeypatch.chdir(tmp_path)
    for folder in ("one", "other"):
        Path(folder).mkdir()
        Path(folder, "mine.py").write_text("from pfl_jax.methods.fedavg import fedavg\n")
    words = ["--grid", "method=one/mine.py:fedavg,other/mine.py:fedavg,fedper"]
    record, table = results(Path("sweep"), words, [((0.5,), None), ((0.6,), None), ((0.7,), None)])
    assert [row["setting"] for row in record["settings"]] == ["one/mine.py:fedavg", "other/mine.py:fedavg", "fedper"]
    assert "| other/mine.py:fedavg | 60.00 |" in table


def test_settings_with_different_scores_are_no_table(tmp_path, pictures):
    def change(path):
        if "lr=0.1" in str(path):
            config = json.loads(path.read_text())
            path.write_text(json.dumps(config | {"task": {"scores": ["mse"], "in_percent": []}}))

    words = ["--method", "fedper", "--grid", "lr=0.05,0.1"]
    with pytest.raises(InvalidInput, match="different scores have no common table: accuracy in %; mse"):
        results(tmp_path, words, [((0.5,), None), ((0.6,), None)], change)
    assert not (tmp_path / "sweep.json").exists()
    with pytest.raises(InvalidInput, match="--task cannot be in the grid"):
        batch.read(Sweep, [*WORDS, "--grid", "task=binary,regression"])


def test_settings_on_different_data_have_no_best_one(tmp_path, pictures):
    def change(path):
        if "lr=0.1" in str(path):
            config = json.loads(path.read_text())
            path.write_text(json.dumps(config | {"data": config["data"] | {"description": "others"}}))

    words = ["--method", "fedper", "--grid", "lr=0.05,0.1"]
    record, table = results(tmp_path, words, [((0.5,), None), ((0.6,), None)], change)
    assert record["title"] == "fedper on digits; others, seed 0"
    assert (record["best"], record["data_source"], record["score"]) == (None, "digits; others", "accuracy in percent")
    assert "(best)" not in table


METHODS = ["--dataset", "digits", "--val-fraction", "0.2", "--grid", "method=fedpac,fedper", "--grid", "lr=0.02,0.05"]


def test_options_of_one_method_vary_with_it_alone():
    order = batch.read(Sweep, [*METHODS, "--grid", "fedpac.lam=0.1,1", "--first-seed", "3", "--seeds", "2"])
    titles = [order.title(setting) for setting in order.settings()]
    assert titles == [
        *(f"fedpac lr={lr} lam={lam}" for lr in ("0.02", "0.05") for lam in ("0.1", "1")),
        *("fedper lr=0.02", "fedper lr=0.05"),
    ]
    jobs = order.jobs_of(order.settings()[1])
    assert [job.spec.seed for job in jobs] == [3, 4]
    assert [job.folder.name for job in jobs] == ["seed-3", "seed-4"]
    assert jobs[0].spec.hyper_parameters["lam"] == 1


def test_the_best_setting_of_each_method_is_run_again_with_fresh_seeds(tmp_path, capsys):
    # Learning rates of 1e-9 learn nothing.
    grid = ["--grid", "method=fedper,local", "--grid", "lr=1e-9,0.1", "--select", "validation", "--select-seeds", "2"]
    words = ["--dataset", "digits", *grid, *SMALL, "--val-fraction", "0.3", "--no-compilation-cache", "--epochs", "3"]
    assert main([*words, "--out", str(tmp_path / "sweep")]) == 0
    record = json.loads((tmp_path / "sweep/selected/sweep.json").read_text())
    assert [row["setting"] for row in record["settings"]] == ["fedper lr=0.1", "local lr=0.1"]
    assert "seeds 1 to 2" in record["title"]
    runs = sorted(path.parent.name for path in (tmp_path / "sweep/selected").rglob("summary.json"))
    assert runs == ["seed-1", "seed-1", "seed-2", "seed-2"]
    # Again, nothing is run.
    assert main([*words, "--out", str(tmp_path / "sweep")]) == 0
    assert "4 of 4 runs are finished" in capsys.readouterr().out


def test_the_dry_run_says_what_there_is_to_do(tmp_path, capsys):
    assert main([*SWEEP, "--grid", "epochs=1,2", "--out", str(tmp_path / "sweep"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.count("4 runs together") == 2
    assert out.count("# absent") == 8


def test_a_sweep_that_diverged_whole_is_told_too(tmp_path):
    record, table = results(tmp_path, ["--method", "fedper", "--grid", "lr=1,2"], [((float("nan"),), None)] * 2)
    assert record["settings"][1]["received"]["mean"] is None
    assert "| lr=2 | — |" in table
    assert record["best"] is None
    assert (tmp_path / "sweep.svg").is_file()


def test_settings_are_named_by_their_methods(tmp_path, pictures):
    words = ["--grid", "method=fedpac,fedper", "--grid", "lr=0.05,0.1"]
    record, _ = results(tmp_path, words, [((0.5,), None), *[((0.7,), None)] * 3])
    assert record["title"] == "fedpac, fedper on digits, seed 0"
    assert [row["setting"] for row in record["settings"]] == [
        *("fedpac lr=0.05", "fedpac lr=0.1", "fedper lr=0.05", "fedper lr=0.1")
    ]
    # Of equal ones the first.
    assert record["best"] == "fedpac lr=0.1"
