"""A mistake in a command of the laboratory is one line, before anything runs."""

import importlib

import pytest


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
