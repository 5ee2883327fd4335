"""One command makes everything in README and docs/ that the committed results give."""

import importlib
import shutil

import pytest
from test_results_page import MAIN, store

from experiments.lab import coverage, other_tasks
from experiments.lab.pages import __main__ as command
from experiments.lab.pages import parts
from experiments.run import committed
from pfl_jax import InvalidInput

ROOT = command.ROOT
WRITTEN = {"README.md", *(f"docs/{name}.md" for name in ("results", "privacy", "robustness", "performance", "fedas"))}
WRITTEN |= {
    "docs/distributed.md",
    "docs/evaluation.md",
    "docs/other-tasks.md",
    "docs/time.md",
    *(f"docs/figures/{name}.svg" for name in ("results", "privacy", "robustness")),
}


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the pages of this one, and one finished run."""
    (tmp_path / "docs").mkdir()
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    (tmp_path / "results").mkdir()
    for name in ("benchmark.jsonl", "other_tasks.jsonl", "coverage.jsonl", "time.md"):
        shutil.copy(ROOT / "results" / name, tmp_path / "results")
    store(tmp_path, f"{MAIN}/fedpac/seed-0", 90.0)
    return tmp_path


def test_all_pages_are_what_the_committed_results_give():
    # Otherwise run python -m experiments.lab.pages.
    assert command.differing(ROOT) == []


def test_the_command_makes_all_and_check_says_what_differs(checkout, capsys):
    assert command.main(["--check"], checkout) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert {name for name in WRITTEN if name in err} == WRITTEN - {
        f"docs/{name}.md" for name in ("performance", "distributed", "evaluation", "other-tasks", "time")
    }
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


def test_the_coverage_is_that_of_the_interval_of_today():
    # Otherwise run python -m experiments.lab.coverage.
    scores, found = coverage.SCORES[2], committed.read(ROOT / coverage.FILE)
    assert coverage.measured(scores) == found[coverage._name(scores)]
    assert all(one["contains"] == pytest.approx(0.95, abs=0.01) for one in found.values() if one["seeds"] > 1)


def test_parts_are_replaced_by_their_names(tmp_path):
    page, end = tmp_path / "page.md", "<!-- end of made -->\n"
    page.write_text(f"before\n<!-- made: one -->\nold\n{end}between\n<!-- made: two -->\n{end}after\n")
    want = f"before\n<!-- made: one -->\n1\n{end}between\n<!-- made: two -->\n2\n{end}after\n"
    assert parts.filled(page, {"two": "2\n", "one": "1\n", "three": "3\n"}) == want
    with pytest.raises(InvalidInput, match=r"page.md has the parts one, two, of one"):
        parts.filled(page, {"one": "1\n"})
    page.write_text("# Title\n")
    with pytest.raises(InvalidInput, match=r"page.md has the parts none, of one"):
        parts.filled(page, {"one": "1\n"})


def test_the_figures_of_other_tasks_are_those_of_the_code_on_the_page():
    # Otherwise run python -m experiments.lab.other_tasks.
    found = committed.read(ROOT / other_tasks.FILE)
    assert {one["code"] for one in found.values()} == {other_tasks.digest(ROOT / other_tasks.PAGE)}
    assert {name: one["rounds"] for name, one in found.items()} == other_tasks.ROUNDS
    assert all(len(one["seeds"]) == other_tasks.SEEDS for one in found.values())


def test_figures_of_other_tasks_are_what_the_page_computes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\ndef ours(rounds, seed):\n    return {'local': {'mse': rounds + seed}}\n```\n")
    found = other_tasks.measured(page, {"ours": 4}, seeds=3)
    seeds = [{"local": {"mse": 4 + seed}} for seed in range(3)]
    assert found == {"ours": {"code": other_tasks.digest(page), "rounds": 4, "seeds": seeds}}
    page.write_text(page.read_text().replace("+", "*"))
    assert other_tasks.digest(page) != found["ours"]["code"]
    assert "| `local` | 5.000 (4.000 to 6.000) |" in other_tasks.table(found["ours"])


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        ("queue", "--only fedpca", "unknown block or method 'fedpca' (blocks are table-1"),
        ("queue", "--collect nowhere", "--collect nowhere: there is no such folder"),
        ("queue", "--everything", "unknown option --everything"),
        ("fedas_ablation", "--rounds 3", "unknown option --rounds"),
        ("pages", "--fast", "unknown option --fast"),
        ("benchmark", "--only nothing", "unknown section 'nothing'"),
        ("benchmark", "--only pfllib", "--pfllib None: no system/main.py there"),
        ("benchmark", "--only pfllib --pfllib docs", "--pfllib docs: no system/main.py there"),
        ("benchmark", "--out missing/figures.jsonl", "missing/figures.jsonl is not there"),
    ],
)
def test_bad_input_is_one_line(command, words, expected, capsys):
    assert importlib.import_module(f"experiments.lab.{command}.__main__").main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert expected in line
