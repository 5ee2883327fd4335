"""docs/your-model-and-method.md, followed word for word in an empty folder."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from flax import serialization

from experiments import export
from experiments.run.command import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/your-model-and-method.md").read_text()
FILES = dict(re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL))
PYTHON = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if text not in FILES.values()]
COMMANDS = [
    shlex.split(line.removeprefix("python -m experiments."))
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder in which a reader of the page works, after all of its commands."""
    folder = tmp_path_factory.mktemp("reader")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, *words in COMMANDS:
            if "--help" in words:
                with pytest.raises(SystemExit) as ending:
                    main(name, words)
                assert ending.value.code == 0
            else:
                assert (export.main(words) if name == "export" else main(name, words)) == 0, words
    return folder


def test_the_page_has_its_files_and_commands():
    assert list(FILES) == ["my_method.py", "test_my_method.py", "my_models.py"]
    assert [name for name, *_ in COMMANDS] == ["digits", "digits", "digits", "export", "export"]
    assert len(PYTHON) == 4


@pytest.mark.slow
def test_the_commands_leave_what_the_page_says(folder):
    config = json.loads((folder / "runs/mine/config.json").read_text())
    assert config["options"]["method"] == "my_method.py:slow_fedavg"
    assert config["hyper_parameters"]["server_lr"] == 0.7
    assert config["own_code"]["method"]["file"] == str((folder / "my_method.py").resolve())
    assert json.loads((folder / "runs/mine/summary.json").read_text())["method"] == "my_method.py:slow_fedavg"
    assert (folder / "runs/net/checkpoints").exists()


@pytest.mark.slow
def test_the_notebook_gives_the_runs_back(folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = {}
    for text in PYTHON:
        exec(text, names)
    assert names["model"].num_features == 16
    assert len(names["runs"]) == 2
    summary = json.loads((folder / "runs/net/summary.json").read_text())
    assert 100 * float(names["accuracy"]) == pytest.approx(summary["received_per_client"][3], abs=1e-3)
    params = serialization.msgpack_restore((folder / "model.msgpack").read_bytes())
    run, test = names["run"], names["test"]
    assert (run.model.apply(params, test.x) == run.predict(3, test.x)).all()


@pytest.mark.slow
@pytest.mark.without_f1_auc
def test_the_pages_test_passes(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    names = {}
    exec(FILES["test_my_method.py"], names)
    names["test_slow_fedavg"]()
    del sys.modules["my_method"]
