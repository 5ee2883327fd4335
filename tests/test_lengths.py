"""Files and functions are short, no other file lists methods, and the project is installed with its requirements."""

import ast
import io
import re
import tokenize
import tomllib
from pathlib import Path

import pytest

import pfl_jax
from pfl_jax.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
FILES = [path for package in ("pfl_jax", "experiments") for path in sorted((ROOT / package).rglob("*.py"))]
MOST_LINES, MOST_OF_A_FUNCTION = 350, 50
WITHOUT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of(node):
    return set(range(node.lineno, node.end_lineno + 1))


def is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def function_lengths(text):
    """(name, lines of code) of every function: without its docstring, comments and the functions inside it."""
    code, tree = set(), ast.parse(text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in WITHOUT_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if is_docstring(node):
            code -= lines_of(node)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {one: [each for each in ast.walk(one) if isinstance(each, ast.FunctionDef)][1:] for one in functions}
    return [(one.name, len(code & lines_of(one) - set().union(*map(lines_of, inside[one])))) for one in functions]


@pytest.mark.parametrize("package", ["pfl_jax", "experiments"])
def test_no_file_and_no_function_is_long(package):
    files = {path: path.read_text() for path in FILES if path.relative_to(ROOT).parts[0] == package}
    long = [f"{path.name}: {lines}" for path, text in files.items() if (lines := text.count("\n")) > MOST_LINES]
    long += [
        f"{path.name}, {name}: {lines}"
        for path, text in files.items()
        for name, lines in function_lengths(text)
        if lines > MOST_OF_A_FUNCTION
    ]
    assert not long


ALLOWED = {
    "pfl_jax/methods/__init__.py": "METHODS itself",
    "experiments/papers/settings.py": "rows of the papers' tables",
    "experiments/presets.py": "presets of methods with a paper",
    "experiments/figures/fedpac.py": "curves of the papers' figures",
    "experiments/figures/fedas.py": "curves of the papers' figures",
    "experiments/lab/queue/planned.py": "runs of the laboratory's queue",
    "experiments/lab/queue/field.py": "methods that are compared with adapters",
    "experiments/lab/pages/results.py": "methods of the page's picture",
    "experiments/lab/pages/natural.py": "methods that FLamby has too",
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
    assert list(PROJECT["project"]["optional-dependencies"]) == [
        *("data", "experiments", "export", "text", "huggingface", "dp", "flower", "cuda", "dev")
    ]


def test_two_commands_install_run_and_test():
    run, test = (
        "pip install -r requirements.txt && python -m experiments.cifar100 --method fedas",
        "pip install -r requirements-dev.txt && pytest",
    )
    assert f"```sh\n{run}\n{test}\n```" in (ROOT / "README.md").read_text()
    # A subshell, since errexit does not see the first command of a list.
    assert f"\n({test})\n" in (ROOT / ".ci/run").read_text()
    # With uv the same packages, by the group that it installs unasked.
    assert PROJECT["dependency-groups"] == {"dev": ["pfl_jax[dev]"]}


def test_the_library_alone_is_installed():
    # Of the two packages at the top, and with every folder of it: one without __init__.py would be left out.
    assert PROJECT["tool"]["setuptools"]["packages"]["find"]["include"] == ["pfl_jax*"]
    folders = {path.parent for path in (ROOT / "pfl_jax").rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_the_version_is_the_packages():
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "pfl_jax.__version__"}
    assert f"## [{pfl_jax.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {pfl_jax.__version__}\n" in (ROOT / "CITATION.cff").read_text()
