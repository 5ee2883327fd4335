"""Every table and every figure of the papers by its own command, at one round, on stand-ins and without stubs."""

import json

import pytest

from experiments import figures, tables
from experiments.papers import published, settings

pytestmark = [pytest.mark.slow, pytest.mark.without_f1_auc]

SMALL = ["--source", "embedded", "--model", "mlp", "--rounds", "1", "--test-size", "10"]
# Table 9 is about its sizes, and Table 6 draws them.
SIZES = {("fedpac", 9): [], ("fedpac", 6): []}
TABLES = [(paper, number) for paper, content in settings.PAPERS.items() for number in content.tables]
PROCEDURES = [(*table, "print") for table in TABLES if table[0] == "fedas"]


@pytest.mark.parametrize(("paper", "number", "procedure"), [*((*one, None) for one in TABLES), *PROCEDURES])
def test_a_table(paper, number, procedure, tmp_path, capsys):
    """A column with all its methods; the same command reads them."""
    rows = [row for row in published.load() if (row.paper, row.table) == (paper, number)]
    column = [row for row in rows if (row.dataset, row.clients, row.setting) == rows[0][2:5]]
    where = ["--dataset", rows[0].dataset, "--clients", str(rows[0].clients), "--setting", *rows[0].setting.split()]
    words = ["--paper", paper, "--table", str(number), *where, *SMALL, "--epochs", "1"]
    words += SIZES.get((paper, number), ["--train-size", "20"])
    words += ["--procedure", procedure] if procedure else []
    assert tables.main([*words, "--out", str(tmp_path)]) == 0
    places = {place["method"]: place for place in json.loads((tmp_path / "table.json").read_text())["places"]}
    assert places.keys() >= {row.method for row in column}
    assert all(places[row.method]["mean"] is not None for row in column)
    capsys.readouterr()
    assert tables.main([*words, "--out", str(tmp_path)]) == 0
    assert f"{len(column)} of {len(column)} runs are finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("paper", "number"), [(paper, number) for paper, every in figures.FIGURES.items() for number in every]
)
def test_a_figure(paper, number, tmp_path, capsys):
    words = ["--paper", paper, "--figure", number, *SMALL, "--num-clients", "5", "--out", str(tmp_path)]
    assert figures.main(words) == 0
    record = json.loads((tmp_path / f"{paper}-figure-{number}.json").read_text())
    assert record["panels"]
    capsys.readouterr()
    assert figures.main(words) == 0
    head = capsys.readouterr().out.split(" runs are finished")[0].splitlines()[-1]
    done, every = head.split(" of ")
    assert done == every
