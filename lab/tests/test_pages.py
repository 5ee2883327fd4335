"""One command makes everything in README and docs/ that the committed results give."""

import importlib
import shutil

import jax
import pytest
from test_results_page import MAIN, store

from lab.pages import __main__ as command
from lab.pages import parts, sizes
from pfl_jax import InvalidInput
from pfl_jax.networks.models import MODELS
from pfl_jax.primitives import byte_count

ROOT = command.ROOT
OF_RESULTS = {"README.md", "docs/results.md", "docs/natural.md", "docs/fairness.md", "docs/figures/results.svg"}
WRITTEN = OF_RESULTS | {f"docs/{name}.md" for name in ("performance", "distributed")}


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the pages of this one, and one finished run."""
    (tmp_path / "docs").mkdir()
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    (tmp_path / "results").mkdir()
    shutil.copy(ROOT / "results/benchmark.jsonl", tmp_path / "results")
    store(tmp_path, f"{MAIN}/fedpac/seed-0", 90.0)
    return tmp_path


def test_all_pages_are_what_the_committed_results_give():
    # Otherwise run python -m lab.pages.
    assert command.differing(ROOT) == []


def test_the_command_makes_all_and_check_says_what_differs(checkout, capsys):
    assert command.main(["--check"], checkout) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert {name for name in WRITTEN if name in err} == OF_RESULTS
    assert command.main([], checkout) == 0
    assert set(capsys.readouterr().out.split()) == WRITTEN
    assert command.main(["--check"], checkout) == 0
    # What stands around a part stays.
    before, after = ((place / "README.md").read_text().split("<!-- made: results -->") for place in (ROOT, checkout))
    assert before[0] == after[0]
    assert before[1].split("<!-- end of made -->")[1] == after[1].split("<!-- end of made -->")[1]
    # The same results give the same bytes.
    made = {name: (checkout / name).read_bytes() for name in WRITTEN}
    assert command.main([], checkout) == 0
    assert {name: (checkout / name).read_bytes() for name in WRITTEN} == made
    store(checkout, f"{MAIN}/fedpac/seed-1", 90.0)
    assert {str(path.relative_to(checkout)) for path in command.differing(checkout)} == {
        *("docs/results.md", "README.md", "docs/figures/results.svg")
    }


def test_sizes_are_those_of_the_models():
    model = MODELS["fedpac_cnn"]((28, 28, 1), 10)
    whole = jax.eval_shape(model.init, jax.random.key(0))
    everything, head = byte_count(whole), byte_count(whole["head"])
    # FedAvg keeps nothing; FedPer keeps the head and sends the rest.
    assert sizes.sizes("fedavg", 1000, 50) == (0, everything, everything, everything)
    assert sizes.sizes("fedper", 1000, 50)[:2] == (head, everything - head)
    said = [sizes.in_words(amount) for amount in (0, 1023, 1024, 1536, 3 * 2**40)]
    assert said == ["0 B", "1023 B", "1 KiB", "1.5 KiB", "3 TiB"]


def test_a_page_without_its_parts_is_refused(tmp_path):
    page, end = tmp_path / "page.md", "<!-- end of made -->\n"
    page.write_text(f"before\n<!-- made: one -->\nold\n{end}between\n<!-- made: two -->\n{end}after\n")
    with pytest.raises(InvalidInput, match=r"page.md has the parts one, two, of one"):
        parts.filled(page, {"one": "1\n"})
    page.write_text("# Title\n")
    with pytest.raises(InvalidInput, match=r"page.md has the parts none, of one"):
        parts.filled(page, {"one": "1\n"})


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        ("queue", "--only fedpca", "unknown block or method 'fedpca' (blocks are table-1"),
        ("queue", "--everything", "unknown option --everything"),
        ("pages", "--fast", "unknown option --fast"),
        ("benchmark", "--out missing/figures.jsonl", "missing/figures.jsonl is not there"),
    ],
)
def test_bad_input_is_one_line(command, words, expected, capsys):
    module = importlib.import_module(f"lab.{command}.__main__")
    assert module.main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert expected in line
