"""Everything on docs/your-data.md runs as it stands, the commands for one round."""

import re
import shlex
from pathlib import Path

import pytest

from experiments.commands.main import main
from experiments.sweep.__main__ import main as sweep

PAGE = (Path(__file__).parents[1] / "docs/your-data.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.without_f1_auc
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names, ran = {"__name__": "page"}, 0
    for language, text in BLOCKS:
        if language == "python":
            exec(compile(text, "docs/your-data.md", "exec"), names)
            continue
        for line in text.splitlines():
            python, m, module, *words = shlex.split(line)
            assert (python, m) == ("python", "-m")
            run = sweep if module == "experiments.sweep" else lambda words: main("custom", words)
            assert run([*words, "--rounds", "1", "--no-compilation-cache"]) == 0, capsys.readouterr().err
            ran += 1
    assert ran >= 4
    assert "('hill', 'north', 'river', 'south') [" in capsys.readouterr().out
    assert len(names["parts"].train) == 5
