"""Bad input of every kind is refused in the one line that docs/bad-input.md has, with exit code 2."""

import bad_input
import pytest

ROWS = bad_input.PAGE.read_text().splitlines()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that was cut off after a round."""
    folder = tmp_path_factory.mktemp("bad") / "run"
    bad_input.make_run(folder)
    return folder


@pytest.mark.parametrize("case", bad_input.cases(), ids=lambda case: f"{case.command}: {case.what}")
def test_it_is_one_line_as_the_page_has_it(case, run, tmp_path):
    code, text = bad_input.answer(case, run, tmp_path)
    assert code == 2
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert bad_input.row(case, code, text) in ROWS
    # No pickle was executed, no folder made for a run that never was.
    assert not (tmp_path / "pickles-are-executed").exists()
    assert not (tmp_path / "runs").exists()


def test_the_page_has_all_of_them_and_no_others():
    listed = [row for row in ROWS if row.startswith("| `")]
    assert len(listed) == len(bad_input.cases()) == len(set(listed)) >= 150
