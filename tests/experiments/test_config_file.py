"""A run as a value: from Python, from .toml and .json files (--config), from the configuration of a run; written by
--print-config."""

import hashlib
import json
import math

import pytest
from rich.console import Console

from experiments.cli.command import main, parse
from experiments.commands import batch
from experiments.host.exit_codes import exit_code
from experiments.run import resume
from experiments.spec.hyper_parameters import method_options
from experiments.spec.identity import difference, relevant_options
from experiments.spec.option_notes import texts_of
from experiments.spec.options import COMMON, RESULT_NEUTRAL
from experiments.spec.spec import Spec, values_in
from experiments.sweep import Sweep
from lab import committed
from lab.committed import ROOT
from pfl_jax import InvalidInput

TOML = """
dataset = "digits"
method = "fedper"
rounds = 7
train-size = 30
size_choices = [30, 40]
lr = 0.25
drop-last = true
shuffle = false
"""


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    return str(path)


def test_a_file_says_what_the_command_line_could(toml):
    request = parse("digits", ["--config", toml])
    words = "--method fedper --rounds 7 --train-size 30 --size-choices 30 40 --lr 0.25 --drop-last --no-shuffle"
    same = parse("digits", words.split())
    assert relevant_options(request) == relevant_options(same)
    assert request.hyper_parameters == same.hyper_parameters
    assert request.given == same.given | {"config"}
    # Also for commands of many runs.
    sweep = batch.read(Sweep, ["--dataset", "digits", "--config", toml, "--seeds", "2"])
    assert [relevant_options(job.spec) for job in sweep.jobs(Console())] == [relevant_options(same)] * 2


def test_what_is_given_beside_it_counts(toml):
    request = parse("digits", ["--rounds", "3", "--config", toml, "--method", "ditto", "--shuffle"])
    assert (request.rounds, request.method, request.shuffle) == (3, "ditto", True)
    assert (request.drop_last, request.hyper_parameters["lr"]) == (True, 0.25)


WORDS = ["--method fedas --beta 0.3", "--method fedprox --local-steps 4 --schedule lr=cosine"]


@pytest.mark.parametrize("words", WORDS)
def test_what_is_printed_is_the_same_run(words, tmp_path, capsys):
    path = tmp_path / "printed.json"
    assert main("cifar10", [*words.split(), "--out", str(tmp_path / "run"), "--print-config"]) == 0
    path.write_text(capsys.readouterr().out)
    assert not (tmp_path / "run").exists()
    one, again = parse("cifar10", words.split()), parse("cifar10", ["--config", str(path)])
    assert relevant_options(one) == relevant_options(again)
    assert again.out is None


def test_the_configuration_of_a_run_repeats_it(tmp_path):
    one = parse("digits", ["--method", "fedper", "--rounds", "4", "--seed", "3", "--chunk", "1"])
    stored = {"dataset": "digits", "options": one.options, "hyper_parameters": one.hyper_parameters}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(stored | {"data": {"source": "embedded"}, "given": []}))
    again = parse("digits", ["--config", str(path)])
    assert relevant_options(one) == relevant_options(again)
    assert (again.seed, again.source, again.chunk) == (3, "embedded", "auto")


def test_code_that_a_file_names_is_not_executed_unasked(tmp_path):
    code, toml = tmp_path / "mine.py", tmp_path / "run.toml"
    code.write_text("raise SystemExit('executed')")
    toml.write_text(f'method = "{code}:mine"')
    with pytest.raises(InvalidInput, match=r"executed only if you name it: give --method too"):
        parse("digits", ["--config", str(toml)])
    assert parse("digits", ["--config", str(toml), "--method", "fedavg"]).method == "fedavg"
    with pytest.raises(InvalidInput, match="cannot be executed: line 1: SystemExit: executed"):
        parse("digits", ["--config", str(toml), "--method", f"{code}:mine"])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("run.toml", "rounds = ", "cannot be read"),
        ("run.json", '{"dataset": "digits", "options": 3, "hyper_parameters": 4, "data": "x.csv"}', "is not a config"),
        ("run.toml", "[data]\ns = 20", "--data must be a text or None, not a dict"),
        ("run.toml", 'dataset = "cifar10"', "is for cifar10, not digits"),
        ("run.toml", None, "cannot read"),
    ],
)
def test_mistakes_are_one_line(name, text, said, tmp_path):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        parse("digits", ["--config", str(path)])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


HARMLESS = {
    "keep_state", "checkpoint_every", "keep_checkpoints", "plot", "tensorboard", "state_on",  # in the run's new folder
    "source", "eval_protocol", "devices", "chunk", "compilation_cache", "data", "test_data", "config",
}  # fmt: skip
"""Options by which results do not change, and which a file may nevertheless give; --config is always beside it."""

