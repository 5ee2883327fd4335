"""The groups of options in --help."""

import dataclasses
import re

import pytest

from experiments.cli.hyper_parameters import TRAINING_HYPER_PARAMETERS, method_options
from experiments.cli.options import Options, flag
from experiments.cli.parser import MAX_COLUMNS
from experiments.cli.request import GROUPS, SELECTION
from experiments.run.command import main
from pfl_jax.methods import METHODS
from pfl_jax.methods.factories import recipes_of


def test_every_option_is_in_one_group_of_the_help():
    listed = [*SELECTION, *(name for _, names in GROUPS.values() for name in names)]
    assert len(listed) == len(set(listed))
    wrapped = {field.name for recipe in recipes_of(METHODS["fedpac"]) for field in dataclasses.fields(recipe)}
    options = {field.name for field in dataclasses.fields(Options)}
    assert set(listed) - set(TRAINING_HYPER_PARAMETERS) == options | wrapped


@pytest.mark.parametrize("method", METHODS)
def test_help_shows_the_methods_own_options_first_and_then_groups(capsys, monkeypatch, method):
    columns = {"local": "80", "fedpac": "200"}.get(method, "100")
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit) as ending:
        main("cifar10", ["--method", method, "--preset", "fedas", "--participation", "0.4", "--help"])
    assert ending.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= min(int(columns), MAX_COLUMNS)
    assert "settings of the fedas preset" in " ".join(text.split())
    assert re.findall(r"^(\w+) options:$", text, re.MULTILINE) == [method, *GROUPS]
    # The defaults are the preset's.
    assert re.search(r"--rounds INT\s+Communication rounds\. \(default: 40\)", text)
    # Every option once, in the order of the groups.
    shown = re.findall(r"^  (--[a-z][a-z0-9-]*)", text, re.MULTILINE)
    shared = [*SELECTION, *(name for _, names in GROUPS.values() for name in names)]
    every = {field.name for field in dataclasses.fields(Options)} | method_options(method).keys()
    own = [name for name in method_options(method) if name not in shared]
    assert shown == [flag(name) for name in [*own, *shared] if name in every]
