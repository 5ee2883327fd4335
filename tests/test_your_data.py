"""Everything on docs/your-data.md runs as it stands: its data always, a round of training in `pytest -m slow`."""

import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from experiments.cli.request import parse
from experiments.run import build
from experiments.run.command import main
from experiments.run.estimate import examples_visited
from experiments.sweep.__main__ import main as sweep

PAGE = (Path(__file__).parents[1] / "docs/your-data.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def commands():
    """(module, words) of the page."""
    lines = [shlex.split(line) for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
    assert all(words[:2] == ["python", "-m"] for words in lines)
    return [(words[2], words[3:]) for words in lines]


@pytest.fixture
def names(tmp_path, monkeypatch, capsys):
    """What the page's Python defines, run in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    found = {"__name__": "page"}
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, "docs/your-data.md", "exec"), found)
    return found | {"printed": capsys.readouterr().out}


def test_the_pages_data_is_what_it_says(names, capsys):
    assert names["printed"] == "('hill', 'north', 'river', 'south') [34 34 33 33]\n0 float32\n"
    assert names["of_dicts"].train_count.tolist() == [34, 34, 33, 33]
    assert names["of_pairs"].test_count.tolist() == [18, 18, 18, 18]
    assert len(names["parts"].train) == 5
    clients = []
    for module, words in commands():
        if module == "experiments.custom":
            experiment = build.build_experiment(parse("custom", words), Console())
            clients.append(experiment.data.num_clients)
            visited = 30 * 5 * int(experiment.data.train_count.sum())
            assert examples_visited(parse("custom", words)) == pytest.approx(visited, rel=0.02)
        else:
            assert sweep([*words, "--dry-run"]) == 0
            preview = capsys.readouterr().out
            assert "4 runs, 0 of them finished" in preview
            assert "0.1 million training examples are left" in preview
    assert clients == [4, 5, 5, 6]
    assert names["tokens"].shape == (len(names["rows"]), 20)
    assert experiment.request.options.vocabulary == names["tokens"].max() + 1 == 1001


@pytest.mark.slow
@pytest.mark.usefixtures("names")
def test_the_page_runs(capsys):
    for module, words in commands():
        short = [*words, "--rounds", "1", "--no-compilation-cache"]
        code = sweep(short) if module == "experiments.sweep" else main("custom", short)
        assert code == 0, capsys.readouterr().err
