"""Mistakes that the tests must notice and that no tool makes, each made in a copy of the repository:

    pytest tests/support/mutants.py -k fedavg

pytest collects this file only if it is named.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """A mistake: `new` in place of the only `old` of the file at `path`, which the test with this node id notices."""

    path: str
    old: str
    new: str
    test: str


MUTANTS = [Mutant(*mutant) for mutant in tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())["mutants"]]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of what tests need."""
    root = tmp_path_factory.mktemp("mutants")
    for name in ("pfl_jax", "experiments", "lab", "tests", "docs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.path}-{mutant.old}")
def test_the_mistake_is_noticed(mutant, copy):
    file = copy / mutant.path
    text = file.read_text()
    file.write_text(text.replace(mutant.old, mutant.new))
    # The copy's pytest is not a worker of this one, and must not remove its compiled programs.
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PFL_JAX_"))}
    command = [sys.executable, "-B", "-m", "pytest", "-n", "0", "-x", "-q", "-m", "", mutant.test]
    try:
        done = subprocess.run(command, cwd=copy, env=variables, capture_output=True, text=True, timeout=600)
    finally:
        file.write_text(text)
    assert done.returncode == 1, done.stdout
    # Nobody could leave such a mistake in the code.
    assert not re.search("(Name|Syntax|Import|Indentation)Error:", done.stdout), done.stdout
