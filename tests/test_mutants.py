"""The mistakes of mutants.py: each has one place and a test that exists; cosmic-ray makes those of a change."""

import re

from mutants import MUTANTS, ROOT


def test_each_mistake_has_one_place():
    assert len(set(MUTANTS)) == len(MUTANTS) <= 60
    places = {mutant: (ROOT / mutant.path).read_text().count(mutant.old) for mutant in MUTANTS}
    assert places == dict.fromkeys(MUTANTS, 1)
    assert all(mutant.new != mutant.old for mutant in MUTANTS)


def test_the_tests_that_should_fail_exist():
    for test in {mutant.test for mutant in MUTANTS}:
        file, *name = re.split(r"::|\[", test)
        text = (ROOT / file).read_text()
        assert not name or f"def {name[0]}(" in text, test
