"""A run that was cut off goes on, and ends as the uninterrupted one; what cannot go on is refused in one line."""

import io
import json
import signal

import jax
import numpy as np
import pytest
from interrupts import ask_to_stop
from rich.console import Console
from run_folders import write_run
from test_command_line import SMALL

from experiments.cli.command import main, parse
from experiments.export import load_run
from experiments.folder.load import inspect
from experiments.run import rounds, run
from experiments.run.run import run_cell
from experiments.spec.spec import Spec
from pfl_jax import InvalidInput
from pfl_jax.engine.checkpoint import FOLDER, Checkpoints

RUN = ["--method", "fedper", "--rounds", "6", "--eval-every", "2", "--num-clients", "5", "--train-size", "20"]
RUN = [*RUN, "--test-size", "10", "--participation", "0.5", "--checkpoint-every", "1"]
RUN = [*RUN, "--held-out-clients", "1", "--drop-rate", "0.5", "--val-fraction", "0.2"]
RUN = [*RUN, "--select-clients", "power_of_choice:3"]


def results(folder):
    """Metrics without times, and all bytes of the final state, wherever the clients' states are stored."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seconds"], line["examples_per_second"]
    state = load_run(folder).state
    leaves = jax.tree.leaves(state._replace(key=jax.random.key_data(state.key)))
    return lines, [np.asarray(leaf).tobytes() for leaf in leaves]


def test_sigterm_lets_the_round_end_and_leaves_a_checkpoint(tmp_path, monkeypatch):
    words = ["--method", "local", "--rounds", "6", *SMALL, "--eval-every", "6", "--checkpoint-every", "6"]
    words.append("--no-compilation-cache")
    seen, add = [], rounds.ActiveRun.add

    def stopping(self, result, *times):
        add(self, result, *times)
        seen.append(result.round)
        if result.round == 2:
            ask_to_stop()

    said, before = io.StringIO(), signal.getsignal(signal.SIGTERM)
    request = parse("digits", [*words, "--out", str(tmp_path / "run")])
    monkeypatch.setattr(rounds.ActiveRun, "add", stopping)
    with pytest.raises(KeyboardInterrupt, match=r"before the first evaluation; --resume .* goes on after round 2"):
        run.run(request, Console(file=said))
    monkeypatch.setattr(rounds.ActiveRun, "add", add)
    assert seen == [1, 2]
    assert "stopping after this round" in said.getvalue()
    assert signal.getsignal(signal.SIGTERM) is before
    assert Checkpoints(tmp_path / "run" / FOLDER).rounds() == [2]
    # As a cell of a table it goes on too.
    cell = parse("digits", words)
    assert inspect(cell, tmp_path / "run") == "unfinished"
    run_cell(cell, tmp_path / "run", Console(file=said))
    assert "after round 2" in said.getvalue()
    assert inspect(cell, tmp_path / "run") == "finished"


@pytest.mark.parametrize("model", ["mlp,mlp", pytest.param("mlp,resnet8,resnet8_bn", marks=pytest.mark.slow)])
def test_a_run_of_several_networks_that_was_interrupted_ends_the_same(tmp_path, monkeypatch, model):
    words = ["--method", "lg_fedavg", "--model", model, "--features", "64", *SMALL]
    words += ["--rounds", "4", "--eval-every", "2", "--participation", "0.7", "--keep-state", "always"]
    assert main("digits", [*words, "--out", str(tmp_path / "whole")]) == 0
    add = rounds.ActiveRun.add

    def stopping(self, result, *times):
        add(self, result, *times)
        if result.round == 3:
            ask_to_stop()

    monkeypatch.setattr(rounds.ActiveRun, "add", stopping)
    assert main("digits", [*words, "--out", str(tmp_path / "cut")]) == 130
    monkeypatch.setattr(rounds.ActiveRun, "add", add)
    assert Checkpoints(tmp_path / "cut" / FOLDER).rounds() == [3]
    assert main("digits", ["--resume", str(tmp_path / "cut")]) == 0
    assert results(tmp_path / "cut") == results(tmp_path / "whole")


def test_options_beside_resume_are_those_of_the_run_s_method(tmp_path, capsys):
    write_run(tmp_path / "prox", ("--method", "fedprox", "--mu", "0.1"))
    # It goes as far as the rounds.
    for words, message in (
        (["--mu", "0.1", "--rounds", "2"], "the run is finished"),
        (["--mu", "0.2", "--rounds", "900"], "the run has --mu 0.1, not 0.2"),
    ):
        assert main("digits", ["--resume", str(tmp_path / "prox"), *words]) == 2
        assert message in capsys.readouterr().err


def test_a_run_with_a_target_goes_on_by_the_protocol_that_ends_it(tmp_path, capsys):
    write_run(tmp_path / "run", ("--method", "fedper", "--target-accuracy", "99"), finished=False)
    words = ["--resume", str(tmp_path / "run"), "--eval-protocol", "trained"]
    assert main("digits", words) == 2
    assert "the run has --eval-protocol received, not trained" in capsys.readouterr().err
    cell = Spec.of("digits", method="fedper", target_accuracy=99, eval_protocol="trained")
    with pytest.raises(InvalidInput, match="--eval-protocol received, not trained"):
        inspect(cell, tmp_path / "run")


def test_real_data_that_the_package_brings_are_both_embedded_and_real(tmp_path):
    words = ("--method", "fedper", "--source", "embedded")
    write_run(tmp_path / "run", words, finished=False)
    assert inspect(parse("digits", words), tmp_path / "run") == "unfinished"
    write_run(tmp_path / "files", words[:2], finished=False)
    with pytest.raises(InvalidInput, match=r"on digits \(files\), not --source embedded"):
        inspect(parse("digits", words), tmp_path / "files")


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    """Folders of a run of five rounds, and of one of three rounds to which two are added."""
    folder, words = tmp_path_factory.mktemp("longer"), list(RUN)
    words[words.index("--rounds") + 1] = "5"
    words[words.index("--eval-every") + 1] = "1"
    # Without --checkpoint-every: the state at the end is what rounds are added to.
    del words[words.index("--checkpoint-every") : words.index("--checkpoint-every") + 2]
    words += ["--schedule", "lr=exponential:0.9", "--keep-state", "always", "--local-steps", "3"]
    assert main("digits", [*words, "--out", str(folder / "whole")]) == 0
    words[words.index("--rounds") + 1] = "3"
    assert main("digits", [*words, "--out", str(folder / "added")]) == 0
    assert main("digits", ["--resume", str(folder / "added"), "--rounds", "5"]) == 0
    return folder / "whole", folder / "added"


def test_added_rounds_are_those_of_the_longer_run(longer):
    whole, added = longer
    assert results(added) == results(whole)
    ours, theirs = (json.loads((path / "summary.json").read_text()) for path in (added, whole))
    for name in ("received_per_client", "trained_per_client", "rounds", "rounds_done"):
        assert ours[name] == theirs[name]
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (added, whole))
    assert ours["options"] | {"out": None} == theirs["options"] | {"out": None}
    assert ours["given"] == theirs["given"]


@pytest.mark.slow
def test_added_rounds_count_in_the_privacy_budget(tmp_path):
    words = ["--method", "fedavg", *SMALL, "--rounds", "1"]
    assert main("digits", [*words, "--dp-clip", "1", "--dp-noise", "1", "--out", str(tmp_path / "run")]) == 0

    def epsilon():
        return json.loads((tmp_path / "run" / "config.json").read_text())["privacy"][0]["epsilon"]

    before = epsilon()
    assert main("digits", ["--resume", str(tmp_path / "run"), "--rounds", "3", "--keep-state", "never"]) == 0
    assert epsilon() > before


def test_what_is_trained_again_is_said_and_a_checkpoint_has_states_on_disk(tmp_path, capsys):
    folder, words = tmp_path / "run", ["--method", "local", *SMALL, "--checkpoint-every", "1", "--keep-state", "never"]
    assert main("digits", [*words, "--rounds", "2", "--state-on", "disk", "--out", str(folder)]) == 0
    (folder / FOLDER / "0-of-1" / "2.npz").unlink()
    assert main("digits", ["--resume", str(folder), "--rounds", "3"]) == 0
    assert "The last checkpoint is of round 1: rounds 2 to 2 are trained again." in capsys.readouterr().out
    assert load_run(folder).state.round == 3
    assert main("digits", ["--resume", str(folder), "--rounds", "4"]) == 0
    assert "trained again" not in capsys.readouterr().out
