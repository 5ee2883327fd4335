"""CONTRIBUTING.md, followed word for word in a copy of the repository: its method passes as a method."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)

ELSEWHERE = ("basedpyright", ".ci/run", "pytest -m quick")
"""Commands of the page that would repeat, in the copy, what is checked for the whole repository anyway."""


def block(language, marker):
    (found,) = [text for name, text in BLOCKS if name == language and marker in text]
    return found


def insert(path, anchor, text):
    """Puts text below the only line of a file that is the anchor, or begins with it."""
    content = path.read_text()
    (line,) = re.findall(rf"^{re.escape(anchor)}.*\n", content, re.MULTILINE)
    path.write_text(content.replace(line, line + text))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    root = tmp_path_factory.mktemp("contributing")
    for folder in ("pfl_jax", "experiments", "lab", "tests", "docs"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "mkdocs.yml", *(path.name for path in ROOT.glob("*.md"))):
        shutil.copy(ROOT / file, root / file)
    (root / "pfl_jax/methods/fedexp.py").write_text(block("python", "def fedexp("))
    methods = root / "pfl_jax/methods/__init__.py"
    insert(methods, "from pfl_jax.methods.fedavg import", block("python", "from pfl_jax.methods.fedexp import"))
    insert(methods, "_FACTORIES = (", block("python", "    fedexp,"))
    insert(root / "tests/methods/test_limits.py", "SAME = [", block("python", '("fedexp", {'))
    insert(root / "docs/methods-at-a-glance.md", "| `fedavg` | one model |", block("markdown", "Jhunjhunwala"))
    insert(root / "docs/methods.md", "| `fedavg` | nothing |", block("markdown", "| nothing | model, squared"))
    field = '    """FILE.py:NAME of a loss that replaces the task'
    insert(root / "experiments/spec/groups.py", field, block("python", "label_smoothing: BelowOne"))
    models, imports = root / "experiments/run/models.py", "from collections.abc import Callable\n"
    insert(models, "        model = _with_loss(", block("python", "if options.label_smoothing"))
    insert(models, "import dataclasses", imports + "from pfl_jax.primitives import masked_mean\n")
    insert(models, '"""Bytes that the states of all examples may take', "\n\n" + block("python", "def smoothed("))
    return root


def follow(command, root):
    """Runs a line of the page in the copy and returns what it printed."""
    # The copy's pytest is not a worker of this one, and must not remove its compiled programs.
    ours = ("PYTEST_", "PFL_JAX_", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    words = shlex.split(command)
    if words[0] == "lint-imports":  # has no module that `python -m` runs
        words[0] = str(Path(sys.executable).with_name(words[0]))
    else:
        words = [sys.executable, *words[1:]] if words[0] == "python" else [sys.executable, "-m", *words]
    done = subprocess.run(
        words, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}"
    return done.stdout


@pytest.mark.slow
def test_the_walk_through(copy):
    commands = [line for line in block("console", "pytest").splitlines() if line not in ELSEWHERE]
    printed = {command.split()[-1]: follow(command, copy) for command in commands}
    # Conformance, the limit, the golden values and the documentation's rows.
    (passed,) = re.findall(r"(\d+) passed", printed["fedexp"])
    assert int(passed) >= 13
    assert "--epsilon" in printed["--help"]
    assert "Number that keeps the step finite" in printed["--help"]
    # Style left the page's code as it is, and only the new method's golden values were written.
    assert (copy / "pfl_jax/methods/fedexp.py").read_text() == block("python", "def fedexp(")
    stored, was = (json.loads((root / "tests/support/golden.json").read_text()) for root in (copy, ROOT))
    assert stored.pop("fedexp")["received"]
    assert stored == was


@pytest.mark.slow
def test_the_new_option(copy):
    run = "python -m experiments.digits --method fedavg --rounds 1 --num-clients 3 --model mlp --out "
    for out, option in (("plain", ""), ("smooth", " --label-smoothing 0.9")):
        follow(run + out + option, copy)
    plain, smooth = (json.loads((copy / out / "summary.json").read_text()) for out in ("plain", "smooth"))
    assert plain["received"] != smooth["received"]
    assert json.loads((copy / "smooth/config.json").read_text())["options"]["label_smoothing"] == 0.9


DOCS = Path(__file__).parents[1] / "docs"


def shown(notebook):
    """What each code cell shows: kinds of its outputs, with their texts."""
    every = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [(sorted(output.get("data", {})), output.get("text") or output.data["text/plain"]) for output in every]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tutorial", "data-frame"])
def test_a_notebook_gives_the_outputs_it_is_stored_with(name, tmp_path):
    # Otherwise run: jupyter execute --inplace docs/NAME.ipynb
    import nbclient
    import nbformat

    if name == "data-frame":
        pytest.importorskip("torch")
    stored = nbformat.read(DOCS / f"{name}.ipynb", as_version=4)
    nbformat.validate(stored)
    # Begins as Jupyter does, beside pfl_jax.
    (tmp_path / "docs").mkdir()
    (tmp_path / "pfl_jax").symlink_to(DOCS.parent / "pfl_jax")
    place = {"metadata": {"path": str(tmp_path / "docs")}}
    today = nbclient.NotebookClient(deepcopy(stored), timeout=600, resources=place).execute()
    assert len(shown(today)) == len(shown(stored))
    number = re.compile(r"\d+\.\d*(?:e-\d+)?")
    for (kinds, text), (kinds_then, text_then) in zip(shown(today), shown(stored), strict=True):
        assert kinds == kinds_then
        assert number.sub("#", text).split() == number.sub("#", text_then).split()
        # Accuracies of ten clients, in percent: a few test examples, as versions of JAX round.
        values, values_then = ([float(word) for word in number.findall(each)] for each in (text, text_then))
        np.testing.assert_allclose(values, values_then, atol=2)
