"""Bad input of every kind is refused in one line that says what is wrong, with exit code 2."""

import bad_input
import pytest

EXPECTED = dict(line.split(" => ") for line in bad_input.REFUSALS.read_text().splitlines())
"""Command and state of files -> part of the message."""
WITH_FILES = bad_input.cases()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that was cut off after a round."""
    folder = tmp_path_factory.mktemp("bad") / "run"
    bad_input.make_run(folder)
    return folder


@pytest.mark.parametrize("name", EXPECTED)
def test_it_is_one_line(name, run, tmp_path):
    code, text = bad_input.answer(WITH_FILES.get(name) or bad_input.Case(name), run, tmp_path)
    assert code == 2
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert EXPECTED[name] in text
    # No pickle was executed, no folder made for a run that never was.
    assert not (tmp_path / "pickles-are-executed").exists()
    assert not (tmp_path / "runs").exists()


def test_every_case_with_files_is_in_the_list():
    assert WITH_FILES.keys() <= EXPECTED.keys()
