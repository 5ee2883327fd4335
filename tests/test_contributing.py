"""CONTRIBUTING.md, followed word for word in a copy of the repository: its method passes as a method."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

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
    for folder in ("pfl_jax", "experiments", "tests", "docs"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "mkdocs.yml", *(path.name for path in ROOT.glob("*.md"))):
        shutil.copy(ROOT / file, root / file)
    (root / "pfl_jax/methods/fedexp.py").write_text(block("python", "def fedexp("))
    methods = root / "pfl_jax/methods/__init__.py"
    insert(methods, "from pfl_jax.methods.fedavg import", block("python", "from pfl_jax.methods.fedexp import"))
    insert(methods, "METHODS:", block("python", '"fedexp": fedexp'))
    insert(root / "tests/methods/test_limits.py", "SAME = [", block("python", '("fedexp", {'))
    insert(root / "docs/methods.md", "| `fedavg` | one model |", block("markdown", "Jhunjhunwala"))
    insert(root / "docs/methods.md", "| `fedavg` | nothing |", block("markdown", "| nothing | model, squared"))
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


DOCS = Path(__file__).parents[1] / "docs"
notebooks = pytest.mark.parametrize(("name", "pictures"), [("tutorial.ipynb", 3), ("data-frame.ipynb", 1)])


@notebooks
def test_a_notebook_is_stored_without_results(name, pictures):
    cells = json.loads((DOCS / name).read_text())["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        assert cell["metadata"] == {}
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.slow
@notebooks
def test_a_notebook_runs_in_jupyter(name, pictures, tmp_path):
    import nbclient
    import nbformat

    if name == "data-frame.ipynb":
        pytest.importorskip("torch")
    notebook = nbformat.read(DOCS / name, as_version=4)
    nbformat.validate(notebook)
    # Begins as Jupyter does, beside pfl_jax.
    (tmp_path / "docs").mkdir()
    (tmp_path / "pfl_jax").symlink_to(DOCS.parent / "pfl_jax")
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path / "docs")}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == pictures
    assert not [output for output in outputs if output.get("name") == "stderr"]
