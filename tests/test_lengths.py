"""Files are short, no other file lists methods, and the project is installed with its requirements."""

import ast
import re
import tomllib
from pathlib import Path

import pfl_jax
from pfl_jax.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pfl_jax", "experiments", "lab")
FOUND = (path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py")))
FILES = [path for path in FOUND if "tests" not in path.relative_to(ROOT).parts]
MOST_LINES = 350


def test_no_file_is_long():
    """Of functions, ruff counts the statements."""
    assert not [path.name for path in FILES if path.read_text().count("\n") > MOST_LINES]


ALLOWED = {
    "experiments/papers/settings.py": "rows of the papers' tables",
    "experiments/spec/presets.py": "presets of methods with a paper",
    "experiments/commands/paper_figures.py": "curves of the papers' figures",
    "lab/queue/planned.py": "runs of the laboratory's queue",
    "lab/queue/field.py": "methods that are compared with adapters",
    "lab/pages/results.py": "methods of the page's picture",
    "lab/pages/sizes.py": "methods of the estimate for a million clients",
    "lab/pages/natural.py": "methods that FLamby has too",
    "lab/pages/fairness.py": "methods whose fairness is compared",
}
"""Files that list methods, and why: they choose what is run or shown, and say nothing of what a method is."""


def lists_of_methods(text):
    """Lines of lists, tuples, sets and dictionaries that name three methods or more."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict):
            names = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
            if len(names & METHODS.keys()) >= 3:
                found.append(node.lineno)
    return found


def test_no_other_file_lists_methods():
    assert {str(path.relative_to(ROOT)) for path in FILES if lists_of_methods(path.read_text())} == ALLOWED.keys()


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements(name):
    """Lines of a file of requirements, as pyproject.toml quotes them, with those of the files that it includes."""
    found = set()
    for line in (ROOT / name).read_text().splitlines():
        if line.startswith("-r "):
            found |= requirements(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            found.add(line.replace('"', "'"))
    return found


def extra(name):
    """What `pip install ".[NAME]"` installs, extras that it names among it."""
    found = set(PROJECT["project"]["dependencies"])
    for entry in PROJECT["project"]["optional-dependencies"][name]:
        own = re.fullmatch(r"pfl_jax\[(\w+)\]", entry)
        found |= extra(own[1]) if own else {entry}
    return found


def test_extras_are_the_requirements():
    assert extra("experiments") == requirements("requirements.txt")
    assert extra("dev") == requirements("requirements-dev.txt")
    assert set(PROJECT["project"]["dependencies"]) < extra("data") < extra("experiments")


def test_the_library_alone_is_installed():
    # Of the two packages at the top, and with every folder of it: one without __init__.py would be left out.
    assert PROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["pfl_jax*"]
    folders = {path.parent for path in (ROOT / "pfl_jax").rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_the_version_is_the_packages():
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "pfl_jax.__version__"}
    assert f"## [{pfl_jax.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {pfl_jax.__version__}\n" in (ROOT / "CITATION.cff").read_text()
