"""docs/recipes.md: its notebook always, and in `pytest -m slow` the whole page in an empty folder; the glossary."""

import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from experiments.report.__main__ import main as report
from experiments.run.command import main
from experiments.sweep.__main__ import main as sweep

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/recipes.md").read_text()
PARTS = re.findall(r"(?:`(\w+\.py)`:\n\n)?```(\w+)\n(.*?)```", PAGE, re.DOTALL)
"""(file or "", language, text) of every block, in order."""


class Last(NamedTuple):
    info: dict[str, Any]
    cohort: np.ndarray


def notebook():
    """Blocks of Python that are no files, and how many of them come before the first command."""
    languages = [language for _, language, _ in PARTS]
    first = languages.index("sh")
    return [
        (position < first, text)
        for position, (name, language, text) in enumerate(PARTS)
        if language == "python" and not name
    ]


@pytest.mark.without_f1_auc
def test_the_notebook(capsys):
    names = {}
    for early, text in notebook():
        if early:
            exec(compile(text, "docs/recipes.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    accuracies = [float(line.removeprefix(f"grower {client}: ")) for client, line in enumerate(lines[:4])]
    assert min(accuracies) >= 0.75
    # The diagonal of the head weights, by client.
    own = [
        float(re.fullmatch(rf"client {client} takes (\d.\d\d) of its own head", line)[1])
        for client, line in enumerate(lines[4:8])
    ]
    assert own == [round(float(weight), 2) for weight in names["last"].info["head_weights"].diagonal()]
    # What client 3 deploys has the accuracy of the evaluation.
    assert lines[8] == f"client 3: {accuracies[3]:.2f}"
    assert len(lines) == 9
    # All states of the list can be read.
    assert [int(result.state.round) for result in names["results"]] == list(range(1, 11))


def test_head_weights_of_a_part_of_the_clients(capsys):
    text = next(text for _, text in notebook() if "of its own head" in text)
    weights, cohort = np.array([[0.9, 0.1], [0.3, 0.7]]), np.array([2, 5])
    exec(compile(text, "docs/recipes.md", "exec"), {"results": [Last({"head_weights": weights}, cohort)]})
    assert capsys.readouterr().out == "client 2 takes 0.90 of its own head\nclient 5 takes 0.70 of its own head\n"


@pytest.mark.slow
def test_the_whole_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names, programs = {}, {"report": report, "sweep": sweep}
    for name, language, text in PARTS:
        if name:
            Path(name).write_text(text)
        elif language == "python":
            exec(compile(text, "docs/recipes.md", "exec"), names)
        else:
            for line in text.splitlines():
                program, *words = shlex.split(line.removeprefix("python -m experiments."))
                assert (programs[program](words) if program in programs else main(program, words)) == 0, line
    config = json.loads(Path("runs/watched/config.json").read_text())
    assert config["info"] == {
        "drift": "[M], Euclidean distance between a client's trained model and the one that it received."
    }
    page = Path("watched.html").read_text()
    assert "drift: my_method.py:watched_fedavg, round 3" in page
    assert config["info"]["drift"].replace("'", "&#39;") in page
    assert Path("runs/compared/sweep.md").read_text().startswith("**fedpac, fedper on digits")
    assert len(names["table"]) == 4
    assert Path("compared.png").stat().st_size > 1000


def test_the_glossary_is_sorted():
    words = re.findall(r"^\| ([\w ,]+?) \|", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)[1:]
    assert words == sorted(words, key=str.lower)
    assert len(words) > 25