STRANGE = (["x"], [["x"]], [3, None], True, math.nan, 10**400, "no such thing")


@pytest.mark.parametrize("name", [*COMMON, *method_options("fedpac"), "dataset"])
def test_a_file_gives_no_option_that_acts_on_this_machine_and_other_types_are_one_line(name, tmp_path, capsys):
    here, usual = name in RESULT_NEUTRAL - HARMLESS, {"dataset": "digits"} | Spec.of("digits").values
    path = tmp_path / "run.json"
    for value in (usual[name], *STRANGE):
        path.write_text(json.dumps({name: value}))
        code = exit_code(lambda: parse("digits", ["--config", str(path)]) and None)
        said = capsys.readouterr().err
        assert code == 2 or (code == 0 and not here)
        assert code == 0 or here or value in STRANGE
        assert said.count("\n") == (code == 2)
        assert ("acts on this machine" in said) == here
    if here:
        # What is given beside it counts: then the file's is not even read.
        assert values_in(str(path), {name: "given"}) == {}


def test_a_file_of_a_stranger_resumes_nothing(tmp_path, capsys):
    code, ran = tmp_path / "mine.py", tmp_path / "ran"
    code.write_text(f"open({str(ran)!r}, 'w')")
    folder = tmp_path / "run"
    assert main("digits", ["--method", "fedavg", "--rounds", "1", "--num-clients", "2", "--out", str(folder)]) == 0
    config = json.loads((folder / "config.json").read_text())
    config["options"]["method"] = f"{code}:mine"
    config["own_code"] = {"method": {"file": str(code), "digest": hashlib.sha256(code.read_bytes()).hexdigest()[:12]}}
    (folder / "config.json").write_text(json.dumps(config))
    for options, words in (
        ({"resume": str(folder), "trust": True, "rounds": 2}, []),
        ({"trust": True}, ["--resume", str(folder), "--rounds", "2"]),
    ):
        path = tmp_path / "options.json"
        path.write_text(json.dumps(options))
        assert main("digits", ["--config", str(path), *words]) == 2
        assert not ran.exists()
    capsys.readouterr()


def formats():
    """Committed configurations, one for each set of options that there has been, and each dataset."""
    found = {}
    for file in sorted((ROOT / "queue").glob("*.jsonl")):
        for record in committed.read(file).values():
            if (config := record.get("config")) is not None and not config.get("own_code"):
                found.setdefault((frozenset(config["options"]), config["dataset"]), config)
    return list(found.values())


def test_runs_of_earlier_formats_go_on(tmp_path):
    found = formats()
    assert len({frozenset(config["options"]) for config in found}) > 1
    for config in found:
        spec = resume.spec_of(config, tmp_path)
        assert difference(spec, config, finished=False) == ""
        for name, value in config["options"].items():
            if name in ("num_clients", "rounds", "partition", "lr", "seed"):
                assert spec.values[name] == value
        assert spec.given == frozenset(config["given"])


# From Python


def test_a_run_is_a_value(tmp_path):
    spec = Spec.of("digits", method="fedprox", rounds=7, mu=1, size_choices=[30, 40], drop_last=True)
    words = "--method fedprox --rounds 7 --mu 1 --size-choices 30 40 --drop-last"
    assert spec == parse("digits", words.split())
    assert (spec.rounds, spec.hyper_parameters["mu"], type(spec.hyper_parameters["mu"])) == (7, 1.0, float)
    assert spec.given == {"method", "rounds", "mu", "size_choices", "drop_last"}
    spec.save(tmp_path / "run.json")
    again = Spec.load(tmp_path / "run.json", seed=3)
    assert relevant_options(again) == relevant_options(spec)
    assert again.seed == 3
    assert relevant_options(Spec.of("digits", **texts_of(spec.command().split()[3:]))) == relevant_options(spec)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"roundz": 3}, "unknown option --roundz; did you mean --rounds?"),
        ({"local_epochs": 3}, "unknown option --local-epochs: here it is --epochs"),
        ({"rounds": 0}, "--rounds"),
        ({"local_steps": 2, "epochs": 3}, "--local-steps cannot be given with --epochs"),
    ],
)
def test_a_run_that_cannot_be_is_refused_when_it_is_made(given, said):
    with pytest.raises(InvalidInput) as caught:
        Spec.of("digits", **given)
    assert said in str(caught.value)
    with pytest.raises(InvalidInput, match="unknown dataset"):
        Spec.of("digit")
