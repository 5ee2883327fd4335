"""Code on the pages of the documentation runs as it stands; what takes long in `pytest -m slow` alone."""

import contextlib
import doctest
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from pages import ROOT, block, blocks, executed
from problems import HYPER_PARAMETERS, tiny_federation, tiny_model
from rich.console import Console
from trees import assert_same, row

from experiments import export
from experiments.cli.command import main, parse
from experiments.export import load_runs
from experiments.report import main as report
from experiments.run import build
from experiments.sweep import main as sweep
from pfl_jax import Cohort, InvalidInput, LocalTraining, methods, primitives, simulate
from pfl_jax.data import federate, load, partition
from pfl_jax.engine.asynchronous import read_devices
from pfl_jax.files import load_model
from pfl_jax.methods import make_method
from pfl_jax.testing import CHECKS, Subject, check_method
from pfl_jax.testing.comparison import assert_close

# README.md and the pages of evaluation, training and adapters


def printed(capsys):
    return [line.split() for line in capsys.readouterr().out.splitlines()]


EXAMPLES = {
    "library": ("README.md", ["simulate.run("]),
    "adapters": ("docs/pretrained.md", ['targets="fc1|fc2"']),
    "training": ("docs/training.md", ['optimizer="adamw"', "optimizer=optax.adam", "cosine_decay_schedule(0.1, 3)"]),
    "validation and a comparison": ("docs/evaluation.md", ["with_validation(", "import difference"]),
    "changing data": ("docs/changing-data.md", ["federate_phases("]),
    "choosing clients": ("docs/choosing-clients.md", ["def by_root("]),
    "early stopping": ("docs/early-stopping.md", ["patience=6"]),
    "virtual time": ("docs/time.md", ["asynchronous.timetable("]),
    "sweep": ("docs/sweeps.md", ["sweep.run("]),
    "fairness": ("docs/fairness.md", ['"weight_lr": 0.1']),
    "graphs": ("docs/decentralized.md", ["erdos_renyi:0.1"]),
}
"""Name -> page, and a text in each of its blocks that runs and prints."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_other_examples_run(name, capsys):
    page, markers = EXAMPLES[name]
    names = executed(block("README.md", "simulate.run(")) if name == "sweep" else {"LocalTraining": LocalTraining}
    executed(*(block(page, marker) for marker in markers), **names)
    rows = printed(capsys)
    assert rows
    assert name not in ("library", "adapters") or float(rows[-1][1]) > 0.5


def test_a_network_starts_from_weights_of_ones_own():
    names = executed(*(block("docs/pretrained.md", marker) for marker in ('targets="fc1|fc2"', "fresh._replace(")))
    assert_same(names["model"].init(jax.random.key(5))["backbone"], names["backbone"])


def test_a_run_from_python(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    executed(block("docs/run-folder.md", "Spec.of("))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "60 mlp 0.02"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["digits-fedper-seed0-001"]


def test_traces_of_fedscale_become_devices(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    behavior = {"duration": 9, "inactive": [4, 4, 60], "finish_time": 90, "active": [0, 4, 50], "model": "phone"}
    pickles = {"client_device_capacity": {7: {"computation": 100.0, "communication": 80.0}}}
    for name, content in (pickles | {"client_behave_trace": {3: behavior}}).items():
        Path(name).write_bytes(pickle.dumps(content))
    executed(block("docs/time.md", "client_behave_trace"))
    devices = read_devices("devices.json")
    assert (devices.seconds_per_example.tolist(), devices.bytes_per_second.tolist()) == ([0.3], [10240])
    assert devices.available == [(90, [(0, 4), (50, 60)])]


def test_the_method_example_is_a_method():
    factory = executed(block("docs/your-model-and-method.md", "def fedavg_median("))["fedavg_median"]
    median = make_method(factory, tiny_model(), **HYPER_PARAMETERS)
    next(simulate.run(median, tiny_federation(), simulate.Settings(rounds=1), jax.random.key(0)))
    # Its purpose: one client's nonsense does not reach the server.
    models = [median.init_server(jax.random.key(0))] * 4
    messages = jax.tree.map(lambda *leaves: jnp.stack(leaves).at[2].set(1e6), *models)
    cohort = Cohort(jnp.arange(4), jnp.full(4, 9), jnp.ones(4, bool), num_clients=4)
    server, _, _ = median.aggregate(jax.random.key(0), None, (), messages, cohort)
    chex.assert_trees_all_equal(server, models[0])


@pytest.mark.parametrize("name", ["my_fedper", "my_ditto", "my_fedproto"])
def test_the_methods_from_nothing_are_methods(name):
    factory = executed(block("docs/your-model-and-method.md", "def my_fedproto("))[name]
    checks = ("structure", "trained_from", "order_of_clients", "clients_outside", "learning")
    check_method(factory, skip=CHECKS.keys() - {*checks})
    built_in = {"my_fedper": methods.fedper, "my_fedproto": methods.fedproto_g}.get(name)
    if built_in is not None:
        own, theirs = (Subject(one).reference for one in (factory, built_in))
        assert_close(own._replace(server=()), theirs._replace(server=()))


# docs/your-own-loop.md and docs/primitives.md


@pytest.mark.without_f1_auc
def test_loops_of_ones_own_give_what_run_gives(capsys):
    names = executed(*blocks("docs/your-own-loop.md"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"seed 0: {names['by_hand'].mean():.3f}"
    # The first of three seeds, by itself and beside the others.
    want, scanned, of_seeds = (names[name]._replace(key=(), trained=()) for name in ("state", "scanned", "states"))
    for state in (scanned, row(of_seeds, 0)):
        assert_same(state, want, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(names["scores"]["accuracy"][0], names["by_hand"], atol=0.05)


# docs/gradients.md


@pytest.mark.slow
def test_gradients_through_training_are_those_of_finite_differences():
    names = executed(*blocks("docs/gradients.md"))
    loss = jax.jit(names["fedpac_loss"])
    for name, at, step in (("by_lr", (0.005, 1.0), (4e-5, 0.0)), ("by_lam", (0.005, 1.0), (0.0, 0.02))):
        above, below = (loss(*(value + sign * one for value, one in zip(at, step, strict=True))) for sign in (1, -1))
        np.testing.assert_allclose(names[name], (above - below) / (2 * sum(step)), rtol=0.05)
    assert names["losses"][-1] < names["losses"][0] - 0.5
    # Move the examples of client 2 along the derivative.
    x, rows, derivative = names["federation"].x.astype(jnp.float32), names["own"][2], names["by_examples"]
    direction = jnp.zeros_like(x).at[rows].set(derivative[rows] / jnp.linalg.norm(derivative[rows]))
    influence = jax.jit(names["loss_of_client_0"])
    change = (influence(x + 0.3 * direction) - influence(x - 0.3 * direction)) / 0.6
    np.testing.assert_allclose(jnp.vdot(derivative, direction), change, rtol=0.05)


def test_every_primitive_has_a_row_and_an_example_that_gives_what_it_shows():
    public = set(primitives.__all__)
    page, examples = (ROOT / "docs/primitives.md").read_text(), "\n".join(blocks("docs/primitives.md", "pycon"))
    rows = {name for one in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)\(", one)}
    assert rows == public
    assert set(re.findall(r"primitives\.(\w+)", examples)) >= public
    said, example = [], doctest.DocTestParser().get_doctest(examples, {}, "docs/primitives.md", None, 0)
    assert not doctest.DocTestRunner().run(example, out=said.append).failed, "".join(said)


# docs/other-tasks.md

TOOLS, DIABETES, NUMBERS, FORTUNES, CHARACTERS, LABELS, OWN_LOSS, DROPOUT = blocks("docs/other-tasks.md")


TASKS = {
    "numbers": [DIABETES, NUMBERS],
    "characters": [FORTUNES, CHARACTERS],
    "labels": [LABELS],
    "own loss": [LABELS.partition("labels = ")[0], OWN_LOSS],
    "dropout": [OWN_LOSS.partition("own_loss = ")[0], DROPOUT],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_other_tasks(name, capsys):
    """Each compares methods with the centralised model."""
    if name == "characters" and not Path("/usr/share/games/fortunes").exists():
        pytest.skip("needs Debian's package fortunes")
    executed(TOOLS, *TASKS[name])
    methods = [words[0] for words in printed(capsys)][-3:]
    assert methods == ["local", "fedavg" if name == "numbers" else "fedper", "centralised"]


# docs/recipes.md

RECIPES = re.findall(r"(?:`(\w+\.py)`:\n\n)?```(\w+)\n(.*?)```", (ROOT / "docs/recipes.md").read_text(), re.DOTALL)
"""(file or "", language, text) of every block, in order."""


@pytest.mark.slow
def test_the_whole_page_of_recipes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names, programs = {}, {"report": report, "sweep": sweep}
    for name, language, text in RECIPES:
        if name:
            Path(name).write_text(text)
        elif language == "python":
            names = executed(text, **names)
        else:
            for line in text.splitlines():
                program, *words = shlex.split(line.removeprefix("python -m experiments."))
                assert (programs[program](words) if program in programs else main(program, words)) == 0, line
    said = "[M], Euclidean distance between a client's trained model and the one that it received."
    assert json.loads(Path("runs/watched/config.json").read_text())["info"] == {"drift": said}
    assert len(names["table"]) == 4
    seconds = [trial.duration.total_seconds() for trial in names["study"].trials]
    assert sorted(seconds)[-2] < 0.1 * max(seconds)


# docs/your-data.md


def commands(page="docs/your-data.md"):
    """(module, words) of a page."""
    lines = [shlex.split(line) for text in blocks(page, "sh") for line in text.splitlines()]
    assert all(words[:2] == ["python", "-m"] for words in lines)
    return [(words[2], words[3:]) for words in lines]


@pytest.fixture
def names(tmp_path, monkeypatch, capsys):
    """What the page's Python defines, run in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    found = executed(*blocks("docs/your-data.md"))
    return found | {"printed": capsys.readouterr().out}


