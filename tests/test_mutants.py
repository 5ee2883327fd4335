"""The mistakes of mutants.py: each has one place and a test that exists; cosmic-ray makes those of a change."""

import re
import shutil
import subprocess
import sys

import pytest
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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="git")
def test_mistakes_in_a_changed_line_are_noticed(tmp_path):
    def run(*words):
        return subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    run("git", "clone", "--quiet", str(ROOT), ".")
    run("git", "checkout", "-q", "-B", "main")
    run("git", "checkout", "-q", "-b", "change")
    file = tmp_path / "pfl_jax/primitives/tree.py"
    text = file.read_text()
    line = "share * a + (1 - share) * b"
    assert line in text
    file.write_text(text.replace(line, "a * share + b * (1 - share)"))
    run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "change")
    said = run(sys.executable, "tests/support/mutation.py", "pfl_jax/primitives/tree.py")
    noticed, made = map(int, re.findall(r"(\d+) of (\d+) mistakes", said)[0])
    assert noticed == made > 5
