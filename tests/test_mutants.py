"""mutants.toml against the code and the tests that it names; `python tests/support/mutation.py` makes the mistakes."""

import re
from pathlib import Path

import pytest
from mutation import ROOT, mutants

MUTANTS = list(mutants())


@pytest.mark.parametrize("path", dict.fromkeys(mutant.path for mutant in MUTANTS))
def test_each_mistake_has_one_place(path):
    text = (ROOT / path).read_text()
    ours = [mutant for mutant in MUTANTS if mutant.path == path]
    assert {mutant.old: text.count(mutant.old) for mutant in ours} == {mutant.old: 1 for mutant in ours}
    assert all(mutant.new != mutant.old for mutant in ours)
    assert len(set(ours)) == len(ours)


def test_the_tests_that_should_fail_exist():
    for test in {mutant.test for mutant in MUTANTS}:
        file, *name = re.split(r"::|\[", test)
        text = (ROOT / file).read_text()
        assert not name or f"def {name[0]}(" in text, test


def test_every_method_has_mistakes():
    methods = {path.name for path in (ROOT / "pfl_jax/methods").glob("*.py")} - {"__init__.py", "factories.py"}
    assert methods <= {Path(mutant.path).name for mutant in MUTANTS}