def test_the_data_of_your_data_is_what_the_page_says(names, capsys):
    prepared = "[[ 2.77 -1.12  1.12]\n [-0.24  0.89 -0.89]]\n"
    assert names["printed"] == f"{prepared}('hill', 'north', 'river', 'south') [34 34 33 33]\n0 float32\n"
    assert names["of_dicts"].train_count.tolist() == [34, 34, 33, 33]
    assert names["of_pairs"].test_count.tolist() == [18, 18, 18, 18]
    assert len(names["parts"].train) == 5
    clients = []
    for module, words in commands():
        if module == "experiments.custom":
            experiment = build.build_experiment(parse("custom", words), Console())
            clients.append(experiment.data.num_clients)
        else:
            assert sweep([*words, "--dry-run"]) == 0
            assert "4 runs, 0 of them finished" in capsys.readouterr().out
    assert clients == [4, 5, 5, 6]
    assert names["tokens"].shape == (len(names["rows"]), 20)
    assert experiment.spec.vocabulary == names["tokens"].max() + 1 == 1001


# docs/your-model-and-method.md, followed word for word in an empty folder

OWN = "docs/your-model-and-method.md"
FILES = dict(re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", (ROOT / OWN).read_text(), re.DOTALL))


@pytest.mark.slow
@pytest.mark.without_f1_auc
def test_the_page_of_your_own_code(tmp_path, monkeypatch):
    """Its files, its commands, its notebook and its test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in FILES.items():
        Path(name).write_text(text)
    for module, words in commands(OWN):
        name = module.removeprefix("experiments.")
        with pytest.raises(SystemExit) if "--help" in words else contextlib.nullcontext():
            assert (export.main(words) if name == "export" else main(name, words)) == 0, words
    config = json.loads(Path("runs/mine/config.json").read_text())
    assert config["options"]["method"] == "my_method.py:slow_fedavg"
    assert config["hyper_parameters"]["server_lr"] == 0.7
    mine = (text for text in blocks(OWN) if text not in FILES.values() and "import equinox" not in text)
    names = executed(*mine)
    params = serialization.msgpack_restore(Path("model.msgpack").read_bytes())
    run, test = names["run"], names["test"]
    assert (run.model.apply(params, test.x) == run.predict(3, test.x)).all()
    executed(FILES["test_my_method.py"])["test_slow_fedavg"]()
    sys.modules.pop("my_method", None)


def test_the_network_of_equinox():
    eqx = pytest.importorskip("equinox")
    names = executed(block(OWN, "import equinox"))
    model, tiny = names["equinox_model"], load("digits")
    federation = federate(tiny, partition.iid(tiny, num_clients=4, train_size=60, test_size=40))
    method = make_method("fedper", model, **HYPER_PARAMETERS)
    *_, last = simulate.run(method, federation, simulate.Settings(rounds=8), jax.random.key(0))
    assert last.received["accuracy"].mean() > 0.6
    normal, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(32, "batch", mode="batch")

    def normalized(backbone, x):
        over_batch = jax.vmap(normal, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return over_batch(model.features(backbone, x), state)[0]

    wrong = make_method("fedper", model._replace(features=normalized), **HYPER_PARAMETERS)
    with pytest.raises(InvalidInput, match="examples of a batch influence each other"):
        simulate.run(wrong, federation, simulate.Settings(rounds=1), jax.random.key(0))


# Trackers of docs/keep.md, whose other code tests/test_keep.py runs

KEEP = "docs/keep.md"


def test_trackers_of_the_page_get_each_evaluation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_trackers.py").write_text(block(KEEP, "def mlflow("))
    (command,) = [line for text in blocks(KEEP, "sh") for line in text.splitlines() if "--tracker" in line]
    words = shlex.split(command)[3:]
    small = ["--num-clients", "3", "--train-size", "10", "--test-size", "5", "--no-compilation-cache"]
    assert main("digits", [*words, *small, "--out", "run"]) == 0
    assert list(Path("run/events").iterdir())


@pytest.mark.slow
def test_a_model_goes_to_the_hub_and_comes_back(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.chdir(tmp_path)
    (commands,) = [text for text in blocks(KEEP, "sh") if "runs/hub" in text]
    run, export_model = (shlex.split(line)[2:] for line in commands.splitlines())
    small = ["--num-clients", "4", "--train-size", "10", "--test-size", "5"]
    assert main(run[0].removeprefix("experiments."), [*run[1:], *small]) == 0
    assert export.main(export_model[1:]) == 0
    repositories = {}

    def upload(self, *, folder_path, repo_id, allow_patterns):
        there = [str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*") if path.is_file()]
        for name in hub.utils.filter_repo_objects(there, allow_patterns=allow_patterns):
            repositories[repo_id][name] = Path(folder_path, name).read_bytes()

    monkeypatch.setattr(hub.HfApi, "create_repo", lambda self, name, exist_ok: repositories.setdefault(name, {}))
    monkeypatch.setattr(hub.HfApi, "upload_folder", upload)
    executed(block(KEEP, "HfApi("))
    ((_, uploaded),) = repositories.items()
    assert sorted(uploaded) == ["config.json", "model.safetensors", "summary.json"]
    Path("downloaded.safetensors").write_bytes(uploaded["model.safetensors"])
    assert load_model("downloaded.safetensors").params.keys() == {"backbone", "head"}


# docs/evening.md and docs/split.md


@pytest.mark.slow
def test_the_evening_ends_with_a_table_and_a_figure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = [line for text in blocks("docs/evening.md", "sh") for line in text.replace("\\\n", "").splitlines()]
    assert len(commands) == 8
    (paper,) = blocks("docs/evening.md", "tex")
    Path("paper.tex").write_text(paper)
    for command in commands:
        words = shlex.split(command)
        if words[0] == "pdflatex" and shutil.which("pdflatex") is None:
            continue
        words = [sys.executable, *words[1:]] if words[0] == "python" else words
        done = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "FedPAC" in Path("table.tex").read_text()
    runs = load_runs("runs/evening/selected")
    assert (sorted(set(runs["seed"])), len(set(runs["method"])), len(runs)) == ([2, 3, 4, 5, 6], 4, 20)
    for name in ("clients.svg", "curves.pdf", "evening.html", "client-3.safetensors"):
        assert Path(name).stat().st_size > 1000


def test_the_deep_head_of_the_page_is_one(capsys):
    names = executed(block("docs/split.md", "class Head("))
    shapes = jax.tree.map(lambda leaf: leaf.shape, jax.eval_shape(names["model"].init, jax.random.key(0)))
    assert set(shapes["head"]) == {"Dense_0", "Dense_1"}
    assert names["model"].num_features == 64
