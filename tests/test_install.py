"""What `pip install .` gives: the library alone, with the versions that requirements.txt has too."""

import tomllib
from pathlib import Path

import pfl_jax

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements():
    """Lines of requirements.txt, as pyproject.toml quotes them."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return {line.replace('"', "'") for line in lines if line and not line.startswith("#")}


def test_versions_are_those_of_the_requirements():
    project = PROJECT["project"]
    assert set(project["dependencies"]) <= requirements()
    assert set(project["optional-dependencies"]["data"]) <= requirements()


def test_the_library_alone_is_installed():
    # Of the two packages at the top, and with every folder of it: one without __init__.py would be left out.
    assert PROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["pfl_jax*"]
    folders = {path.parent for path in (ROOT / "pfl_jax").rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_the_version_is_the_packages():
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "pfl_jax.__version__"}
    assert f"## [{pfl_jax.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert (ROOT / "pfl_jax/py.typed").exists()
