"""What `pip install .` gives: the library alone, with the versions that requirements.txt has too."""

import re
import tomllib
from pathlib import Path

import pfl_jax

ROOT = Path(__file__).parents[1]
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
    assert list(PROJECT["project"]["optional-dependencies"]) == [
        *("data", "experiments", "export", "text", "huggingface", "dp", "flower", "cuda", "dev"),
    ]


def test_the_library_alone_is_installed():
    # Of the two packages at the top, and with every folder of it: one without __init__.py would be left out.
    assert PROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["pfl_jax*"]
    folders = {path.parent for path in (ROOT / "pfl_jax").rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_the_version_is_the_packages():
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "pfl_jax.__version__"}
    assert f"## [{pfl_jax.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {pfl_jax.__version__}\n" in (ROOT / "CITATION.cff").read_text()
