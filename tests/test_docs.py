"""The documentation: every method has its rows, commands are accepted; `python -m docs.build` checks the links."""

import ast
import contextlib
import importlib
import re
import shlex
from dataclasses import fields
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from message_shapes import message_shapes

from experiments.cli.command import parse
from experiments.spec.option_notes import flag
from experiments.spec.options import Options
from experiments.spec.presets import DEFAULT_PRESET
from pfl_jax.messages import split
from pfl_jax.methods import METHODS
from pfl_jax.methods.factories import on_linear_model

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
METHODS_PAGE = (ROOT / "docs/methods.md").read_text().partition("## States of server and clients")[0]


def docstrings():
    """All docstrings of the code, those of attributes too."""
    for file in sorted(
        path for package in ("experiments", "lab", "pfl_jax") for path in (ROOT / package).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                yield str(node.value.value).replace("\\\n", " ")


def commands():
    """(module, words) of every command in a block of a page, and on a line or between backticks of a docstring."""
    blocks = [
        text for page in PAGES for text in re.findall(r"```(?:sh|console|bash)\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for text in docstrings():
        lines += re.findall(r"^ *(python -m .*)$", text, re.MULTILINE)
        lines += (" ".join(words.split()) for words in re.findall(r"(?<!`)`(python -m [^`]*)`", text))
    found = []
    for line in lines:
        for command in re.findall(r"python -m ((?:experiments|lab)\.[\w.]+)([^&]*)", line):
            words = shlex.split(command[1], comments=True)
            # Files of the user's own are those of a page, whose test follows it; DATASET stands for any.
            made = any(word.startswith("$") or word == "RUN..." or ".py:" in word for word in words)
            if (
                not made
                and not command[0].rpartition(".")[2].isupper()
                and not any(word.endswith(".json") for word in words)
            ):
                found.append((command[0], words))
    return found


@pytest.mark.parametrize("name", METHODS)
def test_the_tables_say_what_a_method_keeps_and_sends(name):
    """What the server sees of a single client is all that is no `Mean`; secure aggregation covers the rest."""
    _, client, message, _ = message_shapes(name)
    (row,) = re.findall(rf"^\| `{name}` \|(.*)\|$", METHODS_PAGE, re.MULTILINE)
    keeps, sends, sees, covers = map(str.strip, row.split("|"))
    # pFedHN's clients have embeddings that are the server's, and the tiny model has no normalization layer.
    if name not in ("pfedhn", "fedbn"):
        assert (keeps == "nothing") == (not jax.tree.leaves(client))
    assert (sends == "nothing") == (not jax.tree.leaves(message))
    parts = jax.eval_shape(lambda message: split(message, jnp.ones((), bool)), message)
    single, summed = (jax.tree.leaves(part) for part in parts)
    sizes = [leaf.size for leaf in single]
    kind, _, named = sees.partition(":")
    assert kind == ("single" if max(sizes, default=0) > 1 else "single number" if sizes else "nothing")
    assert bool(named) == bool(sizes)
    if not summed or not single:
        assert covers == ("all" if summed else "nothing" if single else "—")
    else:
        assert covers not in ("all", "nothing", "—")


def test_the_methods_with_a_server_optimizer_are_listed():
    (listed,) = re.findall(
        r"\(`Method.server_is_mean`\): (.*?), and", (ROOT / "docs/training.md").read_text(), re.DOTALL
    )
    made = {name: on_linear_model(factory, {}) for name, factory in METHODS.items()}
    assert set(re.findall(r"`(\w+)`", listed)) == {
        name for name, method in made.items() if method and method.server_is_mean
    }


def test_commands_are_accepted(capsys):
    checked = 0
    for name, words in commands():
        package, _, module = name.partition(".")
        if package == "experiments" and module in DEFAULT_PRESET:
            if "--help" not in words and "--resume" not in words:
                assert parse(module, words).dataset == module
                checked += 1
        else:
            program = importlib.import_module(name)
            if hasattr(program, "__path__"):
                program = importlib.import_module(f"{name}.__main__")
            checked += 1
            with contextlib.suppress(SystemExit):
                program.main(["--help"])
            text = capsys.readouterr().out
            # Every other word of these is an option of a run.
            is_of_runs = module in ("sweep", "partition")
            known = text + " ".join(flag(field.name) for field in fields(Options) if is_of_runs)
            ours = [word for word in words if word.startswith("--")]
            assert all(option in known for option in ours if option != "--method"), (name, words)
    assert checked > 60


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tests_that_a_page_names_are_there(page):
    for file, name in re.findall(r'pytest (?:-m [\w" ]+ )?(tests/\S+\.py)(?: -k (\w+))?(?=[`\n])', page.read_text()):
        assert re.search(rf"def test_\w*{name}", (ROOT / file).read_text()), (file, name)
