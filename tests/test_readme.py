"""The README's code runs as it stands, and its table names every method."""

import re
from pathlib import Path

import pytest

from pfl_jax.methods import METHODS

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)


def block(marker):
    (found,) = [code for code in BLOCKS if marker in code]
    return found


def test_the_library_example_runs_and_learns(capsys):
    exec(compile(block("simulate.run("), "README.md", "exec"), {"__name__": "readme"})
    rounds = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [int(number) for number, _ in rounds] == [1, 2, 3, 4, 5]
    assert float(rounds[-1][1]) > 0.7


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_named_in_the_readme(name):
    assert f"`{name}`" in (Path(__file__).parents[1] / "README.md").read_text()
