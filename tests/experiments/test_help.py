"""The groups of options in --help."""

import dataclasses
import os
import re

import pytest

from experiments.cli.options import Options
from experiments.cli.parser import GROUPS, MAX_COLUMNS, SELECTION, TRAINING_HYPER_PARAMETERS
from experiments.run.command import main
from pfl_jax.methods import METHODS
from pfl_jax.methods.factories import recipes_of

OWN_OPTIONS = {
    "local": [],
    "fedpac": ["lam", "head_lr", "head_epochs", "alignment", "collaboration", "covariance", "solver"],
}


def test_every_option_is_in_one_group_of_the_help():
    listed = [*SELECTION, *(name for _, names in GROUPS.values() for name in names)]
    assert len(listed) == len(set(listed))
    wrapped = {field.name for recipe in recipes_of(METHODS["fedpac"]) for field in dataclasses.fields(recipe)}
    options = {field.name for field in dataclasses.fields(Options)}
    assert set(listed) - set(TRAINING_HYPER_PARAMETERS) == options | wrapped


@pytest.mark.parametrize("method", OWN_OPTIONS)
@pytest.mark.parametrize("columns", [80, 100, 200])
def test_help_shows_the_methods_own_options_first_and_then_groups(capsys, monkeypatch, method, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main("cifar10", ["--method", method, "--preset", "fedas", "--help"])
    assert os.environ["COLUMNS"] == str(columns)
    description, _, boxes = capsys.readouterr().out.partition("-h, --help")
    assert "settings of the fedas preset" in " ".join(description.split())
    lines = boxes.splitlines()
    assert max(map(len, [*lines, *description.splitlines()])) == min(columns, MAX_COLUMNS)
    headings = [heading for line in lines for heading in re.findall(r"^\W+(\w+) options\W*$", line)]
    assert headings == [method, *GROUPS]
    # Every option once, in the order of the groups.
    shown = [name for line in lines for name in re.findall(r"^[^-]{2}--([a-z][a-z-]*)", line)]
    names = [*OWN_OPTIONS[method], *SELECTION, *(name for _, names in GROUPS.values() for name in names)]
    # The privacy of clients is no option of a method that sends no update of what it received.
    names = [name for name in names if method != "local" or name not in ("client_clip", "client_noise")]
    assert shown == [name.replace("_", "-") for name in names]
