"""Bad input of every kind is refused in one line that says what is wrong, with exit code 2."""

import bad_commands
import bad_data_files
import bad_folders
import bad_input
import bad_own_code
import bad_own_data
import pytest

LISTS = (bad_commands, bad_data_files, bad_folders, bad_own_code, bad_own_data)
CASES = [case for each in LISTS for case in each.cases()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that was cut off after a round."""
    folder = tmp_path_factory.mktemp("bad") / "run"
    bad_input.make_run(folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_one_line(case, run, tmp_path):
    code, text = bad_input.answer(case, run, tmp_path)
    assert code == 2
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert case.message
    assert case.message in text
    # No pickle was executed, no folder made for a run that never was.
    assert not (tmp_path / "pickles-are-executed").exists()
    assert not (tmp_path / "runs").exists()
